//! What the kernel says of a process: CPU time, memory, threads.

use std::fs;
use std::time::Duration;

/// A process by its id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proc(pub u32);

/// Memory in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Memory {
    /// Resident set.
    pub rss: u64,
    /// The anonymous part of it.
    pub anon: u64,
    /// The highest resident set since the last [`Proc::reset_peak`].
    pub peak: u64,
}

impl Proc {
    /// CPU time of all threads so far, to the nanosecond (`schedstat`), finished threads included where
    /// the kernel's coarser total is higher.
    pub(crate) fn cpu(self) -> Duration {
        let mut nanos: u64 = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.0)).into_iter().flatten().flatten() {
            let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            nanos += text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
        Duration::from_nanos(nanos)
    }

    /// Memory now.
    pub(crate) fn memory(self) -> Memory {
        let text = fs::read_to_string(format!("/proc/{}/status", self.0)).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find(|l| l.starts_with(name));
            let number = line.and_then(|l| l.split_whitespace().nth(1));
            number.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        Memory { rss: field("VmRSS:"), anon: field("RssAnon:"), peak: field("VmHWM:") }
    }

    /// Starts the peak anew.
    pub(crate) fn reset_peak(self) {
        let _ = fs::write(format!("/proc/{}/clear_refs", self.0), "5");
    }

    /// Number of threads.
    pub(crate) fn threads(self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.0)).map_or(0, Iterator::count)
    }
}
