//! Values that templates work on, with Go's notions of truth and of printing.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::Fault;
use crate::proto::schema::Message;

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
    /// A member of an enum: its name, which is printed, and its number, which is compared.
    Named(String, i64),
    /// A message that is not set.
    Unset(&'static Message),
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
    /// As it is printed, where it can be.
    pub text: Option<String>,
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
            Self::Named(_, n) => json!(n),
            Self::Unset(_) => Json::Null,
        }
    }

    /// Whether `if` takes it: not nothing, not zero, not empty.
    #[must_use]
    pub(crate) fn truth(&self) -> bool {
        match self {
            Self::Nil | Self::Unset(_) => false,
            Self::Bool(on) => *on,
            Self::Int(n) | Self::Named(_, n) => *n != 0,
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
            Self::Named(..) => "int32",
            Self::Unset(of) => of.name,
        }
    }

    /// What Go's reflection calls its kind.
    #[must_use]
    pub(super) fn go_kind(&self) -> &'static str {
        match self {
            Self::Nil => "invalid",
            Self::List(_) => "slice",
            Self::Record(_) | Self::Unset(_) => "ptr",
            other => other.kind(),
        }
    }

    /// As Go's `%v` prints it; a record has no such form here.
    pub fn print(&self) -> Result<String, Fault> {
        Ok(match self {
            Self::Nil | Self::Unset(_) => "<nil>".to_owned(),
            Self::Bool(on) => on.to_string(),
            Self::Int(n) => n.to_string(),
            Self::Float(n) => float(*n),
            Self::Text(text) | Self::Named(text, _) => text.clone(),
            Self::List(items) => {
                let items: Result<Vec<_>, _> = items.iter().map(Self::print).collect();
                format!("[{}]", items?.join(" "))
            }
            Self::Map(members) => {
                let member = |(k, v): (&String, &Self)| Ok::<_, Fault>(format!("{k}:{}", v.print()?));
                let members: Result<Vec<_>, _> = members.iter().map(member).collect();
                format!("map[{}]", members?.join(" "))
            }
            Self::Record(record) => record.text.clone().ok_or(Fault::Unprintable(record.kind))?,
        })
    }

    /// What `.a.b` finds; a member that a map does not have is nothing, and so are its own.
    pub(crate) fn walk(&self, names: &[String]) -> Result<Self, Fault> {
        let Some((name, rest)) = names.split_first() else { return Ok(self.clone()) };
        self.member(name)?.walk(rest)
    }

    fn member(&self, name: &str) -> Result<Cow<'_, Self>, Fault> {
        let or_nothing = |found: Option<_>| found.map_or(Cow::Owned(Self::Nil), Cow::Borrowed);
        match self {
            Self::Map(members) => Ok(or_nothing(members.get(name))),
            Self::Record(record) => {
                // Generated Go types have a getter for each member.
                let found =
                    record.members.get(name).or_else(|| record.members.get(name.strip_prefix("Get")?));
                if found.is_none() && !record.open {
                    return Err(Fault::Field { name: name.to_owned(), kind: record.kind });
                }
                Ok(or_nothing(found))
            }
            Self::Nil => Ok(Cow::Owned(Self::Nil)),
            Self::Unset(of) => unset(of, name).map(Cow::Owned),
            other => Err(Fault::Field { name: name.to_owned(), kind: other.kind() }),
        }
    }
}

// Of a message that is not set, getters know what each field would be.
fn unset(of: &'static Message, name: &str) -> Result<Value, Fault> {
    let find = |name: &str| of.fields.iter().find(|f| capital(f.json) == name);
    match (name.strip_prefix("Get").and_then(find), find(name)) {
        (Some(field), _) => Ok(Value::field(field, None)),
        (None, Some(_)) => Err(Fault::NilPointer { name: name.to_owned(), kind: of.name }),
        (None, None) => Err(Fault::Field { name: name.to_owned(), kind: of.name }),
    }
}

/// A name as Go exports it.
pub(crate) fn capital(name: &str) -> String {
    let mut chars = name.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// A number as Go's `%v`: the shortest form, with an exponent below 1e-4 and from 1e6.
pub(super) fn float(n: f64) -> String {
    if !n.is_finite() {
        return if n.is_nan() {
            "NaN"
        } else if n > 0.0 {
            "+Inf"
        } else {
            "-Inf"
        }
        .to_owned();
    }
    let text = format!("{n:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.parse() {
        Ok(-4..6) => n.to_string(),
        _ => format!("{digits}e{}", signed(exponent)),
    }
}

/// An exponent with its sign and two digits at least.
pub(super) fn signed(exponent: &str) -> String {
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
    format!("{sign}{digits:0>2}")
}

/// Compact JSON as Go writes it: `<`, `>` and `&` escaped, members sorted.
#[must_use]
pub(crate) fn go_json(json: &Json) -> String {
    let mut sorted = json.clone();
    sorted.sort_all_objects();
    escape(&sorted.to_string())
}

/// The same with `<`, `>` and `&` as they are.
pub(super) fn raw_json(json: &Json) -> String {
    let mut sorted = json.clone();
    sorted.sort_all_objects();
    sorted.to_string().replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
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
