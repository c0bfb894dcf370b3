//! Every task has a name and somebody who joins it.
//!
//! [`Group::spawn`] is the only way to start a task (a bare `tokio::spawn` is a lint error). A group
//! owns its tasks: the first that fails or panics is reported by [`Group::failed`] with its name and
//! cause, and [`Group::stop`] cancels the group's [`Stop`] token and waits, with a deadline, until all
//! are gone; those that overrun are named and aborted.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
pub use tokio_util::sync::CancellationToken as Stop;

/// What a task may end with; the error's text is shown with its sources.
pub type TaskResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// A task that ended badly.
#[derive(Debug)]
pub struct Failure {
    /// The name given to [`Group::spawn`].
    pub task: String,
    /// The error with its sources, or the panic's message.
    pub cause: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {} failed: {}", self.task, self.cause)
    }
}

impl std::error::Error for Failure {}

/// A set of named tasks that start, fail and stop together. Cheap to clone.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
}

struct Inner {
    stop: Stop,
    tasks: Mutex<Tasks>,
    failures: mpsc::UnboundedSender<Failure>,
    // Unbounded: a task fails at most once, so the queue never holds more than there are tasks.
    failed: tokio::sync::Mutex<mpsc::UnboundedReceiver<Failure>>,
}

#[derive(Default)]
struct Tasks {
    next: u64,
    running: HashMap<u64, (String, JoinHandle<()>)>,
}

impl Default for Group {
    fn default() -> Self {
        Self::new()
    }
}

impl Group {
    /// An empty group with a fresh stop token.
    #[must_use]
    pub fn new() -> Self {
        Self::under(Stop::new())
    }

    /// An empty group that stops when `stop` is cancelled.
    #[must_use]
    pub fn under(stop: Stop) -> Self {
        let (failures, failed) = mpsc::unbounded_channel();
        let failed = tokio::sync::Mutex::new(failed);
        Self { inner: Arc::new(Inner { stop, tasks: Mutex::default(), failures, failed }) }
    }

    /// The token that tells this group's tasks to end.
    #[must_use]
    pub fn token(&self) -> Stop {
        self.inner.stop.clone()
    }

    /// Starts `task` under `name`. Whoever calls [`Group::stop`] joins it.
    pub fn spawn<F>(&self, name: impl Into<String>, task: F)
    where
        F: Future<Output = TaskResult> + Send + 'static,
    {
        let name = name.into();
        let inner = self.inner.clone();
        let mut tasks = self.inner.tasks.lock().expect("no panic holds this lock");
        let id = tasks.next;
        tasks.next += 1;
        let named = name.clone();
        let report = async move {
            let watched = Watched { id, name: named, inner, done: false };
            watched.run(task).await;
        };
        #[expect(clippy::disallowed_methods, reason = "the one place where tasks are spawned")]
        let handle = tokio::spawn(report);
        // A task that ended between spawn and here has found nothing to remove; `sweep` drops it.
        tasks.running.retain(|_, (_, h)| !h.is_finished());
        tasks.running.insert(id, (name, handle));
    }

    /// Starts a task that cannot fail.
    pub fn run<F>(&self, name: impl Into<String>, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn(name, async move {
            task.await;
            Ok(())
        });
    }

    /// Waits for the next task that fails or panics.
    pub async fn failed(&self) -> Failure {
        match self.inner.failed.lock().await.recv().await {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }

    /// Names of the tasks that still run.
    #[must_use]
    pub fn running(&self) -> Vec<String> {
        let tasks = self.inner.tasks.lock().expect("no panic holds this lock");
        let mut names: Vec<_> =
            tasks.running.values().filter(|(_, h)| !h.is_finished()).map(|(n, _)| n.clone()).collect();
        names.sort();
        names
    }

    /// Cancels the token and joins every task; after `deadline` the rest is aborted.
    ///
    /// Returns the names of the tasks that had to be aborted.
    pub async fn stop(&self, deadline: Duration) -> Vec<String> {
        self.inner.stop.cancel();
        let until = tokio::time::Instant::now() + deadline;
        let mut overrun = Vec::new();
        loop {
            let next = {
                let mut tasks = self.inner.tasks.lock().expect("no panic holds this lock");
                let id = tasks.running.keys().next().copied();
                id.and_then(|id| tasks.running.remove(&id))
            };
            let Some((name, mut handle)) = next else { break };
            if tokio::time::timeout_at(until, &mut handle).await.is_err() {
                handle.abort();
                let _ = handle.await;
                overrun.push(name);
            }
        }
        overrun
    }
}

struct Watched {
    id: u64,
    name: String,
    inner: Arc<Inner>,
    done: bool,
}

impl Watched {
    async fn run<F: Future<Output = TaskResult>>(mut self, task: F) {
        if let Err(error) = task.await {
            self.fail(super::error::chain(&*error));
        }
        self.done = true;
    }

    fn fail(&self, cause: String) {
        let _ = self.inner.failures.send(Failure { task: self.name.clone(), cause });
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.done && std::thread::panicking() {
            self.fail("it panicked; the message stands in the log above".to_owned());
        }
        if let Ok(mut tasks) = self.inner.tasks.lock() {
            tasks.running.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failure_names_task_and_cause() {
        let group = Group::new();
        group.spawn("sds", async { Err("socket gone".into()) });
        let failure = group.failed().await;
        assert_eq!(failure.to_string(), "task sds failed: socket gone");
        assert!(group.stop(Duration::from_secs(1)).await.is_empty());
    }

    #[tokio::test]
    async fn a_panic_is_a_failure() {
        let group = Group::new();
        group.spawn("xds", async { panic!("boom") });
        assert_eq!(group.failed().await.task, "xds");
    }

    #[tokio::test(start_paused = true)]
    async fn stop_joins_the_willing_and_names_the_rest() {
        let group = Group::new();
        let token = group.token();
        group.run("willing", async move { token.cancelled().await });
        group.run("stubborn", std::future::pending());
        assert_eq!(group.running(), ["stubborn", "willing"]);
        assert_eq!(group.stop(Duration::from_secs(5)).await, ["stubborn"]);
        assert!(group.running().is_empty());
    }
}
