//! The connection limit, and which connection is closed when it is reached.
//!
//! A new connection is always accepted; at the limit another one is closed for it, in this order: unfinished request
//! heads, oldest first; idle connections, longest idle first; responses whose reader is stalled; request bodies that do
//! not arrive; requests that wait for a slot of their kind; connections younger than a second, oldest first; and last a
//! response in the making. So a flood of any one kind gives way to a client that sends a request and reads the
//! response, which takes milliseconds where the flood takes seconds.
//!
//! There are two bounds: one of all connections, which cost little as long as they have not asked, and one of
//! those that have. One origin (an address, a process) that has more than its share makes room for itself, and
//! at the bound the origin with the most does. The agent's own Envoy ([`Origin::is_own`]) makes room for nobody.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::progress::{Heads, Phase, Progress};
use crate::base::heap::Crowd;

/// A connection that is younger, or has waited for less, is spared as long as another can make room.
const GRACE: Duration = Duration::from_secs(1);

/// Who comes.
pub(crate) trait Origin: Clone + Eq + Hash {
    /// Whether it is the agent's own: it makes room for nobody, and everybody else for it.
    fn is_own(&self) -> bool {
        false
    }
}

impl Origin for IpAddr {}

/// A body that was waited for this long counts as one that does not arrive: a client has mostly sent it with the head.
const LATE: Duration = Duration::from_millis(200);

/// An origin that has no more than this part of those that may ask is not blamed: of the status server's 384 a dozen,
/// which is more than a kubelet and a Prometheus ask at a time.
const FEW: usize = 32;
/// Nor is one with so many where there may be few, unless that is more than a quarter of them.
const LITTLE: usize = 4;

/// How many connections there may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// All of them.
    pub(crate) all: usize,
    /// Those of one origin.
    pub(crate) share: usize,
    /// Those that have asked.
    pub(crate) asking: usize,
    /// Whether an answer that is being made, or a stream, may have to make room for a newcomer. Where streams
    /// live for ever, only those of an origin that has most of the places do.
    pub(crate) spare_busy: bool,
}

impl Bounds {
    fn least(&self) -> u8 {
        u8::from(self.spare_busy)
    }
}

/// Who has a place. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Places<K>(Arc<Mutex<Table<K>>>);

#[derive(Debug)]
struct Table<K> {
    bounds: Bounds,
    next: u64,
    taken: BTreeMap<u64, Taken<K>>,
    counts: HashMap<K, Count>,
    asking: usize,
}

/// Connections of one origin.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    all: usize,
    /// Of those, the ones that have asked.
    asking: usize,
}

#[derive(Debug)]
struct Taken<K> {
    origin: K,
    progress: Weak<Progress>,
    asking: bool,
}

impl<K: Origin> Taken<K> {
    /// Whether it may be ended for another that asks.
    fn must_ask_again(&self) -> bool {
        self.asking && !self.origin.is_own()
    }
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place<K: Origin> {
    id: u64,
    places: Places<K>,
    _crowd: Crowd,
}

impl<K: Origin> Places<K> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let (taken, counts) = (BTreeMap::new(), HashMap::new());
        Self(Arc::new(Mutex::new(Table { bounds, next: 0, taken, counts, asking: 0 })))
    }

    fn table(&self) -> MutexGuard<'_, Table<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections that have a place.
    pub(crate) fn len(&self) -> usize {
        self.table().taken.len()
    }

    /// Gives a place to a connection from `origin`; ends another one where there is none left. `None` if that
    /// cannot be asked of anybody.
    pub(crate) fn take(&self, origin: K, progress: &Arc<Progress>) -> Option<Place<K>> {
        let mut table = self.table();
        let own = table.counts.get(&origin).map_or(0, |count| count.all);
        if own >= table.bounds.share {
            let least = table.bounds.least();
            if !table.evict(|taken| taken.origin == origin, least) {
                return None;
            }
        } else if table.taken.len() >= table.bounds.all {
            let blamed = table.blamed(|count| count.all, few(table.bounds.all, 8));
            let spare = table.bounds.spare_busy && blamed.as_ref().is_none_or(|blamed| *blamed == origin);
            let least = u8::from(spare && !origin.is_own());
            let made = match blamed {
                Some(blamed) => table.make_room(|_| true, &blamed, &origin, least),
                None => table.evict(|taken| !taken.origin.is_own(), least),
            };
            if !made {
                return None;
            }
        }
        table.counts.entry(origin.clone()).or_default().all += 1;
        let id = table.next;
        table.next += 1;
        table.taken.insert(id, Taken { origin, progress: Arc::downgrade(progress), asking: false });
        Some(Place { id, places: self.clone(), _crowd: Crowd::join() })
    }

    /// Ends the connection that is worth least; tells whether there was one.
    pub(crate) fn evict(&self) -> bool {
        let mut table = self.table();
        let least = table.bounds.least();
        table.evict(|taken| !taken.origin.is_own(), least)
    }

    /// Every connection that has a place.
    pub(crate) fn each(&self) -> Vec<Arc<Progress>> {
        self.table().taken.values().filter_map(|taken| taken.progress.upgrade()).collect()
    }
}

impl<K: Origin> Place<K> {
    /// From now on it counts as one that asks; ends another such one where there are too many, and one that stands
    /// still where there are half as many.
    pub(crate) fn asks(&self) {
        let mut table = self.places.table();
        let bounds = table.bounds;
        let own = table.taken.get(&self.id).filter(|own| !own.asking).map(|own| own.origin.clone());
        if let Some(own) = own {
            if table.asking >= bounds.asking {
                table.evict_asking(&own, bounds.least());
            } else if table.asking >= bounds.asking.div_ceil(2) {
                table.evict_asking(&own, STANDS);
            }
        }
        let table = &mut *table;
        if let Some(own) = table.taken.get_mut(&self.id).filter(|own| !own.asking) {
            own.asking = true;
            table.asking += 1;
            if let Some(count) = table.counts.get_mut(&own.origin) {
                count.asking += 1;
            }
        }
    }
}

impl<K: Origin> Drop for Place<K> {
    fn drop(&mut self) {
        self.places.table().forget(self.id);
    }
}

impl<K: Origin> Table<K> {
    // Whose connections make room at the bound. Among origins of a few connections each, nobody is more to
    // blame than another.
    fn blamed(&self, of: impl Fn(&Count) -> usize, few: usize) -> Option<K> {
        let others = self.counts.iter().filter(|(origin, _)| !origin.is_own());
        let largest = others.max_by_key(|(_, count)| of(count))?;
        (of(largest.1) > few).then(|| largest.0.clone())
    }

    // Ends one that asks, for one of `origin`, and is worth ending at least so much: of the origin that has most of them, so
    // that an old one of somebody else does not go for each that a flood adds.
    fn evict_asking(&mut self, origin: &K, least: u8) {
        let blamed = self.blamed(|count| count.asking, few(self.bounds.asking, FEW));
        let ended = blamed.is_some_and(|blamed| self.make_room(|taken| taken.asking, &blamed, origin, least));
        if !ended {
            self.evict(Taken::must_ask_again, least);
        }
    }

    // Ends one of the origin that is to blame, for one of `origin`. What it is doing goes after what others do not use, but
    // for one of its own.
    fn make_room(&mut self, among: impl Fn(&Taken<K>) -> bool, blamed: &K, origin: &K, least: u8) -> bool {
        let theirs = |taken: &Taken<K>| among(taken) && taken.origin == *blamed;
        // Others are not worth so much, and of them the clock need not be asked.
        let rests = |p: Arc<Progress>| matches!(p.phase(), Phase::New | Phase::Head | Phase::Idle);
        let others = |taken: &Taken<K>| {
            among(taken) && !taken.origin.is_own() && taken.progress.upgrade().is_some_and(rests)
        };
        self.evict(theirs, least.max(1))
            || (blamed != origin && self.evict(others, least.max(IDLE)))
            || (least == 0 && self.evict(theirs, 0))
    }

    // Of those that are worth ending at least so much.
    fn evict(&mut self, among: impl Fn(&Taken<K>) -> bool, least: u8) -> bool {
        let mut worst: Option<((u8, Duration), u64, Arc<Progress>)> = None;
        for (id, taken) in self.taken.iter().filter(|(_, taken)| among(taken)) {
            let Some(progress) = taken.progress.upgrade() else { continue };
            let worth = worth(&progress);
            let unfinished = worth.0 == UNFINISHED && progress.is_unanswered();
            let age = progress.age();
            // The first of equals is the oldest.
            if worst.as_ref().is_none_or(|(most, ..)| worth > *most) {
                worst = Some((worth, *id, progress));
            }
            // Those after it came later, so none of them is worse. In a flood this is the usual case, and then nothing
            // should be slow.
            let found = worst.as_ref().is_some_and(|(most, ..)| most.0 > 0);
            if unfinished || (found && age < GRACE) {
                break;
            }
        }
        let Some((_, id, victim)) = worst.filter(|(worth, ..)| worth.0 >= least) else {
            return false;
        };
        victim.cut();
        self.forget(id);
        true
    }

    fn forget(&mut self, id: u64) {
        let Some(taken) = self.taken.remove(&id) else { return };
        self.asking -= usize::from(taken.asking);
        if let Some(count) = self.counts.get_mut(&taken.origin) {
            count.all -= 1;
            count.asking -= usize::from(taken.asking);
            if count.all == 0 {
                self.counts.remove(&taken.origin);
            }
        }
    }
}

/// Ends connections with the largest heads, as long as all of them together are too large.
pub(crate) fn relieve<K: Origin>(heads: &Heads, places: &[Places<K>]) {
    while heads.is_too_much() {
        let all = places.iter().flat_map(Places::each).filter(|p| !p.is_cut());
        let Some(largest) = all.max_by_key(|p| p.held()).filter(|p| p.held() > 0) else { break };
        largest.cut();
    }
}

/// How many connections are too few for their origin to be blamed: this part of what there may be.
fn few(most: usize, part: usize) -> usize {
    (most / part).max(LITTLE.min(most / 4))
}

/// What [`worth`] says of one that has asked nothing, or not to the end.
const UNFINISHED: u8 = 6;
/// What it says of one that was answered and asks nothing.
const IDLE: u8 = 5;
/// What [`worth`] says at least of a connection whose client has let others wait.
const STANDS: u8 = 3;

/// How willingly a connection is ended: higher goes first.
fn worth(progress: &Progress) -> (u8, Duration) {
    // The clock is asked no more often than must be: in a flood this is what the time goes into.
    let here = progress.in_phase();
    let long = here >= GRACE;
    let phase = progress.phase();
    let stood = progress.stood();
    if phase == Phase::Busy && stood < GRACE && progress.blocked().is_zero() {
        return (0, here);
    }
    let unanswered = progress.unanswered();
    match phase {
        // Whoever trickles bytes grows no younger by it.
        Phase::New | Phase::Head if unanswered >= GRACE => (UNFINISHED, unanswered),
        Phase::Idle if long => (IDLE, here),
        _ if stood >= GRACE => (4, stood),
        Phase::Body if here >= LATE => (STANDS, here),
        Phase::Waiting if long => (2, here),
        // All of them wait for their client, or behind one.
        _ => (1, unanswered),
    }
}

/// For tests: who is the agent's own.
#[cfg(test)]
pub(super) const OWN: &str = "own";

#[cfg(test)]
mod tests {
    use super::*;

    impl Origin for () {}

    impl Origin for &'static str {
        fn is_own(&self) -> bool {
            *self == OWN
        }
    }

    fn one() -> Arc<Progress> {
        Arc::new(Progress::new(Arc::new(Heads::new(100))))
    }

    fn cut(all: &[&Arc<Progress>]) -> Vec<bool> {
        all.iter().map(|p| p.is_cut()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_heads_go_before_readers_that_stand_and_these_before_answers() {
        let places = Places::new(Bounds { all: 4, share: 4, asking: 4, spare_busy: false });
        let (head, idle, stalled, busy) = (one(), one(), one(), one());
        head.enter(Phase::Head);
        idle.enter(Phase::Idle);
        for p in [&stalled, &busy] {
            p.enter(Phase::Busy);
        }
        stalled.wrote(false);
        let mut held: Vec<_> = [&busy, &stalled, &idle, &head].map(|p| places.take("a", p).unwrap()).into();
        tokio::time::advance(Duration::from_secs(2)).await;
        head.head_bytes(1);
        let fresh: Vec<_> = (0..4).map(|_| one()).collect();
        for (n, expected) in
            [[true, false, false, false], [true, true, false, false], [true, true, true, false]]
                .into_iter()
                .enumerate()
        {
            held.push(places.take("a", &fresh[n]).unwrap());
            assert_eq!(cut(&[&head, &idle, &stalled, &busy]), expected, "newcomer {n}");
        }
        // Nothing is left but an answer and newcomers: the oldest of these.
        held.push(places.take("a", &fresh[3]).unwrap());
        assert_eq!(
            cut(&[&busy, &fresh[0], &fresh[1], &fresh[2], &fresh[3]]),
            [false, true, false, false, false]
        );
        assert_eq!(places.len(), 4);
        drop(held);
        assert_eq!(places.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn one_origin_has_its_share_and_the_largest_makes_place() {
        let places = Places::new(Bounds { all: 8, share: 6, asking: 8, spare_busy: false });
        let flood: Vec<_> = (0..7).map(|_| one()).collect();
        let mut held: Vec<_> = flood.iter().map(|p| places.take("flood", p).unwrap()).collect();
        assert!(flood[0].is_cut() && !flood[1].is_cut(), "the seventh took the place of the first");
        let others: Vec<_> = (0..3).map(|_| one()).collect();
        for (n, p) in others.iter().enumerate() {
            held.push(places.take(["x", "y", "z"][n], p).unwrap());
        }
        assert!(flood[1].is_cut() && !flood[2].is_cut());
        assert!(others.iter().all(|p| !p.is_cut()));
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_ask_are_bounded_among_themselves() {
        let places = Places::new(Bounds { all: 8, share: 8, asking: 2, spare_busy: false });
        let all: Vec<_> = (0..4).map(|_| one()).collect();
        let held: Vec<_> = all.iter().map(|p| places.take((), p).unwrap()).collect();
        for place in &held[..2] {
            place.asks();
            place.asks();
        }
        all[0].enter(Phase::Busy);
        all[1].enter(Phase::Body);
        tokio::time::advance(Duration::from_millis(5)).await;
        held[2].asks();
        assert_eq!(cut(&[&all[0], &all[1], &all[2], &all[3]]), [false, true, false, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn of_those_that_ask_the_origin_with_most_makes_place() {
        let places = Places::new(Bounds { all: 128, share: 64, asking: 64, spare_busy: false });
        let kubelet = one();
        let mut held = vec![places.take("kubelet", &kubelet).unwrap()];
        held[0].asks();
        kubelet.enter(Phase::Waiting);
        tokio::time::advance(Duration::from_secs(5)).await;
        let flood: Vec<_> = (0..64).map(|_| one()).collect();
        for progress in &flood {
            let place = places.take("flood", progress).unwrap();
            place.asks();
            progress.enter(Phase::Waiting);
            held.push(place);
        }
        assert!(!kubelet.is_cut(), "though it waits longest");
        assert!(flood[0].is_cut() && !flood[1].is_cut());
    }

    // One origin makes so many answers, and each of others has an idle connection.
    fn answers_and_idlers(
        places: &Places<&'static str>,
        answers: usize,
        others: &[&'static str],
    ) -> ([Vec<Arc<Progress>>; 2], Vec<Place<&'static str>>) {
        let (busy, idle): (Vec<_>, Vec<_>) =
            ((0..answers).map(|_| one()).collect(), others.iter().map(|_| one()).collect());
        let origins = std::iter::repeat_n("scraper", answers).chain(others.iter().copied());
        let held: Vec<_> =
            origins.zip(busy.iter().chain(&idle)).map(|(from, p)| places.take(from, p).unwrap()).collect();
        held.iter().for_each(Place::asks);
        busy.iter().for_each(|p| p.enter(Phase::Busy));
        idle.iter().for_each(|p| p.enter(Phase::Idle));
        ([busy, idle], held)
    }

    #[tokio::test(start_paused = true)]
    async fn what_others_do_not_use_goes_before_an_answer_of_the_largest() {
        let others = ["a", "b", "c", "d", "e", "f"];
        for (all, asking) in [(128, 16), (16, 128)] {
            let places = Places::new(Bounds { all, share: 128, asking, spare_busy: false });
            let ([busy, idle], mut held) = answers_and_idlers(&places, 10, &others);
            tokio::time::advance(Duration::from_secs(2)).await;
            for n in 0..8 {
                let newcomer = one();
                held.push(places.take("kubelet", &newcomer).unwrap());
                held.last().unwrap().asks();
                newcomer.enter(Phase::Busy);
                let cut = |of: &[Arc<Progress>]| of.iter().filter(|p| p.is_cut()).count();
                let expected = (n + 1_usize).min(others.len());
                assert_eq!((cut(&idle), cut(&busy)), (expected, n + 1 - expected), "{all} {asking}");
            }
            // What it adds itself costs nobody else anything.
            let places = Places::new(Bounds { all, share: 128, asking, spare_busy: false });
            let ([busy, idle], mut held) = answers_and_idlers(&places, 10, &others);
            tokio::time::advance(Duration::from_secs(2)).await;
            held.push(places.take("scraper", &one()).unwrap());
            held.last().unwrap().asks();
            assert!(idle.iter().all(|p| !p.is_cut()) && busy.iter().filter(|p| p.is_cut()).count() == 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn few_connections_are_few_however_few_there_may_be() {
        let places = Places::new(Bounds { all: 128, share: 128, asking: 16, spare_busy: false });
        let others: Vec<&'static str> = "abcdefghijklmn".split_inclusive(|_: char| true).collect();
        let (first, kubelet) = (one(), [one(), one()]);
        let mut held = vec![places.take("first", &first).unwrap()];
        for from in &others[1..] {
            held.push(places.take(from, &one()).unwrap());
        }
        for p in &kubelet {
            held.push(places.take("kubelet", p).unwrap());
        }
        held.iter().for_each(Place::asks);
        first.enter(Phase::Waiting);
        kubelet.iter().for_each(|p| p.enter(Phase::Waiting));
        tokio::time::advance(Duration::from_secs(2)).await;
        held.push(places.take("newcomer", &one()).unwrap());
        held.last().unwrap().asks();
        assert!(kubelet.iter().all(|p| !p.is_cut()) && first.is_cut(), "two are no flood");
    }

    #[tokio::test(start_paused = true)]
    async fn half_of_those_that_ask_may_stand_still() {
        let places = Places::new(Bounds { all: 8, share: 8, asking: 4, spare_busy: false });
        let all: Vec<_> = (0..4).map(|_| one()).collect();
        let held: Vec<_> = all.iter().map(|p| places.take((), p).unwrap()).collect();
        all[0].enter(Phase::Busy);
        all[1].enter(Phase::Body);
        held[0].asks();
        held[1].asks();
        tokio::time::advance(Duration::from_secs(2)).await;
        all[2].enter(Phase::Body);
        held[2].asks();
        assert_eq!(cut(&[&all[0], &all[1], &all[2]]), [false, true, false]);
        held[3].asks();
        assert_eq!(cut(&[&all[0], &all[2], &all[3]]), [false; 3], "the others do something");
    }

    #[tokio::test(start_paused = true)]
    async fn streams_make_place_only_where_their_origin_has_most() {
        let places = Places::new(Bounds { all: 4, share: 3, asking: 4, spare_busy: true });
        let streams: Vec<_> = (0..4).map(|_| one()).collect();
        streams.iter().for_each(|p| p.enter(Phase::Busy));
        let mut held: Vec<_> = streams[..3].iter().map(|p| places.take("flood", p).unwrap()).collect();
        assert!(places.take("flood", &one()).is_none(), "its share is used up by its own streams");
        held.push(places.take("envoy", &streams[3]).unwrap());
        held.push(places.take("other", &one()).unwrap());
        assert_eq!(cut(&[&streams[0], &streams[1], &streams[3]]), [true, false, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_own_one_is_let_in_by_a_crowd_of_busy_strangers_and_stays() {
        let places = Places::new(Bounds { all: 16, share: 12, asking: 16, spare_busy: true });
        let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let crowd: Vec<_> = (0..15).map(|_| one()).collect();
        let envoy = [one(), one()];
        envoy[0].enter(Phase::Idle);
        let mut held = vec![places.take(OWN, &envoy[0]).unwrap()];
        held[0].asks();
        for (n, progress) in crowd.iter().enumerate() {
            progress.enter(Phase::Busy);
            held.push(places.take(names[n % 8], progress).unwrap());
        }
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(places.take("i", &one()).is_none(), "strangers do not make place for each other");
        held.push(places.take(OWN, &envoy[1]).unwrap());
        assert_eq!(crowd.iter().filter(|p| p.is_cut()).count(), 1);
        held.iter().for_each(Place::asks);
        assert!(!places.evict(), "all others have streams");
        assert_eq!(cut(&[&envoy[0], &envoy[1]]), [false, false], "nor does the own one for them");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_of_a_byte_now_and_then_stands_still() {
        let p = one();
        p.enter(Phase::Busy);
        for _ in 0..3 {
            p.wrote(false);
            tokio::time::advance(Duration::from_millis(400)).await;
            p.wrote(true);
        }
        assert_eq!((p.blocked(), p.stood()), (Duration::ZERO, Duration::from_millis(1200)));
        assert_eq!(worth(&p).0, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn moments_of_many_answers_do_not_add_up_to_one_that_stands() {
        let p = one();
        for _ in 0..9 {
            p.enter(Phase::Head);
            p.enter(Phase::Busy);
            p.wrote(false);
            tokio::time::advance(Duration::from_millis(400)).await;
            p.wrote(true);
            assert_eq!((p.stood(), worth(&p).0), (Duration::from_millis(400), 0));
            p.enter(Phase::Idle);
        }
        // What was still on its way when the answer was done does not count for the next one.
        p.wrote(false);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(worth(&p).0, 5);
        p.wrote(true);
        p.enter(Phase::Head);
        p.enter(Phase::Busy);
        assert_eq!((p.stood(), worth(&p).0), (Duration::ZERO, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn heads_are_bounded_together() {
        let heads = Arc::new(Heads::new(100));
        let places = Places::new(Bounds { all: 8, share: 8, asking: 8, spare_busy: false });
        let both = [(); 2].map(|()| Arc::new(Progress::new(heads.clone())));
        let mut held = Vec::new();
        for (p, n) in both.iter().zip([40, 50]) {
            p.enter(Phase::Head);
            p.head_bytes(n);
            held.push(places.take((), p).unwrap());
        }
        assert!(futures_util::FutureExt::now_or_never(heads.too_much()).is_none());
        both[0].head_bytes(20);
        heads.too_much().await;
        relieve(&heads, std::slice::from_ref(&places));
        assert!(both[0].is_cut() && !both[1].is_cut());
        drop(both);
        assert!(futures_util::FutureExt::now_or_never(heads.too_much()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_head_counts_until_its_connection_ends() {
        let heads = Arc::new(Heads::new(20_000));
        let places = Places::new(Bounds { all: 8, share: 8, asking: 8, spare_busy: false });
        let all = [(); 4].map(|()| Arc::new(Progress::new(heads.clone())));
        let _held: Vec<_> = all.iter().map(|p| places.take((), p).unwrap()).collect();
        let asked = |p: &Progress, n: usize| {
            p.enter(Phase::Head);
            p.head_bytes(n);
            p.enter(Phase::Busy);
            p.enter(Phase::Idle);
        };
        // Short ones are in a buffer that is there anyway.
        (0..9).for_each(|_| asked(&all[0], 8000));
        assert_eq!(all[0].held(), 0);
        // Several on one connection have one buffer.
        (0..9).for_each(|_| asked(&all[1], 9000));
        asked(&all[1], 100);
        asked(&all[2], 10_000);
        assert_eq!([&all[1], &all[2]].map(|p| p.held()), [9000, 10_000]);
        assert!(!heads.is_too_much());
        asked(&all[3], 9000);
        relieve(&heads, std::slice::from_ref(&places));
        assert_eq!(cut(&all.each_ref()), [false, false, true, false]);
    }
}
