//! How many scrapes there are at a time. Each holds a few buffers, a compressor, and connections to Envoy and
//! the application, half a MB in all; a mesh has one or two scrapers. Who finds no turn waits for one, and whoever
//! holds one without reading, or has closed its side, loses it then: its connection is closed. One address has half of them
//! at most, and the one with the fewest is next (`net::fair`); to one that has fewer a scrape gives way, too, to which
//! nothing has come for so long that a usual scraper had given it up: Envoy hangs, and a scraper may name no limit.
//! Pages for people have turns of the same kind.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::time::Instant;

use crate::net::fair::{Caller, Fair, Slot};
use crate::net::progress::{Phase, Progress};
use crate::serve::ConnState;

/// At a time: bounds what all scrapes together hold to a few MB.
const TURNS: usize = 8;
/// Pages at a time.
const PAGES: usize = 4;
/// Who has been waited for so long in all may lose its turn.
const STOOD: Duration = Duration::from_secs(1);
/// Of whose scrape nothing has come for so long may lose its turn to an address that has fewer: Prometheus' usual limit.
const HANGS: Duration = WAIT;
/// Between two looks at who stands.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait for a turn where the scraper names no limit, and for the scrape's own with any: Prometheus' usual limit.
const WAIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(in crate::status) struct Turns {
    free: Fair,
    taken: Mutex<Vec<Weak<Held>>>,
    /// Longest wait, whatever the scraper's limit.
    most: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        Self { free: Fair::new(TURNS), taken: Mutex::default(), most: WAIT }
    }
}

impl Turns {
    /// For scrapes of several applications, whose bodies are held whole. Waited for as long as the scraper waits: the
    /// answer would lack all of them.
    pub(super) fn one() -> Self {
        Self { free: Fair::new(1), taken: Mutex::default(), most: Duration::MAX }
    }

    /// For pages, each of which is made in one go, while nobody else is answered.
    pub(in crate::status) fn pages() -> Self {
        Self { free: Fair::new(PAGES), ..Self::default() }
    }
}

/// A turn, until it and its copies are dropped.
#[derive(Debug, Clone)]
pub(in crate::status) struct Turn(Arc<Held>);

/// Who has it: a connection may have had others before, and lives on after it.
#[derive(Debug)]
struct Held {
    by: Weak<Progress>,
    from: Caller,
    /// When a piece of its answer came last; before the first one, when it began.
    moved: Mutex<Instant>,
    _slot: Slot,
}

impl Held {
    fn moved(&self) -> MutexGuard<'_, Instant> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the turns until the stream is done with.
pub(super) fn during(
    turns: (Turn, Option<Turn>),
    stream: impl Stream<Item = Bytes> + Send,
) -> impl Stream<Item = Bytes> + Send {
    stream.map(move |bytes| {
        for turn in std::iter::once(&turns.0).chain(&turns.1) {
            *turn.0.moved() = Instant::now();
        }
        bytes
    })
}

impl Turns {
    /// The next turn, and how long it was waited for; `None` when there is none within `limit`, or for too long.
    pub(in crate::status) async fn take(
        &self,
        of: &ConnState,
        limit: Option<Duration>,
    ) -> Option<(Turn, Duration)> {
        let (slot, waited) = match self.free.try_take(of.caller) {
            Some(slot) => (slot, Duration::ZERO),
            None => {
                let begun = Instant::now();
                of.progress.enter(Phase::Waiting);
                let wait = limit.map_or(WAIT, |limit| limit.min(self.most));
                let slot = tokio::time::timeout(wait, self.wait(of.caller)).await.ok();
                of.progress.enter(Phase::Busy);
                (slot?, begun.elapsed())
            }
        };
        let (by, moved) = (Arc::downgrade(&of.progress), Mutex::new(Instant::now()));
        let held = Arc::new(Held { by, from: of.caller, moved, _slot: slot });
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|held| held.strong_count() > 0);
        taken.push(Arc::downgrade(&held));
        Some((Turn(held), waited))
    }

    async fn wait(&self, by: Caller) -> Slot {
        let mut free = std::pin::pin!(self.free.take(by));
        loop {
            self.cut_one(by);
            if let Ok(slot) = tokio::time::timeout(LOOK, &mut free).await {
                return slot;
            }
        }
    }

    // For a client from there: whoever has as many as it may have makes room for itself.
    fn cut_one(&self, from: Caller) {
        let own = self.free.has_its_share(from);
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        // For one that has closed its side, nobody may wait any more.
        let waits = |p: &Progress| if p.has_left() { p.in_phase() } else { p.stood() };
        let having: Vec<_> = taken.iter().filter_map(Weak::upgrade).collect();
        let having =
            having.iter().filter_map(|held| Some((held, held.by.upgrade().filter(|p| !p.is_cut())?)));
        let theirs = having.clone().filter(|(held, _)| !own || held.from == from).map(|(_, p)| p);
        let longest = theirs.max_by_key(|p| waits(p));
        if let Some(progress) = longest.filter(|p| waits(p) >= STOOD) {
            tracing::debug!("closing an answer whose client reads nothing, to make room for another");
            return progress.cut();
        }
        let fewer = self.free.held_by(from);
        let hangs = having.filter_map(|(held, progress)| {
            let (many, long) = (self.free.held_by(held.from), held.moved().elapsed());
            (many > fewer && long >= HANGS).then_some((many, long, progress))
        });
        if let Some((.., progress)) = hangs.max_by_key(|(many, long, _)| (*many, *long)) {
            tracing::debug!("closing an answer of which nothing comes, to make room for another address");
            progress.cut();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::net::progress::Heads;

    // From an address of its own for each number.
    fn scraper(from: usize) -> ConnState {
        let origin = [10, 0, 0, u8::try_from(from).unwrap()].into();
        let conn = ConnState::new(Arc::new(Heads::new(0)), Caller { here: false, origin });
        conn.busy();
        conn
    }

    #[tokio::test(start_paused = true)]
    async fn readers_that_stand_lose_their_turn_and_others_are_waited_for() {
        let turns = Turns::default();
        let all: Vec<_> = (0..TURNS).map(scraper).collect();
        let cut = |n: usize| all[n].progress.is_cut();
        let mut held = Vec::new();
        for one in &all {
            held.push(turns.take(one, None).await.unwrap());
        }
        let late = scraper(TURNS);
        assert!(turns.take(&late, Some(WAIT / 2)).await.is_none(), "all of them read");
        assert!(!(0..TURNS).any(cut));
        all[3].progress.wrote(false);
        let mut waiting = Box::pin(turns.take(&late, None));
        let look = STOOD + LOOK * 2;
        assert!(tokio::time::timeout(look, &mut waiting).await.is_err());
        assert!(cut(3) && !cut(2));
        // Its connection ends, and with it its answer.
        drop(held.remove(3));
        let _turn = waiting.await.unwrap();
        assert_eq!(late.progress.phase(), Phase::Busy);
        all[5].progress.leaves();
        let _ = tokio::time::timeout(LOOK * 2, turns.take(&scraper(99), None)).await;
        assert!(cut(5) && !cut(2), "its client has closed its side");
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_does_not_have_all_turns_nor_those_of_others() {
        let turns = Turns::default();
        let mut held = Vec::new();
        for _ in 0..TURNS / 2 {
            held.push(turns.take(&scraper(1), None).await.unwrap());
        }
        let (more, slow) = (scraper(1), scraper(2));
        let mut waiting = Box::pin(turns.take(&more, None));
        assert!(tokio::time::timeout(LOOK, &mut waiting).await.is_err(), "it has half of them");
        held.push(turns.take(&slow, None).await.expect("others have the other half"));
        slow.progress.wrote(false);
        assert!(tokio::time::timeout(STOOD * 2, &mut waiting).await.is_err());
        assert!(!slow.progress.is_cut(), "that would give it nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_without_a_turn_has_that_of_a_scrape_that_hangs() {
        let turns = Turns::default();
        let all: Vec<_> = (0..TURNS).map(|n| scraper(n % 2)).collect();
        let cut = |n: usize| all[n].progress.is_cut();
        let mut held = Vec::new();
        for one in &all {
            held.push(turns.take(one, None).await.unwrap().0);
        }
        assert!(turns.take(&scraper(2), Some(WAIT / 2)).await.is_none());
        assert!(!(0..TURNS).any(cut), "they may still be answered");
        tokio::time::advance(WAIT / 2).await;
        // All of them but one have moved.
        let sent = held.split_off(1).into_iter().map(|turn| {
            let pieces = [Bytes::from_static(b"a"), Bytes::from_static(b"b")];
            let mut sent = Box::pin(during((turn, None), futures_util::stream::iter(pieces)));
            assert!(sent.next().now_or_never().is_some());
            sent
        });
        let sent: Vec<_> = sent.collect();
        let other = scraper(2);
        let mut waiting = Box::pin(turns.take(&other, None));
        assert!(tokio::time::timeout(LOOK, &mut waiting).await.is_err());
        assert!(cut(0) && !(1..TURNS).any(cut), "nothing came of it");
        // Its connection ends, and with it its answer.
        drop(held);
        let turn = waiting.await.expect("the place of the one that hung");
        // Who has as many has no better right.
        tokio::time::advance(WAIT * 2).await;
        drop(sent);
        let mut held = vec![turn];
        let more: Vec<_> = (3..TURNS + 2).map(scraper).collect();
        for one in &more {
            held.push(turns.take(one, None).await.unwrap());
        }
        tokio::time::advance(WAIT * 2).await;
        assert!(turns.take(&other, None).await.is_none());
        assert!(!other.progress.is_cut() && !more.iter().any(|one| one.progress.is_cut()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_applications_are_waited_for_as_long_as_the_scraper_waits() {
        let turns = Turns::one();
        let (first, second) = (scraper(1), scraper(2));
        let held = turns.take(&first, None).await.unwrap();
        let mut waiting = Box::pin(turns.take(&second, Some(WAIT * 3)));
        assert!(tokio::time::timeout(WAIT * 2, &mut waiting).await.is_err());
        drop(held);
        let (_turn, waited) = waiting.await.unwrap();
        assert!(waited >= WAIT * 2, "taken off its limit");
        assert!(turns.take(&first, Some(WAIT * 3)).await.is_none(), "nor longer");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_has_given_its_turn_back_is_not_cut_for_one() {
        let turns = Turns::default();
        let kept = scraper(0);
        for _ in 0..100 {
            drop(turns.take(&kept, None).await.unwrap());
            assert!(turns.taken.lock().unwrap().len() <= 1, "one entry for each turn that is held");
        }
        let mut held = Vec::new();
        for n in 0..TURNS {
            held.push(turns.take(&scraper(n), None).await.unwrap());
        }
        // What it reads so slowly now needs no turn.
        kept.progress.wrote(false);
        assert!(turns.take(&scraper(99), None).await.is_none());
        assert!(!kept.progress.is_cut());
    }
}
