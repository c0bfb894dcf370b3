//! `vm check`: a line for each thing, and what is in force of the rules.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::{environment, has_iptables, prepare, runner, startable};
use crate::config::Sources;
use crate::config::args;
use crate::config::env::Env;
use crate::config::parts::ca::{self, Signer};
use crate::config::parts::envoy::Presence;
use crate::config::parts::{self, Error, identity, iptables};
use crate::iptables::detect;
use crate::iptables::model::Family;
use crate::iptables::native as nft;
use crate::iptables::run::Runner;
use crate::trouble::Kind;
use crate::vm::check::{self, Grade, Way};
use crate::vm::places::Places;
use crate::vm::rights;

pub(super) fn look(places: &Places, env: &Env) -> u8 {
    let told = |grade, said| check::Line { grade, what: "settings", said };
    let now = SystemTime::now();
    let mut lines: Vec<check::Line>;
    let mut own_rules = false;
    let (by_nft, path);
    // As the agent's own: right under the unit, a surprise in somebody's home.
    let here = std::env::current_dir().unwrap_or_default();
    let elsewhere = (places.root == Path::new(".") && here != Path::new("/")).then(|| {
        format!(
            "places hang off {}, the working directory: --root / looks at this machine's own",
            here.display()
        )
    });
    match prepare(places, env) {
        Ok((plan, config)) => {
            lines = in_force(places).into_iter().map(|said| told(Grade::Ok, said)).collect();
            lines.extend(plan.warnings.iter().map(|warning| told(Grade::Warn, warning.clone())));
            // A root that is not there has a line of its own, and so has every other file that is missing.
            let wrong = startable(&plan, &config).into_iter();
            let wrong = wrong.filter(|error| error.kind != Kind::RootMissing && error.missing.is_none());
            lines.extend(wrong.map(|error| told(Grade::Fail, error.text)));
            own_rules = plan.rules.is_none();
            by_nft = native(&plan.env);
            path = plan.env.get("PATH").cloned();
            let facts = rights::become_for(plan.become_user.as_ref(), || facts(&config));
            let facts = facts.unwrap_or_else(|_| self::facts(&config));
            lines.extend(check::look(places, &plan.env, Some((&plan, &facts)), now));
        }
        Err(errors) => {
            lines = errors.into_iter().map(|error| told(Grade::Fail, error)).collect();
            let variables = places.environment(env.map());
            let mut variables = variables.map_or_else(|_| env.map().clone(), |(variables, _)| variables);
            let named = places.certs.as_ref().map(|dir| dir.to_string_lossy().into_owned());
            let certs = named.or_else(|| variables.get("PROV_CERT").cloned());
            variables.insert("PROV_CERT".to_owned(), certs.unwrap_or_else(|| "./etc/certs".to_owned()));
            lines.extend(check::look(places, &variables, None, now));
            by_nft = native(&variables);
            path = variables.get("PATH").cloned();
        }
    }
    lines.extend(elsewhere.map(|said| check::Line { grade: Grade::Warn, what: "places", said }));
    // Others than root cannot see the rules; that it needs root was said.
    if own_rules || rustix::process::geteuid().is_root() {
        lines.push(redirected(own_rules, by_nft, path.unwrap_or_default()));
    }
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let lost = crate::cli::request::print(text.as_bytes());
    lost.max(u8::from(lines.iter().any(|line| line.grade == Grade::Fail)))
}

// What each file sets, and whose word counts where both do. Values of other names than these are not shown: they may be secrets.
fn in_force(places: &Places) -> Vec<String> {
    let [operators, istioctls] = places.settings();
    let of = |(file, set): &(String, BTreeMap<String, String>), over: &BTreeMap<String, String>| {
        let counts = |name: &&String| !over.contains_key(*name);
        let shown = |name: &String| match &set[name] {
            value if name.starts_with("ISTIO_") && !value.contains('\n') => format!("{name}='{value}'"),
            _ => name.clone(),
        };
        let mut said: Vec<String> = set.keys().filter(counts).map(shown).collect();
        let passed: Vec<&str> = set.keys().filter(|name| !counts(name)).map(String::as_str).collect();
        if !passed.is_empty() {
            said.push(format!("not {}, which the other file sets as well", passed.join(", ")));
        }
        (!said.is_empty()).then(|| format!("{file}: {}", said.join(", ")))
    };
    let none = BTreeMap::new();
    [of(&operators, &istioctls.1), of(&istioctls, &none)].into_iter().flatten().collect()
}

fn facts(config: &Arc<Sources>) -> check::Facts {
    let mounted = parts::identity::plan(config).is_ok_and(|plan| plan.file_mounted);
    let xds = match parts::istiod::xds(config, mounted) {
        Ok(istiod) => Some(Way::By(istiod.transport)),
        Err(error) => barred(error),
    };
    let ca = match parts::ca::signer(config, mounted) {
        Ok(signer) => signer.as_ref().and_then(Signer::connection).map(|ca| Way::By(ca.transport.clone())),
        Err(error) => barred(error).filter(|_| !parts::identity::may_be_external(config)),
    };
    check::Facts {
        envoy: match parts::envoy::presence(config) {
            Ok(Presence::External) => Err("somebody else's business (ENVOY_EXTERNAL)"),
            Ok(Presence::None) => Err("there is none (DISABLE_ENVOY)"),
            Ok(Presence::Own) | Err(_) => Ok(config.envoy_binary().to_owned()),
        },
        xds,
        ca,
        servers: servers(config, mounted),
        without_token: without_token(config, mounted),
        work: config.config_path(),
    }
}

// Where a root cannot be located, the addresses are known all the same.
fn servers(config: &Arc<Sources>, mounted: bool) -> Vec<check::Server> {
    let istiod = config.discovery_address().to_owned();
    let proxy = parts::istiod::proxy(config, "HTTPS_PROXY");
    let ca = ca::place(config, mounted);
    let ca = ca.filter(|(address, _)| !address.is_empty() && *address != istiod);
    let istiod = check::Server { what: "istiod", address: istiod, proxy };
    let ca = ca.map(|(address, proxy)| check::Server { what: "ca", address, proxy });
    std::iter::once(istiod).chain(ca).collect()
}

fn without_token(config: &Sources, mounted: bool) -> Option<&'static str> {
    use identity::Fetcher;
    let fetcher = identity::tokens(config).ok().map(|tokens| tokens.fetcher);
    match fetcher {
        _ if mounted => Some("certificates are mounted"),
        Some(Fetcher::GoogleComputeEngine(_)) => {
            Some("the metadata server gives it (CREDENTIAL_FETCHER_TYPE)")
        }
        Some(Fetcher::Mock) => Some("a fixed one is sent (CREDENTIAL_FETCHER_TYPE=Mock)"),
        _ => None,
    }
}

// What is not about a root was told with the settings.
fn barred(error: Error) -> Option<Way> {
    let of_root = error.kind == Kind::RootMissing || error.missing.is_some();
    of_root.then_some(Way::Barred(error.text))
}

// Programs are looked for where the rules' own command will.
fn redirected(own_rules: bool, by_nft: bool, path: String) -> check::Line {
    let rules = |grade, said: &str| check::Line { grade, what: "rules", said: said.to_owned() };
    if own_rules {
        return rules(Grade::Ok, "somebody else's business (ISTIO_CUSTOM_IP_TABLES)");
    }
    let mut runner = runner(path);
    let lack = match (by_nft, has_iptables(&runner), runner.exists("nft")) {
        (true, _, false) => {
            Some("NATIVE_NFTABLES=true, and no nft on the PATH: install the package nftables")
        }
        (false, false, false) => Some("no iptables on the PATH: install the package iptables"),
        (false, false, true) => Some(
            "no iptables on the PATH: install the package iptables, or set NATIVE_NFTABLES=true in sidecar.env, \
             since nft is there",
        ),
        _ => None,
    };
    if let Some(lack) = lack {
        return rules(Grade::Fail, lack);
    }
    let there = nft::there(&mut runner)
        || [Family::V4, Family::V6].into_iter().any(|family| {
            detect::leftovers(&mut runner, family, None).is_some_and(|c| c.backend.state.has_ours())
        });
    let said = if there { "traffic is redirected" } else { "nothing is redirected yet; vm run does it" };
    rules(Grade::Ok, said)
}

// Whether the rules are to be made by nft itself.
fn native(variables: &BTreeMap<String, String>) -> bool {
    args::parse(&[], iptables::FLAGS, false)
        .is_ok_and(|none| iptables::settings(&none, &environment(variables)).native_nftables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_wrong_with_a_root_has_a_line_of_its_own() {
        assert!(barred(Error::new("some setting")).is_none());
        for of_root in [Error::no_root("none"), Error::missing("not there", "/root.pem".into())] {
            assert!(matches!(barred(of_root), Some(Way::Barred(_))));
        }
    }
}
