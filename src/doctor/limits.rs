//! Limits of this process's surroundings: open files, memory and processes of the control group.

use rustix::process::{Resource, getrlimit};

use super::Check;
use crate::base::cgroup::{Group, Memory};
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
    match Group::own() {
        None => said.push("no control group can be seen".to_owned()),
        Some(group) => memory(&group, &mut said, &mut out),
    }
    if out.is_empty() {
        out.push(Check::ok(NAME, said.join(", ")));
    }
    out
}

fn memory(group: &Group, said: &mut Vec<String>, out: &mut Vec<Check>) {
    let mib = |bytes: u64| bytes / (1 << 20);
    match group.memory() {
        Some(Memory { limit, used }) => {
            let text = format!("memory {} of {} MiB", mib(used), mib(limit));
            #[expect(clippy::cast_precision_loss, reason = "a share")]
            let share = used as f64 / limit as f64;
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
        None => said.push("memory without a limit".to_owned()),
    }
    let kills = group.kills();
    if kills > 0 {
        said.push(format!("{kills} processes of this group were killed for want of memory so far"));
    }
    if let (Some(max), Some(now)) = (group.number("pids.max"), group.number("pids.current"))
        && now.saturating_mul(10) > max.saturating_mul(9)
    {
        out.push(Check::warn(NAME, format!("{now} of {max} processes"), "raise the limit of processes"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_tight_when_little_is_left_that_cannot_be_given_back() {
        let group = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| std::fs::write(group.path().join(file), text).unwrap();
        let look = || {
            let (mut said, mut out) = (Vec::new(), Vec::new());
            memory(&Group::at(group.path()), &mut said, &mut out);
            (said, out.len())
        };
        assert_eq!(look(), (vec!["memory without a limit".to_owned()], 0));
        put("memory.max", "104857600\n");
        put("memory.current", "104000000\n");
        assert_eq!(look().1, 1);
        put("memory.stat", "inactive_file 73400320\n");
        assert_eq!(look(), (vec!["memory 29 of 100 MiB".to_owned()], 0));
        put("memory.events", "oom_kill 3\n");
        assert!(look().0[1].starts_with("3 processes"));
    }
}
