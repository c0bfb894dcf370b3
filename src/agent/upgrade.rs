//! The agent is replaced under a living Envoy (`AGENT_UPGRADE`): the running program becomes the new one by `execve`.
//!
//! ```text
//! pilot-agent upgrade ─ UPGRADE socket ─► door ─┐
//! SIGUSR2, systemctl reload ────────────────────┴► Upgrades ─► rehearsal ─► still: streams end ─► execve
//!                                                                 │ no                              │
//!                                     the old one goes on ◄───────┴───── fall back (execve) ◄── Heir: serves? ─► settled
//! ```
//!
//! **What stays.** The process, and so Envoy's parent, its orphan guard and the service's main process; Envoy with its
//! epochs and files; every listening socket, whose clients wait in the kernel's queue for some milliseconds; key,
//! certificate, their renewal date and the trust bundle; the name table; the last good configuration (`XDS_REPLAY`).
//! Streams end with UNAVAILABLE and are opened again by Envoy, which keeps what it has until then.
//!
//! **Promises.** A program is tried before anything is touched: the very file that will be executed reads what it
//! would be handed, makes the whole configuration of today's words and environment and has Envoy judge the bootstrap
//! (`rehearsal`). What fails there changes nothing. What fails afterwards, until the new program serves, is answered by
//! executing the old one again, whose file is kept open; it goes on as the new one would have. Only what no program
//! can catch of itself, a crash of the machine code between its first instruction and its service, though the same
//! file has just been through the same steps, ends as any crash does. Signals that come meanwhile wait in
//! the kernel until one serves; a SIGTERM ends the agent in order, whichever program it is by then. One at a time; none
//! while the agent stops, Envoy drains, is being replaced or is down. A hot restart that is due, or waits for istiod, is
//! handed over with the Envoys.
//!
//! **Who may.** Root and the agent's own user, by a socket of mode 0600 that asks the kernel who is there, or by a
//! signal, which the kernel restricts likewise. Nothing is reachable by TCP. Without `AGENT_UPGRADE` there is no socket,
//! SIGUSR2 does nothing as in the Go agent, and no descriptor is kept twice.

mod door;
mod envoys;
mod error;
mod heir;
mod rehearsal;
mod state;
mod still;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use prometheus::IntCounterVec;
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;

use super::dns::Last;
use super::signals::Signals;
use super::stages::Stages;
use crate::base::files::Watches;
use crate::base::handover::{self, Parcel};
use crate::base::metrics::Metrics;
use crate::base::notify::{Notify, monotonic_usec};
use crate::base::seldom::Seldom;
use crate::envoy::launch;
use crate::{envoy, secrets, xds};

pub(crate) use door::{Door, Request};
pub(crate) use error::Error;
pub(crate) use heir::{Heir, because, guarded, on_trial};
pub(crate) use rehearsal::{ARGUMENT, rehearse};
pub(crate) use state::Counts;

/// What somebody asks for.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The new program; the file at our own path when it is not said.
    binary: Option<PathBuf>,
    /// Another Envoy instead.
    envoy: Option<PathBuf>,
    /// Who is told how it goes.
    reply: Option<UnixStream>,
}

/// A signal may come without pause.
static UNDER_WAY: Seldom = Seldom::new(10);

/// A program that has passed its trial.
#[derive(Debug)]
pub(crate) struct Program {
    file: OwnedFd,
    path: PathBuf,
    version: String,
}

/// What is handed over, and by whose leave.
pub(super) struct Upgrades {
    pub(super) envoy: envoy::Handle,
    pub(super) secrets: secrets::Handle,
    pub(super) xds: xds::Handle,
    pub(super) names: Last,
    pub(super) stages: Stages,
    pub(super) notify: Option<Notify>,
    limit: Duration,
    process: envoy::Config,
    asked: mpsc::Receiver<Asked>,
    signal: Signal,
    trial: Option<BoxFuture<'static, Result<Program, Error>>>,
    replacing: Option<BoxFuture<'static, Result<String, Error>>>,
    reply: Option<UnixStream>,
    counts: Counts,
    ended: IntCounterVec,
}

/// What is needed to make [`Upgrades`].
pub(super) struct Parts<'a> {
    pub envoy: envoy::Handle,
    pub secrets: secrets::Handle,
    pub xds: xds::Handle,
    pub names: Last,
    pub stages: Stages,
    pub notify: Option<Notify>,
    pub limit: Duration,
    /// How Envoy is started.
    pub process: envoy::Config,
    pub door: Door,
    pub signal: Signal,
    pub counts: Counts,
    pub metrics: &'a Metrics,
    pub watches: &'a Watches,
}

impl Upgrades {
    /// Waits to be asked, by the door or by `signal`.
    pub(super) fn new(parts: Parts<'_>) -> Self {
        let ended = parts.metrics.counter(
            "upgrades_total",
            "Attempts to replace the agent in its process, by how they ended.",
            &["result"],
        );
        let counts = parts.counts;
        for (result, n) in
            [("done", counts.done), ("refused", counts.refused), ("fell back", counts.fell_back)]
        {
            ended.with_label_values(&[result]).inc_by(n);
        }
        let (ask, asked) = mpsc::channel(1);
        let stop = parts.stages.status.token();
        parts.stages.status.lasting("upgrade door", parts.door.serve(ask, parts.watches.clone(), stop));
        Self {
            envoy: parts.envoy,
            secrets: parts.secrets,
            xds: parts.xds,
            names: parts.names,
            stages: parts.stages,
            notify: parts.notify,
            limit: parts.limit,
            process: parts.process,
            asked,
            signal: parts.signal,
            trial: None,
            replacing: None,
            reply: None,
            counts,
            ended,
        }
    }

    /// Waits for a program that is to take over and can. Nothing is lost when it is not waited for to the end.
    pub(crate) async fn next(&mut self) -> Program {
        loop {
            let outcome = tokio::select! {
                Some(asked) = self.asked.recv() => {
                    self.begin(asked);
                    continue;
                }
                Some(()) = self.signal.recv() => {
                    self.begin(Asked { binary: None, envoy: None, reply: None });
                    continue;
                }
                outcome = maybe(&mut self.replacing) => {
                    self.replacing = None;
                    self.replaced(outcome);
                    continue;
                }
                outcome = maybe(&mut self.trial) => outcome,
            };
            self.trial = None;
            match outcome {
                Ok(program) => return program,
                Err(why) => self.refused(&why),
            }
        }
    }

    fn begin(&mut self, asked: Asked) {
        if self.trial.is_some() || self.replacing.is_some() {
            let why = "another upgrade is under way; ask again when it has ended";
            if let Some(more) = UNDER_WAY.may() {
                tracing::warn!("the agent is not replaced: {why}{more}");
            }
            return say(asked.reply.as_ref(), &format!("failed: {why}"));
        }
        self.reply = asked.reply;
        if let Some(path) = asked.envoy {
            if self.xds.is_away() {
                return self.replaced(Err(Error::IstiodAway));
            }
            return match self.envoy.kept() {
                Ok(Some(kept)) => {
                    say(self.reply.as_ref(), &format!("trying {}", path.display()));
                    let (process, handle, limit) = (self.process.clone(), self.envoy.clone(), self.limit);
                    self.replacing = Some(Box::pin(envoys::replace(path, process, kept, handle, limit)));
                }
                Ok(None) => self.replaced(Err(Error::NoEnvoy)),
                Err(why) => self.replaced(Err(why.into())),
            };
        }
        match self.tried(asked.binary) {
            Ok(trial) => self.trial = Some(trial),
            Err(why) => self.refused(&why),
        }
    }

    fn tried(&self, binary: Option<PathBuf>) -> Result<BoxFuture<'static, Result<Program, Error>>, Error> {
        let path = match binary {
            Some(path) => path,
            None => own_path()?,
        };
        let kept = self.envoy.kept()?;
        tracing::info!("an upgrade to {} is asked for: trying it first", path.display());
        say(self.reply.as_ref(), &format!("trying {}", path.display()));
        let parcel = self.parcel(kept, None, false).map_err(Error::Parcel)?;
        let limit = self.limit;
        Ok(Box::pin(async move {
            let program = path.clone();
            let open = move || -> std::io::Result<OwnedFd> {
                launch::check_program(&program)?;
                Ok(File::open(&program)?.into())
            };
            let file = launch::beside(open).await;
            let file = file.map_err(|source| Error::File { path: path.clone(), source })?;
            rehearsal::tried(path, file, parcel, limit).await
        }))
    }

    fn replaced(&mut self, outcome: Result<String, Error>) {
        let line = match outcome {
            Ok(what) => format!("done: {what}"),
            Err(why) => {
                tracing::error!("Envoy is not replaced: {why}; {}", why.hint());
                format!("failed: {why}; Envoy goes on as before; {}", why.hint())
            }
        };
        say(self.reply.take().as_ref(), &line);
    }

    fn refused(&mut self, why: &Error) {
        self.counts.refused += 1;
        self.ended.with_label_values(&["refused"]).inc();
        let hint = why.hint();
        tracing::error!("the agent is not replaced, this one goes on: {why}; {hint}");
        say(self.reply.take().as_ref(), &format!("failed: {why}; {hint}"));
    }

    // All of it; the configuration only when it is meant.
    fn parcel(
        &self,
        kept: Option<envoy::Kept>,
        stop: Option<&'static str>,
        whole: bool,
    ) -> std::io::Result<Parcel> {
        let state = state::HandoverState {
            version: crate::base::build_info::VERSION.to_owned(),
            words: words().map(|word| word.to_string_lossy().into_owned()).collect(),
            began: state::millis(SystemTime::now()),
            envoys: kept,
            stop: stop.map(str::to_owned),
            failed: None,
            counts: self.counts,
            bundle: self.secrets.bundle(),
            identity: None,
        };
        let mut parcel = handover::everything()?;
        state.put(self.secrets.kept(), &mut parcel)?;
        let names = self.names.bytes();
        if !names.is_empty() {
            state::put_bytes(&mut parcel, state::NAMES, &names)?;
        }
        if let Some(replay) = whole.then(|| self.xds.kept()).flatten() {
            state::put_bytes(&mut parcel, state::REPLAY, &replay)?;
        }
        if let Some(reply) = &self.reply {
            parcel.insert(state::REPLY.to_owned(), (String::new(), reply.try_clone()?.into()));
        }
        let own = File::open("/proc/self/exe")?;
        parcel.insert(state::PROGRAM.to_owned(), (String::new(), own.into()));
        Ok(parcel)
    }

    /// Becomes `program`. Returns only when neither it nor this program could be executed: everything has ended by
    /// then but Envoy, so the agent must.
    pub(crate) async fn pass(
        &mut self,
        program: Program,
        pending: impl FnOnce() -> Option<&'static str>,
    ) -> Option<String> {
        let kept = match self.envoy.kept() {
            Ok(kept) => kept,
            Err(why) => {
                self.refused(&why.into());
                return None;
            }
        };
        // Whoever asks now is not kept waiting for an answer that nobody gives.
        while let Ok(asked) = self.asked.try_recv() {
            say(asked.reply.as_ref(), "failed: another upgrade is under way; ask again when it has ended");
        }
        let Program { file, path, version } = program;
        tracing::info!("{} (version {version}) takes over; Envoy goes on", path.display());
        if let Some(notify) = &self.notify {
            let _ = notify.tell(&["RELOADING=1".to_owned(), monotonic_usec()]);
        }
        self.counts.done += 1;
        handover::pass(true);
        handover::block_signals();
        still::keep(&self.stages).await;
        // The signals of before.
        tokio::task::yield_now().await;
        // Or somebody has asked for the end otherwise.
        let stop = pending().or_else(|| self.envoy.asked_to_stop().map(Signals::name_of));
        let error = match self.parcel(kept, stop, true) {
            Ok(mut parcel) => {
                crate::base::logging::flush();
                let error = handover::become_program(&file, words(), &parcel);
                tracing::error!(
                    "{} cannot be executed: {error}; going back to the old program",
                    path.display()
                );
                match heir::again(&mut parcel, &format!("{} cannot be executed: {error}", path.display())) {
                    Ok(never) => match never {},
                    Err(error) => error.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        handover::pass(false);
        handover::unblock_signals();
        say(self.reply.take().as_ref(), &format!("failed: {error}; the agent ends"));
        Some(format!("an upgrade failed half-way: {error}"))
    }
}

async fn maybe<T>(slot: &mut Option<BoxFuture<'static, T>>) -> T {
    match slot {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// A line to whoever asked; who has gone is not waited for.
fn say(to: Option<&UnixStream>, line: &str) {
    if let Some(mut to) = to {
        let _ = to.write_all(format!("{line}\n").as_bytes());
    }
}

// Where this program was started from; a newer file may be there by now.
fn own_path() -> Result<PathBuf, Error> {
    let own = "/proc/self/exe";
    let path = std::fs::read_link(own).map_err(|source| Error::File { path: own.into(), source })?;
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or(path.clone(), PathBuf::from))
}

// As this program was called.
fn words() -> impl Iterator<Item = OsString> {
    std::env::args_os()
}
