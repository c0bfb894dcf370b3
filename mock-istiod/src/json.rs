//! Resources in protobuf JSON (or YAML of the same shape) to protobuf and back, by Envoy's own definitions.

use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, SerializeOptions, Value};
use serde::de::DeserializeSeed;

use crate::resources::Resource;

fn pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    POOL.get_or_init(|| {
        let bytes: &[u8] = include_bytes!("../proto/descriptors.bin");
        DescriptorPool::decode(bytes).expect("tests/descriptors.rs made and checks it")
    })
}

/// Why a resource was not understood.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

/// A resource from its JSON form with an `@type`. A type that is not known here has its bytes, in base64, as
/// `value`; then `name` is its name.
///
/// # Errors
/// When there is no `@type`, or the fields do not fit the type.
pub fn resource(value: &serde_json::Value) -> Result<Resource, Error> {
    let type_url = value["@type"].as_str().ok_or_else(|| Error("a resource without \"@type\"".to_owned()))?;
    let name = type_url.rsplit('/').next().unwrap_or_default();
    let Some(descriptor) = pool().get_message_by_name(name) else {
        let bytes = value["value"].as_str().and_then(|text| STANDARD.decode(text).ok()).ok_or_else(|| {
            Error(format!("{type_url} is not a type known here, and has no \"value\" in base64"))
        })?;
        return Ok(Resource::new(type_url, value["name"].as_str().unwrap_or_default(), bytes));
    };
    let mut fields = value.clone();
    if let Some(map) = fields.as_object_mut() {
        map.remove("@type");
    }
    let message = descriptor.deserialize(fields).map_err(|error| Error(format!("{type_url}: {error}")))?;
    Ok(Resource::new(type_url, name_of(&message), message.encode_to_vec()))
}

/// A resource from a serialised `google.protobuf.Any`; the name is read where the type is known.
///
/// # Errors
/// When the bytes are not an `Any`.
pub fn from_any(bytes: &[u8]) -> Result<Resource, Error> {
    let any =
        prost_types::Any::decode(bytes).map_err(|e| Error(format!("not a google.protobuf.Any: {e}")))?;
    let name = any.type_url.rsplit('/').next().and_then(|name| pool().get_message_by_name(name));
    let message = name.and_then(|descriptor| DynamicMessage::decode(descriptor, &any.value[..]).ok());
    Ok(Resource::new(any.type_url, message.as_ref().map(name_of).unwrap_or_default(), any.value))
}

/// The JSON form of a resource with proto field names, if its type is known.
#[must_use]
pub fn to_json(resource: &Resource) -> Option<serde_json::Value> {
    let descriptor = pool().get_message_by_name(resource.type_url.rsplit('/').next()?)?;
    let message = DynamicMessage::decode(descriptor, &resource.value[..]).ok()?;
    let options = SerializeOptions::new().use_proto_field_name(true);
    let mut value = message.serialize_with_options(serde_json::value::Serializer, &options).ok()?;
    value.as_object_mut()?.insert("@type".to_owned(), resource.type_url.clone().into());
    Some(value)
}

fn name_of(message: &DynamicMessage) -> String {
    ["name", "cluster_name"]
        .iter()
        .find_map(|field| match message.get_field_by_name(field)?.as_ref() {
            Value::String(name) => Some(name.clone()),
            _ => None,
        })
        .unwrap_or_default()
}

/// Every resource in a text: one, a list, or an object with a list `resources` (the form of Envoy's own files);
/// YAML may hold several documents.
///
/// # Errors
/// With the number of the resource that was not understood.
pub fn parse(text: &str) -> Result<Vec<Resource>, Error> {
    let mut values = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = <serde_json::Value as serde::Deserialize>::deserialize(document);
        let value = value.map_err(|error| Error(error.to_string()))?;
        match value {
            serde_json::Value::Null => {}
            serde_json::Value::Array(list) => values.extend(list),
            serde_json::Value::Object(mut map) if map.contains_key("resources") => {
                match map.remove("resources") {
                    Some(serde_json::Value::Array(list)) => values.extend(list),
                    _ => return Err(Error("\"resources\" is not a list".to_owned())),
                }
            }
            other => values.push(other),
        }
    }
    values
        .iter()
        .enumerate()
        .map(|(n, value)| resource(value).map_err(|error| Error(format!("resource {}: {error}", n + 1))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::{CLUSTER, ENDPOINTS};

    #[test]
    fn yaml_becomes_protobuf_with_its_any_inside() {
        let text = format!(
            "resources:\n\
             - \"@type\": {CLUSTER}\n  name: a\n  connect_timeout: 1s\n  type: EDS\n  \
               transport_socket:\n    name: tls\n    typed_config:\n      \
               \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext\n      sni: x\n\
             ---\n\
             \"@type\": {ENDPOINTS}\ncluster_name: a\n"
        );
        let resources = parse(&text).unwrap();
        assert_eq!(resources.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["a", "a"]);
        let back = to_json(&resources[0]).unwrap();
        assert_eq!(back["transport_socket"]["typed_config"]["sni"], "x");
        assert_eq!(back["connect_timeout"], "1s");
        assert_eq!(resource(&back).unwrap(), resources[0]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, reason) in [
            ("name: a", "resource 1: a resource without \"@type\""),
            (&format!("- {{\"@type\": {CLUSTER}, nane: a}}"), "unrecognized field name"),
            ("\"@type\": x/y", "is not a type known here"),
            ("resources: 1", "is not a list"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn unknown_types_pass_as_bytes() {
        let parsed = parse("{\"@type\": x/y, name: n, value: AQI=}").unwrap();
        assert_eq!(parsed, [Resource::new("x/y", "n", vec![1, 2])]);
    }
}
