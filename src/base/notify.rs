//! Tells the service manager how things stand (`sd_notify(3)`).
//!
//! A datagram of a few lines to the socket that `NOTIFY_SOCKET` names. The crate `sd-notify` is declined: it reads the
//! environment by itself, blocks when the manager's queue is full, and does not know abstract sockets. Here a message
//! that finds no room is lost and said so; the next one tells the newest.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager's socket.
#[derive(Debug, Clone)]
pub(crate) struct Notify {
    address: SocketAddr,
    watchdog: Option<Duration>,
}

impl Notify {
    /// From `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`; `None` where nobody wants to be told.
    #[must_use]
    pub(crate) fn new<'a>(env: impl Fn(&str) -> Option<&'a str>) -> Option<Self> {
        let socket = env("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())?;
        let address = match socket.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(socket),
        };
        let address = address
            .map_err(|e| tracing::warn!("NOTIFY_SOCKET={socket}: {e}; the service manager is not notified"));
        let ours = env("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let usec = env("WATCHDOG_USEC").and_then(|usec| usec.parse().ok()).filter(|usec| ours && *usec > 0);
        Some(Self { address: address.ok()?, watchdog: usec.map(Duration::from_micros) })
    }

    /// How often the manager wants to hear `WATCHDOG=1`, at the least.
    #[must_use]
    pub(crate) fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Sends lines like `READY=1`; a line break in a value becomes a blank.
    ///
    /// # Errors
    /// The system's; `WouldBlock` when the manager does not read.
    pub(crate) fn tell(&self, lines: &[String]) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.connect_addr(&self.address)?;
        let text: Vec<String> = lines.iter().map(|line| line.replace('\n', " ")).collect();
        socket.send(text.join("\n").as_bytes()).map(drop)
    }
}

/// The time that goes with `RELOADING=1`.
#[must_use]
pub(crate) fn monotonic_usec() -> String {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    format!("MONOTONIC_USEC={}", now.tv_sec * 1_000_000 + now.tv_nsec / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_and_nobody_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let pid = std::process::id().to_string();
        let path = path.to_string_lossy().into_owned();
        let env = |name: &str| match name {
            "NOTIFY_SOCKET" => Some(path.as_str()),
            "WATCHDOG_USEC" => Some("3000000"),
            "WATCHDOG_PID" => Some(pid.as_str()),
            _ => None,
        };
        let notify = Notify::new(env).unwrap();
        assert_eq!(notify.watchdog(), Some(Duration::from_secs(3)));
        notify.tell(&["READY=1".into(), "STATUS=two\nlines".into()]).unwrap();
        let mut bytes = [0; 100];
        let n = manager.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..n], b"READY=1\nSTATUS=two lines");
        // A manager that does not read.
        let full = (0..100_000).find_map(|_| notify.tell(&["WATCHDOG=1".into()]).err());
        assert_eq!(full.map(|e| e.kind()), Some(io::ErrorKind::WouldBlock));
        drop(manager);
        std::fs::remove_file(&path).unwrap();
        assert!(notify.tell(&["READY=1".into()]).is_err());
        assert!(Notify::new(|_| None).is_none());
    }
}
