//! How much freed memory the C library's allocator keeps.
//!
//! By default glibc gives the end of the heap back to the kernel as soon as 128 KB of it are free. While
//! configuration streams through the relay its buffers come and go, so the end of the heap was given back and
//! asked for again ten times a MB, with a page fault for every 4 KB: a third of the relay's CPU time.
//!
//! The limit can be set by a call (unsafe code) or by a variable (read before `main`). But it also moves by
//! itself: when a block that had a mapping of its own is freed, blocks of up to that size come from the heap
//! from then on, and twice that size may be free at its end (mallopt(3), `M_MMAP_THRESHOLD` and
//! `M_TRIM_THRESHOLD`). Another allocator is left as it is.
//!
//! What is kept for buffers is of use while bytes come. Afterwards it would be part of what each idle agent costs, so
//! it is given back: see [`Passing`], and [`Crowd`] for floods. So is what deep calls have left below the stack, and code: of the 10 MB that were resident once an agent
//! was up, 6 were code and constants that only the start needs, or a renewal, or a push.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::lane::Lane;
use super::slack;
use super::tasks::Stop;

static LANE: Lane = Lane::new("heap", 1);

/// Lets about `bytes` stay free at the end of the heap. Has an effect from 256 KB (below, blocks have no mapping
/// of their own) to 64 MB; never lowers what is kept. Touches one page, for a moment.
pub(crate) fn keep(bytes: usize) {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(bytes / 2)));
}

/// All threads take their memory from one heap. Each thread that lives beside another would otherwise get one of its
/// own, and what it freed there is of no use to the others. To be called before there is a second thread.
pub(crate) fn share() {
    give_back::one_arena();
}

/// So many bytes are worth it: their buffers are a tenth of what an idle agent holds.
const MUCH: usize = 256 * 1024;
/// How long no more come before it is done, and up to a slot of the shared timers longer ([`slack::GRAIN`]).
const QUIET: Duration = Duration::from_secs(1);
/// After so long what ran meanwhile, such as the renewal of a certificate, is not taken to be needed again soon. Mapping
/// anew what is costs a hundred faults, 0.1 ms.
const SELDOM: Duration = Duration::from_secs(15 * 60);

/// Unmaps code that is not run (`give_back`). An unoptimised build has ten times as much of it: what is mapped again
/// would hide what its tests look for, memory that is held.
fn code() {
    if cfg!(not(debug_assertions)) {
        give_back::code();
    }
}

/// Bytes that pass through. Some time after the last of many, the memory of their buffers is given back to the kernel.
#[derive(Debug, Default)]
pub(crate) struct Passing {
    bytes: AtomicUsize,
    much: Notify,
}

impl Passing {
    /// So many more have passed.
    pub(crate) fn more(&self, bytes: usize) {
        let before = self.bytes.fetch_add(bytes, Relaxed);
        if before < MUCH && before.saturating_add(bytes) >= MUCH {
            self.much.notify_one();
        }
    }

    /// Gives back what was much, until `stop`; the start is, too. In a thread, for milliseconds in which others may wait
    /// for memory.
    pub(crate) async fn give_back(&self, stop: Stop) {
        self.more(MUCH);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.much.notified() => {}
                () = sleep_until(slack::point(Instant::now() + SELDOM)) => {
                    let _ = LANE.run(code).await;
                    give_back::stack();
                    continue;
                }
            }
            loop {
                let seen = self.bytes.load(Relaxed);
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = sleep_until(slack::point(Instant::now() + QUIET)) => {}
                }
                if self.bytes.compare_exchange(seen, 0, Relaxed, Relaxed).is_ok() {
                    break;
                }
            }
            // Where there is no thread for it, it stays until the next time.
            let _ = LANE
                .run(|| {
                    give_back::heap();
                    code();
                })
                .await;
            // This thread's, which is the main one.
            give_back::stack();
        }
    }
}

/// Does once, on a thread of its own, what takes many small pieces of memory, and waits for it. glibc keeps up to 7 freed
/// pieces of each of 64 sizes for the thread that freed them, and with these in between the rest does not become whole
/// again: what the main thread holds later would lie scattered over it. A thread's go when it ends.
pub(crate) fn aside<T: Send>(job: impl Fn() -> T + Sync) -> T {
    thread::scope(|scope| match thread::Builder::new().name("aside".to_owned()).spawn_scoped(scope, &job) {
        Ok(aside) => aside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        // Where there is no thread, memory is what it costs.
        Err(_) => job(),
    })
}

/// Streams and connections of which so many together are a burst: a scrape under way holds up to 100 KB, a stream 10.
const BURST: usize = 32;
/// Those that end after the first hundreds mostly do so at once.
const SETTLE: Duration = Duration::from_secs(5);

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
/// Somebody has joined a burst.
static MORE: Notify = Notify::const_new();
/// A thread is about to give the heap back: bursts that come one after the other need no more than one.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Something that comes in large numbers when somebody floods the agent. When three quarters of a burst are gone
/// the heap is given back to the kernel: the allocator by itself would keep nearly all of it.
#[derive(Debug)]
pub(crate) struct Crowd(());

impl Crowd {
    /// One more.
    #[must_use]
    pub(crate) fn join() -> Self {
        let now = NOW.fetch_add(1, Relaxed) + 1;
        MOST.fetch_max(now, Relaxed);
        if now >= BURST {
            MORE.notify_one();
        }
        Self(())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let left = NOW.fetch_sub(1, Relaxed) - 1;
        let most = MOST.load(Relaxed);
        if most < BURST || left > most / 4 {
            return;
        }
        // What is left may be a burst itself. One of many that end at once begins it.
        if MOST.compare_exchange(most, left, Relaxed, Relaxed).is_ok() {
            settle();
        }
    }
}

/// Waits until somebody joins a burst, or has since the last call. For one caller.
pub(crate) async fn joined() {
    MORE.notified().await;
}

/// Gives back what is free of the heap, now: in a thread, for milliseconds in which others may wait for memory. Where there
/// is no thread for it, it stays.
pub(crate) async fn trim() {
    let _ = LANE.run(give_back::heap).await;
}

/// So many bytes, which were no part of the relay's stream, are or will soon be free (a message that is read whole, names that
/// are forgotten): given back as after a burst, where it is much.
pub(crate) fn freed(bytes: usize) {
    if bytes >= MUCH {
        settle();
    }
}

fn settle() {
    if BEGUN.swap(true, Relaxed) {
        return;
    }
    let trim = || {
        thread::sleep(SETTLE);
        BEGUN.store(false, Relaxed);
        give_back::heap();
    };
    // Without a thread it stays until the next burst is over.
    if super::lane::begin("heap", trim).is_err() {
        BEGUN.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Of this thread only.
    fn page_faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // After the name, which may hold anything: minflt is the tenth field.
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(7).unwrap().parse().unwrap()
    }

    // As the relay does while a message streams through.
    fn churn() {
        let buffers: Vec<Vec<u8>> = (0..16).map(|_| vec![1; 32 * 1024]).collect();
        std::hint::black_box(&buffers);
    }

    #[test]
    fn what_is_done_aside_is_done_on_another_thread_and_its_panic_goes_on() {
        let here = thread::current().id();
        assert_ne!(aside(|| thread::current().id()), here);
        assert!(std::panic::catch_unwind(|| aside(|| -> () { panic!("as it does") })).is_err());
    }

    fn asked_for(passing: &Passing) -> bool {
        use futures_util::FutureExt;
        passing.much.notified().now_or_never().is_some()
    }

    #[test]
    fn only_much_is_given_back_and_once() {
        let passing = Passing::default();
        passing.more(MUCH - 1);
        assert!(!asked_for(&passing));
        passing.more(1);
        passing.more(MUCH);
        assert!(asked_for(&passing));
        assert!(!asked_for(&passing), "once for each time");
    }

    #[tokio::test(start_paused = true)]
    async fn what_passed_is_given_back_when_nothing_more_comes() {
        let passing = std::sync::Arc::new(Passing::default());
        let stop = Stop::new();
        let task = {
            let (passing, stop) = (passing.clone(), stop.clone());
            async move { passing.give_back(stop).await }
        };
        let mut group = crate::base::tasks::Set::new("heap");
        group.spawn(task);
        tokio::task::yield_now().await;
        assert_eq!(passing.bytes.load(Relaxed), MUCH, "the start is much");
        while passing.bytes.load(Relaxed) != 0 {
            tokio::time::sleep(QUIET).await;
        }
        passing.more(MUCH);
        for _ in 0..20 {
            tokio::time::sleep(QUIET / 2).await;
            passing.more(1);
            assert!(passing.bytes.load(Relaxed) > MUCH, "while more comes, it is kept");
        }
        while passing.bytes.load(Relaxed) != 0 {
            tokio::time::sleep(QUIET).await;
        }
        stop.cancel();
        group.all_ended().await;
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn buffers_that_come_and_go_stay_mapped() {
        keep(768 * 1024);
        churn();
        let before = page_faults();
        for _ in 0..100 {
            churn();
        }
        let faults = page_faults() - before;
        assert!(faults < 1000, "{faults} page faults in 100 rounds of 128 pages");
    }
}
