//! What others ask for: a stop, a new configuration, the next epoch once the last one is live.

use std::time::Duration;

use tokio::time::Instant;

use super::preparing::For;
use super::surviving::{After, is_refused};
use super::{LIVE_LIMIT, LIVE_POLL, MOST_EPOCHS, Pending, Run};
use crate::envoy::drain::{self, Phase};
use crate::envoy::supervisor::RunState;
use crate::envoy::supervisor::handle::News;
use crate::envoy::{Reason, admin, restart};

/// How often it is looked whether istiod is back.
const AWAY: Duration = Duration::from_secs(2);

impl Pending {
    // As where istiod is away when it is asked for. When it is back, the one before has time to answer.
    fn hold(&mut self, now: Instant) {
        if !self.is_held {
            tracing::info!("Envoy goes on as it is; epoch {} waits until istiod is back", self.epoch);
        }
        self.is_held = true;
        self.next_check = now + AWAY;
        self.until = self.until.max(self.next_check + LIVE_LIMIT);
    }
}

impl Run {
    pub(super) fn requested(&mut self) -> bool {
        let News { drained, reload, stop } = self.asked.take();
        // Once the end has begun it goes, which tells whoever waits that the agent stops.
        let replacement = self.asked.replacement();
        if drained && self.drained() {
            return true;
        }
        if self.machine.phase() != Phase::Running {
            return false;
        }
        if let Some(reason) = stop {
            return self.stop(reason);
        }
        if let Some(replace) = replacement {
            self.replace(replace);
        }
        if let Some(force) = reload {
            self.reload(force);
        }
        false
    }

    // Who answered was the one before, if its successor has yet to take over.
    fn drained(&mut self) -> bool {
        if !self.machine.is_drained()
            && self.epochs.len() > 1
            && let Some(newest) = self.epochs.keys().next_back().copied()
        {
            self.drain_again(newest);
        }
        self.tell(drain::Event::Drained)
    }

    fn stop(&mut self, reason: Reason) -> bool {
        let _ = self.state.send(RunState::Stopping(reason.to_string()));
        tracing::info!("{reason}: the agent stops");
        let event = if reason == Reason::Quit { drain::Event::Quit } else { drain::Event::Stop };
        self.reason = Some(reason);
        self.start_no_more();
        if self.epochs.is_empty() {
            return self.tell(drain::Event::Gone);
        }
        self.tell(event)
    }

    /// The end has begun: whatever was about to start an Envoy does not.
    pub(super) fn start_no_more(&mut self) {
        self.retry_at = None;
        self.reload_again = None;
        self.files = None;
        self.pending = None;
        self.starting = None;
        self.proving = None;
        self.live = None;
        self.judging = None;
    }

    /// Another Envoy would not be ready before istiod is back, and would have the admin port of the one that serves. The wait
    /// has no end of its own, since that one goes on; a stop ends it, istiod's absence is a trouble, and a gauge shows the wait.
    pub(super) fn postponed(&mut self, force: bool) -> bool {
        if self.epochs.is_empty() || !(self.is_away)() {
            return false;
        }
        if std::mem::take(&mut self.untold) || self.reload_again.is_none() {
            tracing::info!("Envoy goes on as it is; its next epoch waits until istiod is back");
        }
        self.reload_again = Some(force || self.reload_again == Some(true));
        self.retry_at = Some(Instant::now() + AWAY);
        true
    }

    pub(super) fn reload(&mut self, force: bool) {
        if self.postponed(force) {
            return;
        }
        // One after the other: an epoch that has to show that it serves is left alone until then.
        if self.is_replacing() {
            // Of those that wait together the first is told.
            if self.reload_again.is_none() {
                tracing::info!("a new configuration waits until Envoy's next epoch has shown that it serves");
            }
            self.reload_again = Some(force || self.reload_again == Some(true));
            return;
        }
        // What a look that is under way has read may be older than the change.
        if self.looking.is_some() {
            self.reload_again = Some(force || self.reload_again == Some(true));
            return;
        }
        let force = self.reload_again.take() == Some(true) || force;
        self.look(For::Reload(force));
    }

    /// The inputs were looked at.
    pub(super) fn changed(&mut self, force: bool) {
        if self.machine.phase() != Phase::Running {
            return;
        }
        if self.is_replacing() {
            self.reload_again = Some(force || self.reload_again == Some(true));
            return;
        }
        self.forced += u64::from(force);
        // A forced restart is one to a configuration that differs in nothing but its number.
        let action = self.core.desire(self.envoy.id.wrapping_add(self.forced));
        match action {
            restart::Action::Start(epoch) => {
                tracing::info!("Envoy's configuration has changed: epoch {epoch} takes over");
                self.meters.restart("hot_restart");
                let now = Instant::now();
                let limit = LIVE_LIMIT.max(self.envoy.config.restart.parent_shutdown + LIVE_POLL);
                self.pending = Some(Pending { epoch, next_check: now, until: now + limit, is_held: false });
            }
            _ => {
                tracing::debug!("Envoy's configuration has not changed, or hot restart is off");
                self.put_back();
            }
        }
    }

    // An epoch with another one has failed, which nobody wants any more.
    fn put_back(&mut self) {
        if self.core.is_settled() && self.settled_at.is_none() && self.executing.is_empty() {
            let has_failed = self.trouble.kind().is_some();
            self.trouble.end();
            if has_failed && self.envoy.config.restart.hot_restart && !self.epochs.is_empty() {
                self.ask_survivor(After::PutBack);
            }
        }
    }

    /// Whether an epoch is about to come, or has yet to show that it serves.
    pub(super) fn is_replacing(&self) -> bool {
        self.pending.is_some() || self.starting.is_some() || self.proving.is_some() || self.survivor.is_some()
    }

    /// What was asked for meanwhile.
    pub(super) fn reload_now(&mut self) {
        if let Some(force) = self.reload_again.take() {
            self.reload(force);
        }
    }

    // The previous epoch has said whether it is live.
    pub(super) fn checked(&mut self, live: Result<(bool, u64), admin::Error>) {
        self.has_admin |= live.is_ok();
        let Some(pending) = &mut self.pending else { return self.proved(&live) };
        let now = Instant::now();
        let previous = u64::from(pending.epoch) - 1;
        let is_live = matches!(live, Ok((true, epoch)) if epoch == previous);
        let alone = self.epochs.is_empty();
        if !alone && self.proving.is_none() && (self.is_away)() {
            pending.hold(now);
            return;
        }
        if alone || (is_live && self.epochs.len() < MOST_EPOCHS) || now >= pending.until {
            if !alone && now >= pending.until {
                tracing::warn!(
                    "Envoy's epoch {previous} is not live, or its predecessor has not ended; continuing anyway"
                );
            }
            let epoch = pending.epoch;
            self.pending = None;
            // One that is slow has it still.
            self.had_admin = !is_refused(&live);
            self.start(epoch);
            return;
        }
        pending.next_check = now + LIVE_POLL;
    }
}
