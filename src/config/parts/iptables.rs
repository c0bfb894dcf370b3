//! Redirection: the flags and variables of `istio-iptables`.

use std::time::Duration;

use crate::config::args::{Flag, Kind, Parsed};
use crate::config::env::{Env, Settings as Variables, var};
use crate::config::go;
use crate::iptables::settings::Settings;

const TEXT: Kind = Kind::Text;
const BOOL: Kind = Kind::Bool;

/// Flags of the command; [`variables`] names those that stand in for a flag.
pub(crate) const FLAGS: &[Flag] = &[
    Flag::new("envoy-port", TEXT, "15001", "port that captured outbound TCP goes to").short('p'),
    Flag::new("inbound-capture-port", TEXT, "15006", "port that captured inbound TCP goes to").short('z'),
    Flag::new("inbound-tunnel-port", TEXT, "15008", "HBONE port, never captured").short('e'),
    Flag::new("proxy-uid", TEXT, "", "users whose traffic is the proxy's own").short('u'),
    Flag::new("proxy-gid", TEXT, "", "groups whose traffic is the proxy's own; empty: as proxy-uid")
        .short('g'),
    Flag::new("istio-inbound-interception-mode", TEXT, "", "TPROXY, or anything else for REDIRECT")
        .short('m'),
    Flag::new("istio-inbound-ports", TEXT, "", "inbound ports to capture; * for all").short('b'),
    Flag::new("istio-local-exclude-ports", TEXT, "", "inbound ports to leave alone, with -b '*'").short('d'),
    Flag::new("istio-exclude-interfaces", TEXT, "", "interfaces to leave alone").short('c'),
    Flag::new("istio-service-cidr", TEXT, "", "destinations to capture; * for all").short('i'),
    Flag::new("istio-service-exclude-cidr", TEXT, "", "destinations to leave alone").short('x'),
    Flag::new("istio-outbound-ports", TEXT, "", "outbound ports to capture besides -i").short('q'),
    Flag::new("istio-local-outbound-ports-exclude", TEXT, "", "outbound ports to leave alone").short('o'),
    Flag::new("kube-virt-interfaces", TEXT, "", "interfaces of VMs in the pod").short('k'),
    Flag::new("istio-inbound-tproxy-mark", TEXT, "1337", "mark of TPROXY packets").short('t'),
    Flag::new("istio-inbound-tproxy-route-table", TEXT, "133", "routing table of TPROXY").short('r'),
    Flag::new("dry-run", BOOL, "false", "run nothing, show what would be").short('n'),
    Flag::new("iptables-probe-port", Kind::Uint(16), "15002", "port of the validation"),
    Flag::new("probe-timeout", Kind::Duration, "5s", "limit of the validation"),
    Flag::new("skip-rule-apply", BOOL, "false", "no rules, addresses or routes"),
    Flag::new("run-validation", BOOL, "false", "check that connections are redirected"),
    Flag::new("redirect-dns", BOOL, "false", "capture DNS"),
    Flag::new("capture-all-dns", BOOL, "false", "capture DNS whatever its server"),
    Flag::new("drop-invalid", BOOL, "false", "drop packets that conntrack calls invalid"),
    Flag::new("dual-stack", BOOL, "false", "look for an IPv6 address behind an IPv4 one"),
    Flag::new("network-namespace", TEXT, "", "path of the network namespace, for the lock"),
    Flag::new("cni-mode", BOOL, "false", "run on the host's file system"),
    Flag::new("reconcile", BOOL, "false", "replace rules of other settings"),
    Flag::new(
        "cleanup-only",
        BOOL,
        "false",
        "only remove what the other flags would make; with --reconcile, whatever made it",
    ),
    Flag::new("force-apply", BOOL, "false", "make the rules anew even when they are in place"),
    Flag::new("native-nftables", BOOL, "false", "use nft in place of iptables"),
    Flag::new("force-iptables-binary", TEXT, "", "legacy or nft"),
    Flag::old("restore-format", BOOL, "of 1.5 to 1.8; without effect, rules always go in by one restore")
        .short('f'),
];

// `ENVOY_PORT` is only printed, as in the Go agent.
const NO_VARIABLE: &str = "envoy-port";

/// Variables of older names that go before the flag's own.
const MORE: &[(&str, &str)] = &[
    ("redirect-dns", var::ISTIO_META_DNS_CAPTURE.name()),
    ("drop-invalid", var::INVALID_DROP.name()),
    ("dual-stack", var::ISTIO_DUAL_STACK.name()),
];

/// The variables that count where the flag is not given, the first that is set.
#[must_use]
pub(crate) fn variables(flag: &str) -> Vec<String> {
    let more = MORE.iter().filter(|(name, _)| *name == flag).map(|(_, variable)| (*variable).to_owned());
    let own = (flag != NO_VARIABLE).then(|| flag.to_ascii_uppercase().replace('-', "_"));
    more.chain(own).collect()
}

/// What flags and variables say. A variable that cannot be read counts as false or zero, as in the Go agent; a flag
/// that cannot be was refused before.
#[must_use]
pub(crate) fn settings(parsed: &Parsed, env: &Env) -> Settings {
    let text = |name: &str| -> String {
        if let Some(value) = parsed.get(name) {
            return value.to_owned();
        }
        let variables = variables(name);
        let set = variables.iter().find_map(|variable| env.get(variable));
        set.map_or_else(|| parsed.or_default(FLAGS, name).to_owned(), str::to_owned)
    };
    let flag = |name: &str| go::boolean(&text(name)).unwrap_or_else(|| odd(name, &text(name), false));
    let (own, _) = Variables::read(env);
    let own = |key| own.text(key).to_owned();
    Settings {
        envoy_port: text("envoy-port"),
        inbound_capture_port: text("inbound-capture-port"),
        inbound_tunnel_port: text("inbound-tunnel-port"),
        proxy_uid: text("proxy-uid"),
        proxy_gid: text("proxy-gid"),
        interception_mode: text("istio-inbound-interception-mode"),
        inbound_ports: text("istio-inbound-ports"),
        local_exclude_ports: text("istio-local-exclude-ports"),
        exclude_interfaces: text("istio-exclude-interfaces"),
        service_cidr: text("istio-service-cidr"),
        service_exclude_cidr: text("istio-service-exclude-cidr"),
        outbound_ports: text("istio-outbound-ports"),
        outbound_ports_exclude: text("istio-local-outbound-ports-exclude"),
        kube_virt_interfaces: text("kube-virt-interfaces"),
        tproxy_mark: text("istio-inbound-tproxy-mark"),
        tproxy_route_table: text("istio-inbound-tproxy-route-table"),
        dry_run: flag("dry-run"),
        probe_port: probe_port(&text("iptables-probe-port")),
        probe_timeout: go::duration(&text("probe-timeout")).map_or_else(
            |_| odd("probe-timeout", &text("probe-timeout"), Duration::ZERO),
            go::Signed::at_least_zero,
        ),
        skip_rule_apply: flag("skip-rule-apply"),
        run_validation: flag("run-validation"),
        redirect_dns: flag("redirect-dns"),
        capture_all_dns: flag("capture-all-dns"),
        drop_invalid: flag("drop-invalid"),
        dual_stack: flag("dual-stack"),
        network_namespace: text("network-namespace"),
        cni_mode: flag("cni-mode"),
        reconcile: flag("reconcile"),
        cleanup_only: flag("cleanup-only"),
        force_apply: flag("force-apply"),
        native_nftables: flag("native-nftables"),
        force_iptables_binary: text("force-iptables-binary"),
        loopback_cidr: own(var::ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR),
        owner_groups: own(var::ISTIO_OUTBOUND_OWNER_GROUPS),
        owner_groups_exclude: own(var::ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE),
        envoy_user: own(var::ENVOY_USER),
        dry_run_file: own(var::DRY_RUN_FILE_PATH),
        whatever_host: false,
    }
}

fn odd<T>(name: &str, value: &str, used: T) -> T {
    tracing::warn!("the variable of --{name} is {value:?}, which cannot be read and counts as zero");
    used
}

// In any base, as every number among the flags.
fn probe_port(text: &str) -> u16 {
    match go::integer(text, 64) {
        _ if text.starts_with(['+', '-']) => odd("iptables-probe-port", text, 0),
        Ok(n) => u16::try_from(n).unwrap_or(u16::MAX),
        Err(why) if why.is_range() => u16::MAX,
        Err(_) => odd("iptables-probe-port", text, 0),
    }
}

mod faults;
#[cfg(test)]
mod recorded;

pub(crate) use faults::faults;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probes_port_is_read_in_any_base() {
        let flags: Vec<Flag> = FLAGS.to_vec();
        let words = ["--iptables-probe-port=0x3a9a".to_owned()];
        let parsed = crate::config::args::parse(&words, &flags, false).unwrap();
        assert_eq!(settings(&parsed, &Env::of(&[])).probe_port, 15002);
        let of = |value| settings(&Parsed::default(), &Env::of(&[("IPTABLES_PROBE_PORT", value)])).probe_port;
        assert_eq!(["0x3a9a", "15003", "70000", "abc", "", "-1"].map(of), [15002, 15003, 65535, 0, 0, 0]);
        let beyond =
            ["99999999999999999999", "0xffffffffffffffffffffffffffffffffffff", "+1", "-99999999999999999999"];
        assert_eq!(beyond.map(of), [65535, 65535, 0, 0]);
    }
}
