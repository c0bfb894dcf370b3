//! Ports that agent and Envoy listen on, for those who look at them before a start.

use super::{Sources, dns};
use crate::config::env::var;
use crate::config::ports::SECURE_PORTS;

/// The status port, where there is a status server.
#[must_use]
pub(crate) fn status(config: &Sources) -> Option<u16> {
    config.status_port().filter(|port| *port > 0)
}

/// Two that want the same port, a line for each pair.
#[must_use]
pub(crate) fn shared(config: &Sources) -> Vec<String> {
    let status = status(config).map(|port| ("the status port (statusPort)".to_owned(), port));
    let all: Vec<(String, u16)> = status.into_iter().chain(listened(config)).collect();
    let mut out = Vec::new();
    for (at, (what, port)) in all.iter().enumerate() {
        for (other, _) in all[at + 1..].iter().filter(|(_, other)| other == port) {
            out.push(format!(
                "{what} and {other} are both {port}, and one of them cannot listen: give it another one"
            ));
        }
    }
    out
}

/// What each port is but the status port, and its number.
#[must_use]
pub(crate) fn listened(config: &Sources) -> Vec<(String, u16)> {
    let s = &config.settings;
    let mut out = Vec::new();
    if let Some(admin) = config.envoy_admin_port() {
        let admin = if admin == 0 { 15000 } else { admin };
        out.push(("Envoy's admin port (proxyAdminPort)".to_owned(), admin));
        let [secure, merged] = SECURE_PORTS;
        for (what, key) in [
            ("readiness", var::ENVOY_STATUS_PORT),
            ("metrics", var::ENVOY_PROMETHEUS_PORT),
            ("secure metrics", secure),
            ("secure merged metrics", merged),
        ] {
            if let Some(port) = u16::try_from(s.int(key)).ok().filter(|port| *port > 0) {
                out.push((format!("Envoy's {what} port ({})", key.name()), port));
            }
        }
    }
    if dns::enabled(config)
        && let Some(port) = s.text(var::DNS_PROXY_ADDR).rsplit_once(':').and_then(|(_, p)| p.parse().ok())
    {
        out.push(("the DNS server's port (DNS_PROXY_ADDR)".to_owned(), port));
    }
    if let Some(port) = u16::try_from(config.sts_port()).ok().filter(|port| *port > 0) {
        out.push(("the token service's port (--stsPort)".to_owned(), port));
    }
    out
}
