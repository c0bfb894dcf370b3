//! Envoys that an earlier agent has left behind: found by what they were started with.
//!
//! One is stale when all of this is so:
//! - its arguments are those that an agent gives, and name this configuration file (of any epoch);
//! - it lives in our mount and network namespaces, so the same path is the same file and its ports are ours;
//! - no agent is among its ancestors: an Envoy whose agent lives is that agent's.
//!
//! What cannot be looked at is left alone. Other users' processes are not ours to end, unless we are root, who may
//! look at them.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{kernel, kin};
use crate::base::path::cleaned;
use crate::base::process;

/// A killed process is gone at once, unless the kernel holds it.
const GONE: Duration = Duration::from_secs(2);

/// No chain of ancestors is longer.
const GENERATIONS: usize = 64;

/// A process found.
#[derive(Debug)]
pub(super) struct Stale {
    /// Its number.
    pub(super) pid: i32,
    handle: OwnedFd,
}

/// The stale Envoys of `config`, the file that the first epoch is started with.
pub(super) fn find(config: &Path) -> Vec<Stale> {
    let Ok(config) = std::path::absolute(config) else { return Vec::new() };
    let config = cleaned(&config);
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    pids.filter(|pid| *pid != own).filter_map(|pid| look(pid, &config)).collect()
}

fn look(pid: i32, config: &Path) -> Option<Stale> {
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let named = kernel::envoys_config(&arguments)?;
    // From here on the number is this process's.
    let handle = kin::handle(pid)?;
    let folder = std::fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
    let same_place = |which: &str| {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{which}")).ok();
        of(&pid.to_string()).is_some_and(|theirs| Some(theirs) == of("self"))
    };
    let stale = is_epoch_of(&cleaned(&folder.join(named)), config)
        && same_place("mnt")
        && same_place("net")
        && !has_agent(pid)
        && std::fs::read(format!("/proc/{pid}/cmdline")).ok()? == arguments;
    stale.then_some(Stale { pid, handle })
}

/// Whether `path` is `config`, or the file of one of its epochs (`envoy-rev3.json` of `envoy-rev.json`).
fn is_epoch_of(path: &Path, config: &Path) -> bool {
    if path == config {
        return true;
    }
    let parts = |p: &Path| {
        Some((p.parent()?.to_owned(), p.file_stem()?.to_owned(), p.extension().map(OsStr::to_owned)))
    };
    let (Some((folder, stem, ending)), Some((of_folder, of_stem, of_ending))) = (parts(path), parts(config))
    else {
        return false;
    };
    let number = stem.as_bytes().strip_prefix(of_stem.as_bytes()).unwrap_or_default();
    folder == of_folder && ending == of_ending && !number.is_empty() && number.iter().all(u8::is_ascii_digit)
}

fn has_agent(pid: i32) -> bool {
    let own = std::fs::read_link("/proc/self/exe").ok();
    let mut at = pid;
    for _ in 0..GENERATIONS {
        let Some(parent) = process::parent(at).filter(|p| *p > 0) else { return false };
        let exe = std::fs::read_link(format!("/proc/{parent}/exe")).ok();
        let comm = std::fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
        if comm.starts_with("pilot-agent") || (own.is_some() && exe == own) {
            // We may have inherited it, as the first process of a container or a reaper does.
            return !(u32::try_from(parent) == Ok(std::process::id()));
        }
        at = parent;
    }
    false
}

/// Ends them and waits until they are gone, 2 s at most for all; gives those that are not.
pub(super) fn end(all: &[Stale]) -> Vec<i32> {
    for one in all {
        kin::kill_tree(one.pid, &one.handle);
    }
    let until = Instant::now() + GONE;
    all.iter().filter(|one| !kin::gone(&one.handle, until)).map(|one| one.pid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agents_envoy_is_told_by_its_arguments() {
        let of = |words: &[&str]| kernel::envoys_config(words.join("\0").as_bytes());
        let ours = ["-c", "etc/e.json", "--drain-time-s", "45", "--allow-unknown-static-fields"];
        assert_eq!(of(&[&["envoy"], &ours[..]].concat()), Some("etc/e.json".into()));
        assert_eq!(of(&[&["/bin/sh", "./envoy.sh"], &ours[..]].concat()), Some("etc/e.json".into()));
        assert_eq!(of(&["envoy", "-c", "etc/e.json"]), None, "somebody's own");
        assert_eq!(of(&["envoy", "--drain-time-s", "1", "--allow-unknown-static-fields", "-c"]), None);
    }

    #[test]
    fn epochs_have_one_configuration() {
        let of = |a: &str, b: &str| is_epoch_of(Path::new(a), Path::new(b));
        assert!(of("/e/envoy-rev.json", "/e/envoy-rev.json"));
        assert!(of("/e/envoy-rev12.json", "/e/envoy-rev.json"));
        assert!(!of("/e/envoy-rev12.yaml", "/e/envoy-rev.json"));
        assert!(!of("/f/envoy-rev1.json", "/e/envoy-rev.json"));
        assert!(!of("/e/envoy-reverse.json", "/e/envoy-rev.json"));
        assert_eq!(cleaned(Path::new("/a/./b/../c")), Path::new("/a/c"));
    }
}
