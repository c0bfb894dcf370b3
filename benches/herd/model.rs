//! The simulation itself: agents, their timers, and an istiod that admits so many.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, SystemTime};

use pilot_agent::testing::secrets::rotation;
use pilot_agent::testing::xds::hold::Hold;
use rand::Rng;
use tonic::Status;

/// An outage after which the back-off has long been at its longest, in seconds.
const STATIONARY: f64 = 60.0;
/// Envoy's back-off before it opens a stream again, at most.
const ENVOY: f64 = 0.5;
const LIFE: Duration = Duration::from_secs(24 * 3600);
/// `SECRET_GRACE_PERIOD_RATIO` and its jitter, as by default.
const RENEWED: (f64, f64) = (0.5, 0.01);

/// Agents that will all want something.
#[derive(Debug)]
pub(crate) struct Herd {
    agents: usize,
}

/// What istiod saw, in seconds.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// Every attempt that reached it.
    pub attempts: Vec<f64>,
    /// Of those, the ones of agents that had been refused before.
    pub again: Vec<f64>,
    /// When each agent had what it wanted.
    pub served: Vec<f64>,
}

impl Herd {
    pub(crate) fn new(agents: usize) -> Self {
        Self { agents }
    }

    /// All streams break at once; istiod can be reached again after `away` seconds, the zero of the result.
    pub(crate) fn after_outage(&self, away: f64, rate: Option<f64>) -> Arrivals {
        let mut rng = rand::rng();
        // The delays are at their longest after seconds; a longer outage is no different.
        let away = away.min(STATIONARY);
        let starts: Vec<f64> = (0..self.agents).map(|_| rng.random_range(0.0..ENVOY) - away).collect();
        play(&starts, rate, true)
    }

    /// Pods start one after the other.
    pub(crate) fn rollout(&self, each_second: f64, rate: Option<f64>) -> Arrivals {
        let mut rng = rand::rng();
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let starts: Vec<f64> =
            (0..self.agents).map(|n| n as f64 / each_second + rng.random_range(0.0..1.0)).collect();
        play(&starts, rate, false)
    }

    /// Certificates that were issued within `spread` seconds, and their renewal.
    pub(crate) fn renewals(&self, spread: f64) -> Arrivals {
        let mut rng = rand::rng();
        let issued = SystemTime::UNIX_EPOCH;
        let delay = || {
            let draw = rotation::draw();
            rotation::delay(issued, issued + LIFE, RENEWED.0, RENEWED.1, draw).as_secs_f64()
        };
        let mut at: Vec<f64> = (0..self.agents).map(|_| rng.random_range(0.0..spread) + delay()).collect();
        at.sort_by(f64::total_cmp);
        let first = at.first().copied().unwrap_or_default();
        at.iter_mut().for_each(|t| *t -= first);
        Arrivals { attempts: at.clone(), again: Vec::new(), served: at }
    }
}

// Each agent tries at its start and, until it is admitted, when its own code says so. Before zero nobody answers.
fn play(starts: &[f64], rate: Option<f64>, served_before: bool) -> Arrivals {
    let mut new = Hold::default();
    if served_before {
        new.reset();
    }
    let mut holds = vec![new; starts.len()];
    let mut refused = vec![false; starts.len()];
    let mut due: BinaryHeap<Reverse<(u64, usize)>> =
        starts.iter().enumerate().map(|(agent, at)| Reverse((micros(*at), agent))).collect();
    let mut gate = rate.map(Gate::new);
    let mut out = Arrivals::default();
    while let Some(Reverse((at, agent))) = due.pop() {
        let now = seconds(at);
        let refusal = if now < 0.0 {
            Status::unavailable("away")
        } else {
            out.attempts.push(now);
            if refused[agent] {
                out.again.push(now);
            }
            if gate.as_mut().is_none_or(|gate| gate.admits(now)) {
                out.served.push(now);
                continue;
            }
            refused[agent] = true;
            Status::resource_exhausted("too many")
        };
        let delay = holds[agent].failed(&refusal);
        due.push(Reverse((at + u64::try_from(delay.as_micros()).unwrap_or(u64::MAX / 4).max(1), agent)));
    }
    out
}

/// Zero of the simulation, so that times before it have a place: 2^40 µs, 12 days.
const ZERO: f64 = 1_099_511_627_776.0;

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within days of the zero above")]
fn micros(at: f64) -> u64 {
    at.mul_add(1e6, ZERO) as u64
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn seconds(at: u64) -> f64 {
    (at as f64 - ZERO) / 1e6
}

/// An admission limit: so many a second, a tenth of a second's worth at once.
#[derive(Debug)]
struct Gate {
    rate: f64,
    tokens: f64,
    at: f64,
}

impl Gate {
    fn new(rate: f64) -> Self {
        Self { rate, tokens: rate / 10.0, at: 0.0 }
    }

    fn admits(&mut self, now: f64) -> bool {
        self.tokens = (now - self.at).mul_add(self.rate, self.tokens).min(self.rate / 10.0);
        self.at = now;
        let admitted = self.tokens >= 1.0;
        self.tokens -= f64::from(u8::from(admitted));
        admitted
    }
}

impl Arrivals {
    /// Attempts in each second, or in each of at most 600 equal spans; and the span's length.
    pub(crate) fn histogram(&self) -> (Vec<usize>, f64) {
        let end = self.attempts.iter().copied().fold(0.0, f64::max);
        let span = (end / 600.0).ceil().max(1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 600")]
        let place = |at: f64| (at / span) as usize;
        let mut bars = vec![0; place(end) + 1];
        for at in &self.attempts {
            bars[place(*at)] += 1;
        }
        (bars, span)
    }

    /// The cells of docs/SCALE.md.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    pub(crate) fn row(&self) -> String {
        let mut served = self.served.clone();
        served.sort_by(f64::total_cmp);
        let at = |share: usize| served.get((served.len() * share / 100).min(served.len().saturating_sub(1)));
        let [half, most, all] = [50, 99, 100].map(|share| at(share).copied().unwrap_or_default());
        // A second in which less than a few are due says nothing of a herd: a few, then.
        let span = (FEW * all / served.len().max(1) as f64).max(1.0);
        let first = busiest(&self.attempts, span);
        let (again, even) = (busiest(&self.again, span), served.len() as f64 / all.max(1.0));
        let each = self.attempts.len() as f64 / served.len().max(1) as f64;
        let times = |count: usize| count as f64 / span / even;
        format!(
            "{half:.1} | {most:.1} | {all:.1} | {each:.1} | {:.0} | {:.1} | {:.0} | {:.1}",
            (first as f64 / span).ceil(),
            times(first),
            (again as f64 / span).ceil(),
            times(again)
        )
    }
}

/// What an even share must be for chance alone not to make three times as much of it.
const FEW: f64 = 30.0;

// How many come in the span, in seconds, in which most come.
fn busiest(at: &[f64], span: f64) -> usize {
    let mut seconds = std::collections::HashMap::new();
    for at in at {
        *seconds.entry((at / span).floor().to_bits()).or_insert(0_usize) += 1;
    }
    seconds.values().copied().max().unwrap_or_default()
}
