//! What is read of the kernel's text files. Pure: other users' processes choose part of what stands there.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The process's control group below the mounted tree, of `/proc/self/cgroup`; empty: not of the second version.
#[must_use]
pub fn control_group(text: &str) -> &str {
    text.lines().find_map(|l| l.strip_prefix("0::/")).unwrap_or_default()
}

/// How many processes were killed for lack of memory, of a group's `memory.events`.
#[must_use]
pub fn oom_kills(text: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// The inode of the socket of that state on `port`, of `/proc/net/tcp` and the like: 0A listens (TCP), 07 is bound (UDP).
#[must_use]
pub fn bound_inode(table: &str, port: u16, state: &str) -> Option<String> {
    // Columns: slot, local address, remote address, state, five more, inode.
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let (_, local_port) = columns.get(1)?.rsplit_once(':')?;
        let listens = *columns.get(3)? == state && u16::from_str_radix(local_port, 16) == Ok(port);
        listens.then(|| columns.get(9).map(|i| (*i).to_owned())).flatten()
    })
}

/// The `-c` of an Envoy that an agent has started, of `/proc/<pid>/cmdline`, whatever stands before it (an
/// interpreter, a script).
#[must_use]
pub fn envoys_config(arguments: &[u8]) -> Option<PathBuf> {
    let words: Vec<&[u8]> = arguments.split(|b| *b == 0).collect();
    let has = |word: &str| words.contains(&word.as_bytes());
    if !has("--drain-time-s") || !has("--allow-unknown-static-fields") {
        return None;
    }
    let at = words.iter().position(|w| *w == b"-c")?;
    Some(PathBuf::from(OsStr::from_bytes(words.get(at + 1)?)))
}
