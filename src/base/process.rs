//! What the kernel tells of other processes.

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
