//! Configuration: every error, every name that nobody reads, and what the parts make of it.

use std::collections::BTreeMap;
use std::path::Path;

use super::Check;
use crate::config::args;
use crate::config::env::{Env, WITHOUT_EFFECT, var};
use crate::config::parts::{self, identity};
use crate::config::unknown::{self, Unknown};
use crate::config::{Config, report};
use crate::trouble::Kind;

const NAME: &str = "configuration";

/// What loading says, and names that are like no other.
pub(super) fn checks(
    loaded: Result<&Config, &Vec<String>>,
    env: &Env,
    root: &Path,
    annotations: &BTreeMap<String, String>,
) -> Vec<Check> {
    let mut out = Vec::new();
    match loaded {
        Ok(config) => {
            let s = &config.settings;
            let variables = report::variables(config).len();
            out.push(Check::ok(
                NAME,
                format!(
                    "{} {}.{}, discoveryAddress {}, {variables} variables set",
                    config.node_type,
                    s.text(var::POD_NAME),
                    s.text(var::POD_NAMESPACE),
                    config.mesh.proxy.discovery_address
                ),
            ));
            for warning in &config.warnings {
                out.push(Check::warn(NAME, warning.clone(), ""));
            }
            out.extend(ignored(config));
        }
        Err(errors) => {
            out.extend(errors.iter().map(|e| Check::fail(NAME, Kind::ConfigInvalid, e.clone()).hint("")));
        }
    }
    // Loading names what looks like a slip. What is like nothing else may be a newer istiod's.
    let mut strange: Vec<String> = Vec::new();
    let mut add = |source: &str, found: Vec<Unknown>| {
        let unlike = found.into_iter().filter(|u| u.nearest.is_none());
        strange.extend(unlike.map(|u| format!("{} of {source}", u.name)));
    };
    if let Some(text) = env.get("PROXY_CONFIG") {
        add("PROXY_CONFIG", unknown::fields(text));
    }
    if let Some(text) = annotations.get("proxy.istio.io/config") {
        add("the annotation proxy.istio.io/config", unknown::fields(text));
    }
    if let Ok(config) = loaded {
        let file = config.flags.or_default(args::PROXY, "meshConfig");
        if let Ok(text) = std::fs::read_to_string(root.join(file)) {
            add(file, unknown::mesh_fields(&text));
        }
    }
    if !strange.is_empty() {
        let said = format!("fields that nobody reads: {}", strange.join(", "));
        out.push(Check::warn(NAME, said, "take them away, unless a newer agent is to read them"));
    }
    out
}

/// Values that are given and have no effect.
fn ignored(config: &Config) -> Vec<Check> {
    let env = config.settings.env();
    let mut names: Vec<String> = Vec::new();
    let old = args::PROXY.iter().filter(|f| f.old && f.help.contains("without effect"));
    names.extend(old.filter(|f| config.flags.get(f.name).is_some()).map(|f| format!("--{}", f.name)));
    // Those the injector always sets are in every pod.
    let everywhere = ["GOMEMLIMIT", "GOMAXPROCS", "TOKEN_AUDIENCES"];
    let without = WITHOUT_EFFECT.iter().filter(|n| !everywhere.contains(n));
    names.extend(without.filter(|n| env.get(n).is_some()).map(|n| (*n).to_owned()));
    if config.settings.some_text(var::CA_ADDR).is_some() && config.settings.flag(var::FILE_MOUNTED_CERTS) {
        names.push("CA_ADDR (FILE_MOUNTED_CERTS takes certificates from files)".to_owned());
    }
    if names.is_empty() {
        return Vec::new();
    }
    let said = format!("given and without effect: {}", names.join(", "));
    vec![Check::warn(NAME, said, "take them away")]
}

/// What the parts of the agent refuse.
pub(super) fn parts(config: &Config) -> Vec<Check> {
    let mut out = Vec::new();
    let mut refused = |text: String| out.push(Check::fail(NAME, Kind::ConfigInvalid, text).hint(""));
    let ipv6 = crate::agent::all_ipv6(&config.addresses);
    if let Err(e) = parts::status::server(config, ipv6) {
        refused(e.to_string());
    }
    if let Err(e) = identity::plan(config) {
        refused(e.to_string());
    }
    let root = rustix::process::getuid().is_root();
    if let Err(e) = parts::envoy::process(config, &config.addresses, Path::new("/proc/self/exe"), root) {
        refused(e.to_string());
    }
    if let Err(e) = crate::ca::provider::Provider::resolve(
        config.settings.text(var::CA_PROVIDER),
        config.settings.some_text(var::CA_ADDR).unwrap_or_default(),
        config.settings.flag(var::ENABLE_GOOGLE_CA),
    ) {
        refused(e.to_string());
    }
    out
}
