//! Ports for tests.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// A TCP port that nobody uses: from below the range that the kernel gives to clients, never twice by one process;
/// two processes begin at different places.
///
/// # Panics
/// When all are taken.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const LOW: u16 = 17_000;
    const COUNT: u16 = 14_000;
    let start = u16::try_from(std::process::id() * 97 % u32::from(COUNT)).expect("below 14000");
    for _ in 0..COUNT {
        let port = LOW + start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {LOW} and {}", LOW + COUNT);
}
