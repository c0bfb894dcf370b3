//! An agent's turn when the agents of a mesh come back (`XDS_RECONNECT_SPREAD`).
//!
//! No agent knows how big its mesh is, so by itself it comes back within seconds, as a small mesh wants it. Where istiod
//! admits only so many streams a second, somebody who knows tells all agents the time over which they are to come back:
//! `docs/SCALE.md` has a table. Promises:
//!
//! - **Even.** The first attempt after a stream broke comes after a random part of that time, drawn from all of it. After
//!   that an agent keeps its turn: each further attempt follows the last after the whole time and up to a tenth more. At
//!   whatever moment istiod comes back, the agents' next attempts so lie evenly over the time that follows. (Delays drawn
//!   anew from the whole time would bring twice as many at its beginning.)
//! - **Nobody waits twice.** A refusal for too many streams sends an agent to its next turn, not among those whose first
//!   turn is still to come.
//! - **Only who can wait.** It is for agents whose Envoy has listeners and serves with them. Before that, dials are not put
//!   off, and delays grow from a fraction of a second, so that nobody waits much longer than istiod was away.
//!
//! Pure: gives spans, knows no clock. [`super::hold`] makes dates of them.

use std::time::Duration;

use rand::Rng;

use crate::base::backoff::{Backoff, Jitter, Policy};

/// How much longer than the time given an agent may take between two attempts, so that agents which came together by chance
/// drift apart.
const DRIFT: f64 = 0.1;

/// Where one agent stands in it.
#[derive(Debug, Clone)]
pub(super) struct Spread {
    over: Duration,
    configured: bool,
    /// A delay was drawn from all of the time: from now on the agent has its turn.
    placed: bool,
    /// Of an agent whose Envoy has no configuration.
    growing: Backoff,
}

impl Spread {
    /// Over a time above zero; `first` bounds the first delay of an agent that starts.
    pub(super) fn new(over: Duration, first: Duration) -> Self {
        let growing = Policy::new(first.min(over), over, 2.0, Jitter::Full).expect("bounds are in order");
        Self { over, configured: false, placed: false, growing: Backoff::new(growing) }
    }

    /// The time over which the mesh comes back.
    pub(super) fn over(&self) -> Duration {
        self.over
    }

    /// Envoy has listeners from now on, or none any more.
    pub(super) fn configured(&mut self, is: bool) {
        self.configured = is;
    }

    /// An Envoy without a configuration has come; whether the one before it had one.
    pub(super) fn starts_anew(&mut self) -> bool {
        if self.configured {
            (self.configured, self.placed) = (false, false);
            self.growing.reset();
            return true;
        }
        false
    }

    /// After istiod's answer the next outage is another one.
    pub(super) fn answered(mut self) -> Self {
        self.placed = false;
        self.growing.reset();
        self
    }

    /// How long the first dial waits after an established stream broke; `None`: not at all.
    pub(super) fn broke(&mut self) -> Option<Duration> {
        self.configured.then(|| self.place())
    }

    /// How long the next attempt waits after one at an istiod that is away.
    pub(super) fn failed(&mut self) -> Duration {
        if self.placed {
            return self.turn();
        }
        if self.configured {
            return self.place();
        }
        self.placed = self.growing.bound() >= self.over;
        self.growing.next_delay()
    }

    /// How long it waits after "too many", where it would wait for `delay` without a spread: never less.
    pub(super) fn refused(&mut self, delay: Duration) -> Duration {
        if !self.configured {
            return delay;
        }
        self.placed = true;
        delay.max(self.turn())
    }

    fn place(&mut self) -> Duration {
        self.placed = true;
        self.over.mul_f64(rand::rng().random_range(0.0..=1.0))
    }

    fn turn(&self) -> Duration {
        self.over.mul_f64(rand::rng().random_range(1.0..=1.0 + DRIFT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OVER: Duration = Duration::from_secs(100);
    const FIRST: Duration = Duration::from_millis(200);
    const AGENTS: usize = 20_000;

    fn serving() -> Spread {
        let mut spread = Spread::new(OVER, FIRST);
        spread.configured(true);
        spread
    }

    // When each of many agents makes its first attempt at or after `back`, in seconds from then; all streams broke at zero.
    fn arrivals(back: f64) -> Vec<f64> {
        let one = |_| {
            let mut spread = serving();
            let mut at = spread.broke().unwrap().as_secs_f64();
            while at < back {
                at += spread.failed().as_secs_f64();
            }
            at - back
        };
        (0..AGENTS).map(one).collect()
    }

    #[test]
    fn whenever_istiod_comes_back_no_part_of_the_time_gets_much_more_than_its_share() {
        for back in [0.0, 1.0, 30.0, 99.0, 150.0, 1000.0] {
            let all = arrivals(back);
            let last = OVER.as_secs_f64() * (1.0 + DRIFT);
            assert!(all.iter().all(|at| (0.0..=last).contains(at)), "back after {back} s");
            // Parts of 5 s, of which each has a twentieth; chance alone adds less than a fifth (6 σ) in a thousand years.
            for part in 0..22_u32 {
                let from = f64::from(part) * 5.0;
                let count = all.iter().filter(|at| (from..from + 5.0).contains(*at)).count();
                assert!(
                    count < AGENTS * 6 / 100,
                    "back after {back} s: {count} of {AGENTS} from {from} s on"
                );
            }
        }
    }

    #[test]
    fn a_refused_agent_waits_for_its_next_turn_and_never_less_than_without() {
        let mut spread = serving();
        for _ in 0..1000 {
            let delay = spread.refused(Duration::from_secs(10));
            assert!((OVER..=OVER.mul_f64(1.0 + DRIFT)).contains(&delay), "{delay:?}");
            assert_eq!(spread.refused(OVER * 3), OVER * 3);
        }
    }

    #[test]
    fn an_agent_whose_envoy_has_nothing_is_not_put_off_and_its_delays_grow() {
        let mut spread = Spread::new(OVER, FIRST);
        assert_eq!(spread.broke(), None);
        assert_eq!(spread.refused(FIRST), FIRST);
        let mut bound = FIRST;
        while bound < OVER * 2 {
            let delay = spread.failed();
            assert!(delay <= bound.min(OVER), "{delay:?} is above {bound:?}");
            bound *= 2;
        }
        assert!(spread.failed() >= OVER, "a long outage has given it its turn");
    }

    #[test]
    fn an_envoy_that_starts_anew_does_not_wait_for_the_turn_of_the_one_before() {
        let mut spread = serving();
        spread.broke().unwrap();
        assert!(spread.failed() >= OVER);
        assert!(spread.starts_anew());
        assert!(spread.failed() <= FIRST);
        assert!(!spread.starts_anew(), "once for each that had a configuration");
        let mut spread = spread.answered();
        assert!(spread.failed() <= FIRST, "what failed before an answer does not count");
    }

    #[test]
    fn a_time_below_the_first_delay_bounds_that_too() {
        let mut spread = Spread::new(FIRST / 2, FIRST);
        assert!((0..100).all(|_| spread.failed() <= FIRST.mul_f64(0.5 * (1.0 + DRIFT))));
    }
}
