//! One published resource: its current value, and notification of its subscribers.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Error, Fetched, Secret};

/// What is published. Followers compare counters, so nothing is missed between two looks; values in
/// between may be, and should be: only the newest certificate is of use.
#[derive(Debug, Default)]
struct Published {
    value: Option<Secret>,
    changes: u64,
    failure: Option<Arc<Error>>,
    failures: u64,
}

/// The writing side.
#[derive(Debug)]
pub(crate) struct Slot(watch::Sender<Published>);

impl Default for Slot {
    fn default() -> Self {
        Self(watch::Sender::new(Published::default()))
    }
}

impl Slot {
    /// A new value for every follower.
    pub(crate) fn publish(&self, secret: Secret) {
        self.0.send_modify(|s| {
            s.value = Some(secret);
            s.changes += 1;
        });
    }

    /// Tells the followers that a new value could not be had; the old one stays.
    pub(super) fn fail(&self, error: Arc<Error>) {
        self.0.send_modify(|s| {
            s.failure = Some(error);
            s.failures += 1;
        });
    }

    /// The value, if there ever was one.
    pub(crate) fn value(&self) -> Option<Secret> {
        self.0.borrow().value.clone()
    }

    /// How many values there were.
    pub(super) fn changes(&self) -> u64 {
        self.0.borrow().changes
    }

    /// How many follow.
    pub(crate) fn followers(&self) -> usize {
        self.0.receiver_count()
    }

    /// The value, waited for. `None` when there will be none.
    pub(crate) async fn wait(&self) -> Option<Fetched> {
        let mut news = self.0.subscribe();
        news.wait_for(|state| state.value.is_some()).await.ok()?;
        drop(news);
        self.fetched()
    }

    /// The value and a follower that knows it already.
    pub(super) fn fetched(&self) -> Option<Fetched> {
        let mut news = self.0.subscribe();
        let state = news.borrow_and_update();
        let (secret, changes, failures) = (state.value.clone(), state.changes, state.failures);
        drop(state);
        Some(Fetched { secret: secret?, updates: Updates { news, changes, failures } })
    }
}

/// Follows one resource.
#[derive(Debug)]
pub(crate) struct Updates {
    news: watch::Receiver<Published>,
    changes: u64,
    failures: u64,
}

/// News of a resource.
#[derive(Debug)]
pub(crate) enum Change {
    /// The new value.
    Updated(Secret),
    /// A new value was due and could not be had. The old one is still good.
    Failed(Arc<Error>),
}

impl Updates {
    /// The value as it is now; [`Updates::next`] waits for a later one.
    pub(crate) fn value(&mut self) -> Option<Secret> {
        let state = self.news.borrow();
        if state.changes != self.changes {
            (self.changes, self.failures) = (state.changes, state.failures);
        }
        state.value.clone()
    }

    /// Waits for news. `None` when there will be no more. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Option<Change> {
        loop {
            if let Some(change) = self.take() {
                return Some(change);
            }
            self.news.changed().await.ok()?;
        }
    }

    fn take(&mut self) -> Option<Change> {
        let state = self.news.borrow_and_update();
        if state.changes != self.changes {
            self.changes = state.changes;
            // A failure before this value is history.
            self.failures = state.failures;
            return state.value.clone().map(Change::Updated);
        }
        if state.failures != self.failures {
            self.failures = state.failures;
            return state.failure.clone().map(Change::Failed);
        }
        None
    }
}

/// For tests of those who consume updates.
#[cfg(test)]
pub(crate) mod fake {
    use super::*;

    /// A resource under the test's control.
    #[derive(Debug, Default)]
    pub(crate) struct Source(Slot);

    impl Source {
        pub(crate) fn publish(&self, secret: Secret) {
            self.0.publish(secret);
        }
        pub(crate) fn fail(&self, error: Error) {
            self.0.fail(Arc::new(error));
        }
        pub(crate) fn fetched(&self) -> Option<Fetched> {
            self.0.fetched()
        }
        pub(crate) fn followers(&self) -> usize {
            self.0.followers()
        }
    }
}
