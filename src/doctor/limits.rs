//! Limits of this process's surroundings: open files, memory and processes of the control group.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use super::Check;
use crate::trouble::Kind;

const NAME: &str = "limits";
/// Envoy raises its soft limit to the hard one; below this even a small mesh runs out of sockets.
const FEW_FILES: u64 = 1024;
/// Share of the memory limit above which the next push may be the last.
const TIGHT: f64 = 0.95;

pub(super) fn checks() -> Vec<Check> {
    let mut out = Vec::new();
    let mut said = Vec::new();
    let files = getrlimit(Resource::Nofile);
    match files.maximum {
        Some(most) if most < FEW_FILES => {
            let text = format!("at most {most} files may be open");
            out.push(Check::warn(NAME, text, Kind::OpenFiles.hint()).maybe(Kind::OpenFiles));
        }
        most => said
            .push(format!("open files {}", most.map_or_else(|| "unlimited".to_owned(), |n| n.to_string()))),
    }
    match group() {
        None => said.push("no control group can be seen".to_owned()),
        Some(group) => memory(&group, &mut said, &mut out),
    }
    if out.is_empty() {
        out.push(Check::ok(NAME, said.join(", ")));
    }
    out
}

/// The folder of this process's control group, where it can be seen (version 2).
fn group() -> Option<PathBuf> {
    let text = read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let below = path.trim_start_matches('/');
    let own = Path::new("/sys/fs/cgroup").join(below);
    // In a container the group's own root is mounted there.
    let at = if own.join("memory.max").exists() { own } else { PathBuf::from("/sys/fs/cgroup") };
    at.join("memory.max").exists().then_some(at)
}

fn memory(group: &Path, said: &mut Vec<String>, out: &mut Vec<Check>) {
    let number = |file: &str| read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let mib = |bytes: u64| bytes / (1 << 20);
    // Pages of files that were not used lately are given back at any time; the kubelet does not count them either.
    let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let idle = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok());
    match (number("memory.max"), number("memory.current")) {
        (Some(max), Some(now)) => {
            let now = now.saturating_sub(idle.unwrap_or_default());
            let text = format!("memory {} of {} MiB", mib(now), mib(max));
            #[expect(clippy::cast_precision_loss, reason = "a share")]
            let share = now as f64 / max as f64;
            if share > TIGHT {
                out.push(Check::warn(
                    NAME,
                    text,
                    "raise the container's memory limit, or narrow what it is sent (Sidecar resource)",
                ));
            } else {
                said.push(text);
            }
        }
        _ => said.push("memory without a limit".to_owned()),
    }
    let events = read_to_string(group.join("memory.events")).unwrap_or_default();
    let kills = events.lines().find_map(|l| l.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok());
    if let Some(kills) = kills.filter(|n| *n > 0) {
        said.push(format!("{kills} processes of this group were killed for want of memory so far"));
    }
    if let (Some(max), Some(now)) = (number("pids.max"), number("pids.current"))
        && now.saturating_mul(10) > max.saturating_mul(9)
    {
        out.push(Check::warn(NAME, format!("{now} of {max} processes"), "raise the limit of processes"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_that_can_be_given_back_are_not_in_use() {
        let group = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| std::fs::write(group.path().join(file), text).unwrap();
        let look = || {
            let (mut said, mut out) = (Vec::new(), Vec::new());
            memory(group.path(), &mut said, &mut out);
            (said, out.len())
        };
        put("memory.max", "104857600\n");
        put("memory.current", "104000000\n");
        assert_eq!(look().1, 1, "without memory.stat all of it counts");
        put("memory.stat", "anon 20000000\nfile 80000000\ninactive_file 73400320\nactive_file 6599680\n");
        assert_eq!(look(), (vec!["memory 29 of 100 MiB".to_owned()], 0));
        put("memory.stat", "inactive_file 1000000\n");
        assert_eq!(look().1, 1);
    }
}
