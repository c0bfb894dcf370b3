//! The bootstrap template at its old place: used when somebody has changed it, passed over when it is one of Istio's.
//!
//! The Go agents read their template from [`PLACE`]; images and machines that were made for them still have it, most
//! as it came, some changed. This agent's bootstrap is built in, so only a changed one matters. Those of the releases that
//! this agent stands in for are known by their sums ([`RELEASED`]). No list of sums can be complete (patch releases,
//! vendors), so the rule for any other looks at what a template gives: rendered with settings of our own, once plain and once with collectors, it is a stock one when everything it gives is in the
//! built-in bootstrap as well, but for what older releases had otherwise ([`was_so`]). What is left out counts for nothing:
//! older releases had less. A template for version 2 of Envoy's API, or one that gives no JSON, is passed over with a
//! warning: no supported Envoy could start with it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::parts::at;
use crate::base::{bounded, heap, sha256};
use crate::bootstrap::{self, Node, Options, RemoteService, Tracer, params, template};

/// Where the Go agents' images have their template.
pub(super) const PLACE: &str = "./var/lib/istio/envoy/envoy_bootstrap_tmpl.json";

/// Words that only version 2 of Envoy's API has.
const API_V2: [&str; 3] = ["envoy.api.v2", "envoy.http_connection_manager", "envoy.config.bootstrap.v2"];

/// SHA-256 of templates that came with a release, so that a start in its image costs a sum and not two renderings (some
/// 3 ms of CPU): `tools/packaging/common/envoy_bootstrap.json` of Istio's branches `release-1.30` and `release-1.31`, both
/// as they stood at the end of August 2026.
const RELEASED: [&str; 2] = [
    "475be1655dfdf9abfe376446c06a071530ea816e238d54cbd4c10962f1a22eda",
    "d3a3fe34ac9f314ddd5e6db9c049d8deb405f6088ae398608f85a3d7007c7c28",
];

/// What is at the old place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// No file.
    Nothing,
    /// As it came with some release.
    Stock,
    /// Somebody's own; with the first thing that no release had.
    Changed(String),
    /// Not usable, and why.
    Useless(String),
}

/// Looks at the file.
pub(super) fn look(path: &Path, env: &BTreeMap<String, String>) -> Found {
    // A pipe would be waited for.
    if !path.is_file() {
        return Found::Nothing;
    }
    match bounded::given(path) {
        Ok(text) => told(&text, &RELEASED, env),
        Err(e) => Found::Useless(e.to_string()),
    }
}

/// The template to use, if there is one of somebody's own.
pub(super) fn own(
    root: &Path,
    env: &BTreeMap<String, String>,
    warnings: &mut Vec<String>,
) -> Option<PathBuf> {
    let place = at(root, PLACE);
    match look(&place, env) {
        Found::Nothing => None,
        Found::Stock => {
            tracing::info!(
                "the bootstrap template {PLACE} is the unchanged one of a release and is ignored: this release's is built in"
            );
            None
        }
        Found::Changed(thing) => {
            tracing::info!(
                "the bootstrap template {PLACE} was changed (no release has {thing}): it is used, as with --templateFile={PLACE}"
            );
            Some(place)
        }
        Found::Useless(why) => {
            warnings.push(format!(
                "the bootstrap template {PLACE} is passed over: {why}; take it away, or name it with --templateFile to use it all the same"
            ));
            None
        }
    }
}

fn told(text: &[u8], released: &[&str], env: &BTreeMap<String, String>) -> Found {
    if released.contains(&sha256::of(text).as_str()) {
        return Found::Stock;
    }
    heap::aside(|| judge(&String::from_utf8_lossy(text), env))
}

fn judge(text: &str, env: &BTreeMap<String, String>) -> Found {
    if API_V2.iter().any(|word| text.contains(word)) {
        return Found::Useless("it is written for version 2 of Envoy's API".to_owned());
    }
    for options in samples() {
        let (Ok(built_in), Ok(data)) = (bootstrap::generate(&options), params::all(&options)) else {
            return Found::Useless("there is nothing to compare it with".to_owned());
        };
        let rendered = match template::render(text, &data, env) {
            Ok(rendered) => rendered,
            Err(e) => return Found::Useless(crate::base::error::chain(&e)),
        };
        let mut given: Value = match serde_json::from_str(&rendered) {
            Ok(given) => given,
            Err(e) => return Found::Useless(format!("what it gives is not JSON: {e}")),
        };
        // The tags of metrics before they were configured; each release had others.
        if let Some(Value::Array(tags)) = given.pointer_mut("/stats_config/stats_tags") {
            tags.retain(|tag| !tag["regex"].as_str().is_some_and(|regex| regex.contains("=\\.=")));
        }
        if let Some(thing) = foreign(&given, &built_in) {
            return Found::Changed(thing);
        }
    }
    Found::Stock
}

/// Settings whose values can be told apart from anything that stands in a template.
fn samples() -> [Options; 2] {
    let node =
        Node { id: "sidecar~192.0.2.1~a.b~c".to_owned(), cluster: "a.b".to_owned(), ..Node::default() };
    let plain = Options {
        node,
        proxy_config: serde_json::json!({
            "configPath": "./etc/istio/proxy", "proxyAdminPort": 15000, "statusPort": 15020, "controlPlaneAuthPolicy": "MUTUAL_TLS",
        }),
        ..Options::default()
    };
    let service =
        |address: &str| Some(RemoteService { address: address.to_owned(), ..RemoteService::default() });
    let collectors = Options {
        tracer: Some(Tracer::Zipkin { address: "zipkin.test:9411".to_owned() }),
        metrics_service: service("metrics.test:1"),
        access_log_service: service("logs.test:1"),
        statsd_address: "192.0.2.2:8125".to_owned(),
        ..plain.clone()
    };
    [plain, collectors]
}

/// The first thing in `given` that is not in `known`.
fn foreign(given: &Value, known: &Value) -> Option<String> {
    let mut there = HashSet::new();
    each(known, &mut Vec::new(), &mut |path, value| {
        there.insert(mark(path, value));
        None::<()>
    });
    let (path, value) = each(given, &mut Vec::new(), &mut |path, value| {
        let is_new = !there.contains(&mark(path, value)) && !was_so(path, &value.to_string());
        is_new.then(|| (path.iter().map(ToString::to_string).collect::<Vec<_>>(), value.to_string()))
    })?;
    let mut ways = HashSet::new();
    each(known, &mut Vec::new(), &mut |path, _| {
        ways.extend((1..=path.len()).map(|n| path[..n].join("\0")));
        None::<()>
    });
    Some(match (1..=path.len()).find(|n| !ways.contains(&path[..*n].join("\0"))) {
        Some(unknown) => path[..unknown].join("."),
        None => format!("{} = {value}", path.join(".")),
    })
}

/// Stands for a value and the way to it. An agent in one of Istio's images has four thousand of them at each start, so they
/// are not kept; two are never alike by chance.
fn mark(path: &[Cow<'_, str>], value: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    (path, value).hash(&mut hasher);
    hasher.finish()
}

/// What stock templates of older releases had otherwise: expressions of stats tags, layers of runtime flags, the way
/// to istiod before all went by the agent, the agent's older socket, options that have moved, the compressor's forms.
fn was_so(path: &[Cow<'_, str>], value: &str) -> bool {
    let path = path.join(".");
    let under = |prefixes: &[&str]| prefixes.iter().any(|p| path.starts_with(p));
    under(&[
        "node.",
        "tracing.",
        "layered_runtime.layers.deprecation",
        "static_resources.clusters.xds-grpc.transport_socket",
        "static_resources.clusters.xds-grpc.load_assignment",
        "static_resources.clusters.xds-grpc.dns_",
        "static_resources.clusters.xds-grpc.respect_dns_ttl",
        "static_resources.clusters.xds-grpc.type",
        "admin.access_log_path",
    ]) || ["google_re2", "http2_protocol_options", "http_filters.envoy.filters.http.compressor"]
        .iter()
        .any(|old| path.contains(old))
        || path.starts_with("static_resources.clusters.sds-grpc.load_assignment")
            && value.ends_with("/etc/istio/proxy/SDS\"")
        || path.starts_with("stats_config.stats_tags.") && path.ends_with(".regex")
        || ["re2.max_program_size.error_level", "overload.global_downstream_max_connections"]
            .iter()
            .any(|key| path.ends_with(key))
}

/// What `found` gives for the first value of which it gives anything, with the way to it; members of lists are known by
/// their names, so that their order does not count.
fn each<'a, T>(
    value: &'a Value,
    path: &mut Vec<Cow<'a, str>>,
    found: &mut impl FnMut(&[Cow<'a, str>], &'a Value) -> Option<T>,
) -> Option<T> {
    let mut below = |name, member| {
        path.push(name);
        let out = each(member, path, found);
        path.pop();
        out
    };
    match value {
        Value::Object(members) if !members.is_empty() => {
            members.iter().find_map(|(name, member)| below(Cow::Borrowed(name), member))
        }
        // An empty list is what a condition has left of one.
        Value::Null => None,
        Value::Array(list) => list.iter().enumerate().find_map(|(place, member)| {
            below(name_of(member).unwrap_or_else(|| Cow::Owned(place.to_string())), member)
        }),
        other => found(path, other),
    }
}

/// Listeners by their port, as older releases gave them no name; patterns by themselves.
fn name_of(member: &Value) -> Option<Cow<'_, str>> {
    if let Some(port) = member.pointer("/address/socket_address/port_value") {
        return Some(Cow::Owned(port.to_string()));
    }
    let named = ["name", "tag_name", "priority"].iter().find_map(|key| member.get(key)?.as_str());
    let pattern = ["prefix", "suffix", "safe_regex"].iter().any(|key| member.get(key).is_some());
    named.map(Cow::Borrowed).or_else(|| pattern.then(|| Cow::Owned(member.to_string())))
}

#[cfg(test)]
mod tests;
