//! How long to wait before the next attempt.
//!
//! One policy type for every retry loop: exponential growth between two bounds, with the share of the
//! delay that is random. `Jitter::Full` (uniform between zero and the bound) spreads a herd best and is
//! the default of ours; the Go agent's ±x % is there where its timing is a contract. Why not a crate:
//! the retry crates wrap the loop itself, while our loops also wait on stop tokens, file changes and
//! pushed values, and need only the next delay.

use std::time::Duration;

use rand::Rng;

/// The random part of a delay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Jitter {
    /// None: the bound itself.
    None,
    /// Uniform in `[0, bound]`.
    Full,
    /// Uniform in `[bound·(1−x), bound·(1+x)]`, `x` in `0.0..=1.0`.
    PlusMinus(f64),
}

/// A back-off policy, checked when it is built.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Policy {
    first: Duration,
    max: Duration,
    factor: f64,
    jitter: Jitter,
}

/// An invalid policy.
#[derive(Debug, thiserror::Error, PartialEq)]
pub(crate) enum Error {
    /// The first delay is longer than the longest.
    #[error("back-off starts at {first:?}, above its maximum {max:?}")]
    Bounds {
        /// First delay.
        first: Duration,
        /// Longest delay.
        max: Duration,
    },
    /// The factor would shrink the delay, or is not a number.
    #[error("back-off factor {0} is below 1 or not a number")]
    Factor(f64),
    /// The jitter share is outside `0.0..=1.0`.
    #[error("back-off jitter {0} is outside 0..=1")]
    Jitter(f64),
}

impl Policy {
    /// Delays grow from `first` by `factor` up to `max`.
    ///
    /// # Errors
    /// Refuses bounds, factors and jitter that are invalid.
    pub(crate) fn new(first: Duration, max: Duration, factor: f64, jitter: Jitter) -> Result<Self, Error> {
        if first > max {
            return Err(Error::Bounds { first, max });
        }
        if !factor.is_finite() || factor < 1.0 {
            return Err(Error::Factor(factor));
        }
        if let Jitter::PlusMinus(x) = jitter
            && !(0.0..=1.0).contains(&x)
        {
            return Err(Error::Jitter(x));
        }
        Ok(Self { first, max, factor, jitter })
    }

    /// The bound of the delay after `failures` failures in a row (0 = the first delay).
    #[must_use]
    pub(crate) fn bound(&self, failures: u32) -> Duration {
        let exponent = i32::try_from(failures).unwrap_or(i32::MAX);
        let seconds = self.first.as_secs_f64() * self.factor.powi(exponent);
        if seconds.is_finite() && seconds < self.max.as_secs_f64() {
            Duration::from_secs_f64(seconds)
        } else {
            self.max
        }
    }

    /// A delay after `failures` failures in a row, jitter applied.
    #[must_use]
    pub(crate) fn delay(&self, failures: u32) -> Duration {
        let bound = self.bound(failures);
        match self.jitter {
            Jitter::None => bound,
            Jitter::Full => bound.mul_f64(rand::rng().random_range(0.0..=1.0)),
            Jitter::PlusMinus(x) => bound.mul_f64(rand::rng().random_range(1.0 - x..=1.0 + x)),
        }
    }
}

/// A policy together with the failures counted so far.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    policy: Policy,
    failures: u32,
}

impl Backoff {
    /// Starts without failures.
    #[must_use]
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, failures: 0 }
    }

    /// Counts a failure and gives the delay before the next attempt.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let delay = self.policy.delay(self.failures);
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// Failures in a row so far.
    #[must_use]
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// What bounds the next delay.
    #[must_use]
    pub(crate) fn bound(&self) -> Duration {
        self.policy.bound(self.failures)
    }

    /// After a success the next failure starts from the first delay again.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nonsense_is_refused() {
        let s = Duration::from_secs;
        assert!(matches!(Policy::new(s(2), s(1), 2.0, Jitter::Full), Err(Error::Bounds { .. })));
        assert!(matches!(Policy::new(s(1), s(2), 0.5, Jitter::Full), Err(Error::Factor(_))));
        assert!(matches!(Policy::new(s(1), s(2), f64::NAN, Jitter::Full), Err(Error::Factor(_))));
        assert!(matches!(Policy::new(s(1), s(2), 2.0, Jitter::PlusMinus(f64::NAN)), Err(Error::Jitter(_))));
    }

    #[test]
    fn failures_add_up_until_a_success() {
        let s = Duration::from_secs;
        let delays = |factor| {
            let mut backoff = Backoff::new(Policy::new(s(1), s(5), factor, Jitter::None).unwrap());
            let first = [(); 4].map(|()| backoff.next_delay().as_secs());
            backoff.reset();
            (first, backoff.next_delay().as_secs())
        };
        assert_eq!(delays(2.0), ([1, 2, 4, 5], 1));
        assert_eq!(delays(1.0), ([1; 4], 1));
    }

    #[test]
    fn a_share_that_is_random_lies_on_both_sides() {
        let s = Duration::from_secs;
        let policy = Policy::new(s(10), s(10), 1.0, Jitter::PlusMinus(0.5)).unwrap();
        let delays: Vec<_> = (0..200).map(|_| policy.delay(0)).collect();
        assert!(delays.iter().all(|delay| (s(5)..=s(15)).contains(delay)), "{delays:?}");
        assert!(delays.iter().any(|delay| *delay < s(10)) && delays.iter().any(|delay| *delay > s(10)));
    }

    proptest! {
        #[test]
        fn delays_stay_between_zero_and_the_bound(
            first in 0u64..10_000, span in 0u64..100_000, factor in 1.0f64..5.0, n in any::<u32>(),
        ) {
            let first = Duration::from_millis(first);
            let max = first + Duration::from_millis(span);
            let policy = Policy::new(first, max, factor, Jitter::Full).unwrap();
            prop_assert!(policy.bound(n) <= max);
            prop_assert!(policy.bound(n) >= first);
            prop_assert!(policy.delay(n) <= policy.bound(n));
        }
    }
}
