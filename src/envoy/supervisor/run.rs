//! The loop: one thing at a time, told to the two pure machines, their answers carried out.

mod adopting;
mod crashes;
mod draining;
mod epochs;
mod executing;
mod guarding;
mod judging;
mod meters;
mod outcome;
mod preparing;
mod replacing;
mod requests;
mod surviving;
mod taken;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::Instant;

use self::meters::Meters;
use self::preparing::{For, Starting};
use super::handle::Asked;
use super::inputs::Looked;
use super::watch::FileWatch;
use super::{Envoy, IsAway, RunState};
use crate::base::error::chain;
use crate::base::files::Watches;
use crate::base::metrics::Metrics;
use crate::envoy::drain::{self, Machine};
use crate::envoy::guard::{Guard, Program};
use crate::envoy::process::{Exit, Process, Written};
use crate::envoy::restart::Core;
use crate::envoy::{Outcome, Reason, admin};
use crate::net::own::Own;
use crate::trouble::{Report, Reporter};

/// How often the previous epoch is asked whether it is live before the next is started, and for how
/// long at most; figures of Istio 1.5 (Envoy's own limit is 15 s).
const LIVE_POLL: Duration = Duration::from_millis(500);
const LIVE_LIMIT: Duration = Duration::from_secs(20);

/// An Envoy that ends this soon may have found a port taken or its bootstrap wrong; one that was started again and
/// lives longer is well.
const SOON: Duration = Duration::from_secs(10);

/// Envoy's numbers of epochs are told apart modulo 3: a third may start only when the first is gone.
const MOST_EPOCHS: usize = 2;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

struct Epoch {
    process: Option<Process>,
    // So that nobody takes from it what it needs of our sockets.
    _own: Option<Own>,
    file: Option<Written>,
    args: Vec<OsString>,
    started: Instant,
    aborted: bool,
}

/// An epoch that waits for the one before it.
struct Pending {
    epoch: u32,
    next_check: Instant,
    until: Instant,
    /// istiod has gone away meanwhile.
    is_held: bool,
}

pub(super) struct Run {
    envoy: Envoy,
    client: admin::Client,
    asked: Arc<Asked>,
    state: watch::Sender<RunState>,
    machine: Machine,
    core: Core,
    origin: Instant,
    // Before the files: a dropped run kills Envoy first.
    ends: FuturesUnordered<Boxed<(u32, Exit)>>,
    epochs: BTreeMap<u32, Epoch>,
    ask: Option<Boxed<Result<u16, admin::Error>>>,
    poll: Option<Boxed<Result<Option<admin::Open>, admin::Error>>>,
    /// An Envoy that has taken the place of a drained one is drained, too.
    drain_again: Option<Boxed<()>>,
    live: Option<Boxed<Result<(bool, u64), admin::Error>>>,
    pending: Option<Pending>,
    looking: Option<Boxed<Option<Looked>>>,
    look_for: For,
    starting: Option<Starting>,
    /// What has yet to become Envoy.
    executing: FuturesUnordered<Boxed<executing::Execution>>,
    /// Another binary that has not shown yet that it serves.
    proving: Option<replacing::Proving>,
    /// What still runs is asked when another epoch has failed.
    survivor: Option<Boxed<surviving::Answer>>,
    /// Envoy's admin port has answered: where it does not any more, that means something.
    has_admin: bool,
    /// It did when the newest epoch was started.
    had_admin: bool,
    reload_again: Option<bool>,
    /// It was due under the program before, and that it waits has not been said by this one.
    untold: bool,
    retry_at: Option<Instant>,
    files: Option<FileWatch>,
    guard: Option<Guard>,
    // When the guard, which somebody has ended, may be started again.
    guard_at: Instant,
    guard_lost: bool,
    base_id: Option<u32>,
    forced: u64,
    last: Option<(Exit, Duration)>,
    aborted: bool,
    reason: Option<Reason>,
    taken: Option<taken::Taken>,
    /// An Envoy that may have ended because of its bootstrap.
    suspect: Option<judging::Suspect>,
    /// What Envoy says of that, while other epochs live on.
    judging: Option<Boxed<Option<Report>>>,
    /// When an Envoy that was started again has lived long enough.
    settled_at: Option<Instant>,
    meters: Meters,
    // At the last poll.
    held: Option<admin::Open>,
    trouble: Arc<Reporter>,
    watches: Watches,
    pub(super) is_away: IsAway,
}

async fn maybe<F: Future + Unpin>(slot: &mut Option<F>) -> F::Output {
    match slot {
        Some(future) => {
            let output = future.await;
            *slot = None;
            output
        }
        None => std::future::pending().await,
    }
}

async fn guards_end(guard: &mut Option<Guard>) -> String {
    match guard {
        Some(guard) => guard.ended().await,
        None => std::future::pending().await,
    }
}

impl Run {
    pub(super) fn new(
        envoy: Envoy,
        asked: Arc<Asked>,
        state: watch::Sender<RunState>,
        metrics: &Metrics,
        trouble: Arc<Reporter>,
        watches: Watches,
    ) -> Self {
        let window = envoy.config.drain.jitter;
        let jitter = window.mul_f64(rand::Rng::random_range(&mut rand::rng(), 0.0..=1.0));
        Self {
            client: admin::Client::new(envoy.config.admin.clone()),
            machine: Machine::new(envoy.config.drain.clone(), jitter),
            core: Core::new(envoy.config.restart.clone(), envoy.id),
            envoy,
            asked,
            state,
            origin: Instant::now(),
            ends: FuturesUnordered::new(),
            epochs: BTreeMap::new(),
            ask: None,
            poll: None,
            drain_again: None,
            live: None,
            pending: None,
            looking: None,
            look_for: For::Nothing,
            starting: None,
            executing: FuturesUnordered::new(),
            proving: None,
            survivor: None,
            has_admin: false,
            had_admin: false,
            untold: false,
            reload_again: None,
            retry_at: None,
            files: None,
            guard: None,
            guard_at: Instant::now(),
            guard_lost: false,
            base_id: None,
            forced: 0,
            last: None,
            aborted: false,
            reason: None,
            taken: None,
            suspect: None,
            judging: None,
            settled_at: None,
            meters: Meters::new(metrics),
            held: None,
            trouble,
            watches,
            is_away: Box::new(|| false),
        }
    }

    pub(super) async fn run(mut self) -> Outcome {
        self.envoy.program = self.program().await;
        let adopted = self.adopt();
        // A signal that came before Envoy existed: there is nothing to drain.
        if let Some(reason) = self.asked.take().stop.filter(|_| !adopted) {
            tracing::info!("{reason}: Envoy is not started");
            let _ = self.state.send(RunState::Stopping(reason.to_string()));
            return Outcome::stopped(&reason);
        }
        self.files = FileWatch::of(&self.envoy.config.restart, &self.watches);
        let mut over = false;
        if adopted && self.requested() {
            over = true;
        } else if !adopted {
            self.end_stale().await;
            let first = self.core.begin();
            over = self.carry_out(first);
        }
        while !over {
            self.keep();
            let gathers = self.files.as_ref().is_some_and(FileWatch::is_batching);
            self.meters.waits(gathers || self.reload_again.is_some() || self.pending.is_some());
            over = self.step().await;
        }
        self.judge().await;
        if let Some(guard) = self.guard.take() {
            guard.leave().await;
        }
        self.outcome().await
    }

    // What is asked meanwhile does not wait for a disk.
    async fn program(&self) -> Program {
        tokio::select! {
            program = Program::look_beside(&self.envoy.config.binary) => program,
            () = self.asked.changed() => {
                self.asked.again();
                Program::UNKNOWN
            }
        }
    }

    async fn step(&mut self) -> bool {
        let wake = self.wake();
        let asked = self.asked.clone();
        tokio::select! {
            biased;
            Some((epoch, exit)) = self.ends.next(), if !self.ends.is_empty() => self.ended(epoch, exit).await,
            () = asked.changed() => self.requested(),
            answer = maybe(&mut self.ask) => {
                match answer {
                    Ok(status) => tracing::info!("Envoy was asked to drain and answered {status}"),
                    Err(error) => tracing::warn!("Envoy could not be asked to drain: {}", chain(&error)),
                }
                self.tell(drain::Event::Answered)
            }
            Some(execution) = self.executing.next(), if !self.executing.is_empty() => {
                self.executed(execution);
                false
            }
            how = guards_end(&mut self.guard) => {
                self.unguarded(&how);
                false
            }
            is_due = super::watch::due(&mut self.files) => {
                if is_due {
                    self.reload(false);
                }
                false
            }
            looked = maybe(&mut self.looking) => {
                self.looked(looked);
                false
            }
            file = Starting::written(&mut self.starting) => {
                self.written(file);
                false
            }
            counted = maybe(&mut self.poll) => self.counted(counted),
            () = maybe(&mut self.drain_again) => false,
            refusal = maybe(&mut self.judging) => {
                self.judged(refusal);
                false
            }
            answer = maybe(&mut self.survivor) => {
                self.survived(&answer);
                false
            }
            live = maybe(&mut self.live) => {
                self.checked(live);
                false
            }
            () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => self.tick(),
        }
    }

    fn wake(&self) -> Option<Instant> {
        let guard = self.missing_guard().then_some(self.guard_at);
        let drain = self.machine.deadline().map(|d| self.origin + d);
        let pending = self.pending.as_ref().map(|p| p.next_check);
        let pending = pending.or_else(|| self.proving.as_ref().map(|p| p.next_check));
        let pending = pending.filter(|_| self.live.is_none());
        let starting = self.starting.as_ref().and_then(|s| s.until);
        [drain, self.retry_at, pending, guard, self.settled_at, starting].into_iter().flatten().min()
    }

    fn tick(&mut self) -> bool {
        let now = Instant::now();
        if self.missing_guard() && self.guard_at <= now {
            self.stand_guard();
        }
        if self.starting.as_ref().and_then(|s| s.until).is_some_and(|at| at <= now) {
            tracing::warn!("Envoy is started with its last configuration");
            self.write();
        }
        if self.settled_at.is_some_and(|at| at <= now) {
            self.settled_at = None;
            self.trouble.end();
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            if self.retry() {
                return true;
            }
        }
        let pending = self.pending.as_ref().map(|p| p.next_check);
        let asked = pending.or_else(|| self.proving.as_ref().map(|p| p.next_check));
        if asked.is_some_and(|at| at <= now) && self.live.is_none() {
            let client = self.client.clone();
            self.live = Some(Box::pin(async move { client.live().await }));
        }
        self.tell(drain::Event::Tick)
    }

    // Beside an Envoy that serves it is a hot restart.
    fn retry(&mut self) -> bool {
        if !self.epochs.is_empty() {
            let force = self.reload_again == Some(true);
            if !self.postponed(force) {
                self.reload_again = None;
                self.reload(force);
            }
            return false;
        }
        let action = self.core.retry();
        self.meters.restart("recovery");
        self.carry_out(action)
    }
}
