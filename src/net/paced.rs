//! Work of many connections, one piece a round of the runtime while they keep it busy.
//!
//! Everything runs on one thread, and whoever has become ready waits for all who were ready before. What a connection has
//! sent is a fraction of a millisecond's work; that of three hundred connections, sent without end, is what a probe would
//! wait for, several times over: to be accepted, read, and answered. So while clients of one socket leave no pause, the
//! pieces of their work stand in a line, and in each round only the first of them is done. Who comes now and then does
//! not notice: a few pieces in a row are done at once.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::ready;
use std::time::{Duration, Instant};

use prometheus::{IntCounterVec, Opts};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::yield_now;

/// So many pieces in a row are done without a line: some two milliseconds of the largest.
const AT_ONCE: u32 = 8;
/// After so long without a piece a new row begins.
const PAUSE: Duration = Duration::from_millis(1);

static TURNS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let help = "Pieces of clients' work that were done in turn, since they left no pause, by listener.";
    IntCounterVec::new(Opts::new("socket_turns_total", help), &["listener"]).expect("a constant name")
});

/// What is counted here, for the registry.
pub(crate) fn turns() -> IntCounterVec {
    TURNS.clone()
}

/// The line of one socket. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Paced(Arc<Line>);

#[derive(Debug)]
struct Line {
    /// Of the socket, for the metric: `sds`, `xds`.
    name: &'static str,
    /// Whose turn it is. As many wait as there are connections; each round ends one's wait, and so does the end of its
    /// connection.
    first: Arc<Semaphore>,
    row: Mutex<Row>,
}

#[derive(Debug)]
struct Row {
    pieces: u32,
    last: Instant,
}

impl Paced {
    /// Without anybody in it; `name` is for the metric.
    pub(crate) fn new(name: &'static str) -> Self {
        let row = Row { pieces: 0, last: Instant::now() };
        Self(Arc::new(Line { name, first: Arc::new(Semaphore::new(1)), row: Mutex::new(row) }))
    }

    /// `work`, of which each piece takes its turn in a line, if there is one.
    pub(crate) async fn work(line: Option<Self>, work: impl Future<Output = ()>) {
        let mut work = pin!(work);
        let mut waiting: Option<Pin<Box<dyn Future<Output = OwnedSemaphorePermit> + Send>>> = None;
        let pieces = poll_fn(|cx| {
            let Some(Self(line)) = &line else { return work.as_mut().poll(cx) };
            if waiting.is_none() && line.is_long() {
                waiting = Some(Box::pin(turn(line.first.clone())));
            }
            let _turn = match &mut waiting {
                Some(turn) => Some(ready!(turn.as_mut().poll(cx))),
                None => None,
            };
            if waiting.take().is_some() {
                TURNS.with_label_values(&[line.name]).inc();
            }
            let done = work.as_mut().poll(cx);
            line.did_one();
            done
        });
        pieces.await;
    }
}

impl Line {
    fn row(&self) -> MutexGuard<'_, Row> {
        self.row.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_long(&self) -> bool {
        let mut row = self.row();
        if row.pieces >= AT_ONCE && row.last.elapsed() > PAUSE && self.first.available_permits() > 0 {
            row.pieces = 0;
        }
        row.pieces >= AT_ONCE
    }

    fn did_one(&self) {
        let mut row = self.row();
        row.pieces = row.pieces.saturating_add(1);
        row.last = Instant::now();
    }
}

// Waits until the others have had theirs, and for the end of the round.
async fn turn(first: Arc<Semaphore>) -> OwnedSemaphorePermit {
    let turn = first.acquire_owned().await.expect("it is never closed");
    yield_now().await;
    turn
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use tokio::task::{AbortHandle, LocalSet, spawn_local};

    use super::*;

    const CLIENTS: usize = 100;

    /// Clients that always have more to do, and what they have done.
    struct Crowd {
        pieces: Rc<RefCell<Vec<u32>>>,
        tasks: Vec<AbortHandle>,
    }

    impl Crowd {
        fn new(line: &Option<Paced>) -> Self {
            let pieces = Rc::new(RefCell::new(vec![0; CLIENTS]));
            let tasks = (0..CLIENTS).map(|client| {
                let pieces = pieces.clone();
                let work = poll_fn(move |cx| {
                    pieces.borrow_mut()[client] += 1;
                    cx.waker().wake_by_ref();
                    std::task::Poll::Pending
                });
                spawn_local(Paced::work(line.clone(), work)).abort_handle()
            });
            let tasks = tasks.collect();
            Self { pieces, tasks }
        }

        fn done(&self) -> u32 {
            self.pieces.borrow().iter().sum()
        }

        /// The most that is done while somebody else waits for one turn, in so many of them.
        async fn most_in_one_of(&self, rounds: usize) -> u32 {
            let most = Cell::new(0);
            for _ in 0..rounds {
                let before = self.done();
                yield_now().await;
                most.set(most.get().max(self.done() - before));
            }
            most.get()
        }
    }

    async fn with<T>(line: Option<Paced>, test: impl AsyncFnOnce(Crowd) -> T) -> T {
        LocalSet::new().run_until(async { test(Crowd::new(&line)).await }).await
    }

    #[tokio::test]
    async fn between_two_turns_of_somebody_else_few_pieces_are_done() {
        let turns = || TURNS.with_label_values(&["between turns"]).get();
        let most =
            with(Some(Paced::new("between turns")), async |crowd| crowd.most_in_one_of(1000).await).await;
        assert!(turns() > 100, "{}", turns());
        assert!((1..=AT_ONCE + 2).contains(&most), "{most}");
        let without = with(None, async |crowd| crowd.most_in_one_of(1000).await).await;
        assert!(without >= 61, "{without}: this test sees nothing");
    }

    #[tokio::test]
    async fn each_has_as_many_turns_as_the_others() {
        let pieces = with(Some(Paced::new("as many")), async |crowd| {
            while crowd.done() < 50 * 100 {
                yield_now().await;
            }
            crowd.pieces.take()
        })
        .await;
        let (least, most) = (pieces.iter().min().unwrap(), pieces.iter().max().unwrap());
        assert!(*least > 0 && most - least <= 2, "{pieces:?}");
    }

    #[tokio::test]
    async fn who_ends_while_it_waits_holds_up_nobody() {
        with(Some(Paced::new("an end")), async |crowd| {
            crowd.most_in_one_of(10).await;
            // All but the last, whoever is first in the line.
            crowd.tasks[..CLIENTS - 1].iter().for_each(AbortHandle::abort);
            let before = crowd.pieces.borrow()[CLIENTS - 1];
            while crowd.pieces.borrow()[CLIENTS - 1] < before + 100 {
                yield_now().await;
            }
        })
        .await;
    }
}
