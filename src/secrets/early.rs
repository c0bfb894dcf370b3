//! Early renewal, when the connection to istiod is known to fail (`RENEWAL_EARLY`). Pure.
//!
//! A certificate is renewed at half its life. An outage of istiod that begins before that moment and lasts long after it
//! takes that half from every proxy at once. With this on, the agent retries the renewal of a certificate that is no
//! longer fresh from the moment any of its parts fails to reach istiod until a new certificate is there: istiod need be
//! reachable only for a moment. Attempts are [`pause`] apart, with jitter, so that a mesh does not retry in step; a failed
//! attempt changes nothing for subscribers.

use std::time::Duration;

use tokio::time::Instant;

/// The first part of the life in which nothing is gained by another certificate.
const FRESH: f64 = 0.1;
/// Share of the life between two attempts on average.
const SHARE: f64 = 1.0 / 48.0;
/// Bounds of that: every ten minutes is often enough for a certificate of a day.
const BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));

/// Trouble is looked for at least so often.
const LOOK: Duration = Duration::from_secs(30);

/// When to ask early.
#[derive(Debug, Default)]
pub(super) struct Early {
    next: Option<Instant>,
}

impl Early {
    /// Whether to ask now, for a certificate of this `life` that has come to this `age`. `trouble`: the way to istiod
    /// is known to be bad. `draw` is in `0.0..=1.0`.
    pub(super) fn due(
        &mut self,
        life: Duration,
        age: Duration,
        now: Instant,
        trouble: bool,
        draw: f64,
    ) -> bool {
        if age < life.mul_f64(FRESH) {
            // A new one has come.
            self.next = None;
            return false;
        }
        if trouble && self.next.is_none() {
            self.next = Some(now + pause(life, draw));
        }
        self.next.is_some_and(|at| now >= at)
    }

    /// When the next attempt is due, while there is something to wait for.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// When to look again: trouble is asked for, it does not tell.
    pub(super) fn wake(&self, life: Duration, now: Instant) -> Instant {
        self.next.unwrap_or_else(|| now + life.mul_f64(SHARE).clamp(BOUNDS.0, LOOK))
    }

    /// An attempt has failed: the next one comes later, also when the trouble is over by then.
    pub(super) fn failed(&mut self, life: Duration, now: Instant, draw: f64) {
        self.next = Some(now + pause(life, draw));
    }
}

/// Between two attempts: a share of the life, from half to one and a half of it.
fn pause(life: Duration, draw: f64) -> Duration {
    life.mul_f64(SHARE).clamp(BOUNDS.0, BOUNDS.1).mul_f64(0.5 + draw.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn only_trouble_begins_it_and_only_a_new_certificate_ends_it() {
        let (mut early, now) = (Early::default(), Instant::now());
        assert!(!early.due(DAY, 5 * HOUR, now, false, 0.0), "nothing is wrong");
        assert!(!early.due(DAY, HOUR, now, true, 0.0), "it is fresh");
        assert_eq!((early.next(), early.wake(DAY, now)), (None, now + LOOK));
        assert!(!early.due(DAY, 3 * HOUR, now, true, 0.0));
        let at = early.next().unwrap();
        assert_eq!(at - now, Duration::from_secs(300));
        assert!(early.due(DAY, 3 * HOUR, at, false, 0.0), "istiod is back, and this is the chance");
        early.failed(DAY, at, 1.0);
        assert_eq!(early.next().unwrap() - at, Duration::from_secs(900), "one and a half of ten minutes");
        assert!(!early.due(DAY, Duration::ZERO, at + DAY, true, 0.0), "it was renewed");
        assert_eq!(early.next(), None);
    }

    #[test]
    fn short_lives_are_not_asked_for_without_pause() {
        assert_eq!(pause(Duration::from_secs(10), 0.0), Duration::from_millis(500));
    }
}
