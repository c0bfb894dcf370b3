//! How Envoy is stopped: a pure state machine.
//!
//! ```text
//! Running ─stop─► Jitter ─► Asking ─answer─► Waiting ──────────────┐ time over
//!    │                        │ └─(exit on zero)─► Minimum ─► Counting ┤ nobody connected, errors, cap
//!    │                        └─ no answer in time ──────────────────┤
//!    └─quit, or stop after /drain ───────────────────────────────────┴─► Killing ─► Ended
//! ```
//!
//! It is told what happens ([`Event`]) and what time it is, and says what to do ([`Action`]) and when to
//! be asked again ([`Machine::deadline`]). Every phase but counting without a cap has a deadline, also
//! the last: a process that SIGKILL does not end (blocked in the kernel) does not hold up the agent.
//!
//! What differs from the Go agent: the request to drain has a limit, counting may have one, the start
//! may be spread ([`Config::jitter`]). What does not: a second signal changes nothing, and exit-on-zero
//! notices that Envoy is gone after its next poll, so the minimum is waited out all the same.

use std::fmt;
use std::time::Duration;

/// Least limit of the request to drain. Beyond it (or `termination_drain`, if longer) an Envoy that
/// accepts and does not answer is killed; the Go agent waits for ever.
pub(crate) const LEAST_ASK_LIMIT: Duration = Duration::from_secs(3);

/// How long SIGKILL may take to end Envoy before the agent ends without having seen it.
pub(crate) const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Time between two polls of the open connections; the Go agent's.
pub(crate) const POLL: Duration = Duration::from_secs(1);

/// Failed polls in a row after which Envoy is killed; the Go agent's.
pub(crate) const MAX_ERRORS: u32 = 5;

/// How to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `terminationDrainDuration`, default 5 s; zero or negative values are zero: no wait.
    pub termination_drain: Duration,
    /// `EXIT_ON_ZERO_ACTIVE_CONNECTIONS` and what belongs to it; takes the place of `termination_drain`.
    pub exit_on_zero: Option<ExitOnZero>,
    /// `TERMINATION_DRAIN_JITTER` (ours, default zero): the start of the drain is put off by a random
    /// time up to this, so that many gateways do not shed their connections at the same moment.
    pub jitter: Duration,
    /// `DRAINED_ENVOY_LIMIT` (ours, default none): an Envoy that was drained by `/drain` and that nobody has ended for
    /// so long is killed, and the agent ends.
    pub drained_limit: Option<Duration>,
    /// `DRAIN_COUNT_REQUESTS` (ours, default false): polls ask for requests under way as well.
    pub requests: bool,
}

/// Wait for the last connection instead of a fixed time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitOnZero {
    /// `MINIMUM_DRAIN_DURATION`, default 5 s.
    pub minimum: Duration,
    /// `MAXIMUM_DRAIN_DURATION` (ours, default none): the longest time from the answer to the drain
    /// request to SIGKILL. Without it only the pod's grace period ends the wait, as in the Go agent.
    pub cap: Option<Duration>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            termination_drain: Duration::from_secs(5),
            exit_on_zero: None,
            jitter: Duration::ZERO,
            drained_limit: None,
            requests: false,
        }
    }
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A signal, or a failure of the agent: drain, then end.
    Stop,
    /// `/quitquitquit`: end without a drain.
    Quit,
    /// `/drain` has been answered: no other drain is needed at the end.
    Drained,
    /// No Envoy is left and none will be started.
    Gone,
    /// The request to drain was answered, or failed at once.
    Answered,
    /// A poll: connections held open, or `None` when Envoy shows no such statistic.
    Counted(Option<u64>),
    /// A poll failed.
    CountFailed,
    /// The deadline is here.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask Envoy to drain; the result comes back as [`Event::Answered`].
    Ask,
    /// Poll the open connections; the result comes back as an event.
    Count,
    /// SIGKILL to every Envoy.
    Kill,
    /// It is over.
    End,
}

/// Where it stands; shown in logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Envoy serves.
    Running,
    /// The drain is put off by the jitter.
    Jitter,
    /// Envoy has been asked to drain and has not answered.
    Asking,
    /// The termination drain runs.
    Waiting,
    /// Exit on zero: the minimum runs.
    Minimum,
    /// Exit on zero: polling.
    Counting {
        /// Failed polls in a row.
        errors: u32,
        /// The last count, if any.
        open: Option<u64>,
    },
    /// SIGKILL is sent.
    Killing,
    /// Over.
    Ended,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Jitter => "waiting for its turn to drain",
            Self::Asking => "asking Envoy to drain",
            Self::Waiting => "draining",
            Self::Minimum => "draining for the minimum time",
            Self::Counting { .. } => "waiting for the last connection",
            Self::Killing => "killing Envoy",
            Self::Ended => "ended",
        })
    }
}

/// The state machine. Times are since any fixed origin and never go back.
#[derive(Debug)]
pub(crate) struct Machine {
    config: Config,
    jitter: Duration,
    phase: Phase,
    deadline: Option<Duration>,
    cap: Option<Duration>,
    /// When the last poll was due.
    polled: Duration,
    drained: bool,
    gone: bool,
}

impl Machine {
    /// Envoy runs. `jitter` is the time drawn from [`Config::jitter`].
    #[must_use]
    pub(crate) fn new(config: Config, jitter: Duration) -> Self {
        Self {
            config,
            jitter,
            phase: Phase::Running,
            deadline: None,
            cap: None,
            polled: Duration::ZERO,
            drained: false,
            gone: false,
        }
    }

    /// Where it stands.
    #[must_use]
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether `/drain` has been answered.
    #[must_use]
    pub(crate) fn is_drained(&self) -> bool {
        self.drained
    }

    /// Whether polls ask for requests as well.
    #[must_use]
    pub(crate) fn counts_requests(&self) -> bool {
        self.config.requests
    }

    /// When [`Event::Tick`] is due.
    #[must_use]
    pub(crate) fn deadline(&self) -> Option<Duration> {
        match (self.deadline, self.cap) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// The limit of the request to drain.
    #[must_use]
    pub(crate) fn ask_limit(&self) -> Duration {
        self.config.termination_drain.max(LEAST_ASK_LIMIT)
    }

    /// Takes an event; gives what to do.
    #[must_use]
    pub(crate) fn handle(&mut self, now: Duration, event: Event) -> Option<Action> {
        match event {
            Event::Gone => self.gone(),
            Event::Drained => {
                self.drained = true;
                if self.phase == Phase::Running && self.deadline.is_none() {
                    self.deadline = self.config.drained_limit.map(|limit| now + limit);
                }
                None
            }
            // Only the first of these counts.
            Event::Stop | Event::Quit if self.phase != Phase::Running => None,
            Event::Quit => Some(self.kill(now)),
            Event::Stop if self.drained => Some(self.kill(now)),
            Event::Stop => self.stop(now),
            Event::Answered if self.phase == Phase::Asking => self.answered(now),
            Event::Counted(open) => self.counted(now, open),
            Event::CountFailed => self.count_failed(now),
            Event::Tick if self.cap.is_some_and(|cap| now >= cap) => Some(self.kill(now)),
            Event::Tick if self.deadline.is_some_and(|at| now >= at) => self.overdue(now),
            Event::Answered | Event::Tick => None,
        }
    }

    fn enter(&mut self, phase: Phase, until: Option<Duration>) {
        self.phase = phase;
        self.deadline = until;
    }

    fn gone(&mut self) -> Option<Action> {
        self.gone = true;
        match self.phase {
            Phase::Ended => None,
            // The Go agent looks whether Envoy is there when it has polled, and scripts rely on the time.
            Phase::Asking if self.config.exit_on_zero.is_some() => None,
            Phase::Minimum | Phase::Counting { .. } => None,
            _ => Some(self.end()),
        }
    }

    fn stop(&mut self, now: Duration) -> Option<Action> {
        if self.jitter > Duration::ZERO {
            self.enter(Phase::Jitter, Some(now + self.jitter));
            return None;
        }
        Some(self.ask(now))
    }

    fn ask(&mut self, now: Duration) -> Action {
        self.enter(Phase::Asking, Some(now + self.ask_limit()));
        Action::Ask
    }

    // The wait begins with the answer: a slow Envoy gets the whole time to drain.
    fn answered(&mut self, now: Duration) -> Option<Action> {
        match self.config.exit_on_zero.clone() {
            Some(zero) => {
                self.cap = zero.cap.map(|cap| now + cap);
                self.enter(Phase::Minimum, Some(now + zero.minimum));
                None
            }
            None if self.config.termination_drain.is_zero() => Some(self.kill(now)),
            None => {
                self.enter(Phase::Waiting, Some(now + self.config.termination_drain));
                None
            }
        }
    }

    fn overdue(&mut self, now: Duration) -> Option<Action> {
        match self.phase {
            Phase::Running if self.drained => Some(self.kill(now)),
            Phase::Running | Phase::Ended => None,
            Phase::Jitter => Some(self.ask(now)),
            // Its time to drain went by while it did not answer.
            Phase::Asking | Phase::Waiting => Some(self.kill(now)),
            Phase::Minimum => {
                self.enter(Phase::Counting { errors: 0, open: None }, Some(now + POLL));
                None
            }
            // No deadline while a poll is under way: it has a limit of its own.
            Phase::Counting { .. } => {
                self.polled = self.deadline.take().unwrap_or(now);
                Some(Action::Count)
            }
            Phase::Killing => Some(self.end()),
        }
    }

    fn counted(&mut self, now: Duration, open: Option<u64>) -> Option<Action> {
        let Phase::Counting { .. } = self.phase else { return None };
        if self.gone || open.unwrap_or(0) == 0 {
            return Some(self.kill(now));
        }
        self.enter(Phase::Counting { errors: 0, open }, Some(self.next_poll(now)));
        None
    }

    // A second after the last one was due. Where its answer took longer, at once, and from then on as if every second
    // had had its poll: the Go agent's ticker.
    fn next_poll(&self, now: Duration) -> Duration {
        let late = now.saturating_sub(self.polled).as_secs() / POLL.as_secs();
        self.polled + POLL * u32::try_from(late.max(1)).unwrap_or(u32::MAX)
    }

    fn count_failed(&mut self, now: Duration) -> Option<Action> {
        let Phase::Counting { errors, open } = self.phase else { return None };
        if self.gone || errors + 1 >= MAX_ERRORS {
            return Some(self.kill(now));
        }
        self.enter(Phase::Counting { errors: errors + 1, open }, Some(self.next_poll(now)));
        None
    }

    fn kill(&mut self, now: Duration) -> Action {
        self.cap = None;
        if self.gone {
            return self.end();
        }
        self.enter(Phase::Killing, Some(now + KILL_LIMIT));
        Action::Kill
    }

    fn end(&mut self) -> Action {
        self.cap = None;
        self.enter(Phase::Ended, None);
        Action::End
    }
}

#[cfg(test)]
mod tests;
