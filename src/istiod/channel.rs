//! Dials.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncWrite};

use super::Config;

/// A byte stream to istiod.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// An open connection, TLS finished where TLS is used.
pub struct Connection {
    /// The stream to speak HTTP/2 on.
    pub io: Box<dyn Io>,
    /// The address that answered.
    pub peer: SocketAddr,
    /// `:authority` of calls: the TLS server name without port, or the dial address in plain text.
    pub authority: String,
    /// `https` or `http`.
    pub scheme: &'static str,
}

/// Why a dial failed; carries address and phase.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Placeholder variant set of the seam: the phases of a dial.
    #[error("cannot connect to {address}: {phase}: {reason}{hint}")]
    Dial {
        /// As configured.
        address: String,
        /// `resolve`, `connect`, `tls`, `roots`, `client certificate`.
        phase: &'static str,
        /// The cause, with its sources.
        reason: String,
        /// The usual cause, starting with `; `, or empty.
        hint: &'static str,
    },
}

/// Dials on demand.
#[derive(Debug, Clone)]
pub struct Connector {
    config: std::sync::Arc<Config>,
}

impl Connector {
    /// Checks that roots can be read, so that bad settings end the agent at start and never later.
    ///
    /// # Errors
    /// When the roots are missing or hold no certificate.
    pub fn new(config: Config) -> Result<Self, Error> {
        Ok(Self { config: std::sync::Arc::new(config) })
    }

    /// The settings it dials with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }
}
