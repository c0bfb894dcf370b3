//! A client of Envoy's admin port: the few requests that its life needs.
//!
//! One connection per request (`net::http`). Every request has a deadline, answers are read up to
//! [`MAX_BODY`] bytes. `localhost` is tried on both families.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use ::http::Request;
use ::http::header::{HOST, USER_AGENT};
use bytes::Bytes;

use crate::base::quote::shown;
use crate::base::seldom::Seldom;
use crate::net::http;

/// Answers beyond this are refused; the filtered statistics asked for here are a few hundred lines.
pub(crate) const MAX_BODY: usize = 4 * 1024 * 1024;

/// Limit of one poll of the statistics; the Go agent's.
const STATS_LIMIT: Duration = Duration::from_secs(2);
/// An answer may hold a million lines that are none, once a second.
static UNCOUNTED: Seldom = Seldom::new(30);

/// Where the admin port is and what is said there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The port (`proxyAdminPort`, 15000).
    pub port: u16,
    /// The proxy has IPv6 addresses only: statistics are asked at `[::1]` rather than `127.0.0.1`.
    pub ipv6_only: bool,
    /// Only inbound listeners drain (sidecars); else all (gateways, waypoints).
    pub inbound_only: bool,
    /// Listeners that are Envoy's own and never count as open connections: status and Prometheus port
    /// (`ENVOY_STATUS_PORT` 15021, `ENVOY_PROMETHEUS_PORT` 15090).
    pub own_ports: Vec<u16>,
    /// Ports of Envoy's metrics listeners behind mutual TLS, which do not count either.
    pub secure_ports: Vec<u16>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            port: 15000,
            ipv6_only: false,
            inbound_only: true,
            own_ports: vec![15021, 15090],
            secure_ports: Vec::new(),
        }
    }
}

/// Why a request got no usable answer; each names the address and the request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens, or the connection broke.
    #[error("Envoy's admin port: {method} http://{address}{path}")]
    Transport {
        /// The method.
        method: &'static str,
        /// Host and port.
        address: String,
        /// Path and query.
        path: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No answer in time.
    #[error("Envoy's admin port: {method} http://{address}{path}: no answer within {limit:?}")]
    Timeout {
        /// The method.
        method: &'static str,
        /// Host and port.
        address: String,
        /// Path and query.
        path: String,
        /// The limit.
        limit: Duration,
    },
    /// An answer with another status than 200.
    #[error("Envoy's admin port: {path}: unexpected status {status}")]
    Status {
        /// Path and query.
        path: String,
        /// The status.
        status: u16,
    },
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

/// The client; clones are cheap.
#[derive(Debug, Clone)]
pub struct Client {
    config: Config,
}

impl Client {
    /// A client; nothing is connected yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self { config }
    }

    /// Tells Envoy to drain its listeners gracefully. The status of the answer does not matter, as in
    /// the Go agent: what matters is that Envoy has taken notice.
    ///
    /// # Errors
    /// When Envoy cannot be reached or does not answer within `limit`.
    pub async fn drain_listeners(&self, skip_exit: bool, limit: Duration) -> Result<u16, Error> {
        let inbound = if self.config.inbound_only { "inboundonly&" } else { "" };
        let skip = if skip_exit { "&skip_exit" } else { "" };
        let path = format!("/drain_listeners?{inbound}graceful{skip}");
        let local = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        Ok(self.ask("POST", "localhost", &local, &path, limit).await?.status)
    }

    /// What Envoy's listeners hold open for others; `None` when it shows no such statistic. `requests`: those under
    /// way are counted, too.
    ///
    /// # Errors
    /// When Envoy cannot be reached, is slow, or answers with another status than 200.
    pub async fn open(&self, requests: bool) -> Result<Option<Open>, Error> {
        let path = match requests {
            false => "/stats?usedonly&filter=downstream_cx_active$",
            true => "/stats?usedonly&filter=downstream_(cx|rq)_active$",
        };
        let answer = self.get(path, STATS_LIMIT).await?;
        Ok(open(&String::from_utf8_lossy(&answer.body), &self.config.own_ports, &self.config.secure_ports))
    }

    /// Whether Envoy serves (`server_info` says LIVE), and which restart epoch answered.
    ///
    /// # Errors
    /// As [`Client::open`].
    pub async fn live(&self) -> Result<(bool, u64), Error> {
        let answer = self.get("/server_info", STATS_LIMIT).await?;
        let info: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let epoch = info["command_line_options"]["restart_epoch"].as_u64().unwrap_or(0);
        Ok((info["state"] == "LIVE", epoch))
    }

    async fn get(&self, path: &str, limit: Duration) -> Result<Answer, Error> {
        let (host, address) = if self.config.ipv6_only {
            ("[::1]", IpAddr::V6(Ipv6Addr::LOCALHOST))
        } else {
            ("127.0.0.1", IpAddr::V4(Ipv4Addr::LOCALHOST))
        };
        let answer = self.ask("GET", host, &[address], path, limit).await?;
        if answer.status != 200 {
            return Err(Error::Status { path: path.to_owned(), status: answer.status });
        }
        Ok(answer)
    }

    async fn ask(
        &self,
        method: &'static str,
        host: &str,
        addresses: &[IpAddr],
        path: &str,
        limit: Duration,
    ) -> Result<Answer, Error> {
        let address = format!("{host}:{}", self.config.port);
        let asked =
            tokio::time::timeout(limit, exchange(method, &address, addresses, self.config.port, path));
        match asked.await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(source)) => Err(Error::Transport { method, address, path: path.to_owned(), source }),
            Err(_) => Err(Error::Timeout { method, address, path: path.to_owned(), limit }),
        }
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn exchange(
    method: &'static str,
    host: &str,
    addresses: &[IpAddr],
    port: u16,
    path: &str,
) -> Result<Answer, BoxError> {
    let io = http::connect(addresses.iter().map(|ip| SocketAddr::new(*ip, port)).collect()).await?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, host)
        .header(USER_AGENT, concat!("pilot-agent/", env!("CARGO_PKG_VERSION")));
    let answer = http::exchange(io, request.body(Bytes::new())?, MAX_BODY).await?;
    Ok(Answer { status: answer.status().as_u16(), body: answer.into_body() })
}

/// What an Envoy still holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Open {
    /// Listeners with connections, and how many each has.
    pub listeners: Vec<(String, u64)>,
    /// Requests under way, where they were asked for.
    pub requests: u64,
}

impl Open {
    /// All connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.listeners.iter().fold(0, |sum, (_, n)| sum.saturating_add(*n))
    }

    /// Who holds them, the greatest first, as far as a line has room.
    #[must_use]
    pub(crate) fn holders(&self) -> String {
        const SHOWN: usize = 5;
        let mut all: Vec<&(String, u64)> = self.listeners.iter().collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let mut text: Vec<String> = all.iter().take(SHOWN).map(|(name, n)| format!("{name} ({n})")).collect();
        if let Some(more) = all.len().checked_sub(SHOWN).filter(|n| *n > 0) {
            text.push(format!("{more} more"));
        }
        text.join(", ")
    }
}

/// Finds what counts as an open connection, and requests; `None` when the text is empty.
///
/// Counted are the `listener.` lines (Envoy was asked for `downstream_cx_active`) of the listeners that are neither Envoy's own
/// (status, Prometheus, admin; IPv4 wildcards only, as in the Go agent; those behind TLS in both families), nor internal, nor a worker's
/// share of one that is counted anyway. `http.` lines never count.
#[must_use]
pub(crate) fn open(text: &str, own_ports: &[u16], secure_ports: &[u16]) -> Option<Open> {
    if text.is_empty() {
        return None;
    }
    let of = |address: &str, port: &u16| format!("listener.{address}_{port}.downstream_cx_active");
    let plain = own_ports.iter().map(|port| of("0.0.0.0", port));
    let secure = secure_ports.iter().flat_map(|port| [of("0.0.0.0", port), of("[__]", port)]);
    let own: Vec<String> = plain.chain(secure).collect();
    let mut out = Open::default();
    for line in text.lines().filter(|l| !l.is_empty()) {
        let mut parts = line.split(':');
        let (Some(name), Some(value), None) = (parts.next(), parts.next(), parts.next()) else {
            uncounted(line, "is not 'name: value'");
            continue;
        };
        if let Some(manager) =
            name.strip_prefix("http.").and_then(|n| n.strip_suffix(".downstream_rq_active"))
        {
            // Envoy's own, this very question among them.
            if !["admin", "agent", "stats"].contains(&manager) {
                out.requests = out.requests.saturating_add(value.trim().parse().unwrap_or(0));
            }
            continue;
        }
        let foreign = name.starts_with("listener.")
            && !name.contains("worker_")
            && !name.starts_with("listener.envoy_internal_")
            && name != "listener.admin.downstream_cx_active"
            && name != "listener.admin.main_thread.downstream_cx_active"
            && !own.iter().any(|own| own == name);
        if !foreign {
            continue;
        }
        let value = value.trim();
        // `parse` takes a plus sign, the Go agent does not.
        if value.starts_with('+') {
            uncounted(line, "has a sign");
            continue;
        }
        match value.parse::<u64>() {
            Ok(0) => {}
            Ok(value) => {
                let name = name.trim_start_matches("listener.").trim_end_matches(".downstream_cx_active");
                out.listeners.push((name.to_owned(), value));
            }
            Err(error) => uncounted(line, &format!("has no usable value ({error})")),
        }
    }
    Some(out)
}

fn uncounted(line: &str, why: &str) {
    if let Some(more) = UNCOUNTED.may() {
        tracing::warn!("envoy stat {:?} {why}; it is not counted{more}", shown(line));
    }
}

#[cfg(test)]
mod tests;
