//! Messages as templates see them: the types that Go generates, by the tables of their definition.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

use super::value::{Record, Value, capital};
use crate::base::go_duration;
use crate::proto::schema::{Enum, Field, Kind, Message, Shape};

const WRAPPER: &[Field] =
    &[Field { json: "value", name: "value", shape: Shape::One, kind: Kind::Int64, oneof: -1 }];
static NUMBER: Message = Message { name: "google.protobuf.Int64Value", fields: WRAPPER };
const SWITCH: &[Field] =
    &[Field { json: "value", name: "value", shape: Shape::One, kind: Kind::Bool, oneof: -1 }];
static BOOLEAN: Message = Message { name: "google.protobuf.BoolValue", fields: SWITCH };
const SPAN: &[Field] = &[
    Field { json: "seconds", name: "seconds", shape: Shape::One, kind: Kind::Int64, oneof: -1 },
    Field { json: "nanos", name: "nanos", shape: Shape::One, kind: Kind::Int32, oneof: -1 },
];
static DURATION: Message = Message { name: "google.protobuf.Duration", fields: SPAN };

impl Value {
    /// A message of type `of` from its JSON form, with every field of it.
    #[must_use]
    pub(crate) fn message(of: &'static Message, json: &Json) -> Self {
        let none = Map::new();
        let given = json.as_object().unwrap_or(&none);
        let members =
            of.fields.iter().map(|f| (capital(f.json), Self::field(f, given.get(f.json)))).collect();
        record(of.name, members, json.clone(), None)
    }

    /// What `field` holds; `None`: it is not set.
    pub(super) fn field(field: &Field, json: Option<&Json>) -> Self {
        match field.shape {
            Shape::One => one(field.kind, json),
            Shape::List => {
                let items = json.and_then(Json::as_array).into_iter().flatten();
                Self::List(items.map(|item| one(field.kind, Some(item))).collect())
            }
            Shape::Map => {
                let entries = json.and_then(Json::as_object).into_iter().flatten();
                Self::Map(entries.map(|(key, item)| (key.clone(), one(field.kind, Some(item)))).collect())
            }
        }
    }
}

fn one(kind: Kind, json: Option<&Json>) -> Value {
    match (kind, json) {
        (Kind::Text, json) => Value::text(json.and_then(Json::as_str).unwrap_or_default()),
        (Kind::Bool, json) => Value::Bool(json.and_then(Json::as_bool).unwrap_or_default()),
        (Kind::Int32 | Kind::Uint32 | Kind::Int64, json) => Value::Int(number(json)),
        (Kind::Double, json) => Value::Float(json.and_then(Json::as_f64).unwrap_or_default()),
        (Kind::Enum(of), json) => named(of, json),
        (Kind::Message(of), Some(json)) => Value::message(of, json),
        (Kind::Message(of), None) => Value::Unset(of),
        (Kind::Duration, Some(json)) => duration(json),
        (Kind::Duration, None) => Value::Unset(&DURATION),
        (Kind::Wrapped(inner), Some(json)) => wrapped(*inner, json),
        (Kind::Wrapped(Kind::Bool), None) => Value::Unset(&BOOLEAN),
        (Kind::Wrapped(_), None) => Value::Unset(&NUMBER),
        (Kind::Struct, json) => json.map_or(Value::Nil, Value::from_json),
    }
}

// 64 bits are text in JSON.
fn number(json: Option<&Json>) -> i64 {
    json.and_then(|n| n.as_i64().or_else(|| n.as_str()?.parse().ok())).unwrap_or_default()
}

fn named(of: &'static Enum, json: Option<&Json>) -> Value {
    let by = |wanted: &dyn Fn(&(&str, i32)) -> bool| of.values.iter().find(|v| wanted(v));
    let found = match json {
        Some(Json::String(name)) => by(&|v| v.0 == name),
        json => by(&|v| i64::from(v.1) == number(json)),
    };
    match found {
        Some((name, number)) => Value::Named((*name).to_owned(), (*number).into()),
        None => Value::Named(number(json).to_string(), number(json)),
    }
}

fn duration(json: &Json) -> Value {
    let nanos = json.as_str().and_then(|t| go_duration::parse(t).ok()).map_or(0, |span| span.nanos());
    let (seconds, rest) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
    let part = |name: &str, n: i64| (n != 0).then(|| format!("{name}:{n}"));
    let parts = [part("seconds", seconds), part("nanos", rest)];
    let text = parts.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let members = [("Seconds", seconds), ("Nanos", rest)];
    let members = members.map(|(name, n)| (name.to_owned(), Value::Int(n))).into();
    record(DURATION.name, members, json.clone(), Some(text))
}

fn wrapped(inner: Kind, json: &Json) -> Value {
    let value = one(inner, Some(json));
    let text = if value.truth() { format!("value:{json}") } else { String::new() };
    record(
        "google.protobuf.Value",
        [("Value".to_owned(), value)].into(),
        serde_json::json!({"value": json}),
        Some(text),
    )
}

fn record(kind: &'static str, members: BTreeMap<String, Value>, json: Json, text: Option<String>) -> Value {
    Value::Record(Box::new(Record { kind, members, json, open: false, text }))
}
