//! Who holds a port, for an error that names it.
//!
//! Read from `/proc`, without sending anything: whoever is there may be another agent's Envoy.

use std::fmt;
use std::path::Path;

use super::kernel::bound_inode;
use crate::base::process;

/// How far up a process's parents are looked at: shells, debuggers and wrappers may stand between agent and Envoy, and
/// what the kernel shows is no loop.
const GENERATIONS: usize = 8;

/// Who listens on a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The process; unknown when it is another user's or in another pid namespace.
    pub pid: Option<u32>,
    /// Its short name.
    pub command: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "pid {pid} ({})", self.command),
            None => f.write_str("a process that cannot be seen from here"),
        }
    }
}

/// The local process that listens on `port`; `None` when nobody does.
#[must_use]
pub(crate) fn holder(port: u16) -> Option<Holder> {
    held("tcp", port, "0A")
}

/// The local process that has `port` for datagrams; `None` when nobody does.
#[must_use]
pub(crate) fn datagram_holder(port: u16) -> Option<Holder> {
    held("udp", port, "07")
}

fn held(network: &str, port: u16, state: &str) -> Option<Holder> {
    let inode = ["", "6"].iter().find_map(|family| {
        bound_inode(&std::fs::read_to_string(format!("/proc/net/{network}{family}")).ok()?, port, state)
    })?;
    let unknown = Holder { pid: None, command: String::new() };
    Some(owner(Path::new("/proc"), &inode).unwrap_or(unknown))
}

fn parent(pid: u32) -> Option<u32> {
    u32::try_from(process::parent(i32::try_from(pid).ok()?)?).ok()
}

// Parents first.
fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(parent(pid), |pid| parent(*pid)).take(GENERATIONS)
}

/// Whether `agent` has started the process `pid`, itself or by a script in between.
#[must_use]
pub(crate) fn descends(pid: u32, agent: u32) -> bool {
    ancestors(pid).any(|pid| pid == agent)
}

/// Whether the holder is an agent, or an agent's Envoy.
#[must_use]
pub(crate) fn of_agent(holder: &Holder) -> bool {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    // Whatever the file is called that both have come from.
    let program = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let own = program(std::process::id());
    let is_agent = |pid: u32| name(pid).trim() == "pilot-agent" || (own.is_some() && program(pid) == own);
    holder.pid.is_some_and(|pid| std::iter::once(pid).chain(ancestors(pid)).any(is_agent))
}

fn owner(proc: &Path, inode: &str) -> Option<Holder> {
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
            return Some(Holder { pid: Some(pid), command: command.trim().to_owned() });
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
        let text = holder(port).unwrap().to_string();
        assert!(text.contains(&format!("pid {} (", std::process::id())), "{text}");
        assert!(of_agent(&holder(port).unwrap()), "it has come from the same file");
        drop(listener);
        assert_eq!(holder(port), None);
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(datagram_holder(port).and_then(|holder| holder.pid), Some(std::process::id()));
        drop(socket);
        assert_eq!(datagram_holder(port), None);
    }

    #[test]
    fn odd_tables_name_nobody() {
        assert_eq!(bound_inode("", 80, "0A"), None);
        assert_eq!(bound_inode("head\n garbage\n 0: 0100007F:0050 0:0 0A\n", 80, "0A"), None);
    }
}
