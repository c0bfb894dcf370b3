//! The cheap end: what signals, the status server and debug pages hold.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};

use super::RunState;
use crate::base::seldom::Seldom;
use crate::envoy::{Kept, Reason, admin};

/// Limit of `/drain`: an Envoy that accepts and never answers does not hold its caller longer. The Go
/// agent waits for ever.
pub(crate) const DRAIN_NOW_LIMIT: Duration = Duration::from_secs(10);

/// What the handles have asked for. No queue: of each kind only whether it was asked matters.
#[derive(Debug, Default)]
pub(super) struct Asked {
    stop: OnceLock<Reason>,
    drained: AtomicBool,
    reload: AtomicU8,
    /// How often Envoy's place was taken so far.
    taken: AtomicU64,
    changed: Notify,
    replace: Mutex<Option<Replace>>,
    /// For a successor, or why there can be none now; nobody asks where none may come.
    kept: Mutex<Option<Result<Kept, NotReplaced>>>,
}

/// Another binary in the place of Envoy's.
#[derive(Debug)]
pub(super) struct Replace {
    pub(super) binary: String,
    /// How long it may take until it is live.
    pub(super) limit: Duration,
    pub(super) done: oneshot::Sender<Result<u32, NotReplaced>>,
}

/// Why Envoy is not replaced by its next epoch; the one before serves on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReplaced {
    /// The feature is not switched on.
    #[error("hot restart is off: set ENVOY_HOT_RESTART=true")]
    Off,
    /// Envoy, or the agent, is doing something else.
    #[error("{0}")]
    Busy(&'static str),
    /// There is no Envoy that could be replaced.
    #[error("Envoy does not run now ({0:?})")]
    NotRunning(RunState),
    /// The new epoch's configuration cannot be made.
    #[error("the bootstrap for it cannot be made; the log says why")]
    Bootstrap,
    /// It was started and did not come to serve.
    #[error("epoch {epoch}: {why}")]
    GaveUp {
        /// Its number.
        epoch: u32,
        /// How it ended.
        why: String,
    },
}

const STOPPING: NotReplaced = NotReplaced::Busy("the agent is stopping");
const OVERTAKEN: NotReplaced = NotReplaced::Busy("another Envoy was asked for before this one was looked at");

/// Signals, `/quitquitquit` and `/drain` may come without pause: beyond these nothing new is said.
static LATER: Seldom = Seldom::new(10);
static DRAINED: Seldom = Seldom::new(10);

const RELOAD: u8 = 1;
const FORCED: u8 = 2;

/// What is new since the last look.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    pub(super) drained: bool,
    /// Whether a reload is asked for, and whether by force.
    pub(super) reload: Option<bool>,
    pub(super) stop: Option<Reason>,
}

impl Asked {
    /// Readiness is about another process: none was there before it, or the one before has ended.
    pub(super) fn takes_the_place(&self) {
        self.taken.fetch_add(1, Ordering::AcqRel);
    }

    /// The binary that is to take over, once.
    pub(super) fn replacement(&self) -> Option<Replace> {
        self.replace.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn keep(&self, kept: Result<Kept, NotReplaced>) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
    }

    /// Waits until something may be new.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Has whoever waits look once more.
    pub(super) fn again(&self) {
        self.changed.notify_one();
    }

    /// What was asked since the last call; a stop is told every time.
    pub(super) fn take(&self) -> News {
        let reload = self.reload.swap(0, Ordering::AcqRel);
        News {
            drained: self.drained.load(Ordering::Acquire),
            reload: (reload != 0).then_some(reload & FORCED != 0),
            stop: self.stop.get().cloned(),
        }
    }
}

/// Asks the supervisor; clones are cheap. Works, and does what makes sense, without Envoy too.
#[derive(Debug, Clone)]
pub struct Handle {
    asked: Arc<Asked>,
    state: watch::Receiver<RunState>,
    client: Option<admin::Client>,
    hot_restart: bool,
}

impl Handle {
    pub(super) fn new(
        asked: Arc<Asked>,
        state: watch::Receiver<RunState>,
        client: Option<admin::Client>,
        hot_restart: bool,
    ) -> Self {
        Self { asked, state, client, hot_restart }
    }

    /// Begins the end: Envoy drains first unless it already has. Only the first reason counts; later
    /// calls change nothing.
    pub fn stop(&self, reason: Reason) {
        if let Err(later) = self.asked.stop.set(reason) {
            if let Some(more) = LATER.may() {
                let first = self.asked.stop.get().map(ToString::to_string).unwrap_or_default();
                tracing::info!("{later}: nothing changes, the agent is stopping already ({first}){more}");
            }
            return;
        }
        self.asked.changed.notify_one();
    }

    /// `/quitquitquit`: the end without a drain. Call it when the answer is on its way: the agent may be
    /// gone milliseconds later.
    pub fn quit(&self) {
        self.stop(Reason::Quit);
    }

    /// The first reason for which the end was asked for.
    #[must_use]
    pub(crate) fn asked_to_stop(&self) -> Option<&Reason> {
        self.asked.stop.get()
    }

    /// `/drain`: Envoy drains its listeners and stays; a later stop does not drain again. Returns when
    /// Envoy has answered, or after [`DRAIN_NOW_LIMIT`]; a failure is logged and counts as done, as in
    /// the Go agent.
    pub async fn drain_now(&self) {
        let Some(client) = &self.client else { return };
        let asked = client.drain_listeners(true, DRAIN_NOW_LIMIT).await;
        if let Some(more) = DRAINED.may() {
            match asked {
                Ok(status) => tracing::info!("Envoy was asked to drain and answered {status}{more}"),
                Err(error) => {
                    tracing::warn!(
                        "Envoy could not be asked to drain: {}{more}",
                        crate::base::error::chain(&error)
                    )
                }
            }
        }
        self.asked.drained.store(true, Ordering::Release);
        self.asked.changed.notify_one();
    }

    /// The configuration's inputs may have changed: starts a new epoch if they have and hot restart is
    /// on. With `force` also when they have not (a request through the debug interface).
    pub fn reload(&self, force: bool) {
        self.asked.reload.fetch_or(if force { RELOAD | FORCED } else { RELOAD }, Ordering::AcqRel);
        self.asked.changed.notify_one();
    }

    /// A reload by force, on request of a person: accepted, or why not.
    ///
    /// # Errors
    /// When hot restart is off, there is no Envoy, or the agent is stopping.
    pub fn hot_restart(&self) -> Result<(), NotReplaced> {
        match (self.hot_restart, self.state()) {
            (false, _) => Err(NotReplaced::Off),
            (true, RunState::Running { .. }) => {
                self.reload(true);
                Ok(())
            }
            (true, state) => Err(NotReplaced::NotRunning(state)),
        }
    }

    /// Has `binary` take over by hot restart; gives its epoch once it is live. The supervisor answers within its limit
    /// for the epoch before plus `limit`: what is not live by then is killed, and its end is the answer.
    ///
    /// # Errors
    /// Why it has not: the one before serves on then.
    pub async fn replace(&self, binary: String, limit: Duration) -> Result<u32, NotReplaced> {
        let (done, result) = oneshot::channel();
        let slot = self.asked.replace.lock();
        let earlier = slot.unwrap_or_else(PoisonError::into_inner).replace(Replace { binary, limit, done });
        if let Some(earlier) = earlier {
            // Whoever asked may have gone.
            let _ = earlier.done.send(Err(OVERTAKEN));
        }
        self.asked.changed.notify_one();
        // What is left here when the supervisor has ended is answered by nobody.
        let mut state = self.state.clone();
        tokio::select! {
            biased;
            answer = result => answer.unwrap_or(Err(STOPPING)),
            () = async { while state.changed().await.is_ok() {} } => Err(STOPPING),
        }
    }

    /// Whether Envoy can be replaced by its next epoch.
    #[must_use]
    pub(crate) fn hot_restarts(&self) -> bool {
        self.hot_restart
    }

    /// What a successor in this process must know; empty where there is no Envoy of ours.
    ///
    /// # Errors
    /// Why there can be none now.
    pub(crate) fn kept(&self) -> Result<Option<Kept>, NotReplaced> {
        if self.asked.stop.get().is_some() {
            return Err(STOPPING);
        }
        self.asked.kept.lock().unwrap_or_else(PoisonError::into_inner).clone().transpose()
    }

    /// What the supervisor is doing.
    #[must_use]
    pub fn state(&self) -> RunState {
        self.state.borrow().clone()
    }

    /// Whether an Envoy runs, as far as readiness cares: not while one is being brought back.
    #[must_use]
    pub fn running(&self) -> bool {
        use RunState::{Disabled, Ended, Recovering, Starting};
        !matches!(*self.state.borrow(), Starting | Disabled | Recovering | Ended)
    }

    /// Which of Envoy's processes readiness is about: another number is another process. In a hot restart that is the one
    /// before until it has ended, since it serves whatever becomes of the next.
    #[must_use]
    pub(crate) fn generation(&self) -> u64 {
        self.asked.taken.load(Ordering::Acquire)
    }

    /// The state as it changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<RunState> {
        self.state.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_replacement_that_nobody_takes_is_answered_all_the_same() {
        let asked = Arc::new(Asked::default());
        let (supervisor, state) = watch::channel(RunState::Starting);
        let handle = Handle::new(asked.clone(), state, None, true);
        let replace = || handle.replace("envoy".to_owned(), Duration::from_secs(600));
        let mut first = std::pin::pin!(replace());
        assert!(
            std::future::poll_fn(|cx| std::task::Poll::Ready(first.as_mut().poll(cx).is_pending())).await
        );
        let ends = async { drop(supervisor) };
        let (second, first, ()) = tokio::join!(replace(), first, ends);
        assert_eq!((first, second), (Err(OVERTAKEN), Err(STOPPING)));
    }

    #[test]
    fn the_first_reason_counts_and_requests_fold() {
        let asked = Arc::new(Asked::default());
        let (_send, state) = watch::channel(RunState::Starting);
        let handle = Handle::new(asked.clone(), state, None, false);
        assert_eq!(asked.take(), News::default());
        assert!(handle.hot_restart().is_err());
        handle.reload(false);
        handle.reload(true);
        handle.reload(false);
        assert_eq!(asked.take().reload, Some(true));
        assert_eq!(asked.take().reload, None);
        assert_eq!(handle.asked_to_stop(), None);
        handle.quit();
        assert_eq!(handle.asked_to_stop(), Some(&Reason::Quit));
        handle.stop(Reason::Signal("terminated"));
        assert_eq!(asked.take().stop, Some(Reason::Quit));
        assert_eq!(asked.take().stop, Some(Reason::Quit));
    }
}
