//! What the last answers were, so that the log tells changes and not probes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::trouble::Kind;

/// A reason that lasts is repeated this often.
const AGAIN: Duration = Duration::from_secs(30);

/// How loudly an answer is told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum How {
    Loud,
    Quiet,
}

/// The memory.
#[derive(Debug, Default)]
pub(super) struct Said(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    ready: bool,
    since: Option<(SystemTime, Instant)>,
    kind: Option<Kind>,
    told: Option<Instant>,
}

impl Said {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer was "ready"; whether that is news.
    pub(super) fn ready(&self) -> bool {
        let mut inner = self.lock();
        let news = !inner.ready;
        *inner = Inner { ready: true, ..Inner::default() };
        news
    }

    /// The answer was "not ready", for this reason; `elsewhere`: the log repeats the cause by itself.
    pub(super) fn not_ready(&self, kind: Option<Kind>, elsewhere: bool) -> How {
        let mut inner = self.lock();
        let due = inner.told.is_none_or(|at| !elsewhere && at.elapsed() >= AGAIN);
        let changed = inner.kind != kind;
        inner.ready = false;
        inner.since.get_or_insert_with(|| (SystemTime::now(), Instant::now()));
        inner.kind = kind;
        if !due && !changed {
            return How::Quiet;
        }
        inner.told = Some(Instant::now());
        How::Loud
    }

    /// Since when it is not ready, as far as anybody has asked.
    pub(super) fn since(&self) -> Option<(SystemTime, Instant)> {
        self.lock().since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_loud_when_it_is_new() {
        let said = Said::default();
        assert_eq!(said.not_ready(Some(Kind::NoConfig), false), How::Loud);
        assert_eq!(said.not_ready(Some(Kind::NoConfig), false), How::Quiet);
        assert_eq!(said.not_ready(Some(Kind::TokenExpired), true), How::Loud);
        assert!(said.since().is_some());
        assert!(said.ready() && !said.ready() && said.since().is_none());
        assert_eq!(said.not_ready(Some(Kind::TokenExpired), true), How::Loud);
    }
}
