//! The loop: one thing at a time, told to the two pure machines, their answers carried out.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use prometheus::{IntCounterVec, IntGaugeVec};
use tokio::sync::watch;
use tokio::time::Instant;

use super::handle::{Asked, News};
use super::watch::FileWatch;
use super::{Envoy, State};
use crate::base::error::chain;
use crate::base::metrics::Metrics;
use crate::envoy::drain::{self, Machine, Phase};
use crate::envoy::process::{self, Exit, Process, Written};
use crate::envoy::restart::{self, Core, Kind};
use crate::envoy::{Outcome, Reason, admin, command, port};

/// How often the previous epoch is asked whether it is live before the next is started, and for how
/// long at most; figures of Istio 1.5 (Envoy's own limit is 15 s).
const LIVE_POLL: Duration = Duration::from_millis(500);
const LIVE_LIMIT: Duration = Duration::from_secs(20);

/// Envoy's numbers of epochs are told apart modulo 3: a third may start only when the first is gone.
const MOST_EPOCHS: usize = 2;

/// An Envoy that ends this soon may have found its admin port taken.
const SOON: Duration = Duration::from_secs(10);

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

struct Epoch {
    process: Option<Process>,
    _file: Option<Written>,
    started: Instant,
    aborted: bool,
}

/// An epoch that waits for the one before it.
struct Pending {
    epoch: u32,
    next_check: Instant,
    until: Instant,
}

pub(super) struct Run {
    envoy: Envoy,
    client: admin::Client,
    asked: Arc<Asked>,
    state: watch::Sender<State>,
    machine: Machine,
    core: Core,
    origin: Instant,
    // Before the files: a dropped run kills Envoy first.
    ends: FuturesUnordered<Boxed<(u32, Exit)>>,
    epochs: BTreeMap<u32, Epoch>,
    ask: Option<Boxed<Result<u16, admin::Error>>>,
    poll: Option<Boxed<Result<Option<u64>, admin::Error>>>,
    live: Option<Boxed<Result<(bool, u64), admin::Error>>>,
    pending: Option<Pending>,
    reload_again: Option<bool>,
    retry_at: Option<Instant>,
    files: Option<FileWatch>,
    base_id: Option<u32>,
    forced: u64,
    last: Option<(Exit, Duration)>,
    aborted: bool,
    reason: Option<Reason>,
    hint: Option<String>,
    restarts: IntCounterVec,
    open: IntGaugeVec,
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

impl Run {
    pub(super) fn new(
        envoy: Envoy,
        asked: Arc<Asked>,
        state: watch::Sender<State>,
        metrics: &Metrics,
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
            live: None,
            pending: None,
            reload_again: None,
            retry_at: None,
            files: None,
            base_id: None,
            forced: 0,
            last: None,
            aborted: false,
            reason: None,
            hint: None,
            restarts: metrics.counter(
                "envoy_restarts_total",
                "Envoys started after the first, by cause.",
                &["cause"],
            ),
            open: metrics.gauge(
                "envoy_drain_open_connections",
                "Connections that Envoy's listeners held at the last poll of an exit-on-zero drain.",
                &[],
            ),
        }
    }

    pub(super) async fn run(mut self) -> Outcome {
        // A signal that came before Envoy existed: there is nothing to drain.
        if let Some(reason) = self.asked.take().stop {
            tracing::info!("{reason}: Envoy is not started");
            let _ = self.state.send(State::Stopping(reason.to_string()));
            return Outcome::stopped(&reason);
        }
        self.files = FileWatch::of(&self.envoy.config.restart);
        let first = self.core.begin();
        let mut over = self.carry_out(first);
        while !over {
            over = self.step().await;
        }
        self.outcome()
    }

    async fn step(&mut self) -> bool {
        let wake = self.wake();
        let asked = self.asked.clone();
        tokio::select! {
            biased;
            Some((epoch, exit)) = self.ends.next(), if !self.ends.is_empty() => self.ended(epoch, exit),
            () = asked.changed() => self.requested(),
            answer = maybe(&mut self.ask) => {
                match answer {
                    Ok(status) => tracing::info!("Envoy was asked to drain and answered {status}"),
                    Err(error) => tracing::warn!("Envoy could not be asked to drain: {}", chain(&error)),
                }
                self.tell(drain::Event::Answered)
            }
            () = super::watch::due(&mut self.files) => {
                self.reload(false);
                false
            }
            counted = maybe(&mut self.poll) => self.counted(counted),
            live = maybe(&mut self.live) => {
                self.checked(live);
                false
            }
            () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => self.tick(),
        }
    }

    fn wake(&self) -> Option<Instant> {
        let drain = self.machine.deadline().map(|d| self.origin + d);
        let pending = self.pending.as_ref().filter(|_| self.live.is_none()).map(|p| p.next_check);
        [drain, self.retry_at, pending].into_iter().flatten().min()
    }

    fn tick(&mut self) -> bool {
        let now = Instant::now();
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            let action = self.core.retry();
            self.restarts.with_label_values(&["recovery"]).inc();
            if self.carry_out(action) {
                return true;
            }
        }
        if self.pending.as_ref().is_some_and(|p| p.next_check <= now) && self.live.is_none() {
            let client = self.client.clone();
            self.live = Some(Box::pin(async move { client.live().await }));
        }
        self.tell(drain::Event::Tick)
    }

    // --- requests ------------------------------------------------------------------------------------

    fn requested(&mut self) -> bool {
        let News { drained, reload, stop } = self.asked.take();
        if drained && self.tell(drain::Event::Drained) {
            return true;
        }
        if self.machine.phase() != Phase::Running {
            return false;
        }
        if let Some(reason) = stop {
            return self.stop(reason);
        }
        if let Some(force) = reload {
            self.reload(force);
        }
        false
    }

    fn stop(&mut self, reason: Reason) -> bool {
        let _ = self.state.send(State::Stopping(reason.to_string()));
        tracing::info!("{reason}: the agent stops");
        let event = if reason == Reason::Quit { drain::Event::Quit } else { drain::Event::Stop };
        self.reason = Some(reason);
        self.retry_at = None;
        self.files = None;
        self.pending = None;
        self.live = None;
        if self.epochs.is_empty() {
            return self.tell(drain::Event::Gone);
        }
        self.tell(event)
    }

    fn reload(&mut self, force: bool) {
        if self.pending.is_some() {
            self.reload_again = Some(force || self.reload_again == Some(true));
            return;
        }
        if let Err(error) = self.envoy.refresh() {
            tracing::warn!(
                "the changed configuration is not applied, Envoy goes on with the last one: {}",
                chain(&error)
            );
            return;
        }
        self.forced += u64::from(force);
        // A forced restart is one to a configuration that differs in nothing but its number.
        let action = self.core.desire(self.envoy.id.wrapping_add(self.forced));
        match action {
            restart::Action::Start(epoch) => {
                tracing::info!("Envoy's configuration has changed: epoch {epoch} takes over");
                self.restarts.with_label_values(&["hot_restart"]).inc();
                let now = Instant::now();
                let limit = LIVE_LIMIT.max(self.envoy.config.restart.parent_shutdown + LIVE_POLL);
                self.pending = Some(Pending { epoch, next_check: now, until: now + limit });
            }
            _ => tracing::debug!("Envoy's configuration has not changed, or hot restart is off"),
        }
    }

    // The previous epoch has said whether it is live.
    fn checked(&mut self, live: Result<(bool, u64), admin::Error>) {
        let Some(pending) = &mut self.pending else { return };
        let now = Instant::now();
        let previous = u64::from(pending.epoch) - 1;
        let is_live = matches!(live, Ok((true, epoch)) if epoch == previous);
        let alone = self.epochs.is_empty();
        if alone || (is_live && self.epochs.len() < MOST_EPOCHS) || now >= pending.until {
            if !alone && now >= pending.until {
                tracing::warn!(
                    "Envoy's epoch {previous} is not live or its predecessor not gone; going on all the same"
                );
            }
            let epoch = pending.epoch;
            self.pending = None;
            self.start(epoch);
            if let Some(force) = self.reload_again.take() {
                self.reload(force);
            }
            return;
        }
        pending.next_check = now + LIVE_POLL;
    }

    // --- processes -----------------------------------------------------------------------------------

    fn carry_out(&mut self, action: restart::Action) -> bool {
        match action {
            restart::Action::None => false,
            restart::Action::Start(epoch) => {
                self.start(epoch);
                false
            }
            restart::Action::KillAll => {
                tracing::warn!("the other epochs of Envoy are killed for a fresh start");
                self.kill_all();
                let waiting = self.pending.take();
                self.live = None;
                waiting.is_some_and(|p| {
                    let action = self.core.ended(p.epoch, Kind::Aborted, Duration::ZERO);
                    self.carry_out(action)
                })
            }
            restart::Action::RetryIn(delay) => {
                tracing::warn!(
                    "Envoy is started again in {delay:?} ({} tries are left then)",
                    self.core.budget()
                );
                let _ = self.state.send(State::Recovering);
                self.retry_at = Some(Instant::now() + delay);
                false
            }
            restart::Action::End => self.tell(drain::Event::Gone),
        }
    }

    fn start(&mut self, epoch: u32) {
        let file = match self.envoy.file.take() {
            Some(file) if epoch == 0 => Some(file),
            _ => {
                if let Err(error) = self.envoy.refresh() {
                    tracing::warn!("Envoy is started with its last configuration: {}", chain(&error));
                }
                match self.envoy.write(epoch) {
                    Ok(file) => file,
                    Err(error) => return self.not_started(epoch, chain(&error)),
                }
            }
        };
        let config = &self.envoy.config;
        let base_id_path = self.envoy.base_id_path();
        if epoch == 0 {
            self.base_id = None;
        } else if self.base_id.is_none() {
            self.base_id = std::fs::read_to_string(&base_id_path).ok().and_then(|t| t.trim().parse().ok());
        }
        let number = command::Epoch {
            number: epoch,
            base_id: self.base_id,
            base_id_path: &base_id_path,
            parent_shutdown_seconds: config.restart.parent_shutdown.as_secs(),
            alone: epoch > 0 && self.epochs.is_empty(),
        };
        let args = command::arguments(
            &self.envoy.path(epoch),
            &config.arguments,
            config.restart.hot_restart.then_some(&number),
        );
        let shown: Vec<_> = args.iter().map(|a| a.to_string_lossy()).collect();
        tracing::info!("Envoy command: [{}]", shown.join(" "));
        let spec = process::Spec {
            launcher: &config.launcher,
            binary: &config.binary,
            args: &args,
            extra_env: &config.extra_env,
            user: config.user,
            own_group: config.own_group,
        };
        match process::spawn(&spec) {
            Ok((process, end)) => {
                self.ends.push(Box::pin(async move { (epoch, end.await) }));
                let started = Instant::now();
                self.epochs
                    .insert(epoch, Epoch { process: Some(process), _file: file, started, aborted: false });
                let _ = self.state.send(State::Running { epoch });
            }
            Err(error) => {
                let launcher = config.launcher.display().to_string();
                drop(file);
                self.not_started(epoch, format!("{launcher}: {error}"));
            }
        }
    }

    // Its end comes the same way as that of any other.
    fn not_started(&mut self, epoch: u32, why: String) {
        self.epochs
            .insert(epoch, Epoch { process: None, _file: None, started: Instant::now(), aborted: false });
        self.ends.push(Box::pin(std::future::ready((epoch, Exit::NotStarted(why)))));
    }

    fn kill_all(&mut self) {
        for epoch in self.epochs.values_mut() {
            epoch.aborted = true;
            if let Some(process) = epoch.process {
                process.kill();
            }
        }
    }

    fn ended(&mut self, number: u32, exit: Exit) -> bool {
        let Some(epoch) = self.epochs.remove(&number) else { return false };
        let ran = epoch.started.elapsed();
        let running = self.machine.phase() == Phase::Running;
        self.report(number, &exit, epoch.aborted, ran);
        if running && !exit.orderly() && ran < SOON && self.epochs.is_empty() {
            self.hint = self.stale(&exit);
        }
        let kind = match &exit {
            _ if epoch.aborted => Kind::Aborted,
            exit if exit.orderly() => Kind::Orderly,
            exit if exit.killed() => Kind::Memory,
            _ => Kind::Abnormal,
        };
        self.aborted = epoch.aborted;
        if !(epoch.aborted && self.last.is_some()) {
            self.last = Some((exit, ran));
        }
        if !running {
            return self.epochs.is_empty() && self.tell(drain::Event::Gone);
        }
        let action = self.core.ended(number, kind, ran);
        self.carry_out(action)
    }

    fn report(&self, number: u32, exit: &Exit, aborted: bool, ran: Duration) {
        let which = if self.envoy.config.restart.hot_restart {
            format!("Envoy epoch {number}")
        } else {
            "Envoy".to_owned()
        };
        if aborted {
            tracing::info!("{which} was killed by the agent after {ran:.1?}");
        } else if *exit == Exit::Status(0) {
            tracing::info!("{which} exited normally after {ran:.1?}");
        } else if matches!(exit, Exit::NotStarted(_)) {
            tracing::error!("{which} exited with error: {exit}");
        } else {
            tracing::error!("{which} exited with error: {exit} (after {ran:.1?})");
        }
        if !aborted && exit.killed() {
            tracing::warn!("Envoy may have been out of memory killed. Check memory usage and limits.");
        }
    }

    // Envoy itself says only that the address is in use.
    fn stale(&self, exit: &Exit) -> Option<String> {
        let Exit::Status(_) = exit else { return None };
        let number = self.envoy.config.admin.port;
        let holder = port::holder(number)?;
        let text = format!(
            "Envoy's admin port {number} is held by {holder}: if that is an Envoy left over from an earlier agent, \
             stop it, or set proxyAdminPort of the proxy config"
        );
        tracing::error!("{text}");
        Some(text)
    }

    // --- the end -------------------------------------------------------------------------------------

    fn tell(&mut self, event: drain::Event) -> bool {
        let before = self.machine.phase();
        let action = self.machine.handle(self.origin.elapsed(), event);
        let phase = self.machine.phase();
        if phase != before && !matches!((before, phase), (Phase::Counting { .. }, Phase::Counting { .. })) {
            self.say(before, phase);
        }
        match action {
            None => false,
            Some(drain::Action::Ask) => {
                // The machine's limit decides; this one only frees the connection.
                let (client, limit) = (self.client.clone(), self.machine.ask_limit() * 2);
                self.ask = Some(Box::pin(async move { client.drain_listeners(false, limit).await }));
                false
            }
            Some(drain::Action::Count) => {
                let client = self.client.clone();
                self.poll = Some(Box::pin(async move { client.active_connections().await }));
                false
            }
            Some(drain::Action::Kill) => {
                self.ask = None;
                self.poll = None;
                self.kill_all();
                false
            }
            Some(drain::Action::End) => true,
        }
    }

    fn counted(&mut self, counted: Result<Option<u64>, admin::Error>) -> bool {
        match counted {
            Ok(open) => {
                let shown = open.unwrap_or(0);
                self.open.with_label_values::<&str>(&[]).set(i64::try_from(shown).unwrap_or(i64::MAX));
                match open {
                    None => tracing::info!("Envoy shows no open connections"),
                    Some(n) => tracing::info!("there are still {n} active connections"),
                }
                self.tell(drain::Event::Counted(open))
            }
            Err(error) => {
                tracing::warn!("the open connections could not be counted: {}", chain(&error));
                self.tell(drain::Event::CountFailed)
            }
        }
    }

    // One line per phase, with what remains of it.
    fn say(&self, before: Phase, phase: Phase) {
        let left = self.machine.deadline().map(|d| d.saturating_sub(self.origin.elapsed()));
        let left = left.unwrap_or_default();
        match phase {
            Phase::Running | Phase::Ended => {}
            Phase::Jitter => {
                tracing::info!("Envoy is drained in {left:.1?}, so that not all gateways do at once")
            }
            Phase::Asking => tracing::info!("Envoy is asked to drain; it has {left:.1?} to answer"),
            Phase::Waiting => {
                tracing::info!("Envoy drains; it is killed in {left:.1?} unless it ends before")
            }
            Phase::Minimum => tracing::info!("Envoy drains; its connections are counted in {left:.1?}"),
            Phase::Counting { .. } => {
                tracing::info!(
                    "Envoy is killed when its last connection has ended; asked every {:?}",
                    drain::POLL
                );
            }
            Phase::Killing => match before {
                Phase::Asking => tracing::warn!("Envoy has not answered the request to drain: it is killed"),
                Phase::Counting { errors: 4, .. } => {
                    tracing::warn!(
                        "the open connections could not be counted five times in a row: Envoy is killed"
                    );
                }
                Phase::Counting { open: Some(n), .. } => {
                    tracing::info!("Envoy is killed; {n} connections were open before")
                }
                Phase::Running => tracing::info!("Envoy is killed without a drain"),
                _ => tracing::info!("Envoy is killed: {} is over", before),
            },
        }
    }

    fn outcome(mut self) -> Outcome {
        if let Some(id) = self.base_id_left() {
            let _ = std::fs::remove_file(format!("/dev/shm/envoy_shared_memory_{}", u64::from(id) * 10));
        }
        let (exit, ran) = self.last.take().map_or((None, Duration::ZERO), |(e, r)| (Some(e), r));
        let left = !self.epochs.is_empty();
        if left {
            tracing::error!(
                "Envoy does not end on SIGKILL (blocked in the kernel?); the agent does not wait for it"
            );
        }
        let _ = self.state.send(State::Ended);
        match self.reason.take() {
            Some(reason) => {
                let mut outcome = Outcome::stopped(&reason);
                // Killed by the agent is how a stop ends; anything but that or a clean end is worth a word.
                if let Some(exit) = exit.as_ref().filter(|e| !self.aborted && !e.orderly()) {
                    outcome.reason.push_str(&format!("; Envoy ended before it was killed: {exit}"));
                }
                outcome.exit = exit;
                outcome.ran = ran;
                outcome
            }
            None => self.by_itself(exit, ran),
        }
    }

    fn by_itself(&self, exit: Option<Exit>, ran: Duration) -> Outcome {
        let code = exit.as_ref().map_or(1, Exit::code);
        let code = if self.core.exhausted() { code.max(1) } else { code };
        let mut reason = match &exit {
            None => "Envoy never ran".to_owned(),
            Some(exit @ Exit::NotStarted(_)) => format!("Envoy was not started: {exit}"),
            Some(exit) => format!("Envoy ended by itself after {ran:.1?}: {exit}"),
        };
        if self.core.exhausted() {
            reason.push_str("; no restart is left");
        }
        if let Some(hint) = &self.hint {
            reason.push_str("; ");
            reason.push_str(hint);
        }
        Outcome { exit_code: if self.envoy.config.always_zero { 0 } else { code }, reason, exit, ran }
    }

    // Only hot restart makes Envoy write one.
    fn base_id_left(&self) -> Option<u32> {
        if !self.envoy.config.restart.hot_restart {
            return None;
        }
        let path = self.envoy.base_id_path();
        let id = std::fs::read_to_string(&path).ok().and_then(|t| t.trim().parse().ok());
        let _ = std::fs::remove_file(path);
        id
    }
}
