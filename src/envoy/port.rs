//! Who holds a TCP port, for an error that names it.
//!
//! Read from `/proc`, without sending anything: whoever is there may be another agent's Envoy.

use std::path::Path;

use super::kernel::listening_inode;

/// The local process that listens on `port`, as `pid 123 (envoy)`; without the pid when it cannot be
/// learnt (another user's or another pid namespace's process). `None` when nobody listens.
#[must_use]
pub fn holder(port: u16) -> Option<String> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .find_map(|table| listening_inode(&std::fs::read_to_string(table).ok()?, port))?;
    Some(
        owner(Path::new("/proc"), &inode)
            .unwrap_or_else(|| "a process that cannot be seen from here".to_owned()),
    )
}

fn owner(proc: &Path, inode: &str) -> Option<String> {
    let socket = format!("socket:[{inode}]");
    for entry in std::fs::read_dir(proc).ok()?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(files) = std::fs::read_dir(entry.path().join("fd")) else { continue };
        let holds = |f: &std::fs::DirEntry| {
            std::fs::read_link(f.path()).is_ok_and(|t| t.as_os_str() == socket.as_str())
        };
        if files.flatten().any(|f| holds(&f)) {
            let command = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            return Some(format!("pid {pid} ({})", command.trim()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_and_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let text = holder(port).unwrap();
        assert!(text.contains(&format!("pid {} (", std::process::id())), "{text}");
        drop(listener);
        assert_eq!(holder(port), None);
    }

    #[test]
    fn odd_tables_name_nobody() {
        assert_eq!(listening_inode("", 80), None);
        assert_eq!(listening_inode("head\n garbage\n 0: 0100007F:0050 0:0 0A\n", 80), None);
    }
}
