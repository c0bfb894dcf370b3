//! Processes and their descendants, by process handles: a process ID may mean another process by the time it is used.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Rounds of looking for what a dying tree has started meanwhile.
const ROUNDS: usize = 5;

/// A handle of a process that exists.
pub(super) fn handle(pid: i32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
}

/// What `pid` has started, and what that has started.
pub(super) fn descendants(pid: i32) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    let mut next = vec![pid];
    while let Some(pid) = next.pop() {
        for child in children(pid) {
            if let Some(handle) = handle(child) {
                found.push(handle);
                next.push(child);
            }
        }
    }
    found
}

// The kernel lists a child with the thread that has started it.
fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_ascii_whitespace().filter_map(|c| c.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Kills a process and its descendants, top first: what is killed starts nothing more.
pub(super) fn kill_tree(pid: i32, handle: &OwnedFd) {
    if gone(handle, Instant::now()) {
        // Its number may be another's by now.
        return;
    }
    for _ in 0..ROUNDS {
        // Stopped, it cannot start another while its children are counted.
        let _ = pidfd_send_signal(handle, Signal::STOP);
        let kin = descendants(pid);
        let last = kin.is_empty();
        for child in &kin {
            let _ = pidfd_send_signal(child, Signal::KILL);
        }
        if last {
            break;
        }
        // A killed child is a child until it was waited for, which a stopped parent does not do.
        if kin.iter().all(|child| gone(child, Instant::now() + Duration::from_millis(200))) {
            break;
        }
    }
    let _ = pidfd_send_signal(handle, Signal::KILL);
}

/// Waits for the end of a process; `false` when the time is up.
pub(super) fn gone(handle: &OwnedFd, until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    let limit = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
    let mut fds = [PollFd::from_borrowed_fd(handle.as_fd(), PollFlags::IN)];
    matches!(poll(&mut fds, Some(&limit)), Ok(n) if n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_thread_has_started_is_a_child() {
        let (up, started) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
            up.send(child.id()).unwrap();
            // The thread's children become another thread's when it ends.
            let _ = ends.recv();
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let child = i32::try_from(started.recv().unwrap()).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let found = children(own);
        drop(end);
        thread.join().unwrap();
        assert!(found.contains(&child), "{child} is not in {found:?}");
    }
}
