//! Finds dead peers: a ping after a time without a read, and an end without an answer.

use std::time::Duration;

use h2::{Ping, PingPong};

use crate::base::slack;
use crate::net::io::Reads;

/// When to ping and how long to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Time without a read before a ping (`GRPC_KEEPALIVE_INTERVAL`, 30 s; at least 10 s towards istiod); 0: the Go
    /// library's own.
    pub interval: Duration,
    /// Time for the answer (`GRPC_KEEPALIVE_TIMEOUT`, 10 s); 0: the Go library's own.
    pub timeout: Duration,
}

impl Default for Keepalive {
    fn default() -> Self {
        Self { interval: Duration::from_secs(30), timeout: Duration::from_secs(10) }
    }
}

/// The Go library does not ping istiod more often than this.
const UPSTREAM_FLOOR: Duration = Duration::from_secs(10);

/// The Go library's where 0 is given: a server's time without a read, and the time for the answer of either side.
const SERVER_INTERVAL: Duration = Duration::from_secs(2 * 60 * 60);
const ANSWER: Duration = Duration::from_secs(20);

impl Keepalive {
    /// For the leg to istiod.
    pub(super) fn upstream(self) -> Self {
        Self { interval: self.interval.max(UPSTREAM_FLOOR), timeout: some(self.timeout, ANSWER) }
    }

    /// For clients of the local sockets.
    #[must_use]
    pub(crate) fn downstream(self) -> Self {
        Self { interval: some(self.interval, SERVER_INTERVAL), timeout: some(self.timeout, ANSWER) }
    }
}

fn some(given: Duration, otherwise: Duration) -> Duration {
    if given.is_zero() { otherwise } else { given }
}

/// How long a server may take to say its first HTTP/2 word; the Go library's bound of one attempt.
const FIRST_WORD: Duration = Duration::from_secs(20);

/// Returns when the peer is dead; anything read counts as life.
pub(super) async fn watch(ping: Option<PingPong>, reads: &Reads, config: Keepalive) {
    let Some(mut ping) = ping else { return std::future::pending().await };
    loop {
        let idle = reads.idle();
        if idle < config.interval {
            slack::sleep(config.interval - idle).await;
            continue;
        }
        if ping.send_ping(Ping::opaque()).is_err() {
            // The connection is ending, which its driver tells.
            return std::future::pending().await;
        }
        loop {
            let before = reads.count();
            match tokio::time::timeout(config.timeout, std::future::poll_fn(|cx| ping.poll_pong(cx))).await {
                Ok(Ok(_)) => break,
                Ok(Err(_)) => return std::future::pending().await,
                Err(_) if reads.count() != before => {}
                Err(_) => return,
            }
        }
    }
}

/// Whether the server has said anything within its first seconds.
pub(super) async fn first_word(reads: &Reads) -> bool {
    tokio::time::sleep(FIRST_WORD).await;
    reads.count() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_means_what_the_go_library_takes() {
        let seconds = |interval, timeout| Keepalive {
            interval: Duration::from_secs(interval),
            timeout: Duration::from_secs(timeout),
        };
        assert_eq!(seconds(0, 0).upstream(), seconds(10, 20));
        assert_eq!(seconds(0, 0).downstream(), seconds(7200, 20));
        assert_eq!(seconds(5, 3).upstream(), seconds(10, 3));
        assert_eq!(seconds(5, 3).downstream(), seconds(5, 3));
    }
}
