//! The way upstream: one [`Connector`] dials istiod (or a CA) for whoever needs a connection.
//!
//! Each [`Connector::connect`] is a fresh dial: names are resolved anew, root and client certificate
//! files are read anew, addresses are tried side by side, so nothing stale outlives its cause. One thing
//! outlives: roots that were good stay in use when their file is missing or broken at a later dial.
//! Both paths speak raw HTTP/2 over it.
//!
//! | file | is about |
//! |---|---|
//! | `channel` | the dial: addresses, TCP, proxy, TLS, and the bound over all of it |
//! | `name`, `roots` | whom to dial, and which certificates to trust |
//! | `auth` | tokens, and the metadata of a call |
//! | `error` | why there is no connection, and what usually helps |
//!
//! Uses `tls`.

pub(crate) mod auth;
mod channel;
mod error;
mod name;
mod roots;
mod stream;

pub(crate) use crate::tls::client::ClientFiles;
pub(crate) use crate::tls::provider::Compliance;
pub use channel::Connection;
pub(crate) use channel::{Connector, Look, Peer};
pub use error::Error;
pub(crate) use error::{Phase, code_name, refused_late};
pub(crate) use roots::RootFiles;
pub use stream::Stream;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Where to connect and how.
#[derive(Clone)]
pub(crate) struct Config {
    /// `host:port` as configured (`ProxyConfig.discoveryAddress` or `CA_ADDR`); IPv6 in brackets.
    pub address: String,
    /// Plain or TLS.
    pub transport: Transport,
    /// Bound of one dial, from name resolution to the end of the TLS handshake. The Go agent's library
    /// limits it to 20 s.
    pub connect_timeout: Duration,
    /// Addresses in random order rather than the resolver's (`XDS_SHUFFLE_ADDRESSES`).
    pub shuffle: bool,
    /// Bytes that are not acknowledged for so long end the connection (`TCP_USER_TIMEOUT`); `None`: the kernel's own
    /// bound, a quarter of an hour.
    pub user_timeout: Option<Duration>,
    /// `HTTPS_PROXY`/`NO_PROXY` as found in the environment: (proxy URL, exclusion list).
    pub proxy: Option<(String, String)>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("address", &self.address)
            .field("transport", &self.transport)
            .field("connect_timeout", &self.connect_timeout)
            // The URL may hold a password.
            .field("proxy", &self.proxy.as_ref().map(|(_, no)| ("..", no)))
            .finish()
    }
}

/// Plain or TLS.
#[derive(Debug, Clone)]
pub(crate) enum Transport {
    /// Without TLS (`controlPlaneAuthPolicy: NONE`, or a CA on port 15010).
    Plaintext,
    /// TLS 1.2 or later with ALPN `h2`.
    Tls(Tls),
}

/// TLS settings; files are read at each dial.
#[derive(Debug, Clone)]
pub(crate) struct Tls {
    /// Which roots to trust.
    pub roots: Roots,
    /// `ISTIOD_SAN`, or empty: then the host of the address counts, where any `localhost` stands for `istiod.istio-system.svc`.
    pub server_name: Option<String>,
    /// Client certificate files, re-examined at each handshake.
    pub client: Option<ClientFiles>,
    /// `COMPLIANCE_POLICY`.
    pub compliance: Compliance,
}

/// Which roots to trust.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Roots {
    /// The system's pool.
    System,
    /// A PEM file; undecodable blocks are skipped, one certificate must remain.
    File(PathBuf),
    /// The first file if it is there, else the other; chosen at start, and anew when the chosen one changes.
    FirstOf(PathBuf, PathBuf),
}
