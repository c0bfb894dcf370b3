//! The values of the table's variables, read once.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Env, Kind, VARS};
use crate::config::go;

/// The values of all variables of the table.
#[derive(Clone)]
pub struct Settings {
    env: Env,
    values: BTreeMap<&'static str, Value>,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Settings").field(&self.env).finish()
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Text(String),
    Bool(bool),
    Int(i64),
    Float(f64),
    Duration(go::Signed),
}

/// Characters of a bad value that a warning shows.
const SHOWN: usize = 100;

fn read(kind: Kind, text: &str) -> Option<Value> {
    match kind {
        Kind::Text => Some(Value::Text(text.to_owned())),
        Kind::Bool => go::boolean(text).map(Value::Bool),
        Kind::Int => text.parse().ok().map(Value::Int),
        // NaN and infinities are no number that a ratio can mean.
        Kind::Float => text.parse().ok().filter(|f: &f64| f.is_finite()).map(Value::Float),
        Kind::Duration => go::duration(text).ok().map(Value::Duration),
    }
}

impl Settings {
    /// Reads all variables; a value that cannot be read leaves the default and gives a warning.
    #[must_use]
    pub fn read(env: &Env) -> (Self, Vec<String>) {
        let mut warnings: Vec<String> = env
            .garbled
            .iter()
            .filter(|name| VARS.iter().any(|v| v.name == **name))
            .map(|name| {
                format!("Invalid environment variable value in {name}: it is not UTF-8; the default is used")
            })
            .collect();
        let mut values = BTreeMap::new();
        for v in VARS {
            let default = read(v.kind, v.default).expect("defaults of the table are of their type");
            let value = match env.get(v.name) {
                None => default,
                Some(text) => read(v.kind, text).unwrap_or_else(|| {
                    let expected = match v.kind {
                        Kind::Bool => "true/false",
                        Kind::Int => "an integer",
                        Kind::Float => "a floating-point value",
                        Kind::Duration | Kind::Text => "a duration",
                    };
                    let shown: String = text.chars().take(SHOWN).collect();
                    warnings.push(format!(
                        "Invalid environment variable value `{shown}` for {}, expecting {expected}, defaulting to {}",
                        v.name, v.default
                    ));
                    default
                }),
            };
            values.insert(v.name, value);
        }
        (Self { env: env.clone(), values }, warnings)
    }

    /// The environment it was read from.
    #[must_use]
    pub fn env(&self) -> &Env {
        &self.env
    }

    fn value(&self, name: &str) -> &Value {
        self.values.get(name).unwrap_or_else(|| panic!("{name} is not in the table of variables"))
    }

    /// A text.
    #[must_use]
    pub fn text(&self, name: &str) -> &str {
        if let Value::Text(text) = self.value(name) { text } else { panic!("{name} is no text") }
    }

    /// A text, `None` when empty.
    #[must_use]
    pub fn some_text(&self, name: &str) -> Option<&str> {
        Some(self.text(name)).filter(|t| !t.is_empty())
    }

    /// A boolean.
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        if let Value::Bool(value) = self.value(name) { *value } else { panic!("{name} is no boolean") }
    }

    /// An integer.
    #[must_use]
    pub fn int(&self, name: &str) -> i64 {
        if let Value::Int(value) = self.value(name) { *value } else { panic!("{name} is no integer") }
    }

    /// A number.
    #[must_use]
    pub fn float(&self, name: &str) -> f64 {
        if let Value::Float(value) = self.value(name) { *value } else { panic!("{name} is no number") }
    }

    /// A span; negative ones count as none.
    #[must_use]
    pub fn duration(&self, name: &str) -> Duration {
        if let Value::Duration(value) = self.value(name) {
            value.at_least_zero()
        } else {
            panic!("{name} is no duration")
        }
    }

    /// An old flag's value takes the place of an unset variable.
    pub fn default_text(&mut self, name: &'static str, value: &str) {
        if self.env.get(name).is_none() && !value.is_empty() {
            self.values.insert(name, Value::Text(value.to_owned()));
            self.env.vars.insert(name.to_owned(), value.to_owned());
        }
    }
}
