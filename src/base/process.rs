//! What the kernel tells of processes, others and this one.

use nix::sys::signal::{SigSet, Signal};

/// The parent of `pid`, as long as both exist. Read from `/proc`, where nothing stands still.
pub(crate) fn parent(pid: i32) -> Option<i32> {
    parent_in(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The parent in `/proc/<pid>/stat`. Pure: the process chooses a part of what stands there.
#[must_use]
pub fn parent_in(stat: &str) -> Option<i32> {
    // The name stands in brackets and may hold any byte.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Lets this thread hear the signals that whoever started the process has blocked, and with it the threads and programs
/// that it starts: the mask is inherited, and a blocked SIGTERM ends nothing, neither the agent nor Envoy. Go's runtime
/// does the same for what a program asks for. Not those that a terminal stops a process with.
pub(crate) fn hear() {
    let mut all = SigSet::all();
    [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU].into_iter().for_each(|stop| all.remove(stop));
    let _ = all.thread_unblock();
}

/// Whether this process ignores `signal`: before it has a handler of its own, because whoever started it wants that, as `nohup`
/// does with SIGHUP. What it starts then ignores it too.
pub(crate) fn ignores(signal: i32) -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| ignored_in(&status, signal))
}

fn ignored_in(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // The first signal is the lowest bit.
    u32::try_from(signal - 1).ok().and_then(|bit| mask.checked_shr(bit)).is_some_and(|rest| rest & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::ignored_in;

    #[test]
    fn the_mask_is_read_bit_by_bit() {
        let status =
            "Name:\tx\nSigBlk:\t0000000000000002\nSigIgn:\t8000000000001001\nSigCgt:\t00000001ffffffff\n";
        let ignored: Vec<i32> = (-1..=66).filter(|signal| ignored_in(status, *signal)).collect();
        assert_eq!(ignored, [1, 13, 64]);
        assert!(!ignored_in("", 1) && !ignored_in("SigIgn:\tx\n", 1));
    }
}
