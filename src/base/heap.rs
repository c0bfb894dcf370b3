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

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Lets about `bytes` stay free at the end of the heap. Has an effect from 256 KB (below, blocks have no mapping
/// of their own) to 64 MB; never lowers what is kept. Touches one page, for a moment.
pub(crate) fn keep(bytes: usize) {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(bytes / 2)));
}

/// Gives what is free back to the kernel: after much was held for a moment. Milliseconds, in which other threads may
/// wait for memory; not on the thread that relays.
pub(crate) fn give_back() {
    heap_trim::give_back();
}

/// Streams and connections of which so many together are a burst: a scrape under way holds up to 100 KB, a stream 10.
const BURST: usize = 32;
/// Those that end after the first hundreds mostly do so at once.
const SETTLE: Duration = Duration::from_secs(5);

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
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
        MOST.fetch_max(NOW.fetch_add(1, Relaxed) + 1, Relaxed);
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
        if MOST.compare_exchange(most, left, Relaxed, Relaxed).is_ok() && !BEGUN.swap(true, Relaxed) {
            let trim = || {
                std::thread::sleep(SETTLE);
                BEGUN.store(false, Relaxed);
                heap_trim::give_back();
            };
            // Without a thread it stays until the next burst is over.
            if super::lane::begin("heap", trim).is_err() {
                BEGUN.store(false, Relaxed);
            }
        }
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
