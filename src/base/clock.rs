//! The wall clock as an argument, so that tests choose the date.
//!
//! The wall clock is read anew each time, never derived from an instant kept since start: a machine
//! that was suspended or whose clock was stepped must not renew certificates by a stale date.

use std::fmt::Debug;
#[cfg(test)]
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
