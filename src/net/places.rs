//! The connection limit, and which connection is closed when it is reached.
//!
//! A new connection is always accepted; at the limit another one is closed for it, in this order: unfinished request
//! heads, oldest first; idle connections, longest idle first; responses whose reader is stalled; request bodies that do
//! not arrive; requests that wait for a slot of their kind; connections younger than a second, oldest first; and last a
//! response in the making. So a flood of any one kind gives way to a client that sends a request and reads the
//! response, which takes milliseconds where the flood takes seconds.
//!
//! Where places are few and newcomers many, a client may not have come to sending, or its request to a slot, before its turn
//! to go: one whose requests were answered before is spared for a moment as long as there is one of a stranger.
//!
//! There are two bounds: one of all connections, which cost little as long as they have not asked, and one of
//! those that have. One origin (an address, a process) that has more than its share makes room for itself, and
//! at the bound the origin with the most does. The agent's own Envoy ([`Origin::is_own`]) makes room for nobody.

use std::collections::{BTreeMap, BTreeSet, HashMap};
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

/// Origins that are remembered for having been answered.
const KNOWN: usize = 128;
/// For so many answers at most.
const TRUST: u8 = 16;
/// What a connection costs of them that asked for nothing until it had to make room.
const BREACH: u8 = 4;

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
    /// Who was answered, and how often.
    known: HashMap<K, u8>,
    /// Those that have asked: mostly few of many.
    asking: BTreeSet<u64>,
}

/// Connections of one origin.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    all: usize,
    /// Of those, the ones that have asked.
    asking: usize,
}

/// Which connections are looked at.
#[derive(Debug, Clone, Copy)]
enum Of {
    All,
    Asking,
}

#[derive(Debug)]
struct Taken<K> {
    origin: K,
    progress: Weak<Progress>,
    asking: bool,
}

impl<K: Origin> Taken<K> {
    fn is_anothers(&self) -> bool {
        !self.origin.is_own()
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
        let (taken, counts, known) = (BTreeMap::new(), HashMap::new(), HashMap::new());
        Self(Arc::new(Mutex::new(Table { bounds, next: 0, taken, counts, known, asking: BTreeSet::new() })))
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
            if !table.evict(Of::All, |taken| taken.origin == origin, least) {
                return None;
            }
        } else if table.taken.len() >= table.bounds.all {
            let blamed = table.blamed(|count| count.all, few(table.bounds.all, 8));
            let spare = table.bounds.spare_busy && blamed.as_ref().is_none_or(|blamed| *blamed == origin);
            let least = u8::from(spare && !origin.is_own());
            let made = match blamed {
                Some(blamed) => table.make_room(Of::All, &blamed, &origin, least),
                None => table.evict(Of::All, Taken::is_anothers, least),
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
        table.evict(Of::All, Taken::is_anothers, least)
    }

    /// Memory is short: ends all that rest or let others wait, and where there is none, half of whoever has most; tells
    /// whether there was one.
    pub(crate) fn shed(&self) -> bool {
        let mut table = self.table();
        let mut ended = false;
        while table.evict(Of::All, Taken::is_anothers, STANDS) {
            ended = true;
        }
        let few = few(table.bounds.all, 8);
        if let Some(blamed) = table.blamed(|count| count.all, few).filter(|_| !ended) {
            let (least, half) = (table.bounds.least(), table.counts[&blamed].all.div_ceil(2));
            for _ in 0..half {
                ended |= table.evict(Of::All, |taken| taken.origin == blamed, least);
            }
        }
        ended
    }

    /// Every connection that has a place.
    pub(crate) fn each(&self) -> Vec<Arc<Progress>> {
        self.table().taken.values().filter_map(|taken| taken.progress.upgrade()).collect()
    }
}

impl<K: Origin> Place<K> {
    /// From now on it counts as one that asks; ends another such one where there are too many, and one that stands
    /// still where there are half as many. Whether it has ended one: that is gone when its task has had its turn.
    pub(crate) fn asks(&self) -> bool {
        let mut table = self.places.table();
        let bounds = table.bounds;
        let own = table.taken.get(&self.id).filter(|own| !own.asking).map(|own| own.origin.clone());
        let ended = own.is_some_and(|own| {
            if table.asking.len() >= bounds.asking {
                table.evict_asking(&own, bounds.least())
            } else {
                table.asking.len() >= bounds.asking.div_ceil(2) && table.evict_asking(&own, STANDS)
            }
        });
        let table = &mut *table;
        if let Some(own) = table.taken.get_mut(&self.id).filter(|own| !own.asking) {
            own.asking = true;
            table.asking.insert(self.id);
            if let Some(count) = table.counts.get_mut(&own.origin) {
                count.asking += 1;
            }
        }
        ended
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
    fn evict_asking(&mut self, origin: &K, least: u8) -> bool {
        let blamed = self.blamed(|count| count.asking, few(self.bounds.asking, FEW));
        let ended = blamed.is_some_and(|blamed| self.make_room(Of::Asking, &blamed, origin, least));
        ended || self.evict(Of::Asking, Taken::is_anothers, least)
    }

    // Ends one of the origin that is to blame, for one of `origin`. What it is doing goes after what others do not use, but
    // for one of its own.
    fn make_room(&mut self, of: Of, blamed: &K, origin: &K, least: u8) -> bool {
        let theirs = |taken: &Taken<K>| taken.origin == *blamed;
        // Others are not worth so much, and of them the clock need not be asked.
        let rests = |p: Arc<Progress>| matches!(p.phase(), Phase::New | Phase::Head | Phase::Idle);
        let others = |taken: &Taken<K>| taken.is_anothers() && taken.progress.upgrade().is_some_and(rests);
        self.evict(of, theirs, least.max(1))
            || (blamed != origin && self.evict(of, others, least.max(IDLE)))
            || (least == 0 && self.evict(of, theirs, 0))
    }

    // In the order in which they came.
    fn each(&self, of: Of) -> impl Iterator<Item = (&u64, &Taken<K>)> {
        let (all, asking) = match of {
            Of::All => (Some(self.taken.iter()), None),
            Of::Asking => (None, Some(self.asking.iter().filter_map(|id| self.taken.get_key_value(id)))),
        };
        all.into_iter().flatten().chain(asking.into_iter().flatten())
    }

    // Of those that are worth ending at least so much.
    fn evict(&mut self, of: Of, among: impl Fn(&Taken<K>) -> bool, least: u8) -> bool {
        let mut worst: Option<((u8, Duration), u64, Arc<Progress>)> = None;
        for (id, taken) in self.each(of).filter(|(_, taken)| among(taken)) {
            let Some(progress) = taken.progress.upgrade() else { continue };
            let worth = worth(&progress, || self.trusts(&taken.origin));
            let unfinished = worth.0 == UNFINISHED && progress.is_unanswered();
            let age = progress.age();
            // The first of equals is the oldest.
            if worst.as_ref().is_none_or(|(most, ..)| worth > *most) {
                worst = Some((worth, *id, progress));
            }
            // Those after it came later, so none of them is worse. In a flood this is the usual case, and then nothing
            // should be slow.
            let found = worst.as_ref().is_some_and(|(most, ..)| most.0 > SPARED);
            if unfinished || (found && age < GRACE) {
                break;
            }
        }
        let Some((_, id, victim)) = worst.filter(|(worth, ..)| worth.0 >= least) else {
            return false;
        };
        let silent = matches!(victim.phase(), Phase::New | Phase::Head) && victim.is_unanswered();
        if let Some(taken) = self.taken.get(&id).filter(|_| silent)
            && let Some(trust) = self.known.get_mut(&taken.origin)
        {
            *trust = trust.saturating_sub(BREACH);
            self.known.retain(|_, trust| *trust > 0);
        }
        victim.cut();
        self.forget(id);
        true
    }

    // Whether it was answered lately and has no more connections than a prober has.
    fn trusts(&self, origin: &K) -> bool {
        self.known.contains_key(origin) && self.counts.get(origin).is_none_or(|count| count.all <= LITTLE)
    }

    // Where there is no room for one more, each loses a little, so that those stay who come again and again.
    fn was_answered(&mut self, origin: &K) {
        if let Some(trust) = self.known.get_mut(origin) {
            *trust = (*trust + 1).min(TRUST);
        } else if self.known.len() < KNOWN {
            self.known.insert(origin.clone(), 1);
        } else {
            self.known.retain(|_, trust| {
                *trust -= 1;
                *trust > 0
            });
        }
    }

    fn forget(&mut self, id: u64) {
        let Some(taken) = self.taken.remove(&id) else { return };
        if taken.progress.upgrade().is_some_and(|progress| progress.phase() == Phase::Idle) {
            self.was_answered(&taken.origin);
        }
        self.asking.remove(&id);
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
const UNFINISHED: u8 = 7;
/// What it says of one that was answered and asks nothing.
const IDLE: u8 = 6;
/// What [`worth`] says at least of a connection whose client has let others wait.
const STANDS: u8 = 4;
/// What it says at most of one whose client is trusted to ask.
const SPARED: u8 = 1;

/// How willingly a connection is ended: higher goes first. `trusted`: whether its client has mostly asked before.
fn worth(progress: &Progress, trusted: impl Fn() -> bool) -> (u8, Duration) {
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
        _ if stood >= GRACE => (5, stood),
        Phase::Body if here >= LATE => (STANDS, here),
        Phase::Waiting if long => (3, here),
        Phase::New | Phase::Head | Phase::Waiting if trusted() => (SPARED, unanswered),
        // All of them wait for their client, or behind one.
        _ => (2, unanswered),
    }
}

/// For tests: who is the agent's own.
#[cfg(test)]
pub(super) const OWN: &str = "own";

#[cfg(test)]
mod tests;
