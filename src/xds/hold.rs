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

use std::time::Duration;

use rand::Rng;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::upstream::Upstream;
use crate::base::backoff::{Backoff, Jitter, Policy};
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
}

impl Default for Hold {
    fn default() -> Self {
        Self {
            backoff: doubling(FIRST, MAX),
            due: None,
            overloaded: false,
            crowded: doubling(CROWDED, CROWDED_MAX),
            herd: false,
        }
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
}

impl Hold {
    /// Failures since istiod last answered.
    #[must_use]
    pub(crate) fn failures(&self) -> u32 {
        self.backoff.failures()
    }

    /// Counts a failure; gives the delay until the next attempt.
    pub fn failed(&mut self, status: &Status) -> Duration {
        self.overloaded = status.code() == Code::ResourceExhausted;
        let mut delay = self.backoff.next_delay();
        if self.overloaded {
            delay = self.crowded.next_delay();
            if let Some(asked) = pushback(status) {
                // Those who were given the same delay come back spread out.
                delay = asked + asked.mul_f64(rand::rng().random_range(0.0..=0.1));
            }
        } else {
            self.gathered();
        }
        self.due = Some(Instant::now() + delay);
        delay
    }

    /// Istiod has answered, or failed in a way that Envoy must see.
    pub fn reset(&mut self) {
        *self = Self::default();
        self.gathered();
    }

    // What comes next comes to others too.
    fn gathered(&mut self) {
        if !self.herd {
            self.herd = true;
            self.crowded = doubling(HERD, CROWDED_MAX);
        }
    }

    /// When the next attempt may begin, if it must wait.
    #[must_use]
    pub fn due(&self) -> Option<Due> {
        self.due.map(|at| Due { at, hurry: !self.overloaded })
    }
}

/// Waits until the next attempt is due, or until there is news.
pub(super) async fn wait(due: Due, wake: &mut watch::Receiver<u64>, upstream: &dyn Upstream) {
    let at = tokio::time::sleep_until(due.at);
    if !due.hurry {
        return at.await;
    }
    tokio::select! {
        () = at => {}
        () = changed(wake) => {
            tracing::info!(target: "xdsproxy", "a token or root file has changed: trying istiod again at once");
        }
        () = resolves_anew(upstream) => {
            tracing::info!(target: "xdsproxy", "the name of istiod resolves anew: trying again at once");
        }
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
mod tests {
    use std::collections::BTreeSet;
    use std::net::SocketAddr;
    use std::sync::Mutex;

    use futures_util::future::BoxFuture;

    use super::*;
    use crate::istiod::{Connection, Error};

    // A name that resolves to one thing after the other; the last one stays.
    #[derive(Debug)]
    struct Name(Option<Mutex<Vec<BTreeSet<SocketAddr>>>>);

    impl Name {
        fn of(addresses: &[&[u8]]) -> Self {
            let set = |last: &&[u8]| last.iter().map(|n| SocketAddr::from(([10, 0, 0, *n], 1))).collect();
            Self(Some(Mutex::new(addresses.iter().rev().map(set).collect())))
        }
    }

    impl Upstream for Name {
        fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
            unreachable!("only its name is looked up")
        }

        fn address(&self) -> &str {
            "istiod:15012"
        }

        fn resolves(&self) -> bool {
            self.0.is_some()
        }

        fn look_up(&self) -> BoxFuture<'_, BTreeSet<SocketAddr>> {
            let mut left = self.0.as_ref().expect("it resolves").lock().unwrap();
            let now = if left.len() > 1 { left.pop() } else { left.first().cloned() };
            Box::pin(std::future::ready(now.unwrap_or_default()))
        }
    }

    #[test]
    fn only_what_can_heal_is_held() {
        for code in 0..17 {
            let held = holdable(&Status::new(Code::from(code), ""));
            assert_eq!(held, [7, 8, 14, 16].contains(&code), "code {code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn delays_stay_in_their_bounds_and_overload_is_waited_out() {
        let mut hold = Hold::default();
        for _ in 0..50 {
            assert!(hold.failed(&Status::unavailable("")) <= MAX);
            assert!(hold.due().unwrap().hurry);
        }
        for (mut hold, first) in [(Hold::default(), CROWDED), (herd(), HERD)] {
            let mut bound = first;
            for _ in 0..50 {
                let delay = hold.failed(&Status::resource_exhausted(""));
                assert!(delay <= bound, "{delay:?} is above {bound:?}");
                assert!(!hold.due().unwrap().hurry);
                bound = (bound * 2).min(CROWDED_MAX);
            }
        }
        let mut hold = Hold::default();
        hold.failed(&Status::unavailable("away"));
        let delays = std::iter::repeat_with(|| hold.clone().failed(&Status::resource_exhausted("")));
        assert!(delays.take(1000).any(|delay| delay > CROWDED), "istiod was away for others too");
        hold.reset();
        assert_eq!((hold.failures(), hold.due()), (0, None));
    }

    // Of an agent that had a configuration.
    fn herd() -> Hold {
        let mut hold = Hold::default();
        hold.reset();
        hold
    }

    #[test]
    fn a_delay_that_istiod_names_is_kept() {
        let crowded = |text: &'static str| {
            let mut status = Status::resource_exhausted("");
            status.metadata_mut().insert(PUSHBACK, text.parse().unwrap());
            status
        };
        let mut hold = Hold::default();
        for (text, ms) in [("20000", 20_000), ("0", 0), ("99999999999", 300_000)] {
            let delay = hold.failed(&crowded(text)).as_millis();
            assert!((ms..=ms + ms / 10).contains(&delay), "{text}: {delay} ms");
        }
        assert!(hold.failed(&crowded("soon")) <= CROWDED_MAX, "no number: as without it");
        assert!(holdable(&crowded("20000")) && holdable(&crowded("soon")));
        assert!(!holdable(&crowded("-1")), "not to be tried again: Envoy is told");
    }

    #[tokio::test(start_paused = true)]
    async fn news_brings_the_attempt_forward_unless_istiod_is_overloaded() {
        let (news, mut wake) = watch::channel(0);
        let start = Instant::now();
        let due = |hurry| Due { at: start + Duration::from_secs(4), hurry };
        news.send(1).unwrap();
        wait(due(true), &mut wake, &Name(None)).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        news.send(2).unwrap();
        wait(due(false), &mut wake, &Name(None)).await;
        assert!(start.elapsed() >= Duration::from_secs(4));
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_resolves_anew_brings_the_attempt_forward() {
        let (_news, mut wake) = watch::channel(0);
        for (addresses, seconds) in [
            (Name::of(&[&[1], &[2]]), 1),
            (Name::of(&[&[1], &[1], &[1, 2]]), 2),
            // It did not resolve, and now it does.
            (Name::of(&[&[], &[1]]), 1),
            // It does not resolve for a moment, and then to the same as before.
            (Name::of(&[&[1], &[], &[1]]), 4),
            (Name::of(&[&[1, 2]]), 4),
            (Name(None), 4),
        ] {
            let start = Instant::now();
            let due = Due { at: start + Duration::from_secs(4), hurry: true };
            wait(due, &mut wake, &addresses).await;
            assert_eq!(start.elapsed().as_secs(), seconds, "{addresses:?}");
        }
    }
}
