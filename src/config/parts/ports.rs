//! Ports beside the status port, for those who look at them before a start.

use super::{Sources, dns};
use crate::config::env::var;

/// What each port is, and its number.
#[must_use]
pub(crate) fn listened(config: &Sources) -> Vec<(String, u16)> {
    let s = &config.settings;
    let mut out = Vec::new();
    if let Some(admin) = config.envoy_admin_port() {
        let admin = if admin == 0 { 15000 } else { admin };
        out.push(("Envoy's admin port (proxyAdminPort)".to_owned(), admin));
        for (what, key) in [("readiness", var::ENVOY_STATUS_PORT), ("metrics", var::ENVOY_PROMETHEUS_PORT)] {
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
    out
}
