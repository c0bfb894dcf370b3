//! Configuration: every error, every name that nobody reads, and what the parts make of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::Check;
use crate::base::bounded;
use crate::config::env::Env;
use crate::config::unknown::{self, Unknown};
use crate::config::{Sources, parts, pod, report};
use crate::trouble::Kind;

const NAME: &str = "configuration";

/// What loading says, and names that are like no other.
pub(super) fn checks(
    loaded: Result<&Arc<Sources>, &Vec<String>>,
    env: &Env,
    root: &Path,
    annotations: &BTreeMap<String, String>,
) -> Vec<Check> {
    let mut out = Vec::new();
    match loaded {
        Ok(config) => {
            let variables = report::variables(config).len();
            out.push(Check::ok(
                NAME,
                format!(
                    "{} {}, discoveryAddress {}, {variables} variables set",
                    config.node_type,
                    report::pod(config),
                    config.discovery_address()
                ),
            ));
            // Told among the ports.
            let shared = parts::ports::shared(config);
            for warning in config.warnings.iter().filter(|warning| !shared.contains(warning)) {
                out.push(Check::warn(NAME, warning.clone(), ""));
            }
            out.extend(ignored(config));
            out.extend(unread(config, root));
            out.extend(machine(env, root));
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
        let file = parts::files::mesh(config);
        if let Ok(text) = bounded::given_text(&root.join(file)) {
            add(file, unknown::mesh_fields(&text));
        }
    }
    if !strange.is_empty() {
        let said = format!("fields that nobody reads: {}", strange.join(", "));
        out.push(Check::warn(NAME, said, "take them away, unless a newer agent is to read them"));
    }
    out
}

/// A virtual machine's settings lie in files that only `vm` reads.
fn machine(env: &Env, root: &Path) -> Option<Check> {
    const FILE: &str = "var/lib/istio/envoy/cluster.env";
    let given = env.get("ISTIO_SERVICE").is_some() || env.get("CANONICAL_SERVICE").is_some();
    let place = [root, Path::new("/")].map(|dir| dir.join(FILE)).into_iter().find(|path| path.exists());
    let place = place.filter(|_| !given)?;
    let said = format!(
        "this machine has settings in {}, and what follows goes by the environment and the working directory",
        place.display()
    );
    Some(Check::warn(NAME, said, "pilot-agent vm check --root / looks with those settings"))
}

/// Values that are given and have no effect.
fn ignored(config: &Sources) -> Option<Check> {
    let names = report::without_effect(config);
    let said = format!("given and without effect: {}", names.join(", "));
    (!names.is_empty()).then(|| Check::warn(NAME, said, "take them away"))
}

/// What is given, cannot be read, and is passed over by a start.
fn unread(config: &Sources, root: &Path) -> Vec<Check> {
    let mut all = parts::envoy::metadata_faults(config);
    all.extend([pod::ANNOTATIONS, pod::LABELS].iter().filter_map(|file| pod::fault(&root.join(file))));
    all.into_iter()
        .map(|why| Check::warn(NAME, why, "repair it: istiod is not told what stands there"))
        .collect()
}

/// What would end the start.
pub(super) fn refused(errors: &[parts::Error]) -> Vec<Check> {
    let check = |error: &parts::Error| match error.kind {
        Kind::RootMissing | Kind::RootBroken => Check::fail("roots", error.kind, error.to_string()),
        kind => Check::fail(NAME, kind, error.to_string()).hint("").broken(),
    };
    errors.iter().map(check).collect()
}
