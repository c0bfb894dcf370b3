//! `vm clean`: all redirection away, whatever settings made it.

use std::collections::BTreeMap;

use super::{has_iptables, runner};
use crate::cli::{fail, istio_iptables};
use crate::config::args;
use crate::config::env::Env;
use crate::config::parts::iptables;
use crate::iptables::run::Runner;
use crate::vm::places::Places;

// Whatever made them, with or without the files that said how: Istio's script then leaves the DNS rules.
pub(super) fn clean(places: &Places, env: &Env) -> u8 {
    let variables = places.environment(env.map()).unwrap_or_else(|errors| {
        errors.iter().for_each(|error| tracing::warn!("{error}; the rules are removed without it"));
        (env.map().clone(), Vec::new())
    });
    // Other settings might be refused, and then nothing would be removed.
    let keep =
        ["PATH", "ISTIO_INBOUND_TPROXY_MARK", "ISTIO_INBOUND_TPROXY_ROUTE_TABLE", "KUBE_VIRT_INTERFACES"];
    let env: BTreeMap<String, String> =
        variables.0.into_iter().filter(|(n, _)| keep.contains(&n.as_str())).collect();
    let mut flags: Vec<String> =
        ["--cleanup-only", "--reconcile", "--redirect-dns", "--istio-inbound-interception-mode=TPROXY"]
            .map(str::to_owned)
            .into();
    // Where only nft is, only nft can have made them.
    let programs = runner(env.get("PATH").cloned().unwrap_or_default());
    if !has_iptables(&programs) && programs.exists("nft") {
        flags.push("--native-nftables".to_owned());
    }
    let env = super::environment(&env);
    match args::parse(&flags, iptables::FLAGS, false) {
        Ok(parsed) => {
            let mut settings = iptables::settings(&parsed, &env);
            // A machine whose network is down must not keep rules that nobody serves.
            settings.whatever_host = true;
            istio_iptables::with(&settings, &env)
        }
        Err(error) => fail(&error.to_string(), None),
    }
}
