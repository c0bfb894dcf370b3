//! Every task has a name and somebody who joins it.
//!
//! [`Group::spawn`] is the only way to start a task (a bare `tokio::spawn` is a lint error). A group
//! owns its tasks: the first that fails or panics is reported by [`Group::failed`] with its name and
//! cause, and [`Group::stop`] cancels the group's [`Stop`] token and waits, with a deadline, until all
//! are gone; those that overrun are named and aborted.
//!
//! The work for one connection, stream or query is not worth the agent: a [`Set`] holds it. A panic there ends
//! that one, is counted, and logged with its place; whoever has a client to tell uses [`caught`]. The panic of
//! work on a thread of its own ([`super::lane::begin`]) is told in the same way.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use prometheus::{IntCounterVec, Opts};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle};
pub use tokio_util::sync::CancellationToken as Stop;

use super::on_purpose;

/// What a task may end with; the error's text is shown with its sources.
pub(crate) type TaskResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// What a loop may end with.
pub(crate) trait Outcome {
    /// As a result.
    ///
    /// # Errors
    /// When it was one.
    fn into_result(self) -> TaskResult;
}

impl Outcome for () {
    fn into_result(self) -> TaskResult {
        Ok(())
    }
}

impl Outcome for TaskResult {
    fn into_result(self) -> TaskResult {
        self
    }
}

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
        self.spawn_boxed(name.into(), Box::pin(task));
    }

    // Boxed at once: futures of many kilobytes are then neither copied from frame to frame, which leaves those pages
    // of the stack in memory for good, nor is the runtime's code for a task made for each of them.
    fn spawn_boxed(&self, name: String, task: BoxFuture<'static, TaskResult>) {
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
        tasks.running.insert(id, (name, handle));
    }

    /// Starts a task that cannot fail.
    pub fn run<F>(&self, name: impl Into<String>, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn_boxed(name.into(), Box::pin(task.map(Ok)));
    }

    /// Starts a loop that ends when the group is stopped and not before: an earlier end is a failure, too.
    pub(crate) fn lasting<F>(&self, name: impl Into<String>, task: F)
    where
        F: Future<Output: Outcome> + Send + 'static,
    {
        let stop = self.token();
        let task = Box::pin(task);
        self.spawn(name, async move {
            task.await.into_result()?;
            if stop.is_cancelled() { Ok(()) } else { Err("it ended, and nobody had stopped it".into()) }
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

static PANICS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let opts = Opts::new("task_panics_total", "Panics in the work for one connection or stream.");
    IntCounterVec::new(opts, &["task"]).expect("a constant name")
});

/// What is counted here, for the registry.
#[must_use]
pub(crate) fn panics() -> IntCounterVec {
    PANICS.clone()
}

/// A panic that was caught; its message is in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it panicked; the message stands in the log")]
pub(crate) struct Panicked;

/// Runs the work for one connection or stream of `task`; a panic in it is counted and told.
///
/// # Errors
/// When it panicked: tell the client.
pub(crate) fn caught<F: Future>(
    task: &'static str,
    work: F,
) -> impl Future<Output = Result<F::Output, Panicked>> + use<F> {
    // No async function: each would have room for `work` twice.
    let work = AssertUnwindSafe(on_purpose::run(task, work));
    work.catch_unwind().map(move |done| done.map_err(|panic| told(task, &*panic)))
}

fn told(task: &str, panic: &(dyn Any + Send)) -> Panicked {
    PANICS.with_label_values(&[task]).inc();
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
    let place = PLACE.take().unwrap_or_else(|| "an unknown place".to_owned());
    tracing::error!("a defect in the agent ended one {task}: panic at {place}: {text}");
    Panicked
}

thread_local! {
    static PLACE: std::cell::Cell<Option<String>> = const { std::cell::Cell::new(None) };
}

/// Keeps the place of each panic for the line that tells of it. Call it once, at the start.
pub(crate) fn remember_places() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PLACE.set(info.location().map(ToString::to_string));
        before(info);
    }));
}

/// Does `work` on this thread, as [`caught`] does.
///
/// # Errors
/// When it panicked.
pub(crate) fn guarded<T>(task: &str, work: impl FnOnce() -> T) -> Result<T, Panicked> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| told(task, &*panic))
}

/// Short tasks of one kind, owned by the loop that starts them; dropping it ends them.
#[derive(Debug)]
#[allow(clippy::disallowed_types, reason = "the one place where sets of tasks are made")]
pub(crate) struct Set<T = ()> {
    name: &'static str,
    tasks: tokio::task::JoinSet<Result<T, Panicked>>,
}

impl<T: Send + 'static> Set<T> {
    /// An empty set; `name` is what one of its tasks is called (`status connection`).
    #[must_use]
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, tasks: Default::default() }
    }

    /// Starts a task. Whoever owns the set joins it.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = T> + Send + 'static) -> AbortHandle {
        self.spawn_boxed(Box::pin(task))
    }

    // As `Group::spawn_boxed`.
    fn spawn_boxed(&mut self, task: BoxFuture<'static, T>) -> AbortHandle {
        let name = self.name;
        let work = AssertUnwindSafe(on_purpose::run_in_set(name, task)).catch_unwind();
        self.tasks.spawn(async move { work.await.map_err(|panic| told(name, &*panic)) })
    }

    /// What the next has given that did not panic; pending as long as there is none.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<T> {
        while let Poll::Ready(Some(joined)) = self.tasks.poll_join_next(cx) {
            if let Ok(Ok(done)) = joined {
                return Poll::Ready(done);
            }
        }
        Poll::Pending
    }

    /// Ends all of them, and waits until they are gone.
    pub(crate) async fn stop(&mut self) {
        self.tasks.shutdown().await;
    }

    /// Waits until all have ended.
    pub(crate) async fn all_ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }

    /// Whether there is none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}

impl Set<()> {
    /// Waits for the next that ends; for ever, if there is none.
    pub(crate) async fn ended(&mut self) {
        let _ = self.next().await;
    }

    /// As [`Set::ended`], with how it ended.
    ///
    /// # Errors
    /// When it panicked.
    pub(crate) async fn next(&mut self) -> Result<(), Panicked> {
        match self.tasks.join_next().await {
            Some(Ok(done)) => done,
            // Aborted by whoever holds its handle.
            Some(Err(_)) => Ok(()),
            None => std::future::pending().await,
        }
    }
}

struct Watched {
    id: u64,
    name: String,
    inner: Arc<Inner>,
    done: bool,
}

impl Watched {
    async fn run(mut self, task: BoxFuture<'static, TaskResult>) {
        if let Err(error) = on_purpose::run(&self.name, task).await {
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

    #[tokio::test]
    async fn a_loop_that_ends_by_itself_is_a_failure() {
        let group = Group::new();
        group.lasting("dns", async {});
        assert_eq!(group.failed().await.to_string(), "task dns failed: it ended, and nobody had stopped it");
        let stop = group.token();
        group.lasting("sds", async move { stop.cancelled().await });
        group.lasting("xds", async { TaskResult::Err("gone".into()) });
        assert_eq!(group.failed().await.to_string(), "task xds failed: gone");
        assert!(group.stop(Duration::from_secs(1)).await.is_empty());
        assert!(futures_util::FutureExt::now_or_never(group.failed()).is_none());
    }

    #[tokio::test]
    async fn a_panic_in_a_set_ends_one_task_and_is_counted() {
        let before = panics().with_label_values(&["test stream"]).get();
        let mut set = Set::new("test stream");
        set.spawn(async { panic!("boom") });
        set.spawn(async {});
        set.all_ended().await;
        assert!(set.is_empty());
        assert!(caught("test stream", async { panic!("{}", 2) }).await.is_err());
        assert_eq!(guarded("test stream", || panic!("3")), Err::<(), _>(Panicked));
        assert_eq!(guarded("test stream", || 4), Ok(4));
        assert_eq!(panics().with_label_values(&["test stream"]).get() - before, 3);
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
