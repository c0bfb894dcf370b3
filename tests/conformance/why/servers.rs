//! Servers that are not what is looked for. They live as long as the test's process; the kernel closes them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

/// Says this to whoever connects, and hangs up once it was read or a moment has passed.
pub(super) fn greeting(words: &'static [u8]) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
            // What is left unread would be answered by a reset.
            let _ = stream.write_all(words);
            let _ = stream.read(&mut [0; 4096]);
        }
    });
    port
}

/// Listens and takes nobody.
pub(super) fn hold(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).expect("the port was free a moment ago");
    std::mem::forget(listener);
}
