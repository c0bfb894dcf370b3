//! The way upstream: one [`Connector`] dials istiod (or a CA) for whoever needs a connection.
//!
//! Each [`Connector::connect`] is a fresh dial: names are resolved anew, root and client certificate
//! files are read anew, addresses are tried in parallel, so nothing stale outlives its cause. Both paths
//! use it: `ca` builds a tonic channel over it, `xds` speaks raw HTTP/2 over it.

pub mod auth;
pub mod channel;
pub mod roots;

pub use channel::{Connection, Connector, Error};

use std::path::PathBuf;
use std::time::Duration;

/// Where to connect and how.
#[derive(Debug, Clone)]
pub struct Config {
    /// `host:port` as configured (`ProxyConfig.discoveryAddress` or `CA_ADDR`); IPv6 in brackets.
    pub address: String,
    /// Plain or TLS.
    pub transport: Transport,
    /// Bound of one dial, from name resolution to the end of the TLS handshake. The Go agent's library
    /// limits it to 20 s.
    pub connect_timeout: Duration,
    /// `HTTPS_PROXY`/`NO_PROXY` as found in the environment: (proxy URL, exclusion list).
    pub proxy: Option<(String, String)>,
}

/// Plain or TLS.
#[derive(Debug, Clone)]
pub enum Transport {
    /// Without TLS (`controlPlaneAuthPolicy: NONE`, or a CA on port 15010).
    Plaintext,
    /// TLS 1.2 or later with ALPN `h2`.
    Tls(Tls),
}

/// TLS settings; files are read at each dial.
#[derive(Debug, Clone)]
pub struct Tls {
    /// Which roots to trust.
    pub roots: Roots,
    /// `ISTIOD_SAN`, or empty: then the host of the address counts, by the rules of `xds-proxy.md` §3.4.
    pub server_name: Option<String>,
    /// Client certificate files, re-examined at each handshake.
    pub client: Option<ClientFiles>,
    /// `COMPLIANCE_POLICY`.
    pub compliance: Compliance,
}

/// Which roots to trust.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Roots {
    /// The system's pool.
    System,
    /// A PEM file; undecodable blocks are skipped, one certificate must remain.
    File(PathBuf),
}

/// A client certificate on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFiles {
    /// PEM chain.
    pub cert: PathBuf,
    /// PEM key.
    pub key: PathBuf,
}

/// `COMPLIANCE_POLICY` restrictions on TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compliance {
    /// No restriction beyond TLS 1.2.
    #[default]
    None,
    /// TLS 1.2 only, ECDHE with AES-GCM, P-256 only.
    Fips140_2,
    /// TLS 1.3 only, AES-GCM, X25519MLKEM768 only.
    Pqc,
}
