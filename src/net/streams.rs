//! A bound of streams over all connections of a socket, and who makes room at the bound.
//!
//! One process has half of them at most. At the bound whoever has fewest is let in, and the connection with the most
//! streams of whoever has most is ended: its client comes again, and a flood never keeps anybody else out. The agent's
//! own Envoy makes room for nobody, and each of the others for it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::places::Origin;
use super::progress::Progress;

/// Whoever has no more is not to blame where memory is short: a proxyless client has 64 at most, and mostly one.
const FEW: usize = 64;

/// How many streams there are. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Streams<K>(Arc<Mutex<Table<K>>>);

#[derive(Debug)]
struct Table<K> {
    most: usize,
    all: usize,
    next: u64,
    of: HashMap<K, usize>,
    connections: HashMap<u64, Connection<K>>,
}

#[derive(Debug)]
struct Connection<K> {
    origin: K,
    streams: usize,
    progress: Weak<Progress>,
}

impl<K: Origin + Copy> Streams<K> {
    pub(crate) fn new(most: usize) -> Self {
        let table = Table { most, all: 0, next: 0, of: HashMap::new(), connections: HashMap::new() };
        Self(Arc::new(Mutex::new(table)))
    }

    fn table(&self) -> MutexGuard<'_, Table<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection without streams; gives its number.
    pub(crate) fn connection(&self, origin: K, progress: &Arc<Progress>) -> u64 {
        let mut table = self.table();
        table.next += 1;
        let id = table.next;
        table.connections.insert(id, Connection { origin, streams: 0, progress: Arc::downgrade(progress) });
        id
    }

    /// One more stream on a connection.
    ///
    /// # Errors
    /// When there may be none: how many there may be.
    pub(crate) fn begin(&self, id: u64) -> Result<(), usize> {
        let mut table = self.table();
        let most = table.most;
        // It has made room for another and is about to end.
        let origin = table.connections.get(&id).ok_or(most)?.origin;
        let own = table.of.get(&origin).copied().unwrap_or(0);
        let most_elsewhere = if origin.is_own() { 0 } else { own + 1 };
        if own >= most.div_ceil(2) || (table.all >= most && !table.make_place(most_elsewhere)) {
            return Err(most);
        }
        table.all += 1;
        *table.of.entry(origin).or_default() += 1;
        if let Some(connection) = table.connections.get_mut(&id) {
            connection.streams += 1;
        }
        Ok(())
    }

    /// One stream less.
    pub(crate) fn end(&self, id: u64) {
        let mut table = self.table();
        let Some(connection) = table.connections.get_mut(&id) else { return };
        connection.streams -= 1;
        let origin = connection.origin;
        table.less(origin, 1);
    }

    /// Memory is short: whoever has most streams, and many, loses half of its connections: those with most first, of
    /// equals the latest.
    pub(crate) fn shed(&self) {
        self.table().shed();
    }

    /// The connection is gone.
    pub(crate) fn forget(&self, id: u64) {
        self.table().remove(id);
    }
}

impl<K: Origin + Copy> Table<K> {
    fn less(&mut self, origin: K, by: usize) {
        self.all -= by;
        if let Some(of) = self.of.get_mut(&origin) {
            *of -= by;
            if *of == 0 {
                self.of.remove(&origin);
            }
        }
    }

    fn remove(&mut self, id: u64) -> Option<Connection<K>> {
        let connection = self.connections.remove(&id)?;
        self.less(connection.origin, connection.streams);
        Some(connection)
    }

    /// Ends a connection of whoever has most, and more than `least`; tells whether there was one.
    fn make_place(&mut self, least: usize) -> bool {
        let others = self.of.iter().filter(|(origin, _)| !origin.is_own());
        let Some((&blamed, &streams)) = others.max_by_key(|(_, n)| **n) else { return false };
        if streams <= least {
            return false;
        }
        let theirs = self.connections.iter().filter(|(_, c)| c.origin == blamed);
        let Some((&id, _)) = theirs.max_by_key(|(_, c)| c.streams) else { return false };
        self.cut(id);
        true
    }

    fn cut(&mut self, id: u64) {
        if let Some(progress) = self.remove(id).and_then(|c| c.progress.upgrade()) {
            progress.cut();
        }
    }

    /// Ends half of the connections with streams of whoever has most streams, and many.
    fn shed(&mut self) {
        let others = self.of.iter().filter(|(origin, _)| !origin.is_own());
        let Some((&blamed, _)) = others.max_by_key(|(_, n)| **n).filter(|(_, n)| **n > FEW) else { return };
        let theirs = self.connections.iter().filter(|(_, c)| c.origin == blamed && c.streams > 0);
        let mut theirs: Vec<_> = theirs.map(|(&id, c)| (Reverse(c.streams), Reverse(id))).collect();
        theirs.sort_unstable();
        theirs.truncate(theirs.len().div_ceil(2));
        theirs.into_iter().for_each(|(_, Reverse(id))| self.cut(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::places::OWN;
    use crate::net::progress::Heads;

    fn one() -> Arc<Progress> {
        Arc::new(Progress::new(Arc::new(Heads::new(0))))
    }

    #[test]
    fn a_process_has_half_and_who_has_most_makes_place() {
        let streams = Streams::new(8);
        let (flood, other, envoy) = (one(), one(), one());
        let f = streams.connection("flood", &flood);
        for _ in 0..4 {
            assert_eq!(streams.begin(f), Ok(()));
        }
        assert_eq!(streams.begin(f), Err(8), "half of them are one process's");
        let again = one();
        assert_eq!(streams.begin(streams.connection("flood", &again)), Err(8), "on whatever connection");
        let o = streams.connection("other", &other);
        for _ in 0..4 {
            assert_eq!(streams.begin(o), Ok(()));
        }
        let e = streams.connection("envoy", &envoy);
        assert_eq!(streams.begin(e), Ok(()));
        assert!(flood.is_cut() ^ other.is_cut() && !envoy.is_cut());
        // What the cut one still lets go counts no more.
        let (cut, left) = if flood.is_cut() { (f, o) } else { (o, f) };
        streams.end(cut);
        streams.forget(cut);
        assert_eq!(streams.begin(cut), Err(8));
        for _ in 0..3 {
            assert_eq!(streams.begin(e), Ok(()));
        }
        streams.end(left);
        assert_eq!(streams.begin(left), Ok(()));
        assert_eq!(streams.table().all, 8);
    }

    #[test]
    fn a_crowd_of_small_processes_makes_place_for_the_own_one() {
        let streams = Streams::new(8);
        let (envoy, crowd) = (one(), [one(), one(), one(), one(), one()]);
        let e = streams.connection(OWN, &envoy);
        for _ in 0..3 {
            assert_eq!(streams.begin(e), Ok(()));
        }
        let names = ["a", "b", "c", "d", "e"];
        for (name, progress) in names.iter().zip(&crowd) {
            assert_eq!(streams.begin(streams.connection(name, progress)), Ok(()));
        }
        let last = one();
        let f = streams.connection("f", &last);
        assert_eq!(streams.begin(f), Err(8), "each has as many as it would have");
        assert_eq!(streams.begin(e), Ok(()), "who has one stream makes place");
        assert!(!envoy.is_cut() && crowd.iter().filter(|p| p.is_cut()).count() == 1);
        assert_eq!(streams.begin(e), Err(8), "half of them are one process's, whoever it is");
    }

    #[test]
    fn nobody_makes_place_for_who_has_as_many() {
        let streams = Streams::new(2);
        let (a, b, c) = (one(), one(), one());
        let [a, b, c] = [("a", &a), ("b", &b), ("c", &c)].map(|(name, p)| streams.connection(name, p));
        assert_eq!([streams.begin(a), streams.begin(b), streams.begin(c)], [Ok(()), Ok(()), Err(2)]);
        streams.forget(a);
        assert_eq!(streams.begin(c), Ok(()));
    }

    #[test]
    fn when_memory_is_short_who_has_most_loses_half_of_its_connections() {
        let streams = Streams::new(2000);
        let all = |name: &'static str, counts: &[usize]| -> Vec<Arc<Progress>> {
            let one_with = |count: &usize| {
                let progress = one();
                let id = streams.connection(name, &progress);
                (0..*count).for_each(|_| assert_eq!(streams.begin(id), Ok(())));
                progress
            };
            counts.iter().map(one_with).collect()
        };
        let (envoy, flood) = (all(OWN, &[200]), all("flood", &[40, 50, 50, 20, 0]));
        let (other, few) = (all("other", &[70]), all("few", &[FEW]));
        let shed = || {
            streams.shed();
            let cut = [&envoy, &flood, &other, &few].into_iter().flatten().map(|p| u8::from(p.is_cut()));
            cut.collect::<Vec<_>>()
        };
        assert_eq!(shed(), [0, 0, 1, 1, 0, 0, 0, 0], "of four with streams those with most");
        assert_eq!(shed(), [0, 0, 1, 1, 0, 0, 1, 0], "then another has most");
        assert_eq!(shed(), shed(), "those with few are not to blame");
    }
}
