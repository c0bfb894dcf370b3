//! Who this proxy is: node id, metadata, locality, service cluster.
//!
//! A function of what others have read ([`Inputs`]): variables, the proxy config, the pod's files, the
//! platform. The rules are the Go agent's, quirks included, since istiod reads the result.

mod metadata;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::ports::SECURE_PORTS;
use super::release::Release;
use crate::bootstrap::{Locality, Node};

/// The name that stands for "no name": it lets the fallbacks of [`cluster`] decide.
const NO_NAME: &str = "istio-proxy";
/// The label of a ReplicaSet; changes with every roll-out, so it is no part of the identity.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// `serviceCluster` and `tracingServiceName` of the proxy config: one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterName {
    /// `serviceCluster`.
    Service(String),
    /// `APP_LABEL_AND_NAMESPACE`, or neither.
    AppLabelAndNamespace,
    /// `CANONICAL_NAME_ONLY`.
    CanonicalName,
    /// `CANONICAL_NAME_AND_NAMESPACE`.
    CanonicalNameAndNamespace,
}

/// What the platform says about this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Platform {
    /// Metadata `PLATFORM_METADATA`.
    pub metadata: BTreeMap<String, String>,
    /// Where the machine is.
    pub locality: Locality,
    /// The machine's own labels; only off Kubernetes.
    pub labels: BTreeMap<String, String>,
}

/// What a node is made from.
#[derive(Debug, Clone)]
pub struct Inputs<'a> {
    /// The whole environment.
    pub env: &'a BTreeMap<String, String>,
    /// Its `ISTIO_METAJSON_*`, in the order they were given.
    pub json: &'a [(&'a str, &'a str)],
    /// `sidecar`, `router`, `waypoint`, ...
    pub kind: &'a str,
    /// All addresses, `INSTANCE_IP` first; may repeat.
    pub addresses: &'a [String],
    /// `--domain`; empty: made from the namespace.
    pub domain: &'a str,
    /// `--id`, or what another registry than Kubernetes makes of it: then the domain may be empty.
    pub id: Option<&'a str>,
    /// The effective proxy config in its JSON form.
    pub proxy_config: &'a Value,
    /// `proxyMetadata`.
    pub proxy_metadata: &'a BTreeMap<String, String>,
    /// `serviceCluster` or `tracingServiceName`.
    pub cluster_name: &'a ClusterName,
    /// The SAN of istiod ([`pilot_san`]), if mutual TLS is on.
    pub pilot_san: Option<&'a str>,
    /// The labels file, if it could be read.
    pub labels: Option<&'a BTreeMap<String, String>>,
    /// The annotations file, if it could be read.
    pub annotations: Option<&'a BTreeMap<String, String>>,
    /// What the platform says.
    pub platform: &'a Platform,
    /// Somebody listens at `./var/run/secrets/credential-uds/socket`.
    pub credential_socket: bool,
    /// Workload certificates come from somebody else's SDS socket.
    pub external_sds: bool,
    /// `--stsPort`.
    pub sts_port: i64,
    /// `--outlierLogPath`.
    pub outlier_log_path: &'a str,
    /// `ENVOY_STATUS_PORT`.
    pub envoy_status_port: i64,
    /// `ENVOY_PROMETHEUS_PORT`.
    pub envoy_prometheus_port: i64,
    /// [`super::ports::SECURE_PORTS`]; 0: none.
    pub secure_ports: [i64; 2],
    /// `DNS_PROXY_ADDR` of the environment; empty: not set.
    pub dns_address: &'a str,
    /// The release to follow.
    pub release: Release,
    /// `EXIT_ON_ZERO_ACTIVE_CONNECTIONS`.
    pub exit_on_zero_connections: bool,
    /// `PEER_METADATA_DISCOVERY`, if set.
    pub metadata_discovery: Option<bool>,
    /// `ENVOY_SKIP_DEPRECATED_LOGS`.
    pub skip_deprecated_logs: bool,
    /// `WORKLOAD_IDENTITY_SOCKET_FILE`.
    pub workload_socket_file: &'a str,
}

/// Why there is no node.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A metadata field holds the wrong type.
    #[error(
        "metadata field {field} cannot be {value}: {reason}; set by ISTIO_META_{key}, ISTIO_METAJSON_* or proxyMetadata"
    )]
    Field {
        /// The field's own name.
        field: &'static str,
        /// The name it was given under.
        key: String,
        /// As given, cut at 100 characters.
        value: String,
        /// What is wanted.
        reason: &'static str,
    },
}

/// The SAN that istiod is known by: the host of the discovery address up to its first colon.
#[must_use]
pub(crate) fn pilot_san(discovery_address: &str) -> String {
    match discovery_address.split(':').next().unwrap_or_default() {
        "localhost" => "istiod.istio-system.svc".to_owned(),
        host => host.to_owned(),
    }
}

/// The domain: as given, else the namespace's.
#[must_use]
pub(crate) fn domain(flag: &str, namespace: &str) -> String {
    if flag.is_empty() { format!("{namespace}.svc.cluster.local") } else { flag.to_owned() }
}

/// Makes the node.
///
/// # Errors
/// When a metadata field that has a type was given something else.
pub fn build(inputs: &Inputs<'_>) -> Result<Node, Error> {
    let mut raw = raw(inputs);
    let mut typed = metadata::decode(&raw, inputs.release)?;

    let mut addresses: Vec<String> = Vec::new();
    for address in inputs.addresses {
        if !addresses.contains(address) {
            addresses.push(address.clone());
        }
    }
    own_fields(inputs, &addresses, &mut typed);
    if metadata::is_empty(typed.get("ISTIO_VERSION").unwrap_or(&Value::Null)) {
        typed.insert("ISTIO_VERSION".into(), json!(inputs.release.version()));
    }
    let hbone = typed.get("ENABLE_HBONE").is_some_and(|v| v == "true");
    let discovery = inputs.metadata_discovery.unwrap_or(hbone);

    let mut annotations = metadata::strings(typed.get("ANNOTATIONS"));
    annotations.extend(inputs.annotations.into_iter().flatten().map(|(k, v)| (k.clone(), v.clone())));
    let mut labels = Labels::new(&typed, inputs);
    let locality = labels.locality().unwrap_or_else(|| inputs.platform.locality.clone());
    typed.insert("ANNOTATIONS".into(), json!(annotations));
    typed.insert("LABELS".into(), json!(labels.all));
    typed.insert("STATIC_LABELS".into(), json!(labels.fixed));
    typed.retain(|_, value| !metadata::is_empty(value));
    // Always there, so that istiod sees the difference between off and an agent that does not know it.
    typed.insert("METADATA_DISCOVERY".into(), json!(discovery.to_string()));
    typed.sort_keys();

    for (key, on) in [("credential", inputs.credential_socket), ("file-credential", inputs.external_sds)] {
        if on {
            raw.insert(key.to_owned(), json!("true"));
        }
    }
    let text = |key: &str| typed.get(key).and_then(Value::as_str).unwrap_or_default();
    let cluster = cluster(inputs.cluster_name, &labels.all, text("WORKLOAD_NAME"), text("NAMESPACE"));
    Ok(Node {
        id: id(inputs),
        cluster,
        locality,
        annotations,
        addresses,
        platform: metadata::strings(typed.get("PLATFORM_METADATA")),
        hbone,
        typed,
        raw,
    })
}

// What the agent knows itself, whatever was given under these names.
fn own_fields(inputs: &Inputs<'_>, addresses: &[String], typed: &mut Map<String, Value>) {
    let env = |key: &str| inputs.env.get(key).map(String::as_str);
    let mut set = |key: &str, value: Value| drop(typed.insert(key.to_owned(), value));
    for (key, variable) in
        [("NAME", "POD_NAME"), ("NAMESPACE", "POD_NAMESPACE"), ("SERVICE_ACCOUNT", "SERVICE_ACCOUNT")]
    {
        if let Some(value) = env(variable) {
            set(key, json!(value));
        }
    }
    set("PROXY_CONFIG", inputs.proxy_config.clone());
    set("INSTANCE_IPS", json!(addresses.join(",")));
    if inputs.sts_port != 0 {
        set("STS_PORT", json!(inputs.sts_port.to_string()));
    }
    set("ENVOY_STATUS_PORT", json!(inputs.envoy_status_port));
    set("ENVOY_PROMETHEUS_PORT", json!(inputs.envoy_prometheus_port));
    for (key, port) in SECURE_PORTS.into_iter().zip(inputs.secure_ports) {
        set(key.name(), json!(port));
    }
    if inputs.release != Release::V1_30 && !inputs.dns_address.is_empty() {
        set("DNS_PROXY_ADDR", json!(inputs.dns_address));
    }
    set("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", metadata::flag(inputs.exit_on_zero_connections));
    set("ENVOY_SKIP_DEPRECATED_LOGS", metadata::flag(inputs.skip_deprecated_logs));
    set("WORKLOAD_IDENTITY_SOCKET_FILE", json!(inputs.workload_socket_file));
    set("OUTLIER_LOG_PATH", json!(inputs.outlier_log_path));
    set("PILOT_SAN", inputs.pilot_san.map_or(Value::Null, |san| json!([san])));
    if !inputs.platform.metadata.is_empty() {
        set("PLATFORM_METADATA", json!(inputs.platform.metadata));
    }
}

fn id(inputs: &Inputs<'_>) -> String {
    let env = |key: &str| inputs.env.get(key).map(String::as_str).unwrap_or_default();
    let (name, namespace) = (env("POD_NAME"), env("POD_NAMESPACE"));
    let address = inputs.addresses.first().map(String::as_str).unwrap_or_default();
    match inputs.id {
        Some(id) => format!("{}~{address}~{id}~{}", inputs.kind, inputs.domain),
        None => format!("{}~{address}~{name}.{namespace}~{}", inputs.kind, domain(inputs.domain, namespace)),
    }
}

// proxyMetadata, then ISTIO_META_*, then the members of ISTIO_METAJSON_* objects, the later ones over the earlier.
fn raw(inputs: &Inputs<'_>) -> Map<String, Value> {
    let mut raw = Map::new();
    let meta = |(k, v): (&String, &String)| Some((k.strip_prefix("ISTIO_META_")?.to_owned(), json!(v)));
    raw.extend(inputs.proxy_metadata.iter().filter_map(meta));
    raw.extend(inputs.env.iter().filter_map(meta));
    for (name, text) in inputs.json {
        match members(text) {
            Ok(members) => raw.extend(members.into_iter().map(|(k, v)| (k, doubles(v)))),
            Err(why) => tracing::warn!("{name} is ignored: {why}"),
        }
    }
    raw
}

/// Why a variable with metadata has no effect.
#[derive(Debug, thiserror::Error)]
enum NoObject {
    #[error("not a JSON object")]
    Other,
    #[error("not a JSON object: {0}")]
    NoJson(#[from] serde_json::Error),
}

fn members(text: &str) -> Result<Map<String, Value>, NoObject> {
    match serde_json::from_str::<Value>(text)? {
        Value::Object(members) => Ok(members),
        _ => Err(NoObject::Other),
    }
}

/// What such a variable has no effect for, if that is so.
pub(super) fn fault(name: &str, text: &str) -> Option<String> {
    members(text).err().map(|why| format!("{name} is ignored: {why}"))
}

// Numbers as istiod knows them from the Go agent: in double precision, whole ones without a fraction.
fn doubles(value: Value) -> Value {
    match value {
        Value::Number(number) => {
            let double = number.as_f64().unwrap_or_default();
            #[expect(clippy::cast_possible_truncation, reason = "whole and within 53 bits")]
            if double.fract() == 0.0 && double.abs() <= 9_007_199_254_740_992.0 {
                json!(double as i64)
            } else {
                json!(double)
            }
        }
        Value::Array(list) => list.into_iter().map(doubles).collect(),
        Value::Object(members) => members.into_iter().map(|(k, v)| (k, doubles(v))).collect(),
        other => other,
    }
}

struct Labels {
    all: BTreeMap<String, String>,
    fixed: BTreeMap<String, String>,
    // Without a labels file both are one thing, and what is written into one shows in the other.
    shared: bool,
}

impl Labels {
    fn new(typed: &Map<String, Value>, inputs: &Inputs<'_>) -> Self {
        let mut all = metadata::strings(typed.get("LABELS"));
        let mut fixed = metadata::strings(typed.get("STATIC_LABELS"));
        let mut shared = false;
        if let Some(given) = inputs.env.get("ISTIO_METAJSON_LABELS").map(|text| given_labels(text))
            && !given.is_empty()
        {
            (all, fixed, shared) = (given.clone(), given, true);
        }
        let own = &inputs.platform.labels;
        fixed.extend(own.iter().map(|(k, v)| (k.clone(), v.clone())));
        if shared {
            all.extend(own.iter().map(|(k, v)| (k.clone(), v.clone())));
        }
        if let Some(file) = inputs.labels {
            all = fixed.clone();
            all.extend(file.iter().filter(|(k, _)| *k != TEMPLATE_HASH).map(|(k, v)| (k.clone(), v.clone())));
            shared = false;
        }
        Self { all, fixed, shared }
    }

    // The label's locality; its tidied text is kept under the old label's name. The new label counts as soon as it is
    // there: empty, it asks for the platform's.
    fn locality(&mut self) -> Option<Locality> {
        let of = |key: &str| self.all.get(key);
        let text = of("topology.istio.io/locality").or_else(|| of("istio-locality"))?;
        if text.is_empty() {
            return None;
        }
        let text = if text.contains('/') { text.clone() } else { text.replace('.', "/") };
        self.all.insert("istio-locality".to_owned(), text.clone());
        if self.shared {
            self.fixed.insert("istio-locality".to_owned(), text.clone());
        }
        let mut parts = text.split('/').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        Some(Locality { region: next(), zone: next(), sub_zone: next() })
    }
}

fn given_labels(text: &str) -> BTreeMap<String, String> {
    let Ok(Value::Object(members)) = serde_json::from_str::<Value>(text) else { return BTreeMap::new() };
    let text_of = |(key, value): (String, Value)| match value {
        Value::String(text) => (key, text),
        other => {
            tracing::warn!("the label {key} of ISTIO_METAJSON_LABELS is left empty: {other} is no text");
            (key, String::new())
        }
    };
    members.into_iter().map(text_of).collect()
}

/// Envoy's service cluster: a name of its own, or what the pod's labels say.
fn cluster(name: &ClusterName, labels: &BTreeMap<String, String>, workload: &str, namespace: &str) -> String {
    let label = |keys: [&str; 3]| keys.into_iter().find_map(|key| labels.get(key));
    let fallback = |name: &str| {
        if !name.is_empty() && name != NO_NAME {
            return name.to_owned();
        }
        if let Some(app) = label(["app", "app.kubernetes.io/name", "service.istio.io/canonical-name"]) {
            return format!("{app}.{namespace}");
        }
        match (workload, namespace) {
            ("", "") => NO_NAME.to_owned(),
            ("", _) => format!("{NO_NAME}.{namespace}"),
            _ => format!("{workload}.{namespace}"),
        }
    };
    let canonical = || {
        let label = label(["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]);
        label.map_or(if workload.is_empty() { NO_NAME } else { workload }, String::as_str).to_owned()
    };
    match name {
        ClusterName::Service(name) => fallback(name),
        ClusterName::AppLabelAndNamespace => fallback(NO_NAME),
        ClusterName::CanonicalNameAndNamespace if !namespace.is_empty() => {
            format!("{}.{namespace}", canonical())
        }
        ClusterName::CanonicalName | ClusterName::CanonicalNameAndNamespace => fallback(&canonical()),
    }
}
