//! Values that templates work on, with Go's notions of truth and of printing.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::Fault;

/// The longest result, in bytes: a bootstrap is some tens of kilobytes.
pub(super) const LIMIT: usize = 16 << 20;

/// A value of a template.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Nothing: a map has no such member.
    Nil,
    /// A boolean.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// Members that may be there.
    Map(BTreeMap<String, Value>),
    /// Members that are known.
    Record(Box<Record>),
}

/// A value with known members, by their names in Go; in JSON it has a form of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// What it is, for errors.
    pub kind: &'static str,
    /// Its members.
    pub members: BTreeMap<String, Value>,
    /// Its JSON form.
    pub json: Json,
    /// Other members are absent rather than unknown.
    pub open: bool,
}

impl Value {
    /// Text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// A list of texts.
    #[must_use]
    pub(crate) fn texts(items: &[String]) -> Self {
        Self::List(items.iter().map(Self::text).collect())
    }

    /// From plain JSON; whole numbers become [`Value::Int`].
    #[must_use]
    pub(crate) fn from_json(json: &Json) -> Self {
        match json {
            Json::Null => Self::Nil,
            Json::Bool(on) => Self::Bool(*on),
            Json::Number(n) => match n.as_i64() {
                Some(whole) => Self::Int(whole),
                None => Self::Float(n.as_f64().unwrap_or_default()),
            },
            Json::String(text) => Self::text(text),
            Json::Array(items) => Self::List(items.iter().map(Self::from_json).collect()),
            Json::Object(members) => {
                Self::Map(members.iter().map(|(k, v)| (k.clone(), Self::from_json(v))).collect())
            }
        }
    }

    /// As JSON.
    #[must_use]
    pub fn to_json(&self) -> Json {
        match self {
            Self::Nil => Json::Null,
            Self::Bool(on) => json!(on),
            Self::Int(n) => json!(n),
            Self::Float(n) => json!(n),
            Self::Text(text) => json!(text),
            Self::List(items) => items.iter().map(Self::to_json).collect(),
            Self::Map(members) => {
                Json::Object(members.iter().map(|(k, v)| (k.clone(), v.to_json())).collect::<Map<_, _>>())
            }
            Self::Record(record) => record.json.clone(),
        }
    }

    /// Whether `if` takes it: not nothing, not zero, not empty.
    #[must_use]
    pub(crate) fn truth(&self) -> bool {
        match self {
            Self::Nil => false,
            Self::Bool(on) => *on,
            Self::Int(n) => *n != 0,
            Self::Float(n) => *n != 0.0,
            Self::Text(text) => !text.is_empty(),
            Self::List(items) => !items.is_empty(),
            Self::Map(members) => !members.is_empty(),
            Self::Record(_) => true,
        }
    }

    /// What its type is called in errors.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float64",
            Self::Text(_) => "string",
            Self::List(_) => "list",
            Self::Map(_) => "map",
            Self::Record(record) => record.kind,
        }
    }

    /// As Go's `%v` prints it; a record has no such form here.
    pub fn print(&self) -> Result<String, Fault> {
        Ok(match self {
            Self::Nil => "<nil>".to_owned(),
            Self::Bool(on) => on.to_string(),
            Self::Int(n) => n.to_string(),
            Self::Float(n) => float(*n),
            Self::Text(text) => text.clone(),
            Self::List(items) => {
                let items: Result<Vec<_>, _> = items.iter().map(Self::print).collect();
                format!("[{}]", items?.join(" "))
            }
            Self::Map(members) => {
                let member = |(k, v): (&String, &Self)| Ok::<_, Fault>(format!("{k}:{}", v.print()?));
                let members: Result<Vec<_>, _> = members.iter().map(member).collect();
                format!("map[{}]", members?.join(" "))
            }
            Self::Record(record) => {
                return Err(Fault::Unprintable(record.kind));
            }
        })
    }

    /// What `.a.b` finds; a member that a map does not have is nothing.
    pub(crate) fn walk(&self, names: &[String]) -> Result<Self, Fault> {
        let mut at = self;
        for name in names {
            at = at.member(name)?.unwrap_or(&Self::Nil);
        }
        Ok(at.clone())
    }

    fn member(&self, name: &str) -> Result<Option<&Self>, Fault> {
        match self {
            Self::Map(members) => Ok(members.get(name)),
            Self::Record(record) => {
                // Generated Go types have a getter for each member.
                let found =
                    record.members.get(name).or_else(|| record.members.get(name.strip_prefix("Get")?));
                if found.is_none() && !record.open {
                    return Err(Fault::Field { name: name.to_owned(), kind: record.kind });
                }
                Ok(found)
            }
            Self::Nil => Err(Fault::NilData(name.to_owned())),
            other => Err(Fault::Field { name: name.to_owned(), kind: other.kind() }),
        }
    }
}

/// A number as Go's `%v`: the shortest form, with an exponent below 1e-4 and from 1e21.
pub(super) fn float(n: f64) -> String {
    let size = n.abs();
    if n == 0.0 || !n.is_finite() || (1e-4..1e21).contains(&size) {
        return match n {
            n if n.is_nan() => "NaN".to_owned(),
            n if n.is_infinite() => if n > 0.0 { "+Inf" } else { "-Inf" }.to_owned(),
            n => n.to_string(),
        };
    }
    let text = format!("{n:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Compact JSON as Go writes it: `<`, `>` and `&` escaped, members sorted.
#[must_use]
pub(crate) fn go_json(json: &Json) -> String {
    let mut sorted = json.clone();
    sorted.sort_all_objects();
    escape(&sorted.to_string())
}

/// What Go's encoder escapes beyond JSON's own rules; only strings can hold these characters.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}
