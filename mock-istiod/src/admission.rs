//! How many streams istiod admits a second (its `PILOT_MAX_REQUESTS_PER_SECOND`, 0: all).
//!
//! As istiod does it: streams take turns at even intervals, one whose turn comes within a second waits for it, and any
//! other is refused at once (`WaitForRequestLimit`; a Go rate limiter with a burst of one).

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The longest that istiod lets a stream wait for its turn.
const PATIENCE: Duration = Duration::from_secs(1);

/// The turns of all streams; by default there are none to wait for.
#[derive(Debug, Default)]
pub(crate) struct Admission(Mutex<Turns>);

#[derive(Debug, Default)]
struct Turns {
    /// Between two of them; none: everybody is admitted.
    every: Duration,
    next: Option<Instant>,
}

impl Admission {
    /// So many a second from now on; 0: all.
    pub(crate) fn set(&self, rate: u32) {
        let every = Duration::from_secs(1).checked_div(rate).unwrap_or_default();
        *self.0.lock().expect("no panic holds this lock") = Turns { every, next: None };
    }

    /// How long a stream that comes at `now` waits; `None`: it is refused.
    pub(crate) fn turn(&self, now: Instant) -> Option<Duration> {
        let mut turns = self.0.lock().expect("no panic holds this lock");
        let wait = turns.next.map_or(Duration::ZERO, |next| next.saturating_duration_since(now));
        if wait > PATIENCE {
            return None;
        }
        turns.next = Some(now + wait + turns.every);
        Some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_within_a_second_is_waited_for_and_a_later_one_is_refused() {
        let (admission, begin) = (Admission::default(), Instant::now());
        assert!((0..1000).all(|_| admission.turn(begin) == Some(Duration::ZERO)), "no limit");
        admission.set(4);
        let waits: Vec<_> = (0..7).map(|_| admission.turn(begin).map(|wait| wait.as_millis())).collect();
        assert_eq!(waits, [Some(0), Some(250), Some(500), Some(750), Some(1000), None, None]);
        // Who was refused has taken nobody's turn, and what is not used is not saved up.
        assert_eq!(admission.turn(begin + Duration::from_secs(1)), Some(Duration::from_millis(250)));
        let later = begin + Duration::from_secs(60);
        assert_eq!(admission.turn(later), Some(Duration::ZERO));
        assert_eq!(admission.turn(later), Some(Duration::from_millis(250)));
        admission.set(0);
        assert!((0..1000).all(|_| admission.turn(later) == Some(Duration::ZERO)), "no limit again");
    }
}
