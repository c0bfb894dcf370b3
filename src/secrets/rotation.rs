//! When to renew: pure functions of dates.

use std::time::{Duration, SystemTime};

use rand::Rng;

use crate::base::backoff::{Jitter, Policy};

/// How long after `created` a certificate is renewed: when `ratio` of its life is left.
///
/// `draw` is a number in `-1.0..=1.0` that scales `jitter`. A ratio of 0 gives the whole life, of 1
/// nothing; a life that is over gives nothing.
#[must_use]
pub fn delay(created: SystemTime, expiry: SystemTime, ratio: f64, jitter: f64, draw: f64) -> Duration {
    let life = expiry.duration_since(created).unwrap_or_default();
    let left = (ratio + draw * jitter).clamp(0.0, 1.0);
    // A value that is no number (a ratio of NaN) means: at once rather than never.
    if left.is_nan() { Duration::ZERO } else { life.saturating_sub(life.mul_f64(left)) }
}

/// By so much the clocks of two machines may differ that are both kept right, where a CA dates nothing back (istiod does, by
/// two minutes).
const CLOCKS: Duration = Duration::from_secs(5);

/// Whether a certificate that begins then is not valid yet, by more than clocks differ.
#[must_use]
pub(super) fn is_ahead(begins: SystemTime, now: SystemTime) -> bool {
    begins.duration_since(now).is_ok_and(|by| by > CLOCKS)
}

/// A number for `draw`.
#[must_use]
pub fn draw() -> f64 {
    rand::rng().random_range(-1.0..=1.0)
}

/// How long to wait after failed renewals. The Go agent starts at 500 ms and grows by half up to a minute; full jitter
/// spreads a mesh whose istiod comes back.
#[must_use]
pub(crate) fn retry() -> Policy {
    Policy::new(Duration::from_millis(500), Duration::from_secs(60), 1.5, Jitter::Full)
        .expect("bounds are in order")
}

/// A span for people: `23h59m`, `12m5s`, `4s`.
#[must_use]
pub(crate) fn span(of: Duration) -> String {
    let s = of.as_secs();
    match s {
        0 => format!("{}ms", of.as_millis()),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m{}s", s / 60, s % 60),
        _ => format!("{}h{}m", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::UNIX_EPOCH;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_day_is_renewed_at_noon_give_or_take_a_quarter_of_an_hour() {
        let expiry = UNIX_EPOCH + 24 * HOUR;
        let minutes = |draw| delay(UNIX_EPOCH, expiry, 0.5, 0.01, draw).as_secs_f64() / 60.0;
        assert!((minutes(0.0) - 720.0).abs() < 0.001);
        assert!((minutes(1.0) - 705.6).abs() < 0.001);
        assert!((minutes(-1.0) - 734.4).abs() < 0.001);
    }

    #[test]
    fn the_ends_of_the_range() {
        let expiry = UNIX_EPOCH + HOUR;
        assert_eq!(delay(UNIX_EPOCH, expiry, 1.0, 0.0, 0.0), Duration::ZERO);
        assert_eq!(delay(UNIX_EPOCH, expiry, 0.0, 0.0, 0.0), HOUR);
        assert_eq!(delay(UNIX_EPOCH, expiry, 7.0, 0.0, 0.0), Duration::ZERO);
        assert_eq!(delay(UNIX_EPOCH, expiry, f64::NAN, 0.0, 0.0), Duration::ZERO);
        assert_eq!(delay(expiry, UNIX_EPOCH, 0.5, 0.0, 0.0), Duration::ZERO);
    }

    #[test]
    fn spans_read_well() {
        for (ms, text) in [(0, "0ms"), (1_500, "1s"), (61_000, "1m1s"), (86_399_000, "23h59m")] {
            assert_eq!(span(Duration::from_millis(ms)), text);
        }
    }

    proptest! {
        #[test]
        fn never_after_the_end(life in 0u64..10_000_000, ratio in -1.0f64..2.0, jitter in 0.0f64..1.0, draw in -1.0f64..=1.0) {
            let life = Duration::from_secs(life);
            prop_assert!(delay(UNIX_EPOCH, UNIX_EPOCH + life, ratio, jitter, draw) <= life);
        }
    }
}
