//! Runs Envoy from its start to the agent's end: the shell around [`super::drain`] and [`super::restart`].
//!
//! One task owns everything; [`Handle`]s send it requests and see its [`State`]. Dropping the
//! supervisor's future at any point kills Envoy and removes its file.

mod handle;
mod run;

use std::hash::{DefaultHasher, Hasher};
use std::path::PathBuf;

use tokio::sync::{mpsc, watch};

pub use handle::{DRAIN_NOW_LIMIT, Handle};

use super::process::Written;
use super::{Bootstrap, Config, ConfigFile, Error, Outcome, Reason, admin, restart};
use crate::base::metrics::Metrics;

/// Requests come from signals, a local operator and file changes: a handful, but a flood of them must
/// wait rather than grow.
const QUEUE: usize = 16;

/// What readiness and debug pages may know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Envoy has not been started.
    Starting,
    /// Envoy runs; the newest epoch (0 unless hot restart is on).
    Running {
        /// The epoch's number.
        epoch: u32,
    },
    /// Envoy died and will be started again.
    Recovering,
    /// The end has begun: why.
    Stopping(String),
    /// Over.
    Ended,
}

/// What a handle asks for.
#[derive(Debug)]
enum Request {
    Stop(Reason),
    Drained,
    Reload { force: bool },
}

/// Runs one Envoy, or none.
pub struct Supervisor {
    envoy: Option<Envoy>,
    requests: mpsc::Receiver<Request>,
    state: watch::Sender<State>,
    metrics: Metrics,
}

/// The Envoy to run.
struct Envoy {
    config: Config,
    bootstrap: Box<dyn Bootstrap>,
    /// The first epoch's file; later ones are written when they start.
    file: Option<Written>,
    /// The last good text, kept only when it may be needed again.
    text: Vec<u8>,
    id: restart::Id,
}

impl Supervisor {
    /// Makes the bootstrap file; nothing is started yet.
    ///
    /// # Errors
    /// When no binary is named, or the bootstrap cannot be made or written: the agent must not start.
    pub fn new(
        config: Config,
        bootstrap: Box<dyn Bootstrap>,
        metrics: &Metrics,
    ) -> Result<(Self, Handle), Error> {
        if config.binary.is_empty() {
            return Err(Error::NoBinary);
        }
        let client = admin::Client::new(config.admin.clone());
        let mut envoy = Envoy { config, bootstrap, file: None, text: Vec::new(), id: 0 };
        envoy.refresh()?;
        envoy.file = envoy.write(0)?;
        Ok(Self::build(Some(envoy), Some(client), metrics))
    }

    /// No Envoy (`DISABLE_ENVOY`): runs until it is told to stop.
    #[must_use]
    pub fn idle(metrics: &Metrics) -> (Self, Handle) {
        Self::build(None, None, metrics)
    }

    fn build(envoy: Option<Envoy>, client: Option<admin::Client>, metrics: &Metrics) -> (Self, Handle) {
        let (send, requests) = mpsc::channel(QUEUE);
        let (state, seen) = watch::channel(State::Starting);
        let handle = Handle::new(send, seen, client);
        (Self { envoy, requests, state, metrics: metrics.clone() }, handle)
    }

    /// Runs until Envoy has ended and will not be started again, or until it was told to stop.
    ///
    /// Call it on the main thread (see [`super::launch`]).
    pub async fn run(mut self) -> Outcome {
        let Some(envoy) = self.envoy.take() else { return self.run_idle().await };
        run::Run::new(envoy, self.requests, self.state, &self.metrics).run().await
    }

    async fn run_idle(mut self) -> Outcome {
        loop {
            // `None` means that nobody is left who could ask; nobody will stop us in order either.
            if let Some(Request::Stop(reason)) = self.requests.recv().await {
                let _ = self.state.send(State::Stopping(reason.to_string()));
                return Outcome::stopped(&reason);
            } else if self.requests.is_closed() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Outcome {
    fn stopped(reason: &Reason) -> Self {
        let exit_code = u8::from(matches!(reason, Reason::Failure(_)));
        Self { exit_code, reason: reason.to_string(), exit: None, ran: std::time::Duration::ZERO }
    }
}

impl Envoy {
    /// Renders again and computes the identity of what would be started; keeps the last good text when
    /// that fails.
    fn refresh(&mut self) -> Result<(), Error> {
        if matches!(self.config.file, ConfigFile::Generated(_)) {
            self.text = self.bootstrap.render().map_err(Error::Render)?;
        }
        let mut hash = DefaultHasher::new();
        hash.write(&self.text);
        if let ConfigFile::Custom(path) = &self.config.file
            && self.restarts()
        {
            hash.write(&std::fs::read(path).unwrap_or_default());
        }
        for file in &self.config.restart.watched {
            // Missing or unreadable files are skipped, as the historic agents did.
            hash.write(&std::fs::read(file).unwrap_or_default());
            hash.write_u8(0);
        }
        self.id = hash.finish();
        Ok(())
    }

    fn restarts(&self) -> bool {
        self.config.restart.hot_restart || self.config.restart.recovery
    }

    fn path(&self, epoch: u32) -> PathBuf {
        match &self.config.file {
            ConfigFile::Custom(path) => path.clone(),
            ConfigFile::Generated(path) if self.config.restart.hot_restart => numbered(path, epoch),
            ConfigFile::Generated(path) => path.clone(),
        }
    }

    fn write(&mut self, epoch: u32) -> Result<Option<Written>, Error> {
        if matches!(self.config.file, ConfigFile::Custom(_)) {
            return Ok(None);
        }
        let written = Written::new(&self.path(epoch), &self.text);
        if !self.restarts() {
            self.text = Vec::new();
        }
        written.map(Some).map_err(|(path, source)| Error::Write { path, source })
    }

    /// Where Envoy's first epoch writes the base id it chose.
    fn base_id_path(&self) -> PathBuf {
        let mut name = self.path(0).into_os_string();
        name.push(".base-id");
        name.into()
    }
}

fn numbered(path: &std::path::Path, epoch: u32) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}{epoch}{extension}"))
}
