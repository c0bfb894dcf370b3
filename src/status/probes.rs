//! `/app-health/...` and `/app-lifecycle/...`: probes of the application that the kubelet asks us to make,
//! because Envoy would refuse them from outside the mesh.

pub mod config;

use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderMap, StatusCode};

pub use config::{Action, Probe, Table, parse};

use super::respond::{Answer, TEXT, page};
use super::{loopback, probe_source};

/// How the application is probed.
#[derive(Debug, Clone)]
pub struct Config {
    /// From [`parse`].
    pub table: Table,
    /// `INSTANCE_IP`, or `localhost` with `REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION`; empty: `source`.
    pub destination: String,
    /// Where probes leave from: [`probe_source`].
    pub source: IpAddr,
    /// `ISTIO_ENABLE_HTTP2_PROBING`: HTTPS probes offer HTTP/2.
    pub http2: bool,
    /// `ENABLE_PROBE_KEEPALIVE_CONNECTIONS`: HTTP probes use connections again.
    pub keepalive: bool,
}

impl Default for Config {
    fn default() -> Self {
        let destination = loopback(false).to_string();
        Self {
            table: Table::default(),
            destination,
            source: probe_source(false),
            http2: true,
            keepalive: false,
        }
    }
}

pub(super) struct Prober {
    config: Config,
}

impl Prober {
    pub(super) fn new(
        config: Config,
        _status_port: u16,
        _crypto: Arc<rustls::crypto::CryptoProvider>,
    ) -> Self {
        Self { config }
    }

    pub(super) async fn answer(&self, path: &str, _headers: &HeaderMap) -> Answer {
        match self.config.table.get(path) {
            None => {
                page(StatusCode::BAD_REQUEST, TEXT, format!("app prober config does not exists for {path}"))
            }
            Some(_) => super::routes::plain(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}
