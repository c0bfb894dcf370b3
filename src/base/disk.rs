//! File-system calls with a deadline.
//!
//! A network or user-space file system can hang, so each call runs on a thread of its own, and the task that asked (never
//! its thread) waits no longer than [`GRACE`]. A call that has not returned keeps its thread and is not repeated before it
//! has; meanwhile the task goes on with what it knows.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::oneshot::{Receiver, error::TryRecvError};

use super::files::{Watcher, Watches};
use super::lane;

/// How long a look is waited for: hundreds of times what a healthy file system needs, and nothing that a
/// stream would notice. Tests of what is read must not fail on a machine that stands still for that long.
const GRACE: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 50 });

/// A kind of look that happens again and again, one at a time.
#[derive(Debug)]
pub(crate) struct Looks<T> {
    overdue: Option<Receiver<T>>,
    grace: Duration,
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        Self { overdue: None, grace: GRACE }
    }
}

impl<T: Send + 'static> Looks<T> {
    /// Looks that are waited for so long.
    #[must_use]
    pub(crate) fn patient(grace: Duration) -> Self {
        Self { overdue: None, grace }
    }

    /// Whether one is overdue.
    #[must_use]
    pub(crate) fn stuck(&self) -> bool {
        self.overdue.is_some()
    }

    /// What `look` finds; `None` when the file system does not answer. What an overdue look has found
    /// meanwhile counts if this one is overdue too.
    pub(crate) async fn run(&mut self, look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let late = match self.overdue.as_mut().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return None,
            Some(Ok(found)) => Some(found),
            Some(Err(TryRecvError::Closed)) | None => None,
        };
        self.overdue = None;
        match begin(look, self.grace).await {
            Ok(found) => Some(found),
            Err(overdue) => {
                self.overdue = overdue;
                late
            }
        }
    }
}

/// A watcher that goes to the thread for whatever may touch the file system. Where it is lost (there was no thread, or its
/// job panicked), the next job has another one, which watches the same.
#[derive(Debug)]
pub(crate) struct Watching {
    here: Option<Watcher>,
    away: Option<Receiver<Watcher>>,
    /// What is to be watched.
    paths: BTreeSet<PathBuf>,
    watches: Watches,
    quiet: Duration,
    /// As of [`Watcher::with_above`].
    above: bool,
    grace: Duration,
    failures: u64,
    /// Those of this watcher that are in `failures`.
    counted: u64,
}

impl Watching {
    /// Watches nothing yet; `quiet` as of [`Watcher::new`].
    #[must_use]
    pub(crate) fn new(watches: &Watches, quiet: Duration) -> Self {
        let here = Some(Watcher::new(watches, quiet));
        let (away, paths) = (None, BTreeSet::new());
        let watches = watches.clone();
        Self { here, away, paths, watches, quiet, above: false, grace: GRACE, failures: 0, counted: 0 }
    }

    /// As [`Watcher::with_above`].
    #[must_use]
    pub(crate) fn with_above(mut self) -> Self {
        self.above = true;
        self.here = self.here.map(Watcher::with_above);
        self
    }

    /// As [`Watcher::set`]; `false`: not now, since an earlier job is overdue or there is no thread.
    pub(crate) async fn set(&mut self, paths: BTreeSet<PathBuf>) -> bool {
        self.paths.clone_from(&paths);
        self.with(|watcher| watcher.set(paths)).await
    }

    /// As [`Watcher::add`]; `false` as in [`Watching::set`].
    pub(crate) async fn add(&mut self, paths: Vec<PathBuf>) -> bool {
        self.paths.extend(paths.iter().cloned());
        self.with(|watcher| watcher.add(paths)).await
    }

    /// As [`Watcher::refresh`]; `false` as in [`Watching::set`].
    pub(crate) async fn refresh(&mut self) -> bool {
        self.with(Watcher::refresh).await
    }

    async fn with(&mut self, job: impl FnOnce(&mut Watcher) + Send + 'static) -> bool {
        match self.away.as_mut().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return false,
            Some(Ok(watcher)) => self.back(watcher),
            Some(Err(TryRecvError::Closed)) | None => {}
        }
        self.away = None;
        let (mut watcher, missing) = match self.here.take() {
            Some(watcher) => (watcher, None),
            None => {
                self.counted = 0;
                let new = Watcher::new(&self.watches, self.quiet);
                (if self.above { new.with_above() } else { new }, Some(self.paths.clone()))
            }
        };
        let job = move || {
            if let Some(paths) = missing {
                watcher.set(paths);
            }
            job(&mut watcher);
            watcher
        };
        match begin(job, self.grace).await {
            Ok(watcher) => self.back(watcher),
            Err(Some(overdue)) => self.away = Some(overdue),
            Err(None) => return false,
        }
        true
    }

    fn back(&mut self, watcher: Watcher) {
        let failures = watcher.failures();
        self.failures += failures - self.counted;
        self.counted = failures;
        self.here = Some(watcher);
    }

    /// Waits for news, first for a watcher that is away: a job of thousands of paths may be overdue and yet end soon.
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn news(&mut self) {
        if let Some(away) = &mut self.away {
            let back = away.await;
            self.away = None;
            if let Ok(watcher) = back {
                self.back(watcher);
            }
        }
        match &mut self.here {
            Some(watcher) => watcher.news().await,
            None => std::future::pending().await,
        }
    }

    /// As [`Watcher::blind`], and while the watcher is away.
    #[must_use]
    pub(crate) fn blind(&self) -> bool {
        self.here.as_ref().is_none_or(Watcher::blind)
    }

    /// As [`Watcher::failures`], of all watchers there were.
    #[must_use]
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }
}

/// Runs `job` on a thread; its result, or where it will arrive (nowhere, when there is no thread).
async fn begin<T: Send + 'static>(
    job: impl FnOnce() -> T + Send + 'static,
    grace: Duration,
) -> Result<T, Option<Receiver<T>>> {
    let mut answer = lane::begin("file look", job).map_err(|error| {
        tracing::debug!("files are not checked: {error}");
        None
    })?;
    match tokio::time::timeout(grace, &mut answer).await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(_)) => Err(None),
        Err(_) => Err(Some(answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[tokio::test]
    async fn a_look_that_hangs_is_not_waited_for_and_not_doubled() {
        let (let_go, hold) = channel::<()>();
        let mut looks = Looks::default();
        assert_eq!(looks.run(|| 1).await, Some(1));
        looks.grace = Duration::from_millis(1);
        assert_eq!(
            looks
                .run(move || {
                    let _ = hold.recv();
                    2
                })
                .await,
            None
        );
        assert!(looks.stuck());
        assert_eq!(looks.run(|| panic!("one is under way")).await, None);
        drop(let_go);
        looks.grace = GRACE;
        // Once it has ended the next look is a fresh one.
        let found = loop {
            match looks.run(|| 3).await {
                Some(found) => break found,
                None => tokio::task::yield_now().await,
            }
        };
        assert_eq!((found, looks.stuck()), (3, false));
    }

    #[tokio::test]
    async fn a_watcher_comes_back_when_the_file_system_does() {
        let (let_go, hold) = channel::<()>();
        let mut watching = Watching::new(&Watches::default(), Duration::ZERO);
        watching.grace = Duration::from_millis(1);
        let held = watching.with(move |_| {
            let _ = hold.recv();
        });
        assert!(held.await);
        assert!(watching.here.is_none());
        assert!(!watching.with(|_| panic!("one is under way")).await);
        drop(let_go);
        watching.grace = GRACE;
        while watching.here.is_none() {
            watching.with(|_| {}).await;
        }
    }
    #[tokio::test]
    async fn a_watcher_that_is_lost_is_followed_by_one_that_watches_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let mut watching = Watching::new(&Watches::default(), Duration::ZERO);
        assert!(watching.set(BTreeSet::from([one.clone()])).await);
        assert!(!watching.with(|_| panic!("as where there is no thread")).await);
        assert!(watching.blind());
        assert!(watching.add(vec![two.clone()]).await);
        for path in [one, two] {
            std::fs::write(&path, "news").unwrap();
            tokio::time::timeout(GRACE, watching.news()).await.expect("it is not watched");
            // Whatever else the write has caused.
            while tokio::time::timeout(Duration::ZERO, watching.news()).await.is_ok() {}
        }
    }

    #[tokio::test]
    async fn a_watcher_that_comes_back_late_is_heard_without_being_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let (let_go, hold) = channel::<()>();
        let mut watching = Watching::new(&Watches::default(), Duration::ZERO);
        watching.grace = Duration::from_millis(1);
        let watched = path.clone();
        let held = watching.with(move |watcher| {
            watcher.add([watched]);
            let _ = hold.recv();
        });
        assert!(held.await);
        assert!(watching.here.is_none());
        drop(let_go);
        let writes = async {
            loop {
                std::fs::write(&path, "news").unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = watching.news() => {}
            () = writes => {}
        }
        assert!(watching.here.is_some());
    }
}
