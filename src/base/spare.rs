//! A thread that is kept for the moment in which the system gives no other.
//!
//! A pod's processes share one limit. Where the application has used it up, a token, roots and a name could not be read
//! any more and the certificate would run out: each of these reads has a thread of its own, since it may hang. They take
//! turns on this one then. Where one of them hangs the others are told that there is no thread, and come again.
//!
//! Neither this thread nor those of jobs take signals: one that comes between two programs ([`super::handover`]) waits for
//! the next, as the main thread has it, and would be lost with a thread that had taken it.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::handover::block_signals;

/// What is done on a thread.
pub(super) type Job = Box<dyn FnOnce() + Send>;

// Nobody joins it: it waits for work as long as the process lives, and what panics there is told by the job itself.
static KEPT: OnceLock<Spare> = OnceLock::new();

/// Keeps one from now on, if there is one: to be called once, early, by a process that is to live long.
pub(crate) fn keep() {
    if let Ok(spare) = Spare::new() {
        // A second one ends with its sender.
        let _ = KEPT.set(spare);
    }
}

/// Does `job` on a thread of this name, or on the one that is kept.
///
/// # Errors
/// When the system gives none, and that one hangs or is not kept.
pub(super) fn start(name: &str, job: Job) -> io::Result<Option<JoinHandle<()>>> {
    start_beside(KEPT.get(), name, job)
}

fn start_beside(spare: Option<&Spare>, name: &str, job: Job) -> io::Result<Option<JoinHandle<()>>> {
    // A closure that no thread was given to is dropped: so it only has a key to the job.
    let job = Arc::new(Mutex::new(Some(job)));
    let take = |job: &Mutex<Option<Job>>| held(job).take();
    let theirs = Arc::clone(&job);
    let spawned = scarce().and_then(|()| {
        Builder::new().name(name.to_owned()).spawn(move || {
            block_signals();
            let job = take(&theirs);
            if let Some(job) = job {
                job();
            }
        })
    });
    let Err(why) = spawned else { return spawned.map(Some) };
    match (spare, take(&job)) {
        (Some(spare), Some(job)) => spare.takes(job).then_some(None).ok_or(why),
        _ => Err(why),
    }
}

fn scarce() -> io::Result<()> {
    #[cfg(test)]
    scarce::check()?;
    Ok(())
}

/// So many may wait for their turn.
const ROW: usize = 16;
/// A job that takes longer hangs: nobody stands in the row behind it.
const LONG: Duration = Duration::from_secs(1);

/// The thread; it ends when this is dropped and its jobs are done.
#[derive(Debug)]
struct Spare {
    row: SyncSender<Job>,
    /// When the job that it is at was begun.
    since: Arc<Mutex<Option<Instant>>>,
}

impl Spare {
    fn new() -> io::Result<Self> {
        let (row, jobs) = sync_channel::<Job>(ROW);
        let since = Arc::new(Mutex::new(None));
        let begun = Arc::clone(&since);
        Builder::new().name("spare".to_owned()).spawn(move || {
            block_signals();
            for job in jobs {
                *held(&begun) = Some(Instant::now());
                job();
                *held(&begun) = None;
            }
        })?;
        Ok(Self { row, since })
    }

    fn takes(&self, job: Job) -> bool {
        let hangs = held(&self.since).is_some_and(|at| at.elapsed() >= LONG);
        !hangs && self.row.try_send(job).is_ok()
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tests of what becomes of work where the system gives no thread.
#[cfg(test)]
pub(crate) mod scarce {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static NONE: Cell<bool> = const { Cell::new(false) };
    }

    /// As long as it lives, nothing that is begun on the thread that made it gets another.
    pub(crate) struct NoThreads(());

    impl NoThreads {
        pub(crate) fn from_now_on() -> Self {
            NONE.set(true);
            Self(())
        }
    }

    impl Drop for NoThreads {
        fn drop(&mut self) {
            NONE.set(false);
        }
    }

    pub(crate) fn check() -> io::Result<()> {
        if NONE.get() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    use nix::sys::signal::{SigSet, Signal};

    #[test]
    fn no_thread_takes_a_signal_that_is_meant_for_the_next_program() {
        let (told, masks) = channel();
        let look = || {
            let told = told.clone();
            Box::new(move || told.send(SigSet::thread_get_mask().unwrap()).unwrap())
        };
        start_beside(None, "test", look()).unwrap();
        let spare = Spare::new().unwrap();
        assert!(spare.takes(look()));
        for mask in masks.iter().take(2) {
            for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR2]
            {
                assert!(mask.contains(signal), "{signal}");
            }
        }
    }

    #[test]
    fn what_no_thread_is_given_for_takes_turns_on_the_spare_one() {
        let _none = scarce::NoThreads::from_now_on();
        let spare = Spare::new().unwrap();
        let start =
            |job: Job| start_beside(Some(&spare), "test", job).map(|thread| assert!(thread.is_none()));
        let (begun, begins) = channel();
        let (let_go, hold) = channel::<()>();
        start(Box::new(move || {
            begun.send(0).unwrap();
            let _ = hold.recv();
            begun.send(1).unwrap();
        }))
        .unwrap();
        assert_eq!(begins.recv(), Ok(0));
        let (second, is_done) = channel();
        start(Box::new(move || second.send(()).unwrap())).unwrap();
        // As if the first one had begun long ago.
        *held(&spare.since) = Instant::now().checked_sub(LONG);
        assert!(start(Box::new(|| {})).is_err());
        drop(let_go);
        assert_eq!((begins.recv(), is_done.recv()), (Ok(1), Ok(())));
        start(Box::new(|| {})).unwrap();
        assert!(start_beside(None, "test", Box::new(|| {})).is_err());
    }
}
