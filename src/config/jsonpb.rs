//! JSON to a message by the rules of the Go agent, with every fault named at once.
//!
//! Its mapping is older and looser than protobuf's: names in either spelling, unknown ones passed over,
//! `null` leaves a field alone, durations in Go's notation, of two members of a oneof the one defined
//! later. [`read`] gives a canonical document (camelCase names, enums by name, durations in seconds,
//! explicit zeros kept, which a merge of layers needs); [`print()`] leaves the zeros out, as the log and the
//! node metadata show it. The canonical form is what protobuf's own JSON mapping takes.

use serde_json::{Map, Number, Value};

use super::go;
use crate::proto::schema::{Enum, Field, Kind, Message, Shape};

/// What may stand around a number in quotes. Of the other blanks of JSON the Go agent reads the escapes, which are none.
const BLANK: char = ' ';

/// A JSON object.
pub(crate) type Object = Map<String, Value>;

/// One fault: where and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {reason}")]
pub struct Fault {
    /// The path of the field; empty for the document itself.
    pub at: String,
    /// What is wrong, with the value where it is no secret, and what to write instead.
    pub reason: String,
}

/// The canonical form of `document` as a message of type `of`; `null` is an empty one.
///
/// # Errors
/// Every fault of it.
pub(crate) fn read(of: &Message, document: &Value) -> Result<Object, Vec<Fault>> {
    let mut reader = Reader { faults: Vec::new() };
    let object = match document {
        Value::Null => Object::new(),
        Value::Object(object) => reader.message(of, object, ""),
        other => {
            let wanted = format!("a list of fields ({})", of.name);
            reader.wrong("", other, "map[string]json.RawMessage", &wanted);
            Object::new()
        }
    };
    if reader.faults.is_empty() { Ok(object) } else { Err(reader.faults) }
}

struct Reader {
    faults: Vec<Fault>,
}

impl Reader {
    fn fault(&mut self, at: &str, reason: String) {
        let at = if at.is_empty() { "document" } else { at };
        self.faults.push(Fault { at: at.to_owned(), reason });
    }

    fn wrong(&mut self, at: &str, value: &Value, go_type: &str, write: &str) {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "bool",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        self.fault(
            at,
            format!("json: cannot unmarshal {kind} into Go value of type {go_type}; write {write}"),
        );
    }

    fn message(&mut self, of: &Message, object: &Object, at: &str) -> Object {
        let mut out = Object::new();
        for field in of.fields {
            let Some(value) = object.get(field.json).or_else(|| object.get(field.name)) else { continue };
            if value.is_null() {
                continue;
            }
            let at = if at.is_empty() { field.json.to_owned() } else { format!("{at}.{}", field.json) };
            let Some(value) = self.field(field, value, &at) else { continue };
            for sibling in siblings(of, field) {
                out.remove(sibling);
            }
            out.insert(field.json.to_owned(), value);
        }
        out
    }

    fn field(&mut self, field: &Field, value: &Value, at: &str) -> Option<Value> {
        match (field.shape, value) {
            (Shape::One, value) => self.value(field.kind, value, at),
            (Shape::List, Value::Array(items)) => {
                let items = items.iter().enumerate();
                let all = items.map(|(n, item)| self.item(field.kind, item, &format!("{at}[{n}]")));
                Some(Value::Array(all.collect::<Vec<_>>().into_iter().flatten().collect()))
            }
            (Shape::List, other) => {
                self.wrong(at, other, "[]json.RawMessage", "a list, also for one item");
                None
            }
            (Shape::Map, Value::Object(entries)) => {
                let mut out = Object::new();
                for (key, item) in entries {
                    if let Some(item) = self.item(field.kind, item, &format!("{at}.{key}")) {
                        out.insert(key.clone(), item);
                    }
                }
                out.sort_keys();
                Some(Value::Object(out))
            }
            (Shape::Map, other) => {
                self.wrong(at, other, "map[string]json.RawMessage", "names with their values");
                None
            }
        }
    }

    // Inside lists and maps `null` is the kind's zero.
    fn item(&mut self, kind: Kind, value: &Value, at: &str) -> Option<Value> {
        if value.is_null() { Some(zero(kind)) } else { self.value(kind, value, at) }
    }

    fn value(&mut self, kind: Kind, value: &Value, at: &str) -> Option<Value> {
        match (kind, value) {
            (Kind::Text, Value::String(_))
            | (Kind::Bool, Value::Bool(_))
            | (Kind::Struct, Value::Object(_)) => Some(value.clone()),
            (Kind::Text, other) => {
                self.wrong(at, other, "string", "it in quotes");
                None
            }
            (Kind::Bool, other) => {
                self.wrong(at, other, "bool", "true or false without quotes");
                None
            }
            (Kind::Struct, other) => {
                self.wrong(at, other, "map[string]json.RawMessage", "names with their values");
                None
            }
            (Kind::Int32, value) => {
                self.integer(value, at, "int32", i64::from(i32::MIN), i64::from(i32::MAX))
            }
            (Kind::Uint32, value) => self.integer(value, at, "uint32", 0, i64::from(u32::MAX)),
            (Kind::Int64, value) => {
                let number = self.integer(value, at, "int64", i64::MIN, i64::MAX)?;
                Some(Value::String(number.to_string()))
            }
            (Kind::Double, value) => self.double(value, at),
            (Kind::Duration, Value::String(text)) => match go::duration(text) {
                Ok(span) => Some(Value::String(span.to_proto())),
                Err(reason) => {
                    self.fault(at, format!("bad Duration: {reason}; write for instance 45s or 1m30s"));
                    None
                }
            },
            (Kind::Duration, other) => {
                self.wrong(at, other, "string", "a duration with its unit, for instance 45s");
                None
            }
            (Kind::Wrapped(inner), value) => self.value(*inner, value, at),
            (Kind::Enum(of), value) => self.one_of(of, value, at),
            (Kind::Message(of), Value::Object(object)) => Some(Value::Object(self.message(of, object, at))),
            (Kind::Message(of), other) => {
                let short = of.name.rsplit('.').next().unwrap_or(of.name);
                self.wrong(at, other, "map[string]json.RawMessage", &format!("the fields of a {short}"));
                None
            }
        }
    }

    fn integer(&mut self, value: &Value, at: &str, go_type: &str, min: i64, max: i64) -> Option<Value> {
        let number = match value {
            Value::Number(number) => number.clone(),
            // In quotes `null` does not leave the field alone.
            Value::String(text) if text.trim_matches(BLANK) == "null" => Number::from(0),
            Value::String(text) => match plain_integer(text.trim_matches(BLANK)) {
                Some(number) => number,
                None => {
                    self.fault(at, format!("{text:?} is no {go_type}; write a whole number"));
                    return None;
                }
            },
            other => {
                self.wrong(at, other, go_type, "a whole number");
                return None;
            }
        };
        match number.as_i64().filter(|n| (min..=max).contains(n)) {
            Some(n) => Some(Value::from(n)),
            None => {
                let what = "json: cannot unmarshal number";
                let reason = format!(
                    "{what} {number} into Go value of type {go_type}; it must be whole and within {min}..{max}"
                );
                self.fault(at, reason);
                None
            }
        }
    }

    fn double(&mut self, value: &Value, at: &str) -> Option<Value> {
        let read = match value {
            Value::Number(number) => number.as_f64(),
            // JSON has no such numbers; protobuf writes them as these texts.
            Value::String(text) if matches!(text.as_str(), "NaN" | "Infinity" | "-Infinity") => {
                return Some(value.clone());
            }
            // As JSON writes a number.
            Value::String(text) if !text.contains(['\t', '\r', '\n']) => serde_json::from_str(text).ok(),
            _ => None,
        };
        match read.filter(|f| f.is_finite()) {
            Some(f) if f.fract() == 0.0 && f.abs() < 1e15 =>
            {
                #[expect(clippy::cast_possible_truncation, reason = "whole and small")]
                Some(Value::from(f as i64))
            }
            Some(f) => Number::from_f64(f).map(Value::Number),
            None => {
                self.fault(at, format!("{value} is no float64; write a number"));
                None
            }
        }
    }

    fn one_of(&mut self, of: &Enum, value: &Value, at: &str) -> Option<Value> {
        match value {
            Value::String(text) if of.values.iter().any(|(name, _)| name == text) => Some(value.clone()),
            Value::String(text) => {
                let names: Vec<&str> = of.values.iter().map(|(name, _)| *name).collect();
                let quoted = format!("{text:?}");
                let reason = format!(
                    "unknown value {quoted:?} for enum {}; it must be one of {}",
                    of.name,
                    names.join(", ")
                );
                self.fault(at, reason);
                None
            }
            value => {
                let number = self.integer(value, at, "int32", i64::from(i32::MIN), i64::from(i32::MAX))?;
                let named = of.values.iter().find(|(_, n)| Some(i64::from(*n)) == number.as_i64());
                Some(named.map_or(number, |(name, _)| Value::from(*name)))
            }
        }
    }
}

fn plain_integer(text: &str) -> Option<Number> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let leading = digits.len() > 1 && digits.starts_with('0');
    let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) && !leading;
    plain.then(|| text.parse::<i64>().map_or_else(|_| Number::from_f64(f64::MAX), |n| Some(n.into())))?
}

fn zero(kind: Kind) -> Value {
    match kind {
        Kind::Text => Value::from(""),
        Kind::Bool => Value::from(false),
        Kind::Int32 | Kind::Uint32 | Kind::Double => Value::from(0),
        Kind::Int64 => Value::from("0"),
        Kind::Duration => Value::from("0s"),
        Kind::Struct | Kind::Message(_) => Value::Object(Object::new()),
        Kind::Wrapped(inner) => zero(*inner),
        Kind::Enum(of) => of.values.first().map_or(Value::Null, |(name, _)| Value::from(*name)),
    }
}

/// The other members of a field's oneof.
pub(crate) fn siblings<'a>(of: &'a Message, field: &'a Field) -> impl Iterator<Item = &'static str> + 'a {
    let others = of.fields.iter().filter(move |f| field.oneof >= 0 && f.oneof == field.oneof);
    others.map(|f| f.json).filter(move |name| *name != field.json)
}

/// A canonical document without what is zero anyway, in the order of definition.
#[must_use]
pub(crate) fn print(of: &Message, document: &Object) -> Object {
    let mut out = Object::new();
    for field in of.fields {
        let Some(value) = document.get(field.json) else { continue };
        let value = match (field.shape, field.kind, value) {
            (Shape::One, kind, value) => {
                let keeps_zero =
                    matches!(kind, Kind::Wrapped(_) | Kind::Duration | Kind::Message(_) | Kind::Struct);
                if !keeps_zero && field.oneof < 0 && *value == zero(kind) {
                    continue;
                }
                printed(kind, value)
            }
            (Shape::List, kind, Value::Array(items)) if !items.is_empty() => {
                Value::Array(items.iter().map(|item| printed(kind, item)).collect())
            }
            (Shape::Map, kind, Value::Object(entries)) if !entries.is_empty() => {
                Value::Object(entries.iter().map(|(k, item)| (k.clone(), printed(kind, item))).collect())
            }
            _ => continue,
        };
        out.insert(field.json.to_owned(), value);
    }
    out
}

fn printed(kind: Kind, value: &Value) -> Value {
    match (kind, value) {
        (Kind::Message(of), Value::Object(object)) => Value::Object(print(of, object)),
        (_, value) => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::schema::ISTIO_MESH_V1ALPHA1_PROXYCONFIG as PROXY;
    use serde_json::json;

    fn ok(document: Value) -> Value {
        Value::Object(read(&PROXY, &document).unwrap_or_else(|f| panic!("{document}: {f:?}")))
    }

    #[test]
    fn the_looser_mapping_is_followed() {
        assert_eq!(
            ok(
                json!({"status_port": "15888", "drain_duration": "20s", "drainDuration": "1m21s", "nope": [1]})
            ),
            json!({"drainDuration": "81s", "statusPort": 15888})
        );
        assert_eq!(ok(json!({"configPath": null, "concurrency": "2"})), json!({"concurrency": 2}));
        assert_eq!(ok(json!({"statusPort": " 15888 "})), json!({"statusPort": 15888}));
        assert_eq!(ok(json!({"concurrency": "null"})), json!({"concurrency": 0}));
        assert_eq!(ok(json!({"tracing": {"sampling": "5e-1"}})), json!({"tracing": {"sampling": 0.5}}));
        let endless = json!({"tracing": {"sampling": "-Infinity"}});
        assert_eq!(ok(endless.clone()), endless);
        assert_eq!(
            ok(json!({"proxyMetadata": {"B": null, "A": "x"}})),
            json!({"proxyMetadata": {"A": "x", "B": ""}})
        );
        assert_eq!(
            ok(json!({"tracingServiceName": 1, "serviceCluster": "a"})),
            json!({"tracingServiceName": "CANONICAL_NAME_ONLY"})
        );
        assert_eq!(
            ok(json!({"tracing": {"zipkin": {"address": "a"}, "datadog": {}, "sampling": 1.0}})),
            json!({"tracing": {"datadog": {}, "sampling": 1}})
        );
        assert_eq!(ok(json!({"interceptionMode": 77})), json!({"interceptionMode": 77}));
        assert_eq!(ok(Value::Null), json!({}));
        let kept = json!({"tracing": {"stackdriver": {"maxNumberOfAttributes": "5"}}});
        assert_eq!(ok(json!({"tracing": {"stackdriver": {"maxNumberOfAttributes": 5}}})), kept);
    }

    #[test]
    fn every_fault_is_named_at_once() {
        let bad = json!({
            "statusPort": 1.5, "proxyMetadata": {"A": true}, "statsCompression": "true", "drainDuration": "45",
            "controlPlaneAuthPolicy": "none", "concurrency": {"value": 1}, "extraStatTags": "one",
            "proxyAdminPort": 4_294_967_296_i64, "tracing": [], "fileFlushMinSizeKb": -1, "configPath": 5,
            "fileFlushInterval": 5, "statNameLength": "1.5e4", "interceptionMode": 1.5,
        });
        for no_number in [".5", "5.", "+5", "inf", "5 5", "", "5\n"] {
            assert!(read(&PROXY, &json!({"tracing": {"sampling": no_number}})).is_err(), "{no_number:?}");
        }
        // A block of text in YAML has a line end, of which the Go agent reads the escape.
        for no_number in ["15888\n", "\t15888", "15888\r"] {
            assert!(read(&PROXY, &json!({"statusPort": no_number})).is_err(), "{no_number:?}");
        }
        let faults = read(&PROXY, &bad).unwrap_err();
        assert_eq!(faults.len(), 14, "{faults:#?}");
        let all: Vec<String> = faults.iter().map(ToString::to_string).collect();
        let has = |text: &str| assert!(all.iter().any(|f| f.contains(text)), "{text} in {all:#?}");
        has("proxyMetadata.A: json: cannot unmarshal bool into Go value of type string; write it in quotes");
        has(
            "controlPlaneAuthPolicy: unknown value \"\\\"none\\\"\" for enum istio.mesh.v1alpha1.AuthenticationPolicy",
        );
        has("drainDuration: bad Duration: time: missing unit in duration \"45\"");
        has("extraStatTags: json: cannot unmarshal string into Go value of type []json.RawMessage");
        assert!(
            read(&PROXY, &json!(5)).unwrap_err()[0]
                .to_string()
                .starts_with("document: json: cannot unmarshal number")
        );
    }

    #[test]
    fn print_leaves_zeros_out_but_not_what_is_set() {
        let document = json!({
            "serviceCluster": "", "statusPort": 0, "controlPlaneAuthPolicy": "NONE", "concurrency": 0,
            "tracing": {"zipkin": {"address": ""}}, "extraStatTags": [], "proxyMetadata": {},
            "fileFlushInterval": "0s", "binaryPath": "b", "statsCompression": false, "sds": {"enabled": false},
        });
        let printed = print(&PROXY, document.as_object().unwrap());
        assert_eq!(
            Value::Object(printed),
            json!({"binaryPath": "b", "serviceCluster": "", "concurrency": 0, "tracing": {"zipkin": {}},
                   "sds": {}, "statsCompression": false, "fileFlushInterval": "0s"})
        );
    }
}
