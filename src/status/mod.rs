//! The status server: what kubelet, Prometheus and people ask of the agent over HTTP (port 15020).
//!
//! It promises that nobody who asks can hurt it: heads, bodies, connections and waits are bounded, an
//! application that hangs takes nobody else's answer with it, and a scrape passes through without ever
//! being held whole. It answers as the Go agent does (paths, status codes, headers, metric names) and
//! says what is missing where the Go agent is silent.
//!
//! | file | is about |
//! |---|---|
//! | `routes`, `compress` | from a request to a handler, from its answer to bytes |
//! | `ready` | `/healthz/ready`: Envoy's own state, then ours |
//! | `probes` | the kubelet's probes of the application, asked on its behalf |
//! | `stats`, `accept`, `own`, `process` | merged metrics |
//! | `debug` | pages for people |
//!
//! Uses `serve` for the listener and its connections, and `fetch` to ask others. What it needs of the rest of the agent comes in [`Handles`].

mod accept;
mod compress;
mod debug;
#[cfg(test)]
mod fake;
mod levels;
mod own;
mod page;
pub(crate) mod probes;
mod process;
mod profile;
pub(crate) mod ready;
mod routes;
mod shared;
pub(crate) mod stats;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;

use crate::base::error::BoxError;
use crate::base::metrics::Metrics;
use crate::base::tasks::{Stop, TaskResult};
use crate::net::accept::bound;
use crate::serve::{self, Limits};
use crate::trouble::{Report, Reporter, Troubles};

/// Connections at a time; the kubelet, Prometheus and Envoy need a handful.
const CONNECTIONS: usize = 4096;
/// Of those, the ones with a request.
const ASKING: usize = 384;

/// What the server serves and where. Filled by `config`, which refuses bad text.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// ProxyConfig `statusPort`, 15020 by default; 0 takes any free port (tests).
    pub port: u16,
    /// The one address to listen on; `None`: all of them, both families.
    pub address: Option<IpAddr>,
    /// Readiness.
    pub ready: ready::Config,
    /// Probes of the application.
    pub probes: probes::Config,
    /// Merged metrics.
    pub stats: stats::Config,
    /// Flag `--profiling`: whether `/debug/pprof/` exists at all.
    pub profiling: bool,
}

impl Config {
    /// A server on `port` that knows no probes and no application; Envoy's admin on 127.0.0.1:15000.
    #[must_use]
    pub(crate) fn new(port: u16) -> Self {
        Self {
            port,
            address: None,
            ready: ready::Config::default(),
            probes: probes::Config::default(),
            stats: stats::Config::default(),
            profiling: true,
        }
    }
}

/// Whether loopback means `::1` here: every address of the proxy is IPv6, or `INSTANCE_IP` is an IPv6
/// address that is not link-local. An `INSTANCE_IP` that is empty or no address counts as IPv4.
#[must_use]
pub(crate) fn ipv6_mode(all_proxy_ips_are_ipv6: bool, instance_ip: &str) -> bool {
    all_proxy_ips_are_ipv6
        || instance_ip
            .parse::<Ipv6Addr>()
            .is_ok_and(|ip| ip.to_ipv4_mapped().is_none() && !ip.is_unicast_link_local())
}

/// Loopback of the family in use: where Envoy's admin listens.
#[must_use]
pub(crate) fn loopback(ipv6: bool) -> IpAddr {
    if ipv6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() }
}

/// The address probes leave from; iptables rules let it past Envoy.
#[must_use]
pub(crate) fn probe_source(ipv6: bool) -> IpAddr {
    if ipv6 { Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6).into() } else { Ipv4Addr::new(127, 0, 0, 6).into() }
}

/// A long page, each piece of which is made when it is sent.
pub(crate) type Pieces = Box<dyn Iterator<Item = Bytes> + Send>;
/// What must be done before its first piece. That may take long: it is done on a thread.
pub(crate) type Making = Box<dyn FnOnce() -> Result<Pieces, BoxError> + Send>;

/// What the server asks of the agent, and tells it. All are called from connections: none may block.
pub(crate) trait Agent: Send + Sync + 'static {
    /// `/quitquitquit`: stop without a drain. Called once its answer has been handed to the kernel.
    fn quit(&self);

    /// `/drain`: ask Envoy to drain its listeners; ready when Envoy has answered or failed.
    fn drain(&self) -> BoxFuture<'_, ()>;

    /// Why the agent is shutting down, once it is (`received signal: terminated`).
    fn terminating(&self) -> Option<String> {
        None
    }

    /// Whether an Envoy process runs now. When it says no, readiness forgets what it had learned of the
    /// last one. Not asked with Envoy disabled.
    fn envoy_running(&self) -> bool {
        true
    }

    /// Which of Envoy's processes is meant: another number is another process, which must prove itself anew.
    fn envoy_generation(&self) -> u64 {
        0
    }

    /// What is wrong with the agent's parts.
    fn troubles(&self) -> Troubles {
        Troubles::default()
    }

    /// Parts that cannot serve yet and that readiness must wait for
    /// (`istio DNS capture is turned ON and DNS lookup table is not ready yet`).
    fn not_ready(&self) -> Vec<Report> {
        Vec::new()
    }

    /// What is broken now though it once worked (an expired identity, no config source).
    /// Only the opt-in strict mode lets it take readiness away.
    fn degraded(&self) -> Vec<Report> {
        Vec::new()
    }

    /// `/debug/ndsz`: the name table as JSON; `None` before the first one.
    fn name_table(&self) -> Option<Making> {
        None
    }

    /// `/debug/pprof/goroutine`: the names of the tasks that run.
    fn tasks(&self) -> Vec<String> {
        Vec::new()
    }

    /// `POST /debug/hot_restart` (ours): replace Envoy by a new epoch; accepted, or why not.
    ///
    /// # Errors
    /// When hot restart is off, or nothing runs.
    fn hot_restart(&self) -> Result<(), BoxError> {
        Err("hot restart is off: set ENVOY_HOT_RESTART=true".into())
    }

    /// `/debug/agentz`: what a person needs to see why something is broken. Never a secret.
    fn agentz(&self) -> serde_json::Value {
        serde_json::Value::Object(serde_json::Map::new())
    }
}

/// What the agent gives the server when it starts to serve.
pub(crate) struct Handles {
    /// The agent itself.
    pub agent: Arc<dyn Agent>,
    /// The registry whose families are scraped; the server adds its own and the process's.
    pub metrics: Metrics,
    /// The TLS implementation for HTTPS probes.
    pub crypto: Arc<rustls::crypto::CryptoProvider>,
    /// When the process started; `startup_duration_seconds` counts from here.
    pub started: tokio::time::Instant,
}

/// Why the status port cannot be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on status port {port}: another process may hold it (statusPort in ProxyConfig, annotation status.sidecar.istio.io/port)"
)]
pub(crate) struct Error {
    port: u16,
    #[source]
    source: std::io::Error,
}

/// A listener that is bound, or one that will be once its port is free.
#[derive(Debug)]
pub(crate) struct Bound {
    config: Config,
    listener: Option<TcpListener>,
    /// That the port is taken.
    trouble: Option<Reporter>,
}

/// Opens the status port.
///
/// # Errors
/// When it cannot be opened; the error names it. The Go agent goes on without its status server then;
/// [`Bound::later`] does the same but takes the port once it is free.
pub(crate) fn bind(config: &Config) -> Result<Bound, Error> {
    let listener = listen(config).map_err(|source| Error { port: config.port, source })?;
    Ok(Bound { config: config.clone(), listener: Some(listener), trouble: None })
}

/// On all addresses of both families, or on the one configured.
fn listen(config: &Config) -> std::io::Result<TcpListener> {
    let all = Ipv6Addr::UNSPECIFIED.into();
    serve::listen(SocketAddr::new(config.address.unwrap_or(all), config.port))
}

impl Bound {
    /// Not bound yet; [`Bound::serve`] tries again until it is, and then ends `trouble`.
    #[must_use]
    pub(crate) fn later(config: &Config, trouble: Reporter) -> Self {
        Self { config: config.clone(), listener: None, trouble: Some(trouble) }
    }

    /// Where it listens; `None` while the port is not ours.
    #[must_use]
    pub(crate) fn addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().and_then(|l| l.local_addr().ok())
    }

    /// Serves until `stop`. From `closing` on no new connection is taken; kept ones are still answered.
    ///
    /// # Errors
    /// When the listener fails for good; the agent should end in order then.
    pub(crate) async fn serve(self, handles: Handles, closing: Stop, stop: Stop) -> TaskResult {
        let port = self.addr().map_or(self.config.port, |a| a.port());
        let shared = Arc::new(shared::Shared::new(self.config.clone(), port, handles)?);
        tokio::select! {
            () = ready::watch(&shared.ready, &*shared.handles.agent) => Ok(()),
            done = self.listened(&shared, closing, stop) => done,
        }
    }

    async fn listened(self, shared: &Arc<shared::Shared>, closing: Stop, stop: Stop) -> TaskResult {
        let mut wait = Duration::from_secs(1);
        let listener = match self.listener {
            Some(listener) => Some(listener),
            None => loop {
                tokio::select! {
                    () = closing.cancelled() => break None,
                    () = stop.cancelled() => return Ok(()),
                    () = tokio::time::sleep(wait) => {}
                }
                match listen(&self.config) {
                    Ok(listener) => {
                        tracing::info!("status port {} is free now and served", self.config.port);
                        if let Some(trouble) = &self.trouble {
                            trouble.end();
                        }
                        break Some(listener);
                    }
                    Err(_) => wait = (wait * 2).min(Duration::from_secs(30)),
                }
            },
        };
        let limits = Limits { connections: bound(CONNECTIONS), asking: ASKING, idle: None };
        serve::serve(listener, shared.clone(), limits, closing, stop).await
    }
}

#[cfg(test)]
mod tests;
