//! A filter given as a struct becomes the message that it stands for. Pure.
//!
//! `udpa.type.v1.TypedStruct` names a type and holds its JSON form. The mapping is protobuf's own, in its
//! strict form: a name that the message does not have, or a value that does not fit, is an error. Which
//! messages there are stands in [`schema`]. Bytes are made directly; no message type is involved, so
//! nothing has to be generated for the JSON form of all of Envoy's.
//!
//! Errors name the field, never its value: one of them is a pull secret.

mod schema;

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_types::value::Kind as Json;
use prost_types::{Struct, Value};

use crate::base::quote::shown;
use crate::base::wire;
use schema::{Field, Kind, Message};

/// A struct that is not the message it stands for. Fields are named, values never.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to unmarshal a TypedStruct: {0}")]
    Undecodable(#[from] prost::DecodeError),
    #[error("its TypedStruct has no value")]
    NoValue,
    #[error("unknown field {0:?}")]
    Unknown(String),
    #[error("field {field:?} is given together with {other:?}")]
    Together { field: String, other: &'static str },
    #[error("field {field:?} is not {wanted}")]
    Wrong { field: String, wanted: &'static str },
    #[error("field {0:?} names a type that is not known here")]
    Type(String),
}

/// `udpa.type.v1.TypedStruct`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Inner {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(message, optional, tag = "2")]
    value: Option<Struct>,
}

/// Decodes a `TypedStruct`.
pub(super) fn inner(value: &Bytes) -> Result<Inner, Error> {
    Ok(Inner::decode(value.clone())?)
}

impl Inner {
    /// The struct as the Wasm message, encoded.
    pub(super) fn wasm(self) -> Result<Bytes, Error> {
        let value = self.value.ok_or(Error::NoValue)?;
        message(&schema::WASM, &value, "").map(Bytes::from)
    }
}

fn at(path: &str, name: &str) -> String {
    let name = shown(name);
    if path.is_empty() { name.into_owned() } else { format!("{path}.{name}") }
}

fn message(of: &Message, object: &Struct, path: &str) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    let mut set: Vec<&Field> = Vec::new();
    for (name, value) in &object.fields {
        let here = at(path, name);
        let field = of.field(name).ok_or_else(|| Error::Unknown(here.clone()))?;
        if matches!(value.kind, None | Some(Json::NullValue(_))) {
            continue;
        }
        if let Some(other) = set.iter().find(|other| field.excludes(other)) {
            return Err(Error::Together { field: here, other: other.name });
        }
        set.push(field);
        put(field, value, &here, &mut out)?;
    }
    Ok(out)
}

fn put(field: &Field, value: &Value, here: &str, out: &mut Vec<u8>) -> Result<(), Error> {
    match (field.kind, value.kind.as_ref()) {
        (Kind::List(inner), Some(Json::ListValue(list))) => {
            let single = Field { kind: *inner, oneof: 1, ..*field };
            list.values
                .iter()
                .enumerate()
                .try_for_each(|(n, v)| put(&single, v, &format!("{here}[{n}]"), out))
        }
        (Kind::Map(inner), Some(Json::StructValue(entries))) => {
            for (key, value) in &entries.fields {
                let mut entry = Vec::new();
                // Keys may be anything, so they are not shown.
                put(
                    &Field { name: "key", number: 1, kind: Kind::Text, oneof: 1 },
                    &text(key),
                    here,
                    &mut entry,
                )?;
                put(&Field { name: "value", number: 2, kind: *inner, oneof: 1 }, value, here, &mut entry)?;
                wire::put(out, field.number, &entry);
            }
            Ok(())
        }
        (kind, Some(json)) => scalar(field, kind, json, here, out),
        (_, None) => Err(wrong(here, "a value")),
    }
}

fn text(text: &str) -> Value {
    Value { kind: Some(Json::StringValue(text.to_owned())) }
}

fn wrong(here: &str, wanted: &'static str) -> Error {
    Error::Wrong { field: here.to_owned(), wanted }
}

// Zeros are left out unless the field's presence means something.
fn varint(field: &Field, value: u64, out: &mut Vec<u8>) {
    if value != 0 || field.oneof != 0 {
        encode_key(field.number, WireType::Varint, out);
        encode_varint(value, out);
    }
}

fn scalar(field: &Field, kind: Kind, json: &Json, here: &str, out: &mut Vec<u8>) -> Result<(), Error> {
    match (kind, json) {
        (Kind::Text, Json::StringValue(text)) => {
            if !text.is_empty() || field.oneof != 0 {
                wire::put(out, field.number, text.as_bytes());
            }
        }
        (Kind::Bytes, Json::StringValue(text)) => {
            let value = base64(text).ok_or_else(|| wrong(here, "base64"))?;
            if !value.is_empty() || field.oneof != 0 {
                wire::put(out, field.number, &value);
            }
        }
        (Kind::Bool, Json::BoolValue(value)) => varint(field, u64::from(*value), out),
        (Kind::Enum(names), Json::StringValue(text)) => {
            let number = names.iter().position(|name| name == text);
            varint(field, number.ok_or_else(|| wrong(here, "one of its enum's values"))? as u64, out);
        }
        (Kind::Enum(_), json) => {
            let number = integer(json, f64::from(i32::MIN), f64::from(i32::MAX));
            varint(
                field,
                number.ok_or_else(|| wrong(here, "one of its enum's values"))?.cast_unsigned(),
                out,
            );
        }
        (Kind::Uint32, json) => {
            let number = integer(json, 0.0, f64::from(u32::MAX));
            varint(
                field,
                number.ok_or_else(|| wrong(here, "an unsigned 32-bit integer"))?.cast_unsigned(),
                out,
            );
        }
        (Kind::Int64, json) => {
            let number = integer(json, -9.0e18, 9.0e18);
            varint(field, number.ok_or_else(|| wrong(here, "a 64-bit integer"))?.cast_unsigned(), out);
        }
        (Kind::Wrapped(inner), json) => {
            let mut wrapper = Vec::new();
            let value = Field { name: field.name, number: 1, kind: *inner, oneof: 0 };
            scalar(&value, *inner, json, here, &mut wrapper)?;
            wire::put(out, field.number, &wrapper);
        }
        (Kind::Duration, Json::StringValue(text)) => {
            let value = duration(text).ok_or_else(|| wrong(here, "a duration such as \"5s\""))?;
            wire::put(out, field.number, &value.encode_to_vec());
        }
        (Kind::Message(inner), Json::StructValue(object)) => {
            wire::put(out, field.number, &message(inner, object, here)?);
        }
        (Kind::Struct, Json::StructValue(object)) => wire::put(out, field.number, &object.encode_to_vec()),
        (Kind::Any, Json::StructValue(object)) => wire::put(out, field.number, &any(object, here)?),
        (kind, _) => return Err(wrong(here, kind.wanted())),
    }
    Ok(())
}

// Numbers come as doubles; whole ones are integers, and so are numbers in quotes.
fn integer(json: &Json, least: f64, most: f64) -> Option<i64> {
    let number = match json {
        Json::NumberValue(number) => *number,
        Json::StringValue(text) => {
            return text.parse::<i64>().ok().filter(|n| (least..=most).contains(&(*n as f64)));
        }
        _ => return None,
    };
    (number.fract() == 0.0 && (least..=most).contains(&number)).then_some(number as i64)
}

// Either alphabet, padded or not.
fn base64(text: &str) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let alphabet =
        if text.contains(['-', '_']) { base64::alphabet::URL_SAFE } else { base64::alphabet::STANDARD };
    GeneralPurpose::new(&alphabet, LENIENT).decode(text.replace(['\r', '\n'], "")).ok()
}

/// Seconds with at most nine decimals and an `s`; protobuf's limit is 10,000 years.
fn duration(text: &str) -> Option<prost_types::Duration> {
    const MOST: i64 = 315_576_000_000;
    let number = text.strip_suffix('s')?;
    let (sign, number) = number.strip_prefix('-').map_or((1, number), |rest| (-1, rest));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || (whole.is_empty() && fraction.is_empty()) || fraction.len() > 9
    {
        return None;
    }
    let seconds: i64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let nanos: i32 = format!("{fraction:0<9}").parse().ok()?;
    (seconds <= MOST).then_some(prost_types::Duration { seconds: sign * seconds, nanos: sign as i32 * nanos })
}

/// An `Any`: its type stands in `@type`; types with a JSON form of their own have it in `value`.
fn any(object: &Struct, path: &str) -> Result<Vec<u8>, Error> {
    if object.fields.is_empty() {
        return Ok(Vec::new());
    }
    let here = at(path, "@type");
    let Some(Json::StringValue(type_url)) = object.fields.get("@type").and_then(|v| v.kind.as_ref()) else {
        return Err(wrong(&here, "the URL of a type"));
    };
    let name = type_url.rsplit('/').next().unwrap_or_default();
    let mut rest = object.clone();
    rest.fields.remove("@type");
    let value = match schema::own_form(name) {
        Some(kind) => {
            let here = at(path, "value");
            let value = rest.fields.remove("value").ok_or_else(|| wrong(&here, "there"))?;
            if let Some(other) = rest.fields.keys().next() {
                return Err(Error::Unknown(at(path, other)));
            }
            // Encoded as a field and taken out again: the kinds know only fields.
            let mut outer = Vec::new();
            let field = Field { name: "value", number: 1, kind, oneof: 1 };
            put(&field, &value, &here, &mut outer)?;
            wire::merged(&outer.into(), 1).ok().flatten().unwrap_or_default().to_vec()
        }
        None => {
            let of = schema::by_name(name).ok_or_else(|| Error::Type(here.clone()))?;
            message(of, &rest, path)?
        }
    };
    Ok(prost_types::Any { type_url: type_url.clone(), value }.encode_to_vec())
}

#[cfg(test)]
mod tests;
