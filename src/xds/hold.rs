//! Envoy's stream kept while the agent dials istiod.
//!
//! Envoy backs off up to 30 s after failed streams, so an agent that fails each of its tries while istiod
//! is away brings configuration back long after istiod is back. Ours lets Envoy see the first failure in
//! a row, exactly as the Go agent does; the stream that Envoy opens next is accepted and kept silent,
//! while the agent dials: at delays of up to 200 ms growing to 4 s, chosen at random so that the agents
//! of a mesh come back spread out, and at once when a token or root file changes or the name of istiod
//! resolves to something else. A hold ends after `XDS_HOLD_TIMEOUT`; then Envoy sees a failure again.
//!
//! What is held: streams for which istiod cannot be reached, and streams that istiod ends before its
//! first response with Unavailable, Unauthenticated, PermissionDenied or ResourceExhausted. The last
//! means "too many", and no file change shortens what follows it: a random delay of up to 2 s, doubled with
//! each refusal up to a minute. An agent whose configuration broke off, or that found istiod away before, has
//! most likely been refused together with its whole mesh, so it begins with 10 s: with less, the agents of a
//! large mesh would be refused many times each (`docs/SCALE.md`). A delay that istiod names itself
//! (`grpc-retry-pushback-ms`) is kept.
//!
//! With `XDS_RECONNECT_SPREAD` the delays come from [`super::spread`]: the first dial after a stream broke is put off,
//! too, and a name that resolves anew brings none forward, since all agents of a mesh see it in the same second. A hold
//! never ends before the attempt that it waits for.

use std::time::Duration;

use rand::Rng;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::spread::Spread;
use super::upstream::Upstream;
use crate::base::backoff::{Backoff, Jitter, Policy};
use crate::base::seldom::Seldom;
use crate::net::grpc::PUSHBACK;

const FIRST: Duration = Duration::from_millis(200);
/// With 5 s the median over ten outages of a minute was 2.2 s from istiod's return to the new configuration; two
/// are wanted.
const MAX: Duration = Duration::from_secs(4);
/// After a first "too many" an agent that starts waits for so long at most...
const CROWDED: Duration = Duration::from_secs(2);
/// ... one that had a configuration, or found istiod away, for so long...
const HERD: Duration = Duration::from_secs(10);
/// ... and any after many for so long (Envoy by itself: 30 s).
const CROWDED_MAX: Duration = Duration::from_secs(60);
/// How long istiod may send an agent away for.
const PUSHBACK_MAX: Duration = Duration::from_secs(300);
/// How often the name is looked up while a stream is held.
const LOOK_UP: Duration = Duration::from_secs(1);

/// Whether a stream that failed so, before istiod's first response, may be tried again in silence.
#[must_use]
pub(crate) fn holdable(status: &Status) -> bool {
    let again = matches!(
        status.code(),
        Code::Unavailable | Code::Unauthenticated | Code::PermissionDenied | Code::ResourceExhausted
    );
    // Less than none: the server asks not to be tried again.
    again && status.metadata().get(PUSHBACK).is_none_or(|value| !value.as_bytes().starts_with(b"-"))
}

/// The delay that istiod names, in milliseconds.
fn pushback(status: &Status) -> Option<Duration> {
    let text = status.metadata().get(PUSHBACK)?.to_str().ok()?;
    text.parse().ok().map(|ms| Duration::from_millis(ms).min(PUSHBACK_MAX))
}

/// Failures in a row, and when the next attempt is due. One for all streams: the one after a failed
/// stream goes on where that one stopped.
#[derive(Debug, Clone)]
pub struct Hold {
    backoff: Backoff,
    due: Option<Instant>,
    overloaded: bool,
    /// For "too many" in a row, and whether others have most likely been told so too.
    crowded: Backoff,
    herd: bool,
    /// The time over which the mesh comes back, where one is set.
    spread: Option<Spread>,
    /// The next attempt waits for its turn, though nothing has failed.
    put_off: bool,
}

impl Default for Hold {
    fn default() -> Self {
        Self::new(None)
    }
}

fn doubling(first: Duration, max: Duration) -> Backoff {
    Backoff::new(Policy::new(first, max, 2.0, Jitter::Full).expect("constants make sense"))
}

/// When the next attempt may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// Not before.
    pub at: Instant,
    /// Whether news (a changed file or name) may bring it forward.
    pub hurry: bool,
    /// Whether it is this agent's turn in the time over which the mesh comes back: of news, only a changed file counts.
    pub spread: bool,
}

impl Due {
    /// For a client that does not wait long: not later than without a spread.
    pub(super) fn soon(self) -> Self {
        let within = MAX.mul_f64(rand::rng().random_range(0.0..=1.0));
        let at = if self.spread && self.hurry { self.at.min(Instant::now() + within) } else { self.at };
        Self { at, ..self }
    }
}

impl Hold {
    /// Before the first attempt; `spread` is the time over which the agents of the mesh come back, where one is set.
    #[must_use]
    pub fn new(spread: Option<Duration>) -> Self {
        Self {
            backoff: doubling(FIRST, MAX),
            due: None,
            overloaded: false,
            crowded: doubling(CROWDED, CROWDED_MAX.max(spread.unwrap_or_default())),
            herd: false,
            spread: spread.map(|over| Spread::new(over, FIRST)),
            put_off: false,
        }
    }

    /// Failures since istiod last answered.
    #[must_use]
    pub(crate) fn failures(&self) -> u32 {
        self.backoff.failures()
    }

    /// Counts a failure; gives the delay until the next attempt.
    pub fn failed(&mut self, status: &Status) -> Duration {
        self.overloaded = status.code() == Code::ResourceExhausted;
        self.put_off = false;
        let mut delay = self.backoff.next_delay();
        if self.overloaded {
            delay = self.crowded.next_delay();
            if let Some(spread) = &mut self.spread {
                delay = spread.refused(delay);
            }
            if let Some(asked) = pushback(status) {
                // Those who were given the same delay come back spread out.
                delay = asked + asked.mul_f64(rand::rng().random_range(0.0..=0.1));
            }
        } else {
            self.gathered();
            if let Some(spread) = &mut self.spread {
                delay = spread.failed();
            }
        }
        self.due = Some(Instant::now() + delay);
        delay
    }

    /// Istiod has answered, or failed in a way that Envoy must see.
    pub fn reset(&mut self) {
        let spread = self.spread.take().map(Spread::answered);
        *self = Self { spread, ..Self::default() };
        self.gathered();
    }

    /// Envoy has a configuration to serve with from now on, or none any more.
    pub fn configured(&mut self, is: bool) {
        if let Some(spread) = &mut self.spread {
            spread.configured(is);
        }
    }

    /// Istiod has ended a stream on which it had answered. Gives how long the next dial is put off, if it is.
    pub fn broke(&mut self) -> Option<Duration> {
        let delay = self.spread.as_mut()?.broke()?;
        (self.due, self.overloaded, self.put_off) = (Some(Instant::now() + delay), false, true);
        Some(delay)
    }

    /// A stream has come from an Envoy that has no configuration: it does not wait for the others of the mesh. Tells
    /// whether it would have.
    pub(super) fn starts(&mut self) -> bool {
        let anew = self.spread.as_mut().is_some_and(Spread::starts_anew);
        let waits = anew && !self.overloaded && self.due.is_some_and(|at| at > Instant::now());
        if waits {
            (self.due, self.put_off) = (None, false);
        }
        waits
    }

    /// How long the dial for a stream that is opened now is still put off.
    pub(super) fn put_off(&self) -> Option<Duration> {
        let left = self.due?.checked_duration_since(Instant::now())?;
        (self.put_off && !left.is_zero()).then_some(left)
    }

    // What comes next comes to others too.
    fn gathered(&mut self) {
        if !self.herd {
            self.herd = true;
            let most = self.spread.as_ref().map_or(CROWDED_MAX, |spread| spread.over().max(CROWDED_MAX));
            self.crowded = doubling(HERD, most);
        }
    }

    /// When the next attempt may begin, if it must wait.
    #[must_use]
    pub fn due(&self) -> Option<Due> {
        let spread = self.spread.is_some();
        self.due.map(|at| Due { at, hurry: !self.overloaded, spread })
    }
}

/// Files and names may change as often as they like.
static NEWS: Seldom = Seldom::new(30);

/// Waits until the next attempt is due, or until there is news.
pub(super) async fn wait(due: Due, wake: &mut watch::Receiver<u64>, upstream: &dyn Upstream) {
    let at = tokio::time::sleep_until(due.at);
    if !due.hurry {
        return at.await;
    }
    let what = tokio::select! {
        () = at => return,
        () = changed(wake) => "a token or root file has changed: trying istiod again at once",
        () = resolves_anew(upstream), if !due.spread => "the name of istiod resolves anew: trying again at once",
    };
    if let Some(more) = NEWS.may() {
        tracing::info!(target: "xdsproxy", "{what}{more}");
    }
}

async fn changed(wake: &mut watch::Receiver<u64>) {
    if wake.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn resolves_anew(upstream: &dyn Upstream) {
    if !upstream.resolves() {
        return std::future::pending().await;
    }
    let before = upstream.look_up().await;
    loop {
        tokio::time::sleep(LOOK_UP).await;
        let now = upstream.look_up().await;
        if now != before && !now.is_empty() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
