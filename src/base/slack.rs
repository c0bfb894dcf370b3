//! Timers that need not be exact fire together.
//!
//! Each wake-up of an idle agent is paid for by the whole node, and every part has something to look at every half
//! minute. [`until`] moves such a moment to a point of a grid that all of them share, so that they are one wake-up. It is
//! never moved to an earlier time, nor by more than a quarter of the wait.
//!
//! Every eighth point is a round. A wait that can end at one does. One of about half a minute or a minute that cannot yet
//! goes as far towards it as it may: whatever comes back so often is there after a few turns, whenever it began, and stays.
//!
//! The grid is that of the runtime's timer, whose wheels have slots of 1, 64 and 4,096 ms: a timer that ends where a slot
//! of the third begins wakes the thread once, any other one of a few seconds or more up to three times, since it falls
//! from wheel to wheel. A grid that missed the runtime's own by more than a millisecond would only cost those.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::Instant;

/// Between two points of the grid: a slot of the third wheel (64 × 64 ms).
pub(crate) const GRAIN: Duration = Duration::from_millis(64 * 64);

/// Between two rounds: 32.768 s.
const ROUND: Duration = GRAIN.saturating_mul(8);

/// What is due sooner is left as it is.
const LEAST: Duration = GRAIN.saturating_mul(4);

static ORIGIN: OnceLock<Instant> = OnceLock::new();

/// Begins the grid. To be called right before the runtime is made.
pub(crate) fn begin() {
    ORIGIN.get_or_init(Instant::now);
}

/// `at` where that is soon; else the next round, or a point before it, that makes the wait at most a quarter longer.
#[must_use]
pub(crate) fn until(at: Instant) -> Instant {
    let wait = at.saturating_duration_since(Instant::now());
    if wait < LEAST {
        return at;
    }
    let (round, latest) = (next(at, ROUND), at + wait / 4);
    if round <= latest {
        return round;
    }
    // From one round a wait as long would end at another.
    let stays = wait.as_nanos().next_multiple_of(ROUND.as_nanos()) <= (wait * 5 / 4).as_nanos();
    // The last point that is not after `latest`, or the first.
    point(if stays { latest + Duration::from_nanos(1) - GRAIN } else { at })
}

/// The next point of the grid that is not before `at`.
#[must_use]
pub(crate) fn point(at: Instant) -> Instant {
    next(at, GRAIN)
}

fn next(at: Instant, grain: Duration) -> Instant {
    let origin = *ORIGIN.get_or_init(Instant::now);
    let since = at.saturating_duration_since(origin).as_nanos();
    let missing = since.next_multiple_of(grain.as_nanos()) - since;
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
            assert!(end >= now + wait && end <= now + wait * 5 / 4, "{wait:?}");
            ends.insert(end);
        }
        // Each at a point of the grid.
        assert!(ends.iter().all(|end| point(*end) == *end), "{ends:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_back_every_half_minute_comes_together_whenever_it_began() {
        begin();
        for began in 0..33 {
            tokio::time::sleep_until(next(Instant::now(), ROUND) + Duration::from_secs(began)).await;
            for turn in 0.. {
                let before = Instant::now();
                sleep(Duration::from_secs(30)).await;
                assert!(before.elapsed() <= Duration::from_millis(37_501), "{:?}", before.elapsed());
                // The runtime's timer is a millisecond late.
                let off = next(Instant::now() - Duration::from_millis(2), ROUND) - Instant::now();
                match (turn, off < Duration::from_millis(2)) {
                    (0..9, _) => {}
                    (9..12, together) => {
                        assert!(together, "began {began} s after the others: {off:?} from them")
                    }
                    _ => break,
                }
            }
        }
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
        assert!((Duration::from_secs(30)..Duration::from_millis(37_502)).contains(&began.elapsed()));
    }
}
