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

/// What is resident, by what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// The binary's functions.
    Code,
    /// Its constants and tables that are as in the file.
    Constants,
    /// What the loader or the process has written in the binary's pages: addresses, variables.
    Relocated,
    /// Heap and other memory that was asked for.
    Heap,
    /// The main thread's stack.
    Stack,
    /// Code and data of shared libraries, other files, and the kernel's own page.
    Libraries,
}

impl Part {
    /// All of them, as a reader calls them.
    pub(crate) const ALL: [(Self, &'static str); 6] = [
        (Self::Code, "code"),
        (Self::Constants, "constants"),
        (Self::Relocated, "relocated data and variables"),
        (Self::Heap, "heap"),
        (Self::Stack, "stack"),
        (Self::Libraries, "libraries"),
    ];
}

/// The parts of `smaps` of a process with this executable, in bytes.
fn parts(smaps: &str, executable: &str) -> Vec<(Part, u64)> {
    let (mut all, mut at) = (Vec::new(), (Part::Heap, false));
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let kb = || second.parse::<u64>().unwrap_or(0) * 1024;
        match first {
            "Rss:" => all.push((at.0, kb())),
            // Of these pages the file is no longer the source.
            "Anonymous:" if at.1 => {
                if let Some((_, rss)) = all.last_mut() {
                    *rss = rss.saturating_sub(kb());
                }
                all.push((Part::Relocated, kb()));
            }
            _ if !first.ends_with(':') => {
                at = match words.nth(3).unwrap_or_default() {
                    path if path == executable => {
                        (if second.contains('x') { Part::Code } else { Part::Constants }, true)
                    }
                    "" | "[heap]" => (Part::Heap, false),
                    "[stack]" => (Part::Stack, false),
                    name if name.starts_with("[anon") => (Part::Heap, false),
                    _ => (Part::Libraries, false),
                }
            }
            _ => {}
        }
    }
    all
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

    /// What is resident now, by what it is, in bytes, in the order of [`Part::ALL`].
    pub(crate) fn parts(self) -> [u64; 6] {
        let read = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", self.id)).unwrap_or_default();
        let executable = fs::read_link(format!("/proc/{}/exe", self.id)).unwrap_or_default();
        let all = parts(&read("smaps"), &executable.to_string_lossy());
        Part::ALL.map(|(part, _)| all.iter().filter(|(of, _)| *of == part).map(|(_, bytes)| bytes).sum())
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
