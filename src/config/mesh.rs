//! The effective ProxyConfig: built-in defaults, mesh file, `PROXY_CONFIG`, annotation, in this order.
//!
//! Layers are merged as JSON objects, field by top-level field, because an explicit zero must override
//! (protobuf's own merge would lose it); each layer is parsed as protobuf JSON by itself so that an error
//! names its source, and the result is parsed once more into the typed message.

use serde_json::{Map, Value, json};

use super::go;
use crate::proto::mesh::ProxyConfig;

type Object = Map<String, Value>;

/// The merged document and its typed form.
#[derive(Debug, Clone)]
pub struct Effective {
    document: Object,
    /// Typed.
    pub proxy: ProxyConfig,
}

/// What 1.30.3 starts from.
fn defaults() -> Object {
    let value = json!({
        "configPath": "./etc/istio/proxy",
        "binaryPath": "/usr/local/bin/envoy",
        "serviceCluster": "istio-proxy",
        "drainDuration": "45s",
        "terminationDrainDuration": "5s",
        "discoveryAddress": "istiod.istio-system.svc:15012",
        "proxyAdminPort": 15000,
        "controlPlaneAuthPolicy": "MUTUAL_TLS",
        "statNameLength": 189,
        "statusPort": 15020,
    });
    if let Value::Object(object) = value { object } else { Object::new() }
}

impl Effective {
    /// The defaults alone.
    #[must_use]
    pub fn new() -> Self {
        let mut out = Self { document: defaults(), proxy: ProxyConfig::default() };
        out.proxy = typed(&out.document).expect("the defaults are a ProxyConfig");
        out
    }

    /// Lays a ProxyConfig document (YAML or JSON) over what is there.
    ///
    /// # Errors
    /// The parser's word.
    pub fn overlay(&mut self, text: &str) -> Result<(), String> {
        let overlay = match yaml(text)? {
            Value::Null => return Ok(()),
            Value::Object(object) => object,
            other => {
                return Err(format!("json: cannot unmarshal {} into Go value of type map", kind_of(&other)));
            }
        };
        self.lay(overlay)
    }

    /// Lays the `defaultConfig` of a mesh file over what is there.
    ///
    /// # Errors
    /// The parser's word.
    pub fn overlay_mesh(&mut self, text: &str) -> Result<(), String> {
        match yaml(text)? {
            Value::Null => Ok(()),
            Value::Object(mut mesh) => match mesh.remove("defaultConfig") {
                None | Some(Value::Null) => Ok(()),
                Some(Value::Object(object)) => self.lay(object),
                Some(other) => Err(format!("defaultConfig is {}, not an object", kind_of(&other))),
            },
            other => Err(format!("json: cannot unmarshal {} into Go value of type map", kind_of(&other))),
        }
    }

    /// Sets one field, as a flag or a single-value annotation does.
    pub fn set(&mut self, field: &str, value: Value) -> Result<(), String> {
        let mut object = Object::new();
        object.insert(field.to_owned(), value);
        self.lay(object)
    }

    fn lay(&mut self, overlay: Object) -> Result<(), String> {
        let overlay = canonical(overlay)?;
        typed(&overlay)?;
        let mut document = self.document.clone();
        for (field, value) in overlay {
            match (field.as_str(), document.get_mut(&field), value) {
                ("proxyMetadata", Some(Value::Object(base)), Value::Object(over)) => base.extend(over),
                ("proxyHeaders", Some(Value::Object(base)), Value::Object(over)) => {
                    let mut over = over;
                    for kept in
                        ["forwardedClientCert", "requestId", "attemptCount", "server", "envoyDebugHeaders"]
                    {
                        if let (None, Some(value)) = (over.get(kept), base.get(kept)) {
                            over.insert(kept.to_owned(), value.clone());
                        }
                    }
                    document.insert(field, Value::Object(over));
                }
                (_, _, value) => {
                    for sibling in siblings(&field) {
                        document.remove(*sibling);
                    }
                    document.insert(field, value);
                }
            }
        }
        self.proxy = typed(&document)?;
        self.document = document;
        Ok(())
    }

    /// For the log.
    #[must_use]
    pub fn to_json(&self) -> Value {
        serde_json::to_value(&self.proxy).unwrap_or(Value::Null)
    }
}

impl Default for Effective {
    fn default() -> Self {
        Self::new()
    }
}

// Setting one member of a oneof clears the other.
fn siblings(field: &str) -> &'static [&'static str] {
    match field {
        "serviceCluster" => &["tracingServiceName"],
        "tracingServiceName" => &["serviceCluster"],
        _ => &[],
    }
}

fn typed(document: &Object) -> Result<ProxyConfig, String> {
    serde_json::from_value(Value::Object(document.clone()))
        .map_err(|e| format!("could not parse proxy config: {e}"))
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// YAML or JSON to JSON; only the first of several documents counts.
///
/// # Errors
/// The parser's word.
pub fn yaml(text: &str) -> Result<Value, String> {
    use serde::Deserialize;
    let mut documents = serde_yaml_ng::Deserializer::from_str(text);
    match documents.next() {
        None => Ok(Value::Null),
        Some(first) => Value::deserialize(first).map_err(|e| format!("error converting YAML to JSON: {e}")),
    }
}

const DURATIONS: &[&str] = &[
    "drainDuration",
    "terminationDrainDuration",
    "discoveryRefreshDelay",
    "fileFlushInterval",
    "pollDelay",
    "time",
    "interval",
];

// Names in lowerCamelCase, nulls left out, durations in protobuf's notation, one member of a oneof.
fn canonical(object: Object) -> Result<Object, String> {
    let mut out = Object::new();
    for (name, value) in object {
        let field = camel(&name);
        if out.contains_key(&field) && field != name {
            continue;
        }
        let value = match value {
            Value::Null => continue,
            Value::Object(map) if is_map(&field) => Value::Object(
                map.into_iter()
                    .map(|(k, v)| (k, if v.is_null() { Value::String(String::new()) } else { v }))
                    .collect(),
            ),
            Value::Object(inner) => Value::Object(canonical(inner)?),
            Value::Array(items) => Value::Array(
                items
                    .into_iter()
                    .map(|item| match item {
                        Value::Object(inner) => canonical(inner).map(Value::Object),
                        other => Ok(other),
                    })
                    .collect::<Result<_, _>>()?,
            ),
            Value::String(text) if DURATIONS.contains(&field.as_str()) => Value::String(span(&text)?),
            other => other,
        };
        for sibling in siblings(&field) {
            out.remove(*sibling);
        }
        out.insert(field, value);
    }
    let tracers: Vec<&str> = ["zipkin", "lightstep", "datadog", "stackdriver", "openCensusAgent"]
        .into_iter()
        .filter(|t| out.contains_key(*t))
        .collect();
    for lost in tracers.iter().rev().skip(1) {
        out.remove(*lost);
    }
    Ok(out)
}

fn is_map(field: &str) -> bool {
    matches!(field, "proxyMetadata" | "runtimeValues" | "customTags")
}

fn camel(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    let mut upper = false;
    for c in name.chars() {
        if c == '_' {
            upper = true;
        } else if std::mem::take(&mut upper) {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

fn span(text: &str) -> Result<String, String> {
    let span = go::duration(text)?;
    let sign = if span.negative { "-" } else { "" };
    let (seconds, nanos) = (span.span.as_secs(), span.span.subsec_nanos());
    Ok(if nanos == 0 { format!("{sign}{seconds}s") } else { format!("{sign}{seconds}.{nanos:09}s") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_replaces_whole_fields_and_explicit_zeros_count() {
        let mut e = Effective::new();
        e.overlay_mesh("defaultConfig:\n  concurrency: 4\n  tracing: {zipkin: {address: 'a:1'}}\n  proxyMetadata: {A: '1'}\n").unwrap();
        e.overlay(
            "{\"concurrency\": 0, \"tracing\": {\"sampling\": 10}, \"proxy_metadata\": {\"B\": \"2\"}}",
        )
        .unwrap();
        assert_eq!(e.proxy.concurrency.as_ref().map(|c| c.value), Some(0));
        assert!(e.proxy.tracing.as_ref().unwrap().tracer.is_none());
        assert_eq!(e.proxy.proxy_metadata.len(), 2);
        e.overlay("drainDuration: 1m30s").unwrap();
        assert_eq!(e.proxy.drain_duration.as_ref().unwrap().seconds, 90);
        assert!(e.overlay("statusPort: {}").is_err());
        assert!(e.overlay("- 1").is_err());
    }
}
