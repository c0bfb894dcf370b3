//! What the streams of the XDS socket share: the way to istiod, who is registered, the hold, the newest verdict on the
//! application. Knows no stream's course.
//!
//! Any process that can open the socket may have a stream, and what becomes of it may have to do with that process only.
//! What is told of the workload (its state, its troubles, whether istiod has failed, what memory may do) comes from the
//! **workload's own** streams: those of the agent's own Envoy; where it has none, those of an Envoy that is expected or that
//! istiod has answered; where there is none either, those of the proxyless clients, for which the agent is there then. Those of
//! others have a hold of their own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
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
    // Of streams beside the workload's.
    others: Mutex<Hold>,
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
    // Its first request has told whether it is one; before that it is nobody's.
    known: bool,
    // An Envoy that is not the agent's own is expected.
    expected: bool,
    // The agent's own requests are made on it.
    asks: bool,
    // Istiod has answered on it.
    live: bool,
}

impl Registered {
    // Whose it is, the higher the nearer to the workload. Where no Envoy is expected, what asks as one may be anything, until
    // istiod has answered it.
    fn rank(&self) -> u8 {
        match () {
            () if self.own.is_some() => 3,
            () if self.proxyless => 1,
            () if self.known && (self.live || self.expected) => 2,
            () => 0,
        }
    }

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

// Whether stream `id` is the workload's: nobody who is nearer to it has one.
fn is_workloads(all: &[Registered], id: u64) -> bool {
    let Some(mine) = all.iter().find(|r| r.id == id).map(Registered::rank) else { return false };
    !all.iter().any(|r| r.rank() > mine && !r.stop.is_cancelled())
}

// Of the streams that are open those of the workload.
fn workloads(all: &[Registered]) -> impl Iterator<Item = &Registered> {
    without(all, None)
}

// The same, were there no stream `id`.
fn without(all: &[Registered], id: Option<u64>) -> impl Iterator<Item = &Registered> {
    let open = move || all.iter().filter(move |r| Some(r.id) != id && !r.stop.is_cancelled());
    let highest = open().map(Registered::rank).max();
    open().filter(move |r| Some(r.rank()) == highest)
}

// Whether istiod has answered on a stream that is the workload's when stream `id` is gone. An own Envoy comes back: till then
// nobody is in its place.
fn goes_on_without(all: &[Registered], id: u64) -> bool {
    let own = all.iter().any(|r| r.id == id && r.own.is_some());
    without(all, Some(id)).any(|r| r.live && (r.own.is_some() || !own))
}

impl Shared {
    /// Before the first stream.
    pub(super) fn new(mut config: Config, parts: Parts) -> Self {
        let meters = Meters::new(&parts.metrics);
        let state = Arc::new(RelayState::new(parts.clock.clone(), parts.upstream.address().to_owned()));
        meters::export(&parts.metrics, &state);
        let passing = Arc::<Passing>::default();
        let hold = || Mutex::new(Hold::new(config.spread.filter(|_| !config.hold.is_zero())));
        let (hold, others) = (hold(), hold());
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
            hold,
            others,
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
        let queue = queue.clone();
        let (proxyless, known, asks, live) = (false, false, false, false);
        let expected = self.config.expects_envoy;
        let new = Registered { id, protocol, queue, stop, own, proxyless, known, expected, asks, live };
        let mut all = self.registered.lock().expect("no panic holds this lock");
        let overlaps = !all.is_empty();
        all.push(new);
        self.state.stream_opened(id, protocol);
        self.show(&all);
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
            self.show(&all);
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

    /// What a stream's client is has been told: it is an Envoy, unless it has been settled as another's.
    pub(super) fn known(&self, id: u64) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        all.iter_mut().filter(|r| r.id == id).for_each(|r| r.known = true);
        self.show(&all);
    }

    /// The agent's own requests go out on this stream.
    pub(super) fn asks(&self, id: u64) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        all.iter_mut().filter(|r| r.id == id).for_each(|r| r.asks = true);
    }

    /// Whether what istiod says to the agent on this stream counts: not where the agent asks on one that is nearer to the workload.
    pub(super) fn is_heard(&self, id: u64) -> bool {
        let all = self.registered.lock().expect("no panic holds this lock");
        let Some(mine) = all.iter().find(|r| r.id == id).map(Registered::rank) else { return false };
        !all.iter().any(|r| r.asks && r.rank() > mine && !r.stop.is_cancelled())
    }

    /// How many streams there are.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.registered.lock().expect("no panic holds this lock").len()
    }

    /// Forgets a stream.
    pub(super) fn unregister(&self, id: u64) {
        let mut all = self.registered.lock().expect("no panic holds this lock");
        all.retain(|r| r.id != id);
        self.state.stream_closed(id);
        self.show(&all);
    }

    /// The client of a stream has left. What the stream has met is over with it where istiod had not answered it, and has
    /// answered another of the workload.
    pub(super) fn left(&self, id: u64) {
        let all = self.registered.lock().expect("no panic holds this lock");
        let unanswered = is_workloads(&all, id) && all.iter().any(|r| r.id == id && !r.live);
        let goes_on = goes_on_without(&all, id);
        drop(all);
        if unanswered && goes_on {
            self.troubles.answered();
        }
    }

    // Of the workload's streams the newest is shown, of epochs side by side that of the latest.
    fn show(&self, all: &[Registered]) {
        self.state.show(workloads(all).max_by_key(|r| (r.own, r.id)).map(|r| r.id));
    }

    /// Whether what becomes of this stream is the workload's.
    pub(super) fn is_workloads(&self, id: u64) -> bool {
        is_workloads(&self.registered.lock().expect("no panic holds this lock"), id)
    }

    /// Whether it is that of the workload's Envoy.
    pub(super) fn is_envoys(&self, id: u64) -> bool {
        let all = self.registered.lock().expect("no panic holds this lock");
        is_workloads(&all, id) && all.iter().any(|r| r.id == id && !r.proxyless)
    }

    /// Whether istiod has answered on a stream of the workload that is open.
    pub(super) fn is_live(&self) -> bool {
        workloads(&self.registered.lock().expect("no panic holds this lock")).any(|r| r.live)
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

    /// Whether istiod has answered on a stream that is the workload's when this one is gone.
    pub(super) fn goes_on_without(&self, id: u64) -> bool {
        goes_on_without(&self.registered.lock().expect("no panic holds this lock"), id)
    }

    /// Whether istiod has answered on another stream that is as near to the workload as this one.
    pub(super) fn has_others(&self, id: u64) -> bool {
        let all = self.registered.lock().expect("no panic holds this lock");
        let mine = all.iter().find(|r| r.id == id).map(Registered::rank);
        all.iter().any(|r| r.id != id && r.live && Some(r.rank()) >= mine && !r.stop.is_cancelled())
    }

    /// Whether a stream of the workload that is opened now is held instead of failed.
    pub(super) fn holds(&self) -> bool {
        !self.config.hold.is_zero() && (self.has_failed() || self.put_off().is_some())
    }

    /// Whether this stream, of which it is known whose it is, is held.
    pub(super) fn holds_on(&self, id: u64) -> bool {
        self.holds() || !self.is_workloads(id) && self.fails_others()
    }

    /// Whether istiod has failed last whoever is beside the workload, and that is held.
    pub(super) fn fails_others(&self) -> bool {
        !self.config.hold.is_zero() && self.others.lock().expect("no panic holds this lock").failures() > 0
    }

    // That of the workload, or that of whoever is beside it.
    fn hold_of(&self, id: u64) -> MutexGuard<'_, Hold> {
        let hold = if self.is_workloads(id) { &self.hold } else { &self.others };
        hold.lock().expect("no panic holds this lock")
    }

    /// How long the next dial is put off, though istiod has not failed.
    pub(super) fn put_off(&self) -> Option<Duration> {
        self.hold.lock().expect("no panic holds this lock").put_off()
    }

    /// Whether istiod has failed the workload last.
    pub(super) fn has_failed(&self) -> bool {
        self.hold.lock().expect("no panic holds this lock").failures() > 0
    }

    pub(super) fn due(&self) -> Option<Due> {
        self.hold.lock().expect("no panic holds this lock").due()
    }

    pub(super) fn due_on(&self, id: u64) -> Option<Due> {
        self.hold_of(id).due()
    }

    /// Tells why an attempt fails, and what is wrong with the token beside a way that fails.
    pub(super) fn told(&self, report: Report) {
        let report = root_cause(report, &*self.tokens);
        let token = beside(&report, &*self.tokens).filter(|_| self.config.needs_token);
        self.troubles.failed(report, token);
    }

    /// As [`Self::failed`], for this stream: in the workload's name only where it is the workload's.
    pub(super) fn failed_on(&self, id: u64, status: &Status, report: Report) -> Duration {
        if self.is_workloads(id) {
            return self.failed(status, report);
        }
        self.others.lock().expect("no panic holds this lock").failed(status)
    }

    /// Counts a failed attempt of the workload's and gives the delay until the next.
    pub(super) fn failed(&self, status: &Status, report: Report) -> Duration {
        self.told(report);
        let (delay, failures) = {
            let mut hold = self.hold.lock().expect("no panic holds this lock");
            (hold.failed(status), hold.failures())
        };
        if !self.is_live() {
            let next = u64::try_from(delay.as_millis()).ok();
            self.state.upstream_failed(failures, status.message().to_owned(), next);
        }
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

    /// Istiod's first message on this stream has come.
    pub(super) fn came_alive(&self, id: u64) {
        // By this it may become the workload's.
        self.hold_of(id).reset();
        let mut all = self.registered.lock().expect("no panic holds this lock");
        all.iter_mut().filter(|r| r.id == id).for_each(|r| r.live = true);
        self.show(&all);
        drop(all);
        self.hold_of(id).reset();
        if !self.is_workloads(id) {
            return;
        }
        self.state.upstream_live();
        self.troubles.answered();
    }

    /// Istiod ended this stream in a way that trying again in silence does not mend.
    pub(super) fn answered_badly(&self, id: u64, status: &Status) {
        self.hold_of(id).reset();
        if !self.is_workloads(id) {
            return;
        }
        self.told(trouble::ended(self.upstream.address(), status));
        if !self.is_live() {
            self.state.upstream_down(Some(status.message().to_owned()));
        }
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
        let is_envoys = |r: &&Registered| r.rank() > 1;
        let is_unknown = |r: &&Registered| r.rank() == 0;
        if all.iter().any(|r| is_envoys(&r)) {
            all.iter().filter(is_envoys).for_each(put);
        } else {
            all.iter().filter(is_unknown).for_each(put);
            all.iter().rfind(|r| r.proxyless).into_iter().for_each(put);
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
        let (proxyless, known, expected, asks, live) = (false, true, true, false, false);
        Registered { id, protocol: Protocol::Sotw, queue, stop, own, proxyless, known, expected, asks, live }
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

    #[test]
    fn whose_the_workloads_stream_is() {
        let of = |all: &[Registered]| all.iter().map(|r| is_workloads(all, r.id)).collect::<Vec<_>>();
        let proxyless = |id| Registered { proxyless: true, ..stream(id, None) };
        assert_eq!(of(&[proxyless(1), proxyless(2)]), [true, true], "where there is nobody else");
        let unknown = Registered { known: false, ..stream(2, None) };
        assert_eq!(of(&[proxyless(1), unknown]), [true, false], "of one that has said nothing");
        let stranger = |live| Registered { expected: false, live, ..stream(2, None) };
        assert_eq!(of(&[proxyless(1), stranger(false)]), [true, false], "which istiod may refuse");
        assert_eq!(of(&[proxyless(1), stranger(true)]), [false, true]);
        let served = Registered { live: true, ..proxyless(1) };
        assert_eq!(of(&[served, proxyless(2)]), [true, true], "what becomes of equals is told");
        let mut all = vec![proxyless(1), stream(2, None), stream(3, None)];
        assert_eq!(of(&all), [false, true, true]);
        assert_eq!(workloads(&all).map(|r| r.id).collect::<Vec<_>>(), [2, 3]);
        all.extend([stream(4, Some(7)), stream(5, Some(8))]);
        assert_eq!(of(&all), [false, false, false, true, true], "its own Envoys, each epoch");
        assert_eq!(workloads(&all).map(|r| r.id).collect::<Vec<_>>(), [4, 5]);
        all[3].stop.cancel();
        all[4].stop.cancel();
        assert_eq!(of(&all)[..3], [false, true, true], "they are ended");
        assert!(!is_workloads(&all, 9), "of none that is not there");
    }
}
