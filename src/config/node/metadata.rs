//! The metadata fields that have a type, read from whatever was given as metadata.
//!
//! Names are matched without regard to case; of two spellings the one that sorts last wins, which is the
//! lower-case one.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::Error;
use crate::config::jsonpb;
use crate::config::release::Release;
use crate::proto::schema::ISTIO_MESH_V1ALPHA1_PROXYCONFIG as PROXY;

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Text.
    Text,
    /// A whole number.
    Number,
    /// Text that is a boolean; shown as `"true"` or left out.
    Flag,
    /// The same, or nothing.
    MaybeFlag,
    /// An object of texts.
    Texts,
    /// A list of texts.
    List,
    /// Text that holds a JSON list of container ports.
    Ports,
    /// The proxy config; the agent's own is shown, but another type is refused.
    Object,
    /// Whatever is given; the agent's own is shown.
    Own,
}

const FIELDS: &[(&str, Kind)] = {
    use Kind::{Flag, List, MaybeFlag, Number, Object, Own, Ports, Text, Texts};
    &[
        ("PROXY_CONFIG", Object),
        ("ISTIO_VERSION", Text),
        ("ISTIO_REVISION", Text),
        ("LABELS", Texts),
        ("STATIC_LABELS", Texts),
        ("ANNOTATIONS", Texts),
        ("INSTANCE_IPS", Own),
        ("NAME", Text),
        ("NAMESPACE", Text),
        ("SERVICE_ACCOUNT", Text),
        ("NODE_NAME", Text),
        ("WORKLOAD_NAME", Text),
        ("OWNER", Text),
        ("INTERCEPTION_MODE", Text),
        ("MESH_ID", Text),
        ("CLUSTER_ID", Text),
        ("NETWORK", Text),
        ("APP_CONTAINERS", Text),
        ("ISTIO_PROXY_SHA", Text),
        ("REQUESTED_NETWORK_VIEW", Text),
        ("POD_PORTS", Ports),
        ("GENERATOR", Text),
        ("HTTP_PROXY_PORT", Text),
        ("IDLE_TIMEOUT", Text),
        ("HTTP10", Text),
        ("BASE", Text),
        ("AUTO_REGISTER_GROUP", Text),
        ("WORKLOAD_ENTRY", Text),
        ("UNPRIVILEGED_POD", Text),
        ("CLOUDRUN_ADDR", Text),
        ("TLS_SERVER_CERT_CHAIN", Text),
        ("TLS_SERVER_KEY", Text),
        ("TLS_SERVER_ROOT_CERT", Text),
        ("TLS_CLIENT_CERT_CHAIN", Text),
        ("TLS_CLIENT_KEY", Text),
        ("TLS_CLIENT_ROOT_CERT", Text),
        ("DNS_CAPTURE", Flag),
        ("DNS_AUTO_ALLOCATE", Flag),
        ("ENABLE_HBONE", Flag),
        ("DISABLE_HBONE_SEND", Flag),
        ("INBOUND_LISTENER_EXACT_BALANCE", Flag),
        ("OUTBOUND_LISTENER_EXACT_BALANCE", Flag),
        ("PLATFORM_METADATA", Texts),
        ("STS_PORT", Text),
        ("ENVOY_STATUS_PORT", Number),
        ("ENVOY_PROMETHEUS_PORT", Number),
        ("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", Flag),
        ("METADATA_DISCOVERY", MaybeFlag),
        ("ENVOY_SKIP_DEPRECATED_LOGS", Flag),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", Text),
        ("PILOT_SAN", List),
        ("OUTLIER_LOG_PATH", Text),
        ("ENVOY_SECURE_METRICS_PORT", Number),
        ("ENVOY_SECURE_MERGED_METRICS_PORT", Number),
        ("ENABLE_SELF_DISCOVERY", Flag),
        ("DNS_PROXY_ADDR", Text),
    ]
};

/// How many fields at the end of the list are 1.31's own.
const NEW_IN_31: usize = 4;

/// The typed fields of `raw`; empty ones included.
pub(super) fn decode(raw: &Map<String, Value>, release: Release) -> Result<Map<String, Value>, Error> {
    let fields = if release == Release::V1_30 { &FIELDS[..FIELDS.len() - NEW_IN_31] } else { FIELDS };
    let mut typed = Map::new();
    let sorted: BTreeMap<_, _> = raw.iter().collect();
    for (key, value) in sorted {
        let Some((field, kind)) = fields.iter().find(|(field, _)| field.eq_ignore_ascii_case(key)) else {
            continue;
        };
        let read = read(*kind, value).map_err(|reason| Error::Field {
            field,
            key: key.clone(),
            value: value.to_string().chars().take(100).collect(),
            reason,
        })?;
        match (read, typed.get_mut(*field)) {
            (Value::Null, _) => {}
            (Value::Object(more), Some(Value::Object(members))) => members.extend(more),
            (read, _) => drop(typed.insert((*field).to_owned(), read)),
        }
    }
    Ok(typed)
}

fn read(kind: Kind, value: &Value) -> Result<Value, &'static str> {
    match (kind, value) {
        (Kind::Flag | Kind::Ports, Value::String(_)) => {}
        // Null leaves a field as it is, but text must be text.
        (Kind::Flag, _) => return Err("wanted the text true or false"),
        (Kind::Ports, _) => return Err("wanted text that holds a JSON list of ports"),
        (_, Value::Null) => return Ok(Value::Null),
        _ => {}
    }
    match kind {
        Kind::Text if value.is_string() => Ok(value.clone()),
        Kind::Text => Err("wanted text"),
        Kind::Number if value.is_i64() => Ok(value.clone()),
        Kind::Number => Err("wanted a whole number, not text"),
        Kind::Flag | Kind::MaybeFlag => match value.as_str().and_then(boolean) {
            Some(on) => Ok(flag(on)),
            None => Err("wanted the text true or false"),
        },
        Kind::Texts => match value {
            Value::Object(members) if members.values().all(|v| v.is_string() || v.is_null()) => {
                Ok(members.iter().map(|(k, v)| (k.clone(), json!(v.as_str().unwrap_or_default()))).collect())
            }
            _ => Err("wanted an object whose members are text"),
        },
        Kind::List => match value {
            Value::Array(items) if items.iter().all(|v| v.is_string() || v.is_null()) => {
                Ok(items.iter().map(|v| v.as_str().unwrap_or_default()).collect())
            }
            _ => Err("wanted a list of texts"),
        },
        Kind::Object if value.is_object() && jsonpb::read(&PROXY, value).is_ok() => Ok(value.clone()),
        Kind::Object => Err("wanted a proxy config"),
        Kind::Own => Ok(Value::Null),
        Kind::Ports => ports(value.as_str().unwrap_or_default()),
    }
}

// Each port again with the members that istiod reads, in its order; other members are dropped.
fn ports(text: &str) -> Result<Value, &'static str> {
    const WANTED: &str = "wanted a JSON list of {name, containerPort, protocol}";
    let list: Option<Vec<Option<Map<String, Value>>>> = serde_json::from_str(text).map_err(|_| WANTED)?;
    let Some(list) = list else { return Ok(Value::Null) };
    let mut ports = Vec::new();
    for port in list {
        let port = port.unwrap_or_default();
        let member = |key: &str| {
            let found = port.iter().rfind(|(k, v)| k.eq_ignore_ascii_case(key) && !v.is_null());
            found.map(|(_, v)| v)
        };
        let text = |key| match member(key) {
            None => Ok(""),
            Some(value) => value.as_str().ok_or(WANTED),
        };
        let number = match member("containerPort") {
            None => 0,
            Some(value) => value.as_i64().ok_or(WANTED)?,
        };
        let mut out = Map::new();
        if !text("name")?.is_empty() {
            out.insert("name".into(), json!(text("name")?));
        }
        out.insert("containerPort".into(), json!(number));
        out.insert("protocol".into(), json!(text("protocol")?));
        ports.push(Value::Object(out));
    }
    Ok(if ports.is_empty() { Value::Null } else { json!(Value::Array(ports).to_string()) })
}

/// The forms that Go's `strconv.ParseBool` takes.
pub(super) fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// A boolean as metadata shows it: `"true"` or nothing.
pub(super) fn flag(on: bool) -> Value {
    if on { json!("true") } else { Value::Null }
}

/// An object's members that are text.
pub(super) fn strings(value: Option<&Value>) -> BTreeMap<String, String> {
    let members = value.and_then(Value::as_object).into_iter().flatten();
    members.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect()
}

/// Whether a typed field is left out.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_i64() == Some(0),
        Value::Array(items) => items.is_empty(),
        // An object of texts; the proxy config is never empty.
        Value::Object(members) => members.is_empty(),
        Value::Bool(_) => false,
    }
}
