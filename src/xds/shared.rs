//! What the streams of the XDS socket share: the way to istiod, who is registered, the hold, the newest verdict on the
//! application. Knows no stream's course.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tonic::Status;

use super::hold::{Due, Hold};
use super::memory::Memory;
use super::meters::{self, Meters};
use super::own::{Own, Queue};
use super::protocol::Protocol;
use super::state::RelayState;
use super::tap::{Convert, Tap};
use super::trouble::Troubles;
use super::upstream::Upstream;
use super::{Config, Parts, trouble, types};
use crate::base::heap::Passing;
use crate::base::seldom::Seldom;
use crate::base::tasks::Stop;
use crate::istiod::auth::{CallHeaders, TokenSource, beside, root_cause};
use crate::trouble::{Report, Reporter};

/// Streams that stand side by side: each target of a proxyless client has one.
const SIDE_BY_SIDE: usize = 64;
/// Whoever opens streams by the thousand must not fill the log with them.
static OVERLAPPING: Seldom = Seldom::new(60);
/// Istiod and clients cause these as often as they like.
static PUT_OFF: Seldom = Seldom::new(60);
static NOT_PUT_OFF: Seldom = Seldom::new(60);

/// What all streams share.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) upstream: Arc<dyn Upstream>,
    pub(super) tokens: Arc<dyn TokenSource>,
    pub(super) headers: CallHeaders,
    pub(super) taps: Vec<Arc<dyn Tap>>,
    pub(super) convert: Option<Arc<dyn Convert>>,
    pub(super) wake: watch::Receiver<u64>,
    pub(super) meters: Meters,
    pub(super) state: Arc<RelayState>,
    /// The last good configuration, where it is kept.
    pub(super) memory: Option<Arc<Memory>>,
    /// What istiod has brought.
    pub(super) passing: Arc<Passing>,
    pub(super) troubles: Troubles,
    /// Of the socket itself.
    pub(super) socket_trouble: Mutex<Reporter>,
    /// The version Envoy last named for extension configs; outlives streams, as in the Go agent.
    pub(super) ecds_version: Mutex<String>,
    hold: Mutex<Hold>,
    // The newest report: `Some(None)` is healthy.
    health: Mutex<Option<Option<String>>>,
    // In the order in which they were opened.
    registered: Mutex<Vec<Registered>>,
    next_id: AtomicU64,
}

struct Registered {
    id: u64,
    protocol: Protocol,
    queue: Arc<Queue>,
    stop: Stop,
    // Of the agent's own Envoy: of which, by the order of their start.
    own: Option<u64>,
    // Of a client that is no Envoy, whose streams may stand side by side.
    proxyless: bool,
}

impl Registered {
    // Whether this stream of an Envoy ends that one.
    fn replaces(&self, old: &Self) -> bool {
        let is_other_epoch = self.own.zip(old.own).is_some_and(|(new, old)| new != old);
        old.id < self.id && !old.proxyless && !is_other_epoch && !old.stop.is_cancelled()
    }
}

// Whether the last good configuration is that of stream `id`: not where the agent's own Envoy has one beside it, or a later
// epoch of it.
fn is_noted(all: &[Registered], id: u64) -> bool {
    let mine = all.iter().find(|r| r.id == id).and_then(|r| r.own);
    all.iter().filter(|r| r.id != id && !r.stop.is_cancelled()).all(|r| r.own <= mine)
}

impl Shared {
    /// Before the first stream.
    pub(super) fn new(mut config: Config, parts: Parts) -> Self {
        let meters = Meters::new(&parts.metrics);
        let state = Arc::new(RelayState::new(parts.clock.clone(), parts.upstream.address().to_owned()));
        meters::export(&parts.metrics, &state);
        let passing = Arc::<Passing>::default();
        let hold = Hold::new(config.spread.filter(|_| !config.hold.is_zero()));
        let memory = config.replay.take().map(|of| Arc::new(Memory::new(of, &parts, passing.clone())));
        Self {
            config,
            upstream: parts.upstream,
            tokens: parts.tokens,
            headers: parts.headers,
            taps: parts.taps,
            convert: parts.convert,
            wake: parts.wake,
            meters,
            state,
            memory,
            passing,
            socket_trouble: Mutex::new(parts.trouble.sibling()),
            troubles: Troubles::new(parts.trouble),
            ecds_version: Mutex::default(),
            hold: Mutex::new(hold),
            health: Mutex::default(),
            registered: Mutex::default(),
            next_id: AtomicU64::new(1),
        }
    }

    /// Notes a stream; gives its ID, its stop, and whether there is an older one.
    pub(super) fn register(
        &self,
        protocol: Protocol,
        own: Option<u64>,
        queue: &Arc<Queue>,
        stop: &Stop,
    ) -> (u64, Stop, bool) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mine = stop.child_token();
        let stop = mine.clone();
        let new = Registered { id, protocol, queue: queue.clone(), stop, own, proxyless: false };
        let mut all = self.registered.lock().expect("no panic holds this lock");
        let overlaps = !all.is_empty();
        all.push(new);
        self.state.stream_opened(id, protocol);
        (id, mine, overlaps)
    }

    /// A stream turns out to be of a client that is no Envoy, or not. Envoy has one: the older ones are told
    /// to end. But for those of another process of the agent's own: in a hot restart the epoch that is replaced lives on for
    /// a while, opens its stream anew when it ends, and would end that of the new one, and so on.
    pub(super) fn settle(&self, id: u64, proxyless: bool) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        if proxyless {
            all.iter_mut().filter(|r| r.id == id).for_each(|r| r.proxyless = true);
            let mut open = all.iter().filter(|r| r.proxyless && !r.stop.is_cancelled());
            let oldest = open.next().filter(|_| open.count() >= SIDE_BY_SIDE);
            if let Some(oldest) = oldest {
                if let Some(more) = OVERLAPPING.may() {
                    tracing::warn!(target: "xdsproxy", "more than {SIDE_BY_SIDE} streams of proxyless clients: closing the oldest{more}");
                }
                oldest.stop.cancel();
            }
            return;
        }
        let Some(new) = all.iter().find(|r| r.id == id) else { return };
        for older in all.iter().filter(|old| new.replaces(old)) {
            if let Some(more) = OVERLAPPING.may() {
                tracing::warn!(target: "xdsproxy", "registered overlapping stream; closing previous{more}");
            }
            older.stop.cancel();
        }
    }

    /// Forgets a stream.
    pub(super) fn unregister(&self, id: u64) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        all.retain(|r| r.id != id);
        self.state.stream_closed(id);
        if let Some(left) = all.last().filter(|left| left.id < id) {
            self.state.stream_opened(left.id, left.protocol);
        }
    }

    /// Whether the agent's own Envoy has a stream: others stand beside it, as those of proxyless clients do.
    pub(super) fn has_own(&self) -> bool {
        let all = self.registered.lock().expect("no panic holds this lock");
        all.iter().any(|r| r.own.is_some() && !r.stop.is_cancelled())
    }

    /// Whether the last good configuration is that of this stream.
    pub(super) fn is_noted(&self, id: u64) -> bool {
        is_noted(&self.registered.lock().expect("no panic holds this lock"), id)
    }

    /// Whether another stream is open beside this one, which has a way of its own.
    pub(super) fn has_others(&self, id: u64) -> bool {
        let all = self.registered.lock().expect("no panic holds this lock");
        all.iter().any(|r| r.id != id && !r.stop.is_cancelled())
    }

    /// Whether a stream that is opened now is held instead of failed.
    pub(super) fn holds(&self) -> bool {
        !self.config.hold.is_zero() && (self.has_failed() || self.put_off().is_some())
    }

    /// How long the next dial is put off, though istiod has not failed.
    pub(super) fn put_off(&self) -> Option<Duration> {
        self.hold.lock().expect("no panic holds this lock").put_off()
    }

    /// Whether istiod has failed last.
    pub(super) fn has_failed(&self) -> bool {
        self.hold.lock().expect("no panic holds this lock").failures() > 0
    }

    pub(super) fn due(&self) -> Option<Due> {
        self.hold.lock().expect("no panic holds this lock").due()
    }

    /// Tells why an attempt fails, and what is wrong with the token beside a way that fails.
    pub(super) fn told(&self, report: Report) {
        let report = root_cause(report, &*self.tokens);
        let token = beside(&report, &*self.tokens).filter(|_| self.config.needs_token);
        self.troubles.failed(report, token);
    }

    /// Counts a failed attempt and gives the delay until the next.
    pub(super) fn failed(&self, status: &Status, report: Report) -> Duration {
        self.told(report);
        let (delay, failures) = {
            let mut hold = self.hold.lock().expect("no panic holds this lock");
            (hold.failed(status), hold.failures())
        };
        let next = u64::try_from(delay.as_millis()).ok();
        self.state.upstream_failed(failures, status.message().to_owned(), next);
        delay
    }

    /// Istiod has ended a stream of Envoy's on which it had answered: the agents of the mesh take turns.
    pub(super) fn broke(&self) {
        let delay = self.hold.lock().expect("no panic holds this lock").broke();
        let Some((delay, over)) = delay.zip(self.config.spread) else { return };
        self.state.put_off(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
        if let Some(more) = PUT_OFF.may() {
            tracing::info!(target: "xdsproxy", "the stream to istiod broke: dialling again is put off for {delay:.1?}, since the \
                agents of the mesh come back over {over:?} (XDS_RECONNECT_SPREAD){more}");
        }
    }

    /// Envoy has taken listeners, or asks as one that has none.
    pub(super) fn configured(&self, is: bool) {
        self.hold.lock().expect("no panic holds this lock").configured(is);
    }

    /// An Envoy has come that has nothing, and so has rejected nothing.
    pub(super) fn begins_anew(&self) {
        self.state.begins_anew();
        self.troubles.begins_anew();
        self.convert.iter().for_each(|convert| convert.dropped());
    }

    /// Envoy asks for nothing of this type any more.
    pub(super) fn dropped(&self, type_url: &str) {
        self.state.dropped(type_url);
        self.troubles.accepted(type_url);
        self.convert.iter().filter(|_| type_url == types::ECDS).for_each(|convert| convert.dropped());
    }

    /// A held stream is that of an Envoy without a configuration.
    pub(super) fn starts(&self) {
        if self.hold.lock().expect("no panic holds this lock").starts()
            && let Some(more) = NOT_PUT_OFF.may()
        {
            tracing::info!(target: "xdsproxy", "Envoy has no configuration: istiod is dialled at once{more}");
        }
    }

    /// Istiod's first message on a stream has come.
    pub(super) fn came_alive(&self) {
        self.hold.lock().expect("no panic holds this lock").reset();
        self.state.upstream_live();
        self.troubles.answered();
    }

    /// Istiod ended a stream in a way that trying again in silence does not mend.
    pub(super) fn answered_badly(&self, status: &Status) {
        self.told(trouble::ended(self.upstream.address(), status));
        self.hold.lock().expect("no panic holds this lock").reset();
        self.state.upstream_down(Some(status.message().to_owned()));
    }

    /// The agent's own requests, which follow Envoy's first one for listeners.
    pub(super) fn own(&self, protocol: Protocol) -> Vec<Own> {
        let of = |type_url| Own { type_url, frame: protocol.initial(type_url), health: false };
        let taps = self.taps.iter().map(|tap| of(tap.type_url()));
        taps.chain(self.last_health(protocol)).collect()
    }

    /// The newest health report, for a new stream.
    fn last_health(&self, protocol: Protocol) -> Option<Own> {
        let health = self.health.lock().expect("no panic holds this lock");
        health.as_ref().map(|unhealthy| report(protocol, unhealthy.as_deref()))
    }

    /// Tells istiod, and every later stream, of the application.
    pub(super) fn set_health(&self, unhealthy: Option<String>) {
        let all = self.registered.lock().expect("no panic holds this lock");
        let put = |stream: &Registered| stream.queue.put(report(stream.protocol, unhealthy.as_deref()));
        // The workload's own, if it has one. Of which client a new stream is is not known before its first request.
        if all.iter().any(|r| !r.proxyless) {
            all.iter().filter(|r| !r.proxyless).for_each(put);
        } else {
            all.last().into_iter().for_each(put);
        }
        *self.health.lock().expect("no panic holds this lock") = Some(unhealthy);
    }
}

fn report(protocol: Protocol, unhealthy: Option<&str>) -> Own {
    Own { type_url: types::HEALTH, frame: protocol.health(unhealthy), health: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(id: u64, own: Option<u64>) -> Registered {
        let (queue, stop) = (Arc::default(), Stop::new());
        Registered { id, protocol: Protocol::Sotw, queue, stop, own, proxyless: false }
    }

    #[test]
    fn an_epoch_ends_its_own_stream_and_strangers_those_of_strangers() {
        for (new, old, ends) in [
            (Some(1), Some(1), true),
            (Some(2), Some(1), false),
            (Some(1), Some(2), false),
            (None, None, true),
            (Some(1), None, true),
        ] {
            assert_eq!(stream(2, new).replaces(&stream(1, old)), ends, "{new:?} {old:?}");
            assert!(!stream(1, new).replaces(&stream(2, old)), "a later one");
        }
    }

    #[test]
    fn of_streams_side_by_side_that_of_the_latest_epoch_is_noted() {
        let all = [stream(1, None), stream(2, Some(7)), stream(3, Some(6)), stream(4, None)];
        assert_eq!([1, 2, 3, 4].map(|id| is_noted(&all, id)), [false, true, false, false]);
        all[1].stop.cancel();
        assert_eq!([1, 2, 3, 4].map(|id| is_noted(&all, id)), [false, true, true, false]);
        assert!(is_noted(&[stream(1, None), stream(2, None)], 2), "where all are somebody else's");
    }
}
