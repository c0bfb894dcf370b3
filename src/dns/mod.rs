//! The local DNS server: answers for the hosts that istiod announces, hands everything else on.
//!
//! ```text
//! istiod ─ NDS ─► agent ─► Table ─ watch ─► server ◄─ UDP, TCP ─ application (port 15053)
//!                                             └► upstream ─► nameservers of resolv.conf
//! ```
//!
//! | file | is about |
//! |---|---|
//! | `table` | pure: a name table, and what a name has for answers |
//! | `wire` | pure: which messages are queries, and replies of the records we know |
//! | `resolv` | `resolv.conf` |
//! | `upstream` | asking the nameservers |
//! | `itself` | nameservers that lead back here |
//! | `servers`, `cache` | which of them to ask first, and answers that are kept; opt-in |
//! | `server` | sockets, their limits and the handler |
//!
//! It promises that a query is answered from one whole table, never from half of two; that what it does
//! not know goes on and comes back byte for byte; and that nobody who asks, and no nameserver that is
//! silent, can make it hold more than a bounded number of sockets for a bounded time.
//!
//! The wire format is walked here, not read with a library: messages pass through unchanged, only a
//! question's name and type, record boundaries and the EDNS size are read, and only A, AAAA and CNAME are
//! written. Libraries decode and encode whole messages, refuse classes they do not know and pick their
//! own compression.
//!
//! Uses only what every part may use.

mod cache;
mod itself;
pub(crate) mod resolv;
mod server;
mod servers;
mod table;
mod upstream;
pub(crate) mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

pub(crate) use cache::Config as Cache;
pub(crate) use server::{Bound, bind, check, resolves};
#[cfg(debug_assertions)]
pub use table::fuzz;
pub(crate) use table::{Page, Scope, Table};

/// The current table; `None` until the first one has come.
pub(crate) type Current = watch::Receiver<Option<Arc<Table>>>;

/// What the server serves and where.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// `DNS_PROXY_ADDR`, as `host:port`.
    pub address: String,
    /// Read when the ports are bound; with `adaptive` again when it changes.
    pub resolv_conf: PathBuf,
    /// Before the first table queries go to the nameservers; otherwise they fail.
    pub before_sync: bool,
    /// All nameservers at once, or one after another in random order.
    pub parallel: bool,
    /// `DNS_FORWARD_ADAPTIVE`: nameservers that answer come first, a query is sent again within `timeout`, and an
    /// answer that was cut is fetched over TCP.
    pub adaptive: bool,
    /// Answers that are kept.
    pub cache: Cache,
    /// Limit of connecting, of sending and of receiving, each.
    pub timeout: Duration,
}

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// `resolv.conf` cannot be read.
    #[error("failed to start local DNS server: cannot read {path}: it names the upstream resolvers")]
    ResolvConf {
        /// The file.
        path: PathBuf,
        #[source]
        /// Why.
        source: std::io::Error,
    },
    /// The address cannot be split.
    #[error(
        "failed to start local DNS server: dns address must be a valid host:port: DNS_PROXY_ADDR is {0:?}"
    )]
    Address(String),
    /// A port cannot be had.
    #[error(
        "failed to start local DNS server: cannot listen on {network} {address} (DNS_PROXY_ADDR): {}",
        why_not(source)
    )]
    Bind {
        /// `udp` or `tcp`.
        network: &'static str,
        /// As asked for.
        address: String,
        #[source]
        /// Why.
        source: std::io::Error,
    },
}

// What is behind it, and what to do.
fn why_not(source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind as E;
    match source.kind() {
        E::AddrNotAvailable => {
            "this machine has no such address; write one that it has, or leave the variable out (localhost:15053)"
        }
        E::PermissionDenied => "the port is for root; write one above 1023",
        E::AddrInUse => "another process has it; end that one, or write another port",
        _ => {
            "another process may hold it, or its host is none of this machine's; write an address of this machine"
        }
    }
}
