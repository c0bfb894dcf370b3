//! Runs Envoy from its start to the agent's end: the shell around [`super::drain`] and [`super::restart`].
//!
//! One task owns everything; [`Handle`]s leave it requests and see its [`RunState`]. Dropping the
//! supervisor's future at any point kills Envoy and removes its file.

mod handle;
mod inputs;
mod run;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch as channel;

use handle::Asked;
pub use handle::{Handle, NotReplaced};
use inputs::{Found, Inputs};

use super::guard::{Guard, Program};
use super::process::Written;
use super::{Bootstrap, Config, ConfigFile, Error, Kept, Outcome, Reason, admin, restart};
use crate::base::error::chain;
use crate::base::files::Watches;
use crate::base::metrics::Metrics;
use crate::net::own::Own;
use crate::trouble::Reporter;

/// What readiness and debug pages may know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    /// Envoy has not been started.
    Starting,
    /// There is none (`DISABLE_ENVOY`).
    Disabled,
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

/// Runs one Envoy, or none.
pub struct Supervisor {
    envoy: Option<Envoy>,
    /// Of an Envoy that somebody else runs.
    external: Option<External>,
    asked: Arc<Asked>,
    state: channel::Sender<RunState>,
    metrics: Metrics,
    trouble: Arc<Reporter>,
    watches: Watches,
    is_away: IsAway,
}

/// Whether another Envoy would have no configuration, since istiod is away.
type IsAway = Box<dyn Fn() -> bool + Send + Sync>;

/// What is kept for an Envoy that somebody else runs.
struct External {
    _file: Option<Written>,
}

/// The Envoy to run.
struct Envoy {
    config: Config,
    /// `None` while they are looked at.
    inputs: Option<Inputs>,
    /// The first epoch's file; later ones are written when they start.
    file: Option<Written>,
    /// The last good text, kept only when it may be needed again.
    text: Vec<u8>,
    id: restart::Id,
    /// What the binary is, as it was seen when the last epoch was prepared.
    program: Program,
    /// What runs already, and its guard.
    kept: Option<Kept>,
    /// Of those: on the sockets, which are served before they are taken over, they are known at once.
    named: Vec<Own>,
    guard: Option<Guard>,
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
        let lives_on = i64::try_from(config.restart.parent_shutdown.as_secs()).unwrap_or(i64::MAX);
        if config.restart.hot_restart && lives_on <= config.arguments.drain_seconds {
            tracing::warn!(
                "a replaced Envoy is ended after {lives_on} s but drains for {} s: connections will be cut; \
                 set ENVOY_PARENT_SHUTDOWN_DURATION above drainDuration of the proxy config",
                config.arguments.drain_seconds
            );
        }
        let client = admin::Client::new(config.admin.clone());
        let mut envoy = Envoy::new(config, bootstrap);
        envoy.look()?;
        envoy.file = envoy.write(0)?;
        Ok(Self::build(Some(envoy), Some(client), metrics))
    }

    /// The Envoys that the program before us in this process has started; they and their files stay as they are.
    ///
    /// # Errors
    /// When the bootstrap for the next one cannot be made.
    pub(crate) fn adopting(
        mut config: Config,
        bootstrap: Box<dyn Bootstrap>,
        kept: Kept,
        metrics: &Metrics,
    ) -> Result<(Self, Handle), Error> {
        let client = admin::Client::new(config.admin.clone());
        config.binary.clone_from(&kept.binary);
        // Its line is closed if nobody takes it before this program serves.
        let guard = kept.guard.and_then(Guard::adopt);
        let file = kept.epochs.last().and_then(|epoch| epoch.file.clone());
        let named = kept.epochs.iter().map(|epoch| Own::process(epoch.pid)).collect();
        let mut envoy = Envoy { guard, kept: Some(kept), named, ..Envoy::new(config, bootstrap) };
        if let Err(error) = envoy.look() {
            // What runs was started with a good one.
            let Some(text) = file.and_then(|path| std::fs::read(path).ok()) else { return Err(error) };
            tracing::warn!("Envoy goes on with its last configuration: {}", chain(&error));
            envoy.text = text;
        }
        let running: Vec<u32> =
            envoy.kept.iter().flat_map(|kept| kept.epochs.iter().map(|epoch| epoch.number)).collect();
        let (supervisor, handle) = Self::build(Some(envoy), Some(client), metrics);
        // Who asks before they are looked after is told how it is: Envoy runs.
        for epoch in running {
            supervisor.asked.takes_the_place();
            let _ = supervisor.state.send(RunState::Running { epoch });
        }
        Ok((supervisor, handle))
    }

    /// An Envoy that somebody else starts and ends (`ENVOY_EXTERNAL`): its bootstrap file is there while the agent
    /// is, and its admin port is asked; runs until it is told to stop.
    ///
    /// # Errors
    /// When the bootstrap cannot be made or written.
    pub fn external(
        config: Config,
        bootstrap: Box<dyn Bootstrap>,
        metrics: &Metrics,
    ) -> Result<(Self, Handle), Error> {
        let client = admin::Client::new(config.admin.clone());
        let mut envoy = Envoy::new(config, bootstrap);
        envoy.look()?;
        let file = envoy.write(0)?;
        tracing::info!(
            "Envoy is not started (ENVOY_EXTERNAL): start one with -c {}",
            envoy.path(0).display()
        );
        let (mut supervisor, handle) = Self::build(None, Some(client), metrics);
        supervisor.external = Some(External { _file: file });
        Ok((supervisor, handle))
    }

    /// No Envoy (`DISABLE_ENVOY`): runs until it is told to stop.
    #[must_use]
    pub fn idle(metrics: &Metrics) -> (Self, Handle) {
        Self::build(None, None, metrics)
    }

    fn build(envoy: Option<Envoy>, client: Option<admin::Client>, metrics: &Metrics) -> (Self, Handle) {
        let asked = Arc::new(Asked::default());
        let (state, seen) = channel::channel(RunState::Starting);
        let hot_restart = envoy.as_ref().is_some_and(|e| e.config.restart.hot_restart);
        let handle = Handle::new(asked.clone(), seen, client, hot_restart);
        (
            Self {
                envoy,
                external: None,
                asked,
                state,
                metrics: metrics.clone(),
                trouble: Arc::default(),
                watches: Watches::default(),
                is_away: Box::new(|| false),
            },
            handle,
        )
    }

    /// Tells `trouble` of an Envoy that ends by itself.
    #[must_use]
    pub(crate) fn with_trouble(mut self, trouble: Arc<Reporter>) -> Self {
        self.trouble = trouble;
        self
    }

    /// Watches files on the agent's list of them.
    #[must_use]
    pub(crate) fn with_watches(mut self, watches: Watches) -> Self {
        self.watches = watches;
        self
    }

    /// Starts no epoch beside one that serves while `is_away`.
    #[must_use]
    pub fn with_upstream(mut self, is_away: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.is_away = Box::new(is_away);
        self
    }

    /// What it tells: whoever holds this keeps the trouble on the list when Envoy has ended.
    #[must_use]
    pub fn trouble(&self) -> Arc<Reporter> {
        self.trouble.clone()
    }

    /// Runs until Envoy has ended and will not be started again, or until it was told to stop.
    ///
    /// Call it on the main thread (see [`super::launch`]).
    pub async fn run(mut self) -> Outcome {
        let Some(envoy) = self.envoy.take() else { return self.run_idle().await };
        let mut run = run::Run::new(envoy, self.asked, self.state, &self.metrics, self.trouble, self.watches);
        run.is_away = self.is_away;
        run.run().await
    }

    async fn run_idle(self) -> Outcome {
        let _ = self.state.send(match self.external {
            // As far as anybody can tell from here; its admin port tells the rest.
            Some(_) => RunState::Running { epoch: 0 },
            None => RunState::Disabled,
        });
        loop {
            if let Some(reason) = self.asked.take().stop {
                let _ = self.state.send(RunState::Stopping(reason.to_string()));
                return Outcome::stopped(&reason);
            }
            self.asked.changed().await;
        }
    }
}

impl Outcome {
    fn stopped(reason: &Reason) -> Self {
        let exit_code = u8::from(matches!(reason, Reason::Failure(_)));
        Self {
            exit_code,
            reason: reason.to_string(),
            exit: None,
            ran: std::time::Duration::ZERO,
            cut: String::new(),
        }
    }
}

impl Envoy {
    fn new(config: Config, bootstrap: Box<dyn Bootstrap>) -> Self {
        let inputs = Some(Inputs::new(&config, bootstrap));
        let program = Program::default();
        Self {
            config,
            inputs,
            file: None,
            text: Vec::new(),
            id: 0,
            program,
            kept: None,
            named: Vec::new(),
            guard: None,
        }
    }

    /// Looks at the inputs here and now, before anything is served.
    fn look(&mut self) -> Result<(), Error> {
        if let Some(inputs) = &mut self.inputs {
            let found = inputs.look()?;
            self.know(found);
        }
        Ok(())
    }

    /// Keeps what was found.
    fn know(&mut self, found: Found) {
        if let Some(text) = found.text {
            self.text = text;
        }
        self.config.arguments.override_json = found.over;
        self.id = found.id;
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

    /// What every epoch's file is named after.
    fn file_of_all(&self) -> PathBuf {
        match &self.config.file {
            ConfigFile::Custom(path) | ConfigFile::Generated(path) => path.clone(),
        }
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
