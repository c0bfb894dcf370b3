//! What can stand behind a flag or a command, for completion and man pages. Nothing is refused by it.

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, ValueHint};

use super::{COMMANDS, vm};
use crate::base::logging::SCOPES;
use crate::envoy::command;

/// Names behind `completion`.
pub(super) const SHELLS: [&str; 4] = ["bash", "zsh", "fish", "powershell"];

const LEVELS: [&str; 6] = ["debug", "info", "warn", "error", "fatal", "none"];
const ROLES: [&str; 5] = ["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];
const METHODS: [&str; 4] = ["GET", "POST", "PUT", "DELETE"];
/// What people ask of Envoy's admin port and of the agent's own.
const PATHS: [&str; 14] = [
    "clusters",
    "config_dump",
    "listeners",
    "logging",
    "server_info",
    "stats",
    "stats/prometheus",
    "healthz/ready",
    "drain",
    "quitquitquit",
    "debug/agentz",
    "debug/hot_restart",
    "debug/syncz",
    "debug/config_dump",
];

/// An argument with what can stand behind it.
pub(super) fn flag(command: &str, name: &str, arg: Arg) -> Arg {
    match (command, name) {
        (_, "log_output_level" | "log_stacktrace_level") => {
            let scopes =
                SCOPES.iter().chain(&["all"]).flat_map(|s| LEVELS.map(|level| format!("{s}:{level}")));
            values(arg, LEVELS.map(str::to_owned).into_iter().chain(scopes))
        }
        (_, "log_caller") => values(arg, SCOPES.iter().chain(&["all"])),
        (_, "log_target") => arg.value_hint(ValueHint::FilePath),
        ("proxy", "proxyLogLevel" | "proxyComponentLogLevel") => values(arg, command::LEVELS),
        ("proxy", "meshConfig" | "templateFile" | "outlierLogPath") => arg.value_hint(ValueHint::FilePath),
        ("request", "debug-port") => values(arg, ["15000", "15004", "15020", "15021"]),
        ("version", "output") => values(arg, ["json", "yaml", "full", "full-json"]),
        ("istio-iptables", "istio-inbound-interception-mode") => values(arg, ["REDIRECT", "TPROXY"]),
        ("istio-iptables", "force-iptables-binary") => values(arg, ["legacy", "nft"]),
        ("istio-iptables", "network-namespace") => arg.value_hint(ValueHint::FilePath),
        ("vm", "root" | "certs" | "dir") => arg.value_hint(ValueHint::DirPath),
        ("upgrade", _) => arg.value_hint(ValueHint::FilePath),
        ("vm", _) => arg.value_hint(ValueHint::FilePath),
        _ => arg,
    }
}

/// The words behind a command.
pub(super) fn words(command: &str) -> Vec<Arg> {
    let one = |name: &'static str| Arg::new(name).hide(true);
    match command {
        "proxy" => vec![values(one("type"), ROLES)],
        "request" => vec![values(one("method"), METHODS), values(one("path"), PATHS)],
        "completion" => vec![values(one("shell"), SHELLS)],
        "help" => vec![values(one("command"), COMMANDS.iter().filter(|c| !c.hidden).map(|c| c.name))],
        "vm" => {
            let actions = vm::ACTIONS.map(|(name, about)| PossibleValue::new(name).help(about));
            vec![one("action").value_parser(PossibleValuesParser::new(actions)).hide_possible_values(true)]
        }
        _ => Vec::new(),
    }
}

fn values<T: AsRef<str>>(arg: Arg, all: impl IntoIterator<Item = T>) -> Arg {
    let all: Vec<PossibleValue> =
        all.into_iter().map(|v| PossibleValue::new(v.as_ref().to_owned())).collect();
    arg.value_parser(PossibleValuesParser::new(all)).hide_possible_values(true)
}
