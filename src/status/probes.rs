//! `/app-health/...` and `/app-lifecycle/...`: probes of the application that the kubelet asks us to make,
//! because Envoy would refuse them from outside the mesh.
//!
//! The injector points the kubelet at these paths and gives the real probes in a variable. Each leaves
//! from an address of its own (127.0.0.6 or ::6), which iptables rules let past Envoy, and is judged as
//! the kubelet would. Nothing is pooled or kept unless a variable asks for it, and no task is started:
//! a thousand probes a second leave no trace.

pub(crate) mod config;
mod grpc;
mod http;
mod seen;
mod sniff;
mod tcp;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ::http::{HeaderMap, StatusCode, header};
use tokio::sync::Semaphore;

pub use config::parse;
pub(crate) use config::{Action, Table};

use super::{loopback, probe_source};
use crate::base::error::{BoxError, chain};
use crate::base::quote::cut;
use crate::base::seldom::Seldom;
use crate::fetch::{self, Dialer, Kept, REQUESTS, Tls, Trust};
use crate::net::fair::{Caller, Fair, Slot};
use crate::net::progress::{Phase, Progress};
use crate::serve::ConnState;
use crate::serve::respond::{Answer, TEXT, page, status};
use crate::trouble::Reporter;

/// How the application is probed.
#[derive(Debug, Clone)]
pub(crate) struct Config {
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

/// A kubelet asks each of a pod's few probes every ten seconds or so; more lines than this are somebody else's doing.
static FAILED: Seldom = Seldom::new(60);
/// Longest cause in a line.
const CAUSE: usize = 1024;

/// A probe without a limit of its own ends here. The kubelet has long given up then; Go would wait on.
const NO_LIMIT: Duration = Duration::from_secs(600);

pub(super) struct Prober {
    table: Table,
    /// Without brackets.
    destination: String,
    /// No destination was given: gRPC's library calls a server without a host `localhost`.
    nameless: bool,
    dialer: Dialer,
    kept: Option<Kept>,
    status_port: u16,
    /// Probes under way that came by a redirect.
    led: AtomicUsize,
    /// Of those whose answer may have a long head.
    wide: Semaphore,
    /// For each path, those that may be under way at a time.
    slots: BTreeMap<String, Fair>,
    seen: seen::Seen,
}

/// Probes at a time that may be answered with a head of up to 1 MB: a pod has a few probes.
const WIDE: usize = 8;

/// Why a probe has no answer.
#[derive(Debug, thiserror::Error)]
enum Unanswered {
    /// It cannot be asked for.
    #[error("{}", chain(.0))]
    Url(#[source] fetch::Error),
    /// Where it went, and what came of it.
    #[error("{to}: {}", chain(&**why))]
    At { to: String, why: BoxError },
    /// Too many of the same path had not been answered.
    #[error("others of it had no answer for as long as it has")]
    Crowded,
}

fn no_time(seconds: i32) -> BoxError {
    format!("its timeout of {seconds} s is over before it begins").into()
}

/// Counts one of [`Prober::led`].
struct Led<'a>(&'a AtomicUsize);

impl Drop for Led<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Prober {
    pub(super) fn new(
        config: Config,
        most: usize,
        status_port: u16,
        crypto: Arc<rustls::crypto::CryptoProvider>,
        trouble: Reporter,
    ) -> Self {
        let nameless = config.destination.is_empty();
        let destination = if nameless { config.source.to_string() } else { config.destination };
        let tls = Some(Arc::new(Tls::new(crypto, config.http2, Trust::Anybody)));
        let paths = config.table.paths();
        // A quarter of the connections for those that wait for an application.
        let each = (most / 4 / paths.clone().count().max(1)).clamp(4, 64);
        Self {
            slots: paths.map(|path| (path.to_owned(), Fair::new(each))).collect(),
            table: config.table,
            destination,
            nameless,
            dialer: Dialer { source: Some(config.source), tls, ..Dialer::default() },
            kept: config.keepalive.then(Kept::default),
            status_port,
            led: AtomicUsize::new(0),
            wide: Semaphore::new(WIDE),
            seen: seen::Seen::new(trouble),
        }
    }

    /// Makes the probe that belongs to `path`.
    pub(super) async fn answer(&self, path: &str, headers: &HeaderMap, conn: &ConnState) -> Answer {
        let Some(probe) = self.table.get(path) else {
            return page(
                StatusCode::BAD_REQUEST,
                TEXT,
                format!("app prober config does not exists for {path}"),
            );
        };
        // An application may lead its probe back here, which probes it anew: each turn is within the one before, so
        // as many at once as a client follows redirects are one that never ends.
        let _led = match headers.contains_key(header::REFERER) {
            true if self.led.fetch_add(1, Ordering::Relaxed) + 1 >= REQUESTS => {
                self.led.fetch_sub(1, Ordering::Relaxed);
                if let Some(more) = FAILED.may() {
                    tracing::warn!(target: "probes", "probe {path} of the application failed: it leads back here: stopped \
                        after {REQUESTS} redirects{more}");
                }
                return status(StatusCode::INTERNAL_SERVER_ERROR);
            }
            true => Some(Led(&self.led)),
            false => None,
        };
        let seconds = probe.timeout_seconds;
        let slot = self.slot(path, seconds, conn.caller, &conn.progress).await;
        let result = match &probe.action {
            _ if slot.is_none() => Err(Unanswered::Crowded),
            Action::Http { path, port, https } => self.http(path, *port, *https, seconds, headers).await,
            Action::Tcp { port } => self.tcp(*port, seconds).await,
            Action::Grpc { port, service } => self.grpc(*port, service, seconds, headers).await,
        };
        drop(slot);
        self.seen.note(path, &result);
        result.unwrap_or_else(|why| {
            // An application's words may be as long as its head.
            let why = why.to_string();
            let why = cut(&why, CAUSE);
            if let Some(more) = FAILED.may_hold(why.len()) {
                tracing::warn!(target: "probes", "probe {path} of the application failed: {why}{more}");
            }
            status(StatusCode::INTERNAL_SERVER_ERROR)
        })
    }

    // Those of an application that does not answer would hold all connections that the server may have.
    async fn slot(&self, path: &str, seconds: i32, by: Caller, of: &Progress) -> Option<Slot> {
        let slots = self.slots.get(path)?;
        if let Some(slot) = slots.try_take(by) {
            return Some(slot);
        }
        of.enter(Phase::Waiting);
        let slot = tokio::time::timeout(limit(seconds), slots.take(by)).await;
        of.enter(Phase::Busy);
        slot.ok()
    }

    /// What the probes have come to, for people.
    pub(super) fn document(&self) -> serde_json::Value {
        self.seen.document()
    }

    /// `host:port`, with brackets where they are needed.
    fn authority(&self, port: i32) -> String {
        if self.destination.contains(':') {
            format!("[{}]:{port}", self.destination)
        } else {
            format!("{}:{port}", self.destination)
        }
    }
}

/// A limit in seconds; zero and less: none.
fn limit(seconds: i32) -> Duration {
    u64::try_from(seconds).ok().filter(|s| *s > 0).map_or(NO_LIMIT, Duration::from_secs)
}

#[cfg(test)]
mod tests;
