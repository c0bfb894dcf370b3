//! The control group that this process is in, and its memory. Both versions of the kernel's interface.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// A control group with a memory controller.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    folder: PathBuf,
    files: &'static Files,
}

/// How a version names what it tells.
#[derive(Debug)]
struct Files {
    most: &'static str,
    now: &'static str,
    /// In `memory.stat`: pages of files that were not used lately.
    idle: &'static str,
    /// Where processes that were killed are counted, as `oom_kill`.
    kills: &'static str,
}

static SECOND: Files =
    Files { most: "memory.max", now: "memory.current", idle: "inactive_file", kills: "memory.events" };
static FIRST: Files = Files {
    most: "memory.limit_in_bytes",
    now: "memory.usage_in_bytes",
    idle: "total_inactive_file",
    kills: "memory.oom_control",
};

/// The first version's word for "no limit" is the largest number of whole pages that it can count.
const NO_LIMIT: u64 = 1 << 62;

/// Memory of a group, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// What there may be.
    pub(crate) limit: u64,
    /// What is in use: pages of files that were not used lately are given back at any time, and do not count; the kubelet
    /// does not count them either.
    pub(crate) used: u64,
}

impl Memory {
    /// What is left.
    pub(crate) fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl Group {
    /// This process's, where it can be seen. Read from the kernel's own file systems, where nothing stands still.
    pub(crate) fn own() -> Option<Self> {
        Self::of(&read_to_string("/proc/self/cgroup").ok()?, Path::new("/sys/fs/cgroup"))
    }

    fn of(groups: &str, mount: &Path) -> Option<Self> {
        // Each line: a number, the controllers, the path.
        let lines = || groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let second =
            lines().find(|(all, _)| all.is_empty()).map(|(_, path)| (mount.to_owned(), path, &SECOND));
        let first = lines().find(|(all, _)| all.split(',').any(|one| one == "memory"));
        let first = first.map(|(_, path)| (mount.join("memory"), path, &FIRST));
        // Where both versions are mounted, a controller is the first one's.
        first.into_iter().chain(second).find_map(|(root, path, files)| {
            let own = root.join(path.trim_start_matches('/'));
            // In a container the group's own folder is mounted as the root.
            let folder = [own, root].into_iter().find(|folder| folder.join(files.most).exists())?;
            Some(Self { folder, files })
        })
    }

    /// A number that it tells in a file of its own.
    pub(crate) fn number(&self, file: &str) -> Option<u64> {
        self.text(file)?.trim().parse().ok()
    }

    fn text(&self, file: &str) -> Option<String> {
        read_to_string(self.folder.join(file)).ok()
    }

    /// What a line of a file says behind this word.
    fn word(&self, file: &str, word: &str) -> Option<u64> {
        let text = self.text(file)?;
        text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' ')?.trim().parse().ok())
    }

    /// Its memory; `None` where it has no limit, or none can be read.
    pub(crate) fn memory(&self) -> Option<Memory> {
        let limit = self.number(self.files.most).filter(|most| *most < NO_LIMIT)?;
        let idle = self.word("memory.stat", self.files.idle).unwrap_or_default();
        Some(Memory { limit, used: self.number(self.files.now)?.saturating_sub(idle) })
    }

    /// Processes of it that were killed for want of memory.
    pub(crate) fn kills(&self) -> u64 {
        self.word(self.files.kills, "oom_kill").unwrap_or_default()
    }
}

#[cfg(test)]
impl Group {
    /// For tests: one of the second version in this folder.
    pub(crate) fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), files: &SECOND }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;

    const FIRSTS: &str = "9:cpu,cpuacct:/a\n7:memory:/kubepods/pod1\n0::/\n";

    fn put(folder: &Path, files: &[(&str, &str)]) {
        create_dir_all(folder).unwrap();
        for (file, text) in files {
            write(folder.join(file), text).unwrap();
        }
    }

    #[test]
    fn both_versions_are_read_in_a_container_and_outside() {
        let first = [
            ("memory.limit_in_bytes", "67108864\n"),
            ("memory.usage_in_bytes", "60000000\n"),
            ("memory.stat", "inactive_file 1\ntotal_inactive_file 20000000\n"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ];
        let second = [
            ("memory.max", "67108864\n"),
            ("memory.current", "60000000\n"),
            ("memory.stat", "anon 5\ninactive_file 20000000\n"),
            ("memory.events", "oom 3\noom_kill 2\n"),
        ];
        let memory = Memory { limit: 64 << 20, used: 40_000_000 };
        for (groups, below, files) in [
            (FIRSTS, "memory/kubepods/pod1", first),
            (FIRSTS, "memory", first),
            ("0::/system.slice/agent.service\n", "system.slice/agent.service", second),
            ("0::/../other\n", "", second),
        ] {
            let mount = tempfile::tempdir().unwrap();
            put(&mount.path().join(below), &files);
            let group = Group::of(groups, mount.path()).unwrap();
            assert_eq!((group.memory(), group.kills()), (Some(memory), 2), "{below}");
        }
        assert_eq!(memory.left(), (64 << 20) - 40_000_000);
    }

    #[test]
    fn without_a_limit_there_is_none() {
        let mount = tempfile::tempdir().unwrap();
        assert!(Group::of("0::/\n", mount.path()).is_none() && Group::of("", mount.path()).is_none());
        put(mount.path(), &[("memory.max", "max\n"), ("memory.current", "1\n")]);
        assert_eq!(Group::of("0::/\n", mount.path()).unwrap().memory(), None);
        let none = [("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.usage_in_bytes", "1\n")];
        put(&mount.path().join("memory"), &none);
        assert_eq!(Group::of(FIRSTS, mount.path()).unwrap().memory(), None);
    }

    #[test]
    fn what_was_not_used_lately_is_not_in_use() {
        let group = tempfile::tempdir().unwrap();
        let look = |files: &[(&str, &str)]| {
            put(group.path(), files);
            Group::at(group.path()).memory().map(|memory| memory.used)
        };
        let both = [("memory.max", "104857600\n"), ("memory.current", "104000000\n")];
        assert_eq!(look(&both), Some(104_000_000), "without memory.stat all of it counts");
        assert_eq!(look(&[("memory.stat", "inactive_file 73400320\nactive_file 6\n")]), Some(30_599_680));
    }
}
