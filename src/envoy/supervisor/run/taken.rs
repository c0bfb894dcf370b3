//! Why an Envoy that ended at once could not listen. Itself it says only that the address is in use.

use std::path::Path;

use super::judging;
use crate::envoy::port::{self, Holder};
use crate::trouble::Kind;

/// A port of Envoy's that somebody else listens on.
pub(super) struct Taken {
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// Who holds Envoy's admin port, or another one of this bootstrap.
pub(super) fn look(admin: u16, bootstrap: &Path) -> Option<Taken> {
    if let Some(holder) = port::holder(admin) {
        let taken = of(
            &format!("Envoy's admin port {admin}"),
            &holder,
            "if that is an Envoy left over from an earlier agent, stop it, or set proxyAdminPort of the proxy config",
        );
        tracing::error!("{}", taken.text);
        return Some(taken);
    }
    let bootstrap = std::fs::read(bootstrap).unwrap_or_default();
    let held = |port: u16| Some((port, port::holder(port)?));
    let (port, holder) = judging::listeners(&bootstrap).into_iter().find_map(held)?;
    Some(of(
        &format!("the port {port}, on which Envoy's bootstrap has a listener,"),
        &holder,
        "stop that process, or set another port (ENVOY_STATUS_PORT, ENVOY_PROMETHEUS_PORT)",
    ))
}

fn of(name: &str, holder: &Holder, what_to_do: &str) -> Taken {
    if holder.pid == Some(std::process::id()) {
        let text = format!(
            "{name} is one that this agent listens on: two settings name the same port (the agent's are statusPort of the \
             proxy config, DNS_PROXY_ADDR and --stsPort); give one of them another"
        );
        return Taken { kind: Kind::ConfigInvalid, text };
    }
    // Whoever ended it would end a proxy that serves.
    let own = holder.pid.is_some_and(|pid| port::descends(pid, std::process::id()));
    let what_to_do = if port::of_agent(holder) && !own {
        "another agent runs here, whose Envoy that is: two on one machine need folders and ports of their own (configPath, \
         statusPort, proxyAdminPort, ENVOY_STATUS_PORT, ENVOY_PROMETHEUS_PORT)"
    } else {
        what_to_do
    };
    Taken { kind: Kind::PortTaken, text: format!("{name} is held by {holder}: {what_to_do}") }
}
