//! The simulation itself: agents, their timers, and an istiod that admits so many.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, SystemTime};

use pilot_agent::testing::secrets::rotation;
use pilot_agent::testing::xds::hold::Hold;
use rand::Rng;
use tonic::Status;

/// Envoy's back-off before it opens a stream again, at most.
const ENVOY: f64 = 0.5;
/// An outage after which, without a spread, the back-off has long been at its longest, in seconds.
const STATIONARY: f64 = 60.0;
/// Configuration that an agent is pushed on a fresh stream, in MB: that of some hundred services.
pub(crate) const CONFIG_MB: usize = 1;
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
    /// Every request for a certificate that reached it.
    pub csrs: Vec<f64>,
}

/// What is set and what istiod does.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mesh {
    /// Streams that all istiods admit a second.
    pub rate: Option<f64>,
    /// `XDS_RECONNECT_SPREAD`, in seconds.
    pub spread: Option<f64>,
}

impl Herd {
    pub(crate) fn new(agents: usize) -> Self {
        Self { agents }
    }

    /// All streams break at once; istiod can be reached again after `away` seconds, the zero of the result. Of
    /// certificates that fall due meanwhile there are as many as in any such time.
    pub(crate) fn after_outage(&self, away: f64, mesh: Mesh) -> Arrivals {
        let mut rng = rand::rng();
        let mut agents = Vec::with_capacity(self.agents);
        let begin = if mesh.spread.is_some() { away } else { away.min(STATIONARY) };
        for _ in 0..self.agents {
            let mut hold = hold(mesh);
            hold.reset();
            hold.configured(true);
            let turn = hold.broke().unwrap_or_default().as_secs_f64();
            agents.push((rng.random_range(0.0..ENVOY).max(turn) - begin, hold));
        }
        let mut out = play(agents, mesh.rate);
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let due = self.agents as f64 * away / (LIFE.as_secs_f64() * RENEWED.0);
        out.csrs = certificates(due, away);
        out
    }

    /// Pods start one after the other: a certificate and a stream each.
    pub(crate) fn rollout(&self, each_second: f64, mesh: Mesh) -> Arrivals {
        let mut rng = rand::rng();
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let starts: Vec<f64> =
            (0..self.agents).map(|n| n as f64 / each_second + rng.random_range(0.0..1.0)).collect();
        let mut out = play(starts.iter().map(|at| (*at, hold(mesh))).collect(), mesh.rate);
        out.csrs = starts;
        out
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
        Arrivals { csrs: at.clone(), served: at, ..Arrivals::default() }
    }
}

fn hold(mesh: Mesh) -> Hold {
    Hold::new(mesh.spread.map(Duration::from_secs_f64))
}

// Renewals that fell due at even intervals while the CA was away, each tried again until it is there.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
fn certificates(due: f64, away: f64) -> Vec<f64> {
    let mut rng = rand::rng();
    let one = |_| {
        let mut at = rng.random_range(-1.0..0.0) * away;
        for failures in 0.. {
            if at >= 0.0 {
                break;
            }
            at += rotation::retry_after(failures).as_secs_f64();
        }
        at
    };
    (0..due.round() as usize).map(one).collect()
}

// Each agent tries at its start and, until it is admitted, when its own code says so. Before zero nobody answers.
fn play(agents: Vec<(f64, Hold)>, rate: Option<f64>) -> Arrivals {
    let (starts, mut holds): (Vec<f64>, Vec<Hold>) = agents.into_iter().unzip();
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
            if let Some(wait) = gate.as_mut().map_or(Some(0.0), |gate| gate.turn(now)) {
                out.served.push(now + wait);
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

/// istiod's admission limit (`WaitForRequestLimit`): streams take turns at even intervals, one whose turn comes within a
/// second waits for it, any other is refused at once.
#[derive(Debug)]
struct Gate {
    every: f64,
    next: f64,
}

impl Gate {
    fn new(rate: f64) -> Self {
        Self { every: rate.recip(), next: 0.0 }
    }

    // How long a stream waits that comes now; none: it is refused.
    fn turn(&mut self, now: f64) -> Option<f64> {
        let wait = (self.next - now).max(0.0);
        (wait <= 1.0).then(|| {
            self.next = now + wait + self.every;
            wait
        })
    }
}

impl Arrivals {
    /// The most that came within a second: attempts, requests for certificates, agents served.
    pub(crate) fn most(&self) -> [usize; 3] {
        [&self.attempts, &self.csrs, &self.served].map(|at| busiest(at, 1.0))
    }

    /// When the last agent had what it wanted.
    pub(crate) fn last(&self) -> f64 {
        self.served.iter().copied().fold(0.0, f64::max)
    }

    /// The busiest second's attempts, in even shares.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    pub(crate) fn share(&self) -> f64 {
        busiest(&self.attempts, 1.0) as f64 * self.last().max(1.0) / self.served.len().max(1) as f64
    }

    /// The cells of docs/SCALE.md.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    pub(crate) fn row(&self) -> String {
        let mut served = self.served.clone();
        served.sort_by(f64::total_cmp);
        let at = |share: usize| served.get((served.len() * share / 100).min(served.len().saturating_sub(1)));
        let [half, most, all] = [50, 99, 100].map(|share| at(share).copied().unwrap_or_default());
        // Streams, or where none are opened, certificates.
        let wanted = if self.attempts.is_empty() { &self.csrs } else { &self.attempts };
        // A second in which less than a few are due says nothing of a herd: a few, then.
        let span = (FEW * all / served.len().max(1) as f64).max(1.0);
        let first = busiest(wanted, span);
        let (again, even) = (busiest(&self.again, span), served.len() as f64 / all.max(1.0));
        let each = wanted.len() as f64 / served.len().max(1) as f64;
        let times = |count: usize| count as f64 / span / even;
        format!(
            "{half:.1} | {most:.1} | {all:.1} | {each:.1} | {:.0} | {:.1} | {:.0} | {:.1} | {} | {}",
            (first as f64 / span).ceil(),
            times(first),
            (again as f64 / span).ceil(),
            times(again),
            busiest(&self.csrs, 1.0),
            // One configuration each, in MB as assumed.
            if self.attempts.is_empty() { 0 } else { busiest(&self.served, 1.0) * CONFIG_MB }
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
