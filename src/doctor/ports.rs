//! Ports that agent and Envoy listen on: free, theirs, or held by whom.

use super::{Check, Scene};
use crate::config::parts::{self, envoy::Presence};
use crate::envoy::port::{self, Holder};
use crate::trouble::Kind;

const NAME: &str = "ports";

/// `alive`: an agent answers on its status port.
pub(super) fn checks(scene: &Scene, status_port: Option<u16>, alive: bool) -> Vec<Check> {
    let status = status_port.map(|port| ("status port (statusPort)".to_owned(), port, Kind::StatusPortTaken));
    let others = parts::ports::listened(&scene.config).into_iter();
    let others = others.map(|(what, port)| (what, port, Kind::PortTaken));
    let mut wanted: Vec<(String, u16, Kind)> = Vec::new();
    for one in status.into_iter().chain(others) {
        if !wanted.iter().any(|(_, port, _)| *port == one.1) {
            wanted.push(one);
        }
    }
    let status_held = status_port.and_then(port::holder);
    // An Envoy of somebody else's is no child of the agent.
    let external = parts::envoy::presence(&scene.config).is_ok_and(|p| p == Presence::External);
    let agent = if alive && !external { status_held.as_ref().and_then(|h| h.pid) } else { None };
    let silent = status_held.as_ref().filter(|holder| !alive && port::of_agent(holder)).and_then(|h| h.pid);
    let displaced = !alive && status_held.is_some_and(|holder| !port::of_agent(&holder));
    let shared = parts::ports::shared(&scene.config).into_iter();
    let mut out: Vec<Check> =
        shared.map(|said| Check::fail(NAME, Kind::ConfigInvalid, said).hint("")).collect();
    let (mut free, mut ours) = (Vec::new(), Vec::new());
    for (what, port, kind) in &wanted {
        match port::holder(*port).or_else(|| datagrams(what, *port)) {
            None => free.push(port.to_string()),
            Some(holder) if alive && is_ours(&holder, agent) => ours.push(port.to_string()),
            // An agent that could not have its status port runs all the same.
            Some(holder) if displaced && port::of_agent(&holder) => {
                ours.push(port.to_string());
            }
            // Whoever ended it would end a proxy that serves.
            Some(holder) if silent.is_some() && is_ours(&holder, silent) => {
                let said =
                    format!("{what} {port} is held by {holder}, of a running agent that gives no answer");
                let hint = "is that agent stopped (kill -CONT lets it go on), starved of CPU, or behind a loopback interface that \
                            is down? End it only if it stays silent: its Envoy, which may serve well, ends with it";
                out.push(Check::fail(NAME, *kind, said).hint(hint).broken());
            }
            Some(holder) => {
                let said = format!("{what} {port} is held by {holder}");
                let hint = "stop that process, or configure another port; an Envoy left over from an earlier agent is ended by its pid";
                // An agent goes on without its status server, but the kubelet's probes come to a stranger, and nobody
                // can be asked for what else is wrong.
                out.push(Check::fail(NAME, *kind, said).hint(hint).broken());
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

// The DNS server has its port for both.
fn datagrams(what: &str, port: u16) -> Option<Holder> {
    what.ends_with("(DNS_PROXY_ADDR)").then(|| port::datagram_holder(port)).flatten()
}

// The agent itself, or what it has started. What cannot be seen is not accused while an agent answers.
fn is_ours(holder: &Holder, agent: Option<u32>) -> bool {
    match (holder.pid, agent) {
        (Some(pid), Some(agent)) => pid == agent || port::descends(pid, agent),
        _ => true,
    }
}
