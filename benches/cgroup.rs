//! Control groups: a memory limit around each agent, and a share of a processor where a section asks for one. Both
//! versions of the kernel's interface; needs root. Where there can be none, one line says why.
//!
//! To a group's memory the kernel counts the page cache of files that its processes were the first to read, the agent's
//! binary among them, and takes that back when the limit is near. So a group that reaches its limit is not yet in trouble;
//! one in which a process is killed is, and ends the run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::table::{Row, Value};

/// Of a processor's time, in µs; the kernel's own default.
const PERIOD: u64 = 100_000;

/// Which binary is limited, and to how many bytes.
static LIMIT: OnceLock<(PathBuf, u64, Tree)> = OnceLock::new();
static SEEN: Mutex<Vec<Usage>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// What a group's memory came to, in bytes and counts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    /// The most so far, page cache included.
    pub peak: u64,
    /// Anonymous memory now.
    pub anon: u64,
    /// What the kernel holds for it now: sockets, page tables, threads, descriptors.
    pub kernel: u64,
    /// How often the limit was reached and page cache taken back.
    pub hits: u64,
    /// Processes that were killed.
    pub kills: u64,
}

/// Where groups of a controller are made.
#[derive(Debug)]
struct Tree {
    /// Ours, empty of processes.
    folder: PathBuf,
    /// Where this process is.
    home: PathBuf,
    unified: bool,
}

/// A controller's place among the mounts: its root, our own group below it, and whether it is of the second version.
fn place(controller: &str, mounts: &str, own: &str, unified: &str) -> Option<(PathBuf, PathBuf, bool)> {
    let mount = |kind: &str, has: &dyn Fn(&str) -> bool| {
        let words = |line: &'_ str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mut all = mounts.lines().map(words).filter(|w| w.len() > 3 && w[2] == kind && has(&w[3]));
        all.next().map(|w| PathBuf::from(&w[1]))
    };
    let below = |names: &dyn Fn(&str) -> bool| {
        let mut lines = own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        lines.find(|(all, _)| names(all)).map(|(_, path)| PathBuf::from(path.trim_start_matches('/')))
    };
    if unified.split_whitespace().any(|name| name == controller) {
        let root = mount("cgroup2", &|_| true)?;
        return Some((root, below(&str::is_empty)?, true));
    }
    let named = |list: &str| list.split(',').any(|name| name == controller);
    Some((mount("cgroup", &named)?, below(&named)?, false))
}

impl Tree {
    fn of(controller: &str) -> Result<Self, String> {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let mounts = text("/proc/mounts");
        let second = mounts.lines().filter(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let second = second.filter_map(|line| line.split(' ').nth(1)).next().unwrap_or_default();
        let offered = text(&format!("{second}/cgroup.controllers"));
        let (root, below, unified) = place(controller, &mounts, &text("/proc/self/cgroup"), &offered)
            .ok_or_else(|| format!("there is no cgroup controller {controller} here"))?;
        // In a container the path may be told as it is outside.
        let home = Some(root.join(&below)).filter(|path| path.is_dir()).unwrap_or_else(|| root.clone());
        let mut why =
            format!("no group with the controller {controller} can be made below {}", root.display());
        for above in home.ancestors().take_while(|path| path.starts_with(&root)) {
            match Self::make(controller, above, unified) {
                Ok(folder) => return Ok(Self { folder, home, unified }),
                Err(error) => why = format!("{}: {error}", above.display()),
            }
        }
        Err(format!("{why} (needs root)"))
    }

    // A group that holds processes has no groups with controllers of the second version below it.
    fn make(controller: &str, above: &Path, unified: bool) -> io::Result<PathBuf> {
        let folder = above.join(format!("pilot-agent-bench-{}", std::process::id()));
        let enable =
            |folder: &Path| fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"));
        if unified {
            enable(above)?;
        }
        made(&folder)?;
        if unified && let Err(error) = enable(&folder) {
            let _ = fs::remove_dir(&folder);
            return Err(error);
        }
        Ok(folder)
    }

    fn group(&self) -> io::Result<PathBuf> {
        let folder = self.folder.join(COUNT.fetch_add(1, Relaxed).to_string());
        made(&folder)?;
        Ok(folder)
    }
}

fn made(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// The first of the files that is there, by version.
fn either(folder: &Path, names: [&str; 2]) -> Option<PathBuf> {
    names.into_iter().map(|name| folder.join(name)).find(|path| path.exists())
}

/// A number that stands alone, or behind its name.
fn number(folder: &Path, names: [&str; 2], key: [&str; 2]) -> u64 {
    let text = either(folder, names).and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
    let line =
        |line: &str| line.split_once(' ').filter(|(name, _)| key.contains(name))?.1.trim().parse().ok();
    text.trim().parse().ok().or_else(|| text.lines().find_map(line)).unwrap_or(0)
}

/// Puts a limit of memory around everything that is started of `binary` from now on.
pub(crate) fn limit(binary: &Path, megabytes: u64) -> Result<(), String> {
    let tree = Tree::of("memory")?;
    let trial = tree.group().map_err(|e| format!("{}: {e}", tree.folder.display()))?;
    let file = either(&trial, ["memory.max", "memory.limit_in_bytes"]);
    let _ = fs::remove_dir(&trial);
    file.ok_or_else(|| format!("{} has no memory limit", trial.display()))?;
    let _ = LIMIT.set((binary.to_owned(), megabytes * 1_000_000, tree));
    Ok(())
}

/// A group around one agent and what it starts; gone when dropped, by when they must have ended.
#[derive(Debug)]
pub(crate) struct Group(PathBuf);

impl Group {
    /// One with a limit, where the binary is to have one.
    pub(crate) fn around(binary: &Path) -> io::Result<Option<Self>> {
        let Some((_, limit, tree)) = LIMIT.get().filter(|(limited, ..)| limited == binary) else {
            return Ok(None);
        };
        let group = Self(tree.group()?);
        let file =
            either(&group.0, ["memory.max", "memory.limit_in_bytes"]).ok_or(io::ErrorKind::NotFound)?;
        fs::write(file, limit.to_string())?;
        // Where there is swap, none of it: a limit that swaps holds anything.
        if let Some(file) = either(&group.0, ["memory.swap.max", "memory.swappiness"]) {
            let _ = fs::write(file, "0");
        }
        Ok(Some(group))
    }

    /// What a process writes its ID to in order to join.
    pub(crate) fn door(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    /// The same for leaving, for what an agent starts and its limit is not about.
    pub(crate) fn way_out() -> Option<PathBuf> {
        LIMIT.get().map(|(_, _, tree)| tree.home.join("cgroup.procs"))
    }

    /// Memory now.
    pub(crate) fn usage(&self) -> Usage {
        let read = |names, key| number(&self.0, names, key);
        Usage {
            peak: read(["memory.peak", "memory.max_usage_in_bytes"], [""; 2]),
            anon: read(["memory.stat"; 2], ["anon", "total_rss"]),
            kernel: read(["memory.stat"; 2], ["kernel"; 2])
                + read(["memory.stat"; 2], ["sock"; 2])
                + read(["memory.kmem.usage_in_bytes"; 2], [""; 2])
                + read(["memory.kmem.tcp.usage_in_bytes"; 2], [""; 2]),
            hits: read(["memory.events", "memory.failcnt"], ["max"; 2]),
            kills: read(["memory.events", "memory.oom_control"], ["oom_kill"; 2]),
        }
    }

    /// Keeps what it came to for the end of the run.
    pub(crate) fn note(&self) {
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).push(self.usage());
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        gone(&self.0);
    }
}

// What was ended may take a moment to leave.
fn gone(folder: &Path) {
    for _ in 0..100 {
        if fs::remove_dir(folder).is_ok() || !folder.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process's share of one processor, until dropped.
#[derive(Debug)]
pub(crate) struct Share {
    folder: PathBuf,
    own: bool,
}

impl Share {
    /// Gives the process and what it starts from now on so many hundredths of a processor.
    pub(crate) fn of(process: u32, group: Option<&Group>, percent: u64) -> Result<Self, String> {
        let tree = Tree::of("cpu")?;
        let fail = |error: io::Error| format!("{}: {error}", tree.folder.display());
        // A process is in one group of the second version: the one it has gets the other limit, too.
        let share = match group {
            Some(group) if tree.unified => Self { folder: group.0.clone(), own: false },
            _ => {
                let share = Self { folder: tree.group().map_err(fail)?, own: true };
                fs::write(share.folder.join("cgroup.procs"), process.to_string()).map_err(fail)?;
                share
            }
        };
        let quota = PERIOD * percent / 100;
        if share.folder.join("cpu.max").exists() {
            fs::write(share.folder.join("cpu.max"), format!("{quota} {PERIOD}")).map_err(fail)?;
        } else {
            fs::write(share.folder.join("cpu.cfs_period_us"), PERIOD.to_string()).map_err(fail)?;
            fs::write(share.folder.join("cpu.cfs_quota_us"), quota.to_string()).map_err(fail)?;
        }
        Ok(share)
    }

    /// Periods in which it wanted to run, and those of them in which it had to wait.
    pub(crate) fn waited(&self) -> (u64, u64) {
        let read = |key| number(&self.folder, ["cpu.stat"; 2], [key; 2]);
        (read("nr_periods"), read("nr_throttled"))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let _ = fs::write(self.folder.join("cpu.max"), format!("max {PERIOD}"))
            .or_else(|_| fs::write(self.folder.join("cpu.cfs_quota_us"), "-1"));
        if self.own {
            gone(&self.folder);
        }
    }
}

/// An error when a process was killed in a group so far: what was measured just now, by this name, says nothing then.
pub(crate) fn held(what: &str) -> Result<(), String> {
    let seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((binary, limit, _)) = LIMIT.get() else { return Ok(()) };
    killed(&seen, binary, *limit).map_or(Ok(()), |killed| Err(format!("{what}: {killed}")))
}

fn killed(seen: &[Usage], binary: &Path, limit: u64) -> Option<String> {
    let kills: u64 = seen.iter().map(|usage| usage.kills).sum();
    (kills > 0).then(|| {
        format!(
            "{}: {kills} processes were killed at their memory limit of {} MB (--memory-limit 0 measures without)",
            binary.display(),
            limit / 1_000_000
        )
    })
}

/// What all groups came to; an error when a process was killed in one.
pub(crate) fn rows() -> Result<Vec<Row>, String> {
    let seen = std::mem::take(&mut *SEEN.lock().unwrap_or_else(PoisonError::into_inner));
    let Some((binary, limit, _)) = LIMIT.get().filter(|_| !seen.is_empty()) else { return Ok(Vec::new()) };
    if let Some(killed) = killed(&seen, binary, *limit) {
        return Err(killed);
    }
    #[expect(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^53")]
    let of =
        |value: fn(&Usage) -> u64, by: f64| Value::of(seen.iter().map(|u| value(u) as f64 / by).collect());
    let row = |what: &str, ours, target| {
        let what = what.to_owned();
        Row { what, ours, peer: None, wire: None, direct: None, target }
    };
    Ok(vec![
        row("highest of a group, page cache included (MB)", of(|u| u.peak, 1e6), "–"),
        row("anonymous memory at the end (MB)", of(|u| u.anon, 1e6), "–"),
        row("times the limit was reached", of(|u| u.hits, 1.0), "–"),
        row("killed", of(|u| u.kills, 1.0), "0"),
    ])
}

/// Removes what was made for all.
pub(crate) fn end() {
    let cpu = Tree::of("cpu").ok().map(|tree| tree.folder);
    for folder in LIMIT.get().map(|(_, _, tree)| tree.folder.clone()).into_iter().chain(cpu) {
        let _ = fs::remove_dir(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n";
    const SECOND: &str = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate 0 0\n";

    fn found(controller: &str, mounts: &str, own: &str, unified: &str) -> Option<(String, String, bool)> {
        let (root, below, second) = place(controller, mounts, own, unified)?;
        Some((root.display().to_string(), below.display().to_string(), second))
    }

    #[test]
    fn where_a_controller_is() {
        let own = "5:memory:/pod/a\n1:cpu,cpuacct:/\n0::/x\n";
        let memory = ("/sys/fs/cgroup/memory".to_owned(), "pod/a".to_owned(), false);
        assert_eq!(found("memory", FIRST, own, "hugetlb"), Some(memory));
        let cpu = ("/sys/fs/cgroup/cpu,cpuacct".to_owned(), String::new(), false);
        assert_eq!(found("cpu", FIRST, own, "hugetlb"), Some(cpu), "not cpuacct, not the unified tree");
        let own = "0::/user.slice/session-1.scope\n";
        let cpu = ("/sys/fs/cgroup".to_owned(), "user.slice/session-1.scope".to_owned(), true);
        assert_eq!(found("cpu", SECOND, own, "cpuset cpu io memory"), Some(cpu));
        assert_eq!(found("memory", SECOND, own, "cpuset cpu"), None, "not offered");
    }

    #[test]
    fn whoever_is_killed_is_told() {
        let binary = Path::new("agent");
        let fine = Usage { hits: 9, ..Usage::default() };
        assert_eq!(killed(&[fine; 3], binary, 64_000_000), None, "the limit gave back page cache only");
        let told = killed(&[fine, Usage { kills: 2, ..fine }], binary, 64_000_000).unwrap();
        assert!(told.starts_with("agent: 2 processes were killed at their memory limit of 64 MB"), "{told}");
    }

    #[test]
    fn numbers_of_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        put("memory.failcnt", "7\n");
        put("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        put("memory.max_usage_in_bytes", "1000\n");
        put("memory.kmem.usage_in_bytes", "20\n");
        put("memory.stat", "cache 5\nrss 6\ntotal_rss 9\n");
        let group = std::mem::ManuallyDrop::new(Group(folder.path().to_owned()));
        let usage = group.usage();
        assert_eq!((usage.peak, usage.anon, usage.hits, usage.kills, usage.kernel), (1000, 9, 7, 3, 20));
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        put("memory.events", "low 0\nhigh 0\nmax 8\noom 1\noom_kill 1\n");
        put("memory.peak", "2000\n");
        put("memory.stat", "anon 11\nfile 5\nkernel 30\nsock 2\n");
        let group = std::mem::ManuallyDrop::new(Group(folder.path().to_owned()));
        let usage = group.usage();
        assert_eq!((usage.peak, usage.anon, usage.hits, usage.kills, usage.kernel), (2000, 11, 8, 1, 32));
    }
}
