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

/// Lets about `bytes` stay free at the end of the heap. Has an effect from 256 KB (below, blocks have no mapping
/// of their own) to 64 MB; never lowers what is kept. Touches one page, for a moment.
pub fn keep(bytes: usize) {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(bytes / 2)));
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
