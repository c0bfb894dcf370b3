//! A bounded number of slots, shared fairly by those who want them.
//!
//! A queue in the order of arrival is whoever asks most: a client with hundreds of requests would have all slots
//! and all places before everybody else. Here one origin has half of the slots at most, and a slot that comes back goes to
//! the origin that holds the fewest; of the two sides (this pod, and elsewhere) to the one that holds fewer. Among equals
//! the one that waits longest is next. Who comes from one address cannot be told apart, and shares that half.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Who wants a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Whether it is of this pod.
    pub(crate) here: bool,
    /// An IPv4 address, or the upper 64 bits of an IPv6 address.
    pub(crate) origin: IpAddr,
}

/// Slots. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Fair(Arc<Mutex<Table>>);

#[derive(Debug)]
struct Table {
    most: usize,
    /// Slots that are taken, elsewhere and here.
    held: [usize; 2],
    /// Whoever has a slot or waits for one.
    groups: Vec<Group>,
    next: u64,
}

#[derive(Debug)]
struct Group {
    by: Caller,
    held: usize,
    // In the order of arrival. A connection waits with one at a time, and those are bounded.
    waiting: VecDeque<(u64, oneshot::Sender<Slot>)>,
}

/// A slot, until it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Fair,
    by: Caller,
}

impl Fair {
    /// `most` slots, of which one origin has half.
    pub(crate) fn new(most: usize) -> Self {
        Self(Arc::new(Mutex::new(Table { most, held: [0; 2], groups: Vec::new(), next: 0 })))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot, if there is one for `by` now.
    pub(crate) fn try_take(&self, by: Caller) -> Option<Slot> {
        // Nobody is passed: those that wait while there is room have all that they may have.
        self.table().take(by).then(|| Slot { slots: self.clone(), by })
    }

    /// Whether `by` has as many as it may have, however many are free.
    pub(crate) fn has_its_share(&self, by: Caller) -> bool {
        let table = self.table();
        table.held_by(by) >= table.share()
    }

    /// How many `by` has.
    pub(crate) fn held_by(&self, by: Caller) -> usize {
        self.table().held_by(by)
    }

    /// Waits for a slot. Who stops waiting leaves nothing behind.
    pub(crate) async fn take(&self, by: Caller) -> Slot {
        loop {
            if let Some(slot) = self.try_take(by) {
                return slot;
            }
            let turn = self.table().wait(by);
            if let Ok(slot) = turn.await {
                return slot;
            }
        }
    }

    // Gives away what has come back.
    fn give(&self) {
        loop {
            let next = self.table().next();
            let Some((by, turn)) = next else { return };
            // Who has gone meanwhile gives it back.
            drop(turn.send(Slot { slots: self.clone(), by }));
        }
    }
}

impl Table {
    fn group(&mut self, by: Caller) -> &mut Group {
        let at = self.groups.iter().position(|group| group.by == by).unwrap_or_else(|| {
            self.groups.push(Group { by, held: 0, waiting: VecDeque::new() });
            self.groups.len() - 1
        });
        &mut self.groups[at]
    }

    fn is_full(&self) -> bool {
        self.held.iter().sum::<usize>() >= self.most
    }

    fn share(&self) -> usize {
        (self.most / 2).max(1)
    }

    fn held_by(&self, by: Caller) -> usize {
        self.groups.iter().find(|group| group.by == by).map_or(0, |group| group.held)
    }

    fn take(&mut self, by: Caller) -> bool {
        let room = !self.is_full() && self.held_by(by) < self.share();
        if room {
            self.group(by).held += 1;
            self.held[usize::from(by.here)] += 1;
        }
        room
    }

    fn wait(&mut self, by: Caller) -> oneshot::Receiver<Slot> {
        let (given, turn) = oneshot::channel();
        let place = self.next;
        self.next += 1;
        // While no slot comes back nobody else takes away who has gone, and any number may come and go.
        for group in &mut self.groups {
            group.waiting.retain(|(_, turn)| !turn.is_closed());
        }
        self.tidy();
        self.group(by).waiting.push_back((place, given));
        turn
    }

    fn tidy(&mut self) {
        self.groups.retain(|group| group.held > 0 || !group.waiting.is_empty());
    }

    // The next to have a slot, which counts as taken from now on.
    fn next(&mut self) -> Option<(Caller, oneshot::Sender<Slot>)> {
        if self.is_full() {
            return None;
        }
        for group in &mut self.groups {
            while group.waiting.pop_front_if(|(_, turn)| turn.is_closed()).is_some() {}
        }
        self.tidy();
        let (share, held) = (self.share(), self.held);
        let may = self.groups.iter().filter(|group| group.held < share);
        let first = |group: &Group| {
            let place = group.waiting.front()?.0;
            Some(((held[usize::from(group.by.here)], group.held, place), group.by))
        };
        let (_, by) = may.filter_map(first).min_by_key(|(order, _)| *order)?;
        let (_, turn) = self.group(by).waiting.pop_front()?;
        self.take(by);
        Some((by, turn))
    }

    fn back(&mut self, by: Caller) {
        self.group(by).held -= 1;
        self.held[usize::from(by.here)] -= 1;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.table().back(self.by);
        self.slots.give();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn caller(here: bool, last: u8) -> Caller {
        Caller { here, origin: [10, 0, 0, last].into() }
    }

    #[tokio::test]
    async fn one_origin_has_half_and_the_one_with_fewest_is_next() {
        let slots = Fair::new(4);
        let flood = caller(false, 1);
        let mut held: Vec<_> =
            std::iter::repeat_with(|| slots.try_take(flood)).map_while(|slot| slot).collect();
        assert_eq!(held.len(), 2, "half");
        let mut more: Vec<_> = (0..9).map(|_| Box::pin(slots.take(flood))).collect();
        assert!(more.iter_mut().all(|one| one.now_or_never().is_none()));
        let other = caller(false, 2);
        let mut others = vec![slots.try_take(other).unwrap(), slots.try_take(other).unwrap()];
        let mut third = Box::pin(slots.take(caller(false, 3)));
        let mut local = Box::pin(slots.take(caller(true, 4)));
        assert!((&mut third).now_or_never().is_none() && (&mut local).now_or_never().is_none());
        held.pop();
        assert!((&mut third).now_or_never().is_none(), "its side has more");
        let local = local.now_or_never().expect("nobody of its side has one");
        others.pop();
        assert!(third.now_or_never().is_some(), "before those that came before it");
        assert!((&mut more[0]).now_or_never().is_some(), "and what it gave back goes on");
        drop((held, others, local));
    }

    #[tokio::test]
    async fn those_who_came_and_went_leave_nothing_behind() {
        let slots = Fair::new(1);
        let _held = slots.try_take(caller(false, 0)).unwrap();
        for last in 1..=200 {
            assert!(Box::pin(slots.take(caller(false, last))).now_or_never().is_none());
        }
        assert!(slots.table().groups.len() <= 2, "the one that has it, and the last one");
    }

    #[tokio::test]
    async fn what_nobody_waits_for_any_more_is_not_lost() {
        let slots = Fair::new(2);
        let (one, two) = (caller(false, 1), caller(false, 2));
        let held = [slots.try_take(one).unwrap(), slots.try_take(two).unwrap()];
        let (mut gone, mut late, mut stays) =
            (Box::pin(slots.take(one)), Box::pin(slots.take(one)), Box::pin(slots.take(two)));
        for waiting in [&mut gone, &mut late, &mut stays] {
            assert!(waiting.now_or_never().is_none());
        }
        drop(gone);
        drop(held);
        // It was given one and never looked.
        drop(late);
        assert!(stays.now_or_never().is_some());
        let both = [slots.try_take(one), slots.try_take(two)];
        assert!(both.iter().all(Option::is_some));
    }
}
