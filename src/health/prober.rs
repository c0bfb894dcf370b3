//! One probe of the application. Each kind is one file; texts are the ones istiod shows.

mod exec;
mod grpc;
mod http;
mod tcp;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;

use super::{Config, Method, Outcome};
use crate::base::lane::Lane;
use crate::fetch::{Dialer, Tls, Trust};

/// What every probe says it is.
const USER_AGENT: &str = "istio-probe/1.0";

/// Look-ups of the application's host, of which a probe begins one.
static NAMES: Lane = Lane::new("the application's host", 2);

pub(super) struct Prober {
    method: Method,
    /// Of HTTP probes, which leave from an address that iptables rules know.
    marked: Dialer,
    /// Of all others.
    plain: Dialer,
}

impl Prober {
    pub(super) fn new(config: &Config, crypto: Arc<CryptoProvider>) -> Self {
        let source: IpAddr = config.source;
        // Verified, and HTTP/1.1 only: see docs/COMPATIBILITY.md.
        let tls = Some(Arc::new(Tls::new(crypto, false, Trust::System)));
        Self {
            method: config.method.clone(),
            marked: Dialer { source: Some(source), tls, names: &NAMES, ..Dialer::default() },
            plain: Dialer { names: &NAMES, ..Dialer::default() },
        }
    }

    /// Probes once; `limit` is for all of it.
    pub(super) async fn probe(&self, limit: Duration) -> Outcome {
        match &self.method {
            Method::Http { scheme, host, port, path, headers } => {
                let place = http::Place { scheme, host, port: *port, path };
                http::probe(&self.marked, &place, headers, limit).await
            }
            Method::Tcp { host, port } => tcp::probe(&self.plain, host, *port, limit).await,
            Method::Exec { command } => exec::probe(command, limit).await,
            Method::Grpc { host, port, service } => {
                grpc::probe(&self.plain, host, *port, service, limit).await
            }
        }
    }
}

/// Host and port as they are written together.
fn authority(host: &str, port: u32) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
