//! How many scrapes there are at a time. Each holds a few buffers, a compressor, and connections to Envoy and
//! the application, half a MB in all; a mesh has one or two scrapers. Who finds no turn waits for one, and whoever
//! holds one without reading, or has closed its side, loses it then: its connection is closed.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::net::progress::{Phase, Progress};

/// At a time: bounds what all scrapes together hold to a few MB.
const TURNS: usize = 8;
/// Who has been waited for so long in all may lose its turn.
const STOOD: Duration = Duration::from_secs(1);
/// Between two looks at who stands.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait for a turn where the scraper names no limit, and for the scrape's own with any: Prometheus' usual limit.
const WAIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Turns {
    free: Arc<Semaphore>,
    taken: Mutex<Vec<Weak<Held>>>,
    /// Longest wait, whatever the scraper's limit.
    most: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        Self { free: Arc::new(Semaphore::new(TURNS)), taken: Mutex::default(), most: WAIT }
    }
}

impl Turns {
    /// For scrapes of several applications, whose bodies are held whole. Waited for as long as the scraper waits: the
    /// answer would lack all of them.
    pub(super) fn one() -> Self {
        Self { free: Arc::new(Semaphore::new(1)), taken: Mutex::default(), most: Duration::MAX }
    }
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _held: Arc<Held>,
}

/// Who has it: a connection may have had others before, and lives on after it.
#[derive(Debug)]
struct Held {
    by: Weak<Progress>,
    _permit: OwnedSemaphorePermit,
}

/// Keeps the turns until the stream is done with.
pub(super) fn during(
    turns: (Turn, Option<Turn>),
    stream: impl Stream<Item = Bytes> + Send,
) -> impl Stream<Item = Bytes> + Send {
    stream.map(move |bytes| {
        let _ = &turns;
        bytes
    })
}

impl Turns {
    /// The next turn, and how long it was waited for; `None` when there is none within `limit`, or for too long.
    pub(super) async fn take(&self, of: &Arc<Progress>, limit: Option<Duration>) -> Option<(Turn, Duration)> {
        let (permit, waited) = match self.free.clone().try_acquire_owned() {
            Ok(permit) => (permit, Duration::ZERO),
            Err(_) => {
                let begun = Instant::now();
                of.enter(Phase::Waiting);
                let wait = limit.map_or(WAIT, |limit| limit.min(self.most));
                let permit = tokio::time::timeout(wait, self.wait()).await.ok();
                of.enter(Phase::Busy);
                (permit?, begun.elapsed())
            }
        };
        let held = Arc::new(Held { by: Arc::downgrade(of), _permit: permit });
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|held| held.strong_count() > 0);
        taken.push(Arc::downgrade(&held));
        Some((Turn { _held: held }, waited))
    }

    async fn wait(&self) -> OwnedSemaphorePermit {
        let mut free = std::pin::pin!(self.free.clone().acquire_owned());
        loop {
            self.cut_one();
            match tokio::time::timeout(LOOK, &mut free).await {
                Ok(Ok(turn)) => return turn,
                // It is never closed.
                Ok(Err(_)) => std::future::pending::<()>().await,
                Err(_) => {}
            }
        }
    }

    fn cut_one(&self) {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = |p: &Arc<Progress>| p.phase() == Phase::Busy && !p.is_cut();
        // For one that has closed its side, nobody may wait any more.
        let waits = |p: &Progress| if p.has_left() { p.in_phase() } else { p.stood() };
        let having = taken.iter().filter_map(|held| held.upgrade()?.by.upgrade()).filter(answered);
        let longest = having.max_by_key(|p| waits(p));
        if let Some(progress) = longest.filter(|p| waits(p) >= STOOD) {
            tracing::debug!("closing a scrape whose client reads nothing, to make room for another");
            progress.cut();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::progress::Heads;

    fn scraper() -> Arc<Progress> {
        let progress = Progress::new(Arc::new(Heads::new(0)));
        progress.enter(Phase::Busy);
        Arc::new(progress)
    }

    #[tokio::test(start_paused = true)]
    async fn readers_that_stand_lose_their_turn_and_others_are_waited_for() {
        let turns = Turns::default();
        let all: Vec<_> = (0..TURNS).map(|_| scraper()).collect();
        let mut held = Vec::new();
        for one in &all {
            held.push(turns.take(one, None).await.unwrap());
        }
        let late = scraper();
        assert!(turns.take(&late, None).await.is_none(), "all of them read");
        assert!(all.iter().all(|p| !p.is_cut()));
        all[3].wrote(false);
        let mut waiting = Box::pin(turns.take(&late, None));
        let look = STOOD + LOOK * 2;
        assert!(tokio::time::timeout(look, &mut waiting).await.is_err());
        assert!(all[3].is_cut() && !all[2].is_cut());
        // Its connection ends, and with it its answer.
        drop(held.remove(3));
        let _turn = waiting.await.unwrap();
        assert_eq!(late.phase(), Phase::Busy);
        all[5].leaves();
        let _ = tokio::time::timeout(LOOK * 2, turns.take(&scraper(), None)).await;
        assert!(all[5].is_cut() && !all[2].is_cut(), "its client has closed its side");
    }

    #[tokio::test(start_paused = true)]
    async fn the_applications_are_waited_for_as_long_as_the_scraper_waits() {
        let turns = Turns::one();
        let (first, second) = (scraper(), scraper());
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
        let kept = scraper();
        for _ in 0..100 {
            drop(turns.take(&kept, None).await.unwrap());
            assert!(turns.taken.lock().unwrap().len() <= 1, "one entry for each turn that is held");
        }
        let all: Vec<_> = (0..TURNS).map(|_| scraper()).collect();
        let mut held = Vec::new();
        for one in &all {
            held.push(turns.take(one, None).await.unwrap());
        }
        // What it reads so slowly now needs no turn.
        kept.wrote(false);
        assert!(turns.take(&scraper(), None).await.is_none());
        assert!(!kept.is_cut());
    }
}
