//! Which epoch of Envoy should run: a pure core.
//!
//! Two switches, both off by default (as Istio 1.30: Envoy's end is the agent's end):
//!
//! - [`Config::hot_restart`]: a changed configuration starts the next epoch beside the running one;
//!   Envoy itself hands over the sockets, drains the old process and ends it after the parent shutdown
//!   time. An equal configuration changes nothing.
//! - [`Config::recovery`]: an abnormal end is answered by a new start, with a budget of
//!   [`BUDGET`] tries and delays of 200 ms · 2^n as in Istio 0.8. The budget refills on a changed
//!   configuration and, unlike there, after [`STABLE`] of running, so that a rare crash a week does not
//!   use it up. A death for lack of memory is answered once.
//!
//! An abnormal end of one of several epochs: with recovery all are killed and one starts anew, since the
//! survivors wait for a partner that is gone; without it the others live on and only the last one's end
//! is the agent's, unless what is left has drained for it (`supervisor/run/surviving.rs`). Of one that could not even be executed (a full disk, a program that is not there) the others
//! know nothing: they live on, and it is tried again, after 51 s at most. A clean end is never answered by a new start.
//!
//! Epoch numbers are "highest running + 1", not a mere count: Envoy finds its predecessor by number.

use std::collections::BTreeMap;
use std::time::Duration;

/// Restarts after an abnormal end until the configuration changes or Envoy has run for [`STABLE`].
pub(crate) const BUDGET: u32 = 10;

/// First delay; doubles with every restart.
pub(crate) const FIRST_DELAY: Duration = Duration::from_millis(200);

/// An Envoy that ran this long had no problem starting; a later end counts as the first.
pub(crate) const STABLE: Duration = Duration::from_secs(600);

/// Restarts after a death for lack of memory: what ran out once will again.
const MEMORY_BUDGET: u32 = 1;

/// The delay before an epoch is tried again beside one that serves doubles so often.
const DOUBLED: u32 = 8;

/// What to do when the configuration changes or Envoy dies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `ENVOY_HOT_RESTART` (ours, default false): start a new epoch when the configuration changes or
    /// somebody asks.
    pub hot_restart: bool,
    /// `ENVOY_RECOVERY` (ours, default false): start again after an abnormal end.
    pub recovery: bool,
    /// `ENVOY_PARENT_SHUTDOWN_DURATION` (ours), `--parent-shutdown-time-s`: how long the old epoch lives on beside the new one (historic default
    /// of ProxyConfig: 60 s). Should exceed `drainDuration`.
    pub parent_shutdown: Duration,
    /// `ENVOY_RESTART_ON_FILES` (ours, comma-separated): files whose content is part of the configuration
    /// (mounted certificates, as in 0.8–1.6): a change of any starts an epoch when the agent is told to look ([`super::Handle::reload`]).
    pub watched: Vec<std::path::PathBuf>,
    /// Files that the bootstrap is made from, or that stand in its place: looked at when they change, and what comes of
    /// them decides.
    pub inputs: Vec<std::path::PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hot_restart: false,
            recovery: false,
            parent_shutdown: Duration::from_secs(60),
            watched: Vec::new(),
            inputs: Vec::new(),
        }
    }
}

/// Identity of a configuration; equal ids need no restart.
pub(crate) type Id = u64;

/// What ended how, as far as restarting cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// With 0, or because somebody asked it to.
    Orderly,
    /// Killed by SIGKILL, not by the agent.
    Memory,
    /// Anything else.
    Abnormal,
    /// It was never executed.
    NotStarted,
    /// Killed by the agent itself to make room for a fresh start.
    Aborted,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing.
    None,
    /// Start this epoch.
    Start(u32),
    /// SIGKILL to all that still run; their ends follow.
    KillAll,
    /// Ask again ([`Core::retry`]) after this delay.
    RetryIn(Duration),
    /// Another serves: desire again after this delay.
    AgainIn(Duration),
    /// Nothing runs and nothing will be started.
    End,
}

/// The core.
#[derive(Debug)]
pub(crate) struct Core {
    config: Config,
    desired: Id,
    active: BTreeMap<u32, Id>,
    budget: u32,
    memory_budget: u32,
    /// A fresh start is due once all have ended.
    retry_due: bool,
    exhausted: bool,
    /// Epochs in a row that could not be executed beside another.
    not_started: u32,
}

impl Core {
    /// Nothing runs yet; `desired` is the configuration to start with.
    #[must_use]
    pub(crate) fn new(config: Config, desired: Id) -> Self {
        Self {
            config,
            desired,
            active: BTreeMap::new(),
            budget: BUDGET,
            memory_budget: MEMORY_BUDGET,
            retry_due: false,
            exhausted: false,
            not_started: 0,
        }
    }

    /// Restarts that are left beside the one that comes, for people.
    #[must_use]
    pub(crate) fn left(&self) -> String {
        let memory = if self.memory_budget == 0 { ", none where memory runs out again" } else { "" };
        format!("{} more attempts after that{memory}", self.budget)
    }

    /// Recovery gave up: the last end was abnormal and no restart is left.
    #[must_use]
    pub(crate) fn exhausted(&self) -> bool {
        self.exhausted
    }

    /// Epochs that run, lowest (oldest) first.
    #[cfg(test)]
    pub(crate) fn active(&self) -> Vec<u32> {
        self.active.keys().copied().collect()
    }

    /// The first start.
    #[must_use]
    pub(crate) fn begin(&mut self) -> Action {
        self.start()
    }

    /// This epoch runs already, with the configuration to start with.
    pub(crate) fn adopt(&mut self, epoch: u32) {
        self.active.insert(epoch, self.desired);
    }

    /// The configuration is now `id`.
    #[must_use]
    pub(crate) fn desire(&mut self, id: Id) -> Action {
        if id == self.desired {
            return Action::None;
        }
        self.desired = id;
        self.refill();
        // While a fresh start is due it takes the new configuration anyway.
        if self.retry_due || self.active.is_empty() || !self.config.hot_restart {
            return Action::None;
        }
        if self.current() == Some(id) {
            return Action::None;
        }
        self.start()
    }

    /// Epoch `epoch`, which is about to start, is started with configuration `id`: the newest, whatever it was asked for.
    pub(crate) fn renew(&mut self, epoch: u32, id: Id) {
        let Some(active) = self.active.get_mut(&epoch) else { return };
        *active = id;
        if id != self.desired {
            self.desired = id;
            self.refill();
        }
    }

    /// Whether what runs has the configuration that is desired.
    #[must_use]
    pub(crate) fn is_settled(&self) -> bool {
        self.current() == Some(self.desired)
    }

    /// Gives up what was desired last: the running configuration is the desired one.
    pub(crate) fn settle(&mut self) {
        self.desired = self.current().unwrap_or(self.desired);
    }

    /// Epoch `epoch` has ended after `ran`.
    #[must_use]
    pub(crate) fn ended(&mut self, epoch: u32, kind: Kind, ran: Duration) -> Action {
        self.active.remove(&epoch);
        if ran >= STABLE {
            self.refill();
        }
        if kind == Kind::NotStarted && !self.active.is_empty() && !self.retry_due {
            self.settle();
            let delay = FIRST_DELAY * 2u32.pow(self.not_started.min(DOUBLED));
            self.not_started += 1;
            return Action::AgainIn(delay);
        }
        self.not_started = 0;
        let bad = matches!(kind, Kind::Abnormal | Kind::Memory | Kind::NotStarted);
        if self.config.recovery && bad && !self.retry_due && !self.exhausted {
            if kind == Kind::Memory && self.memory_budget == 0 {
                self.exhausted = true;
            } else {
                self.memory_budget -= u32::from(kind == Kind::Memory);
                self.retry_due = true;
            }
            if !self.active.is_empty() {
                return Action::KillAll;
            }
        }
        if !self.active.is_empty() {
            return Action::None;
        }
        if !self.retry_due {
            return Action::End;
        }
        match self.budget {
            0 => {
                self.exhausted = true;
                Action::End
            }
            left => {
                self.budget -= 1;
                Action::RetryIn(FIRST_DELAY * 2u32.pow(BUDGET - left))
            }
        }
    }

    /// The delay of [`Action::RetryIn`] is over.
    #[must_use]
    pub(crate) fn retry(&mut self) -> Action {
        if !self.retry_due || !self.active.is_empty() {
            return Action::None;
        }
        self.retry_due = false;
        self.start()
    }

    fn refill(&mut self) {
        self.budget = BUDGET;
        self.memory_budget = MEMORY_BUDGET;
    }

    fn current(&self) -> Option<Id> {
        self.active.values().next_back().copied()
    }

    fn start(&mut self) -> Action {
        let epoch = self.active.keys().next_back().map_or(0, |n| n + 1);
        self.active.insert(epoch, self.desired);
        Action::Start(epoch)
    }
}

#[cfg(test)]
mod tests;
