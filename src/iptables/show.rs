//! The two blocks that a run logs first: what it was given, and what it made of it.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::options::{Dns, Mode};
use super::settings::{Resolved, Settings};

const ENVIRONMENT: &[&str] = &[
    "ENVOY_PORT",
    "INBOUND_CAPTURE_PORT",
    "ISTIO_INBOUND_INTERCEPTION_MODE",
    "ISTIO_INBOUND_TPROXY_ROUTE_TABLE",
    "ISTIO_INBOUND_PORTS",
    "ISTIO_OUTBOUND_PORTS",
    "ISTIO_LOCAL_EXCLUDE_PORTS",
    "ISTIO_EXCLUDE_INTERFACES",
    "ISTIO_SERVICE_CIDR",
    "ISTIO_SERVICE_EXCLUDE_CIDR",
    "ISTIO_META_DNS_CAPTURE",
    "INVALID_DROP",
];

/// The variables as they stand.
pub(crate) fn environment(env: &BTreeMap<String, String>, native: bool) {
    let tool = if native { "nftables" } else { "iptables" };
    let mut text = format!("Istio {tool} environment:\n");
    for name in ENVIRONMENT {
        let _ = writeln!(text, "{name}={}", env.get(*name).map_or("", String::as_str));
    }
    tracing::info!("{text}");
}

/// The configuration in effect.
pub(crate) fn config(s: &Settings, resolved: &Resolved) {
    let o = &resolved.options;
    let (v4, v6) = match &o.dns {
        Dns::Servers { v4, v6 } => (
            v4.iter().map(ToString::to_string).collect::<Vec<_>>(),
            v6.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ),
        Dns::Off | Dns::All => (Vec::new(), Vec::new()),
    };
    let servers = format!("[{}],[{}]", v4.join(" "), v6.join(" "));
    let mode = if o.mode == Mode::Tproxy { "TPROXY" } else { s.interception_mode.as_str() };
    let [uids, gids] = &resolved.proxy_ids;
    let flag = |b: bool| if b { "true" } else { "false" };
    let lines: [(&str, &str); 31] = [
        ("PROXY_PORT", &o.outbound_port),
        ("PROXY_INBOUND_CAPTURE_PORT", &o.inbound_port),
        ("PROXY_TUNNEL_PORT", &o.tunnel_port),
        ("PROXY_UID", uids),
        ("PROXY_GID", gids),
        ("INBOUND_INTERCEPTION_MODE", mode),
        ("INBOUND_TPROXY_MARK", &o.tproxy_mark),
        ("INBOUND_TPROXY_ROUTE_TABLE", &o.tproxy_table),
        ("INBOUND_PORTS_INCLUDE", &s.inbound_ports),
        ("INBOUND_PORTS_EXCLUDE", &s.local_exclude_ports),
        ("OUTBOUND_OWNER_GROUPS_INCLUDE", &s.owner_groups),
        ("OUTBOUND_OWNER_GROUPS_EXCLUDE", &s.owner_groups_exclude),
        ("OUTBOUND_IP_RANGES_INCLUDE", &s.service_cidr),
        ("OUTBOUND_IP_RANGES_EXCLUDE", &s.service_exclude_cidr),
        ("OUTBOUND_PORTS_INCLUDE", &s.outbound_ports),
        ("OUTBOUND_PORTS_EXCLUDE", &s.outbound_ports_exclude),
        ("KUBE_VIRT_INTERFACES", &s.kube_virt_interfaces),
        ("ENABLE_INBOUND_IPV6", flag(o.ipv6)),
        ("DUAL_STACK", flag(s.dual_stack)),
        ("DNS_CAPTURE", flag(s.redirect_dns)),
        ("DROP_INVALID", flag(o.drop_invalid)),
        ("CAPTURE_ALL_DNS", flag(s.capture_all_dns)),
        ("DNS_SERVERS", &servers),
        ("NETWORK_NAMESPACE", &s.network_namespace),
        ("CNI_MODE", flag(s.cni_mode)),
        ("EXCLUDE_INTERFACES", &s.exclude_interfaces),
        ("RECONCILE", flag(s.reconcile)),
        ("CLEANUP_ONLY", flag(s.cleanup_only)),
        ("FORCE_APPLY", flag(s.force_apply)),
        ("NATIVE_NFTABLES", flag(s.native_nftables)),
        ("FORCE_IPTABLES_BINARY", &s.force_iptables_binary),
    ];
    let mut text = String::from("Istio config:\n");
    for (name, value) in lines {
        let _ = writeln!(text, "{name}={value}");
    }
    tracing::info!("{text}");
}
