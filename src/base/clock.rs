//! The wall clock as an argument, so that tests choose the date.
//!
//! The wall clock is read anew each time, never derived from an instant kept since start: a machine
//! that was suspended or whose clock was stepped must not renew certificates by a stale date.

use std::fmt::Debug;
#[cfg(test)]
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Where dates come from.
pub trait Clock: Send + Sync + Debug {
    /// The wall-clock time now.
    fn now(&self) -> SystemTime;
}

/// A machine whose clock says less has it wrong: this program is younger (2026-01-01, in seconds since 1970).
const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

/// Whether a clock that says `now` is behind for certain, whatever else disagrees with it.
#[must_use]
pub(crate) fn is_behind(now: SystemTime) -> bool {
    now < UNIX_EPOCH + EARLIEST
}

/// A time in UTC to the second. 99991231235959Z, which means no end, is a day later than what can be told: the last
/// time that can be stands for it.
pub(crate) fn rfc3339(at: SystemTime) -> String {
    format!("{:.0}", jiff::Timestamp::try_from(at).unwrap_or(jiff::Timestamp::MAX))
}

/// Until when something is good that came with a life: a date, and never longer than that date was away when it came, by
/// a clock that nobody sets. One that was ahead then and is set right would prolong it by as much.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Until {
    date: SystemTime,
    latest: Option<Instant>,
}

impl Until {
    /// Until `date`, of what came at `now`.
    #[must_use]
    pub(crate) fn new(date: SystemTime, now: SystemTime) -> Self {
        let away = date.duration_since(now).unwrap_or_default();
        Self { date, latest: Instant::now().checked_add(away) }
    }

    /// The date.
    #[must_use]
    pub(crate) fn date(self) -> SystemTime {
        self.date
    }

    /// What is left of it; nothing when it is over.
    #[must_use]
    pub(crate) fn left(self, now: SystemTime) -> Duration {
        let left = self.date.duration_since(now).unwrap_or_default();
        self.latest.map_or(left, |latest| left.min(latest.saturating_duration_since(Instant::now())))
    }
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct System;

impl Clock for System {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock that stands still until it is told otherwise, for tests.
#[cfg(test)]
#[derive(Debug, Clone)]
pub(crate) struct Fixed(Arc<Mutex<SystemTime>>);

#[cfg(test)]
impl Fixed {
    /// Stands at `at`.
    #[must_use]
    pub(crate) fn at(at: SystemTime) -> Self {
        Self(Arc::new(Mutex::new(at)))
    }

    /// Goes forward by `by`.
    pub(crate) fn advance(&self, by: Duration) {
        *self.0.lock().expect("no panic holds this lock") += by;
    }

    /// Jumps to `to`, in either direction.
    pub(crate) fn set(&self, to: SystemTime) {
        *self.0.lock().expect("no panic holds this lock") = to;
    }
}

#[cfg(test)]
impl Clock for Fixed {
    fn now(&self) -> SystemTime {
        *self.0.lock().expect("no panic holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_came_with_a_life_has_that_and_no_more_wherever_the_clock_is_set_to() {
        let seconds = Duration::from_secs;
        let came = UNIX_EPOCH + seconds(1_000_000);
        let until = Until::new(came + seconds(100), came);
        assert_eq!(until.left(came - seconds(5000)), seconds(100), "set back");
        assert_eq!(until.left(came + seconds(100)), Duration::ZERO, "set forward, or it has slept");
        tokio::time::advance(seconds(60)).await;
        assert_eq!(until.left(came - seconds(5000)), seconds(40));
        assert_eq!(until.left(came + seconds(70)), seconds(30));
        tokio::time::advance(seconds(60)).await;
        assert_eq!(until.left(came - seconds(5000)), Duration::ZERO);
        assert_eq!(Until::new(came, came + seconds(9)).left(came), Duration::ZERO, "it came too late");
    }
}
