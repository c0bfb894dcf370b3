//! What the kernel says of a process: CPU time, memory, threads.

use std::fs;
use std::time::Duration;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// A process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proc {
    /// Its ID.
    pub id: u32,
    /// CPU time that it had before it became what is measured.
    pub before: Duration,
}

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

/// What only `smaps_rollup` and the page tables tell, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shared {
    /// Proportional set: a page that n processes map counts an nth.
    pub pss: u64,
    /// Page tables.
    pub tables: u64,
}

/// Memory that the kernel holds for TCP sockets of this machine, in bytes.
pub(crate) fn socket_memory() -> u64 {
    let text = fs::read_to_string("/proc/net/sockstat").unwrap_or_default();
    let tcp = text.lines().find(|line| line.starts_with("TCP:")).unwrap_or_default();
    let pages = tcp.split_whitespace().skip_while(|word| *word != "mem").nth(1);
    pages.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 4096
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|l| l.starts_with(name));
    line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

impl Proc {
    /// CPU time since [`Proc::before`], to the nanosecond, of finished threads too: much is done in short ones.
    pub(crate) fn cpu(self) -> Duration {
        let process = i32::try_from(self.id).map(Pid::from_raw).unwrap_or(Pid::this());
        let clock = clock_getcpuclockid(process).and_then(clock_gettime);
        clock.map_or(Duration::ZERO, Duration::from).saturating_sub(self.before)
    }

    /// Memory now.
    pub(crate) fn memory(self) -> Memory {
        let text = fs::read_to_string(format!("/proc/{}/status", self.id)).unwrap_or_default();
        let bytes = |name: &str| field(&text, name) * 1024;
        Memory { rss: bytes("VmRSS:"), anon: bytes("RssAnon:"), peak: bytes("VmHWM:") }
    }

    /// What it shares with others of its kind.
    pub(crate) fn shared(self) -> Shared {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.id)).unwrap_or_default();
        let status = fs::read_to_string(format!("/proc/{}/status", self.id)).unwrap_or_default();
        Shared { pss: field(&rollup, "Pss:") * 1024, tables: field(&status, "VmPTE:") * 1024 }
    }

    /// How often its threads have gone to sleep so far, which is how often they were woken.
    pub(crate) fn wakes(self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id)).into_iter().flatten().flatten();
        tasks
            .map(|task| fs::read_to_string(task.path().join("status")).unwrap_or_default())
            .map(|text| field(&text, "voluntary_ctxt_switches:"))
            .sum()
    }

    /// Starts the peak anew.
    pub(crate) fn reset_peak(self) {
        let _ = fs::write(format!("/proc/{}/clear_refs", self.id), "5");
    }

    /// Number of threads.
    pub(crate) fn threads(self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.id)).map_or(0, Iterator::count)
    }
}
