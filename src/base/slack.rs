//! Timers that need not be exact fire together.
//!
//! Each wake-up of an idle agent is paid for by the whole node, and every part has something to look at every half
//! minute. [`until`] moves such a moment to the next point of a grid that all of them share, so that they are one
//! wake-up. It is never moved to an earlier time, nor by more than a quarter of the wait.
//!
//! The grid is that of the runtime's timer, whose wheels have slots of 1, 64 and 4,096 ms: a timer that ends where a slot
//! of the third begins wakes the thread once, any other one of a few seconds or more up to three times, since it falls
//! from wheel to wheel. A grid that missed the runtime's own by more than a millisecond would only cost those.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::Instant;

/// Between two points of the grid: a slot of the third wheel (64 × 64 ms).
pub(crate) const GRAIN: Duration = Duration::from_millis(64 * 64);

/// What is due sooner is left as it is.
const LEAST: Duration = GRAIN.saturating_mul(4);

static ORIGIN: OnceLock<Instant> = OnceLock::new();

/// Begins the grid. To be called right before the runtime is made.
pub(crate) fn begin() {
    ORIGIN.get_or_init(Instant::now);
}

/// `at`, or the next point of the grid where that makes the wait at most a quarter longer.
#[must_use]
pub(crate) fn until(at: Instant) -> Instant {
    let now = Instant::now();
    if at.saturating_duration_since(now) < LEAST { at } else { point(at) }
}

/// The next point of the grid that is not before `at`.
#[must_use]
pub(crate) fn point(at: Instant) -> Instant {
    let origin = *ORIGIN.get_or_init(Instant::now);
    let since = at.saturating_duration_since(origin).as_nanos();
    let missing = since.next_multiple_of(GRAIN.as_nanos()) - since;
    at + Duration::from_nanos(u64::try_from(missing).unwrap_or(0))
}

/// Sleeps for `wait`, or up to a quarter longer.
pub(crate) async fn sleep(wait: Duration) {
    tokio::time::sleep_until(until(Instant::now() + wait)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_end_together_and_short_ones_when_they_should() {
        begin();
        let now = Instant::now();
        for short in [0, 1, 1000, 10_000, 16_383].map(Duration::from_millis) {
            assert_eq!(until(now + short), now + short);
        }
        let mut ends = std::collections::BTreeSet::new();
        for wait in (30_000..60_000).step_by(7).map(Duration::from_millis) {
            let end = until(now + wait);
            assert!(end >= now + wait && end < now + wait + GRAIN, "{wait:?}");
            ends.insert(end);
        }
        assert!(ends.len() <= 9, "{} wake-ups in half a minute", ends.len());
        let all: Vec<_> = ends.into_iter().collect();
        assert!(all.windows(2).all(|two| two[1] - two[0] == GRAIN), "{all:?}");
    }

    #[test]
    fn a_point_is_its_own_next_point_and_the_past_is_left_alone() {
        begin();
        let now = Instant::now();
        let next = point(now);
        assert_eq!((point(next), point(next + Duration::from_nanos(1))), (next, next + GRAIN));
        if let Some(past) = ORIGIN.get().unwrap().checked_sub(Duration::from_secs(1)) {
            assert_eq!((until(past), point(past)), (past, past));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sleeping_takes_at_least_the_time() {
        let began = Instant::now();
        sleep(Duration::from_secs(30)).await;
        assert!(
            (Duration::from_secs(30)..Duration::from_secs(30) + GRAIN + Duration::from_millis(2))
                .contains(&began.elapsed())
        );
    }
}
