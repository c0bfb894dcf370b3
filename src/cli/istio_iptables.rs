//! `pilot-agent istio-iptables`.

use std::time::Duration;

use crate::config::args::{Flag, Kind, Parsed};
use crate::config::env::Env;
use crate::config::go;
use crate::iptables::command;
use crate::iptables::settings::Settings;

const TEXT: Kind = Kind::Text;
const BOOL: Kind = Kind::Bool;

/// Flags of the command. Their variables are their names in upper case with `_` for `-`, apart from
/// [`NO_VARIABLE`].
pub const FLAGS: &[Flag] = &[
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
    Flag::new(
        "restore-format",
        BOOL,
        "true",
        "of 1.5 to 1.8; without effect, rules always go in by one restore",
    )
    .short('f'),
];

// `ENVOY_PORT` is only printed, as ever.
const NO_VARIABLE: &str = "envoy-port";

/// Variables of older names that override the main one.
const MORE: &[(&str, &str)] = &[
    ("redirect-dns", "ISTIO_META_DNS_CAPTURE"),
    ("drop-invalid", "INVALID_DROP"),
    ("dual-stack", "ISTIO_DUAL_STACK"),
];

/// Runs the command; gives the exit status.
pub(super) fn run(parsed: &Parsed, env: &Env) -> u8 {
    let text = |name: &str| -> String {
        if let Some(value) = parsed.get(name) {
            return value.to_owned();
        }
        let more = MORE.iter().find(|(n, _)| *n == name).and_then(|(_, variable)| env.get(variable));
        let main = name.to_ascii_uppercase().replace('-', "_");
        let main = if name == NO_VARIABLE { None } else { env.get(&main) };
        more.or(main).map_or_else(|| parsed.or_default(FLAGS, name).to_owned(), str::to_owned)
    };
    // A variable that cannot be read counts as false or zero, as in the Go agent; on the command line it
    // was refused above.
    let flag = |name: &str| go::boolean(&text(name)).unwrap_or_else(|| odd(name, &text(name), false));
    let env_text = |name: &str, default: &str| env.get(name).unwrap_or(default).to_owned();
    let settings = Settings {
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
        loopback_cidr: env_text("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "127.0.0.1/32"),
        owner_groups: env_text("ISTIO_OUTBOUND_OWNER_GROUPS", "*"),
        owner_groups_exclude: env_text("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", ""),
        envoy_user: env_text("ENVOY_USER", "istio-proxy"),
        dry_run_file: env_text("DRY_RUN_FILE_PATH", ""),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("Error: the runtime cannot be built: {e}");
            return command::FAILED;
        }
    };
    runtime.block_on(command::run(&settings, env.get("PATH").unwrap_or_default(), env.map()))
}

fn odd<T>(name: &str, value: &str, used: T) -> T {
    tracing::warn!("the variable of --{name} is {value:?}, which cannot be read and counts as zero");
    used
}

fn probe_port(text: &str) -> u16 {
    match text.parse::<u64>() {
        Ok(n) => u16::try_from(n).unwrap_or(u16::MAX),
        Err(_) => odd("iptables-probe-port", text, 0),
    }
}
