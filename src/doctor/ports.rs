//! Ports that agent and Envoy listen on: free, theirs, or held by whom.

use super::{Check, Scene};
use crate::config::env::var;
use crate::config::parts;
use crate::envoy::port::{self, Holder};
use crate::trouble::Kind;

const NAME: &str = "ports";

/// `alive`: an agent answers on its status port.
pub(super) fn checks(scene: &Scene, status_port: u16, alive: bool) -> Vec<Check> {
    let config = &scene.config;
    let s = &config.settings;
    let number = |n: i64| u16::try_from(n).ok().filter(|n| *n > 0);
    let mut wanted: Vec<(String, u16, Kind)> = Vec::new();
    wanted.push(("status port (statusPort)".to_owned(), status_port, Kind::StatusPortTaken));
    if !s.flag(var::DISABLE_ENVOY) {
        let admin = number(i64::from(config.mesh.proxy.proxy_admin_port)).unwrap_or(15000);
        wanted.push(("Envoy's admin port (proxyAdminPort)".to_owned(), admin, Kind::PortTaken));
        for (what, name) in [("readiness", var::ENVOY_STATUS_PORT), ("metrics", var::ENVOY_PROMETHEUS_PORT)] {
            if let Some(port) = number(s.int(name)) {
                wanted.push((format!("Envoy's {what} port ({})", name.name()), port, Kind::PortTaken));
            }
        }
    }
    if parts::dns::enabled(config)
        && let Some(port) = s.text(var::DNS_PROXY_ADDR).rsplit_once(':').and_then(|(_, p)| p.parse().ok())
    {
        wanted.push(("the DNS server's port (DNS_PROXY_ADDR)".to_owned(), port, Kind::PortTaken));
    }
    // An Envoy of somebody else's is no child of the agent.
    let external = s.flag(var::ENVOY_EXTERNAL);
    let agent = if alive && !external { port::holder(status_port).and_then(|h| h.pid) } else { None };
    let mut out = Vec::new();
    let (mut free, mut ours) = (Vec::new(), Vec::new());
    for (what, port, kind) in &wanted {
        match port::holder(*port) {
            None => free.push(port.to_string()),
            Some(holder) if alive && is_ours(&holder, agent) => ours.push(port.to_string()),
            Some(holder) => {
                let said = format!("{what} {port} is held by {holder}");
                let hint = "stop that process, or configure another port; an Envoy left over from an earlier agent is ended by its pid";
                let check = Check::fail(NAME, *kind, said).hint(hint);
                // The agent goes on without its status server, and tries again.
                out.push(check);
            }
        }
    }
    if out.is_empty() {
        let mut said = Vec::new();
        if !ours.is_empty() {
            said.push(format!("{} held by the running agent and its Envoy", ours.join(", ")));
        }
        if !free.is_empty() {
            said.push(format!("{} free", free.join(", ")));
        }
        out.push(Check::ok(NAME, said.join("; ")));
    }
    out
}

// The agent itself, or its child. What cannot be seen is not accused while an agent answers.
fn is_ours(holder: &Holder, agent: Option<u32>) -> bool {
    match (holder.pid, agent) {
        (Some(pid), Some(agent)) => pid == agent || port::parent(pid) == Some(agent),
        _ => true,
    }
}
