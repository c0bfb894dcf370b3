//! The values of the table's variables, read once.

use std::time::Duration;

use super::table::Var;
use super::{Env, Key, Kind, REDIRECT, VARS, kinds};
use crate::config::go;

/// The values of all variables of the table.
#[derive(Clone)]
pub(crate) struct Settings {
    env: Env,
    // By place in the table.
    values: Vec<Value>,
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

/// Of these nothing is no amount either.
const ABOVE_ZERO: [&str; 3] = ["AGENT_UPGRADE_TIMEOUT", "XDS_REPLAY_MAX_AGE", "XDS_REPLAY_MAX_BYTES"];

/// What is wrong with a value that is one of its kind. The Go agent takes what is below zero for what it is; of none of our
/// own that is an amount.
fn wrong(var: &Var, value: &Value) -> Option<&'static str> {
    let sign = match value {
        Value::Int(value) => value.signum(),
        Value::Duration(value) => value.nanos().signum(),
        _ => return None,
    };
    match sign {
        -1 if var.ours => Some("zero or more"),
        0 if ABOVE_ZERO.contains(&var.name) => Some("more than zero"),
        _ => None,
    }
}

fn expected(kind: Kind) -> &'static str {
    match kind {
        Kind::Bool => "true/false",
        Kind::Int => "an integer",
        Kind::Float => "a floating-point value",
        Kind::Duration | Kind::Text => "a duration",
    }
}

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
    pub(crate) fn read(env: &Env) -> (Self, Vec<String>) {
        let mut warnings: Vec<String> = env
            .garbled
            .iter()
            .filter(|name| VARS.iter().any(|v| v.name == **name))
            .map(|name| {
                format!("Invalid environment variable value in {name}: it is not UTF-8; the default is used")
            })
            .collect();
        let mut values = Vec::with_capacity(VARS.len());
        for v in VARS {
            let default = read(v.kind, v.default).expect("defaults of the table are of their type");
            let text = env.get(v.name);
            let value = text.and_then(|text| read(v.kind, text));
            let wrong = value.as_ref().map_or(Some(expected(v.kind)), |value| wrong(v, value));
            if let Some((text, expected)) = text.zip(wrong)
                && v.part != REDIRECT
            {
                let shown: String = text.chars().take(SHOWN).collect();
                warnings.push(format!(
                    "Invalid environment variable value `{shown}` for {}, expecting {expected}, defaulting to {}",
                    v.name, v.default
                ));
            }
            let value = value.filter(|_| wrong.is_none()).unwrap_or(default);
            values.push(value);
        }
        (Self { env: env.clone(), values }, warnings)
    }

    /// The environment it was read from.
    #[must_use]
    pub(crate) fn env(&self) -> &Env {
        &self.env
    }

    /// A text.
    #[must_use]
    pub(crate) fn text(&self, key: Key<kinds::Text>) -> &str {
        if let Value::Text(text) = &self.values[key.place] { text } else { unreachable!("keys are typed") }
    }

    /// A text, `None` when empty.
    #[must_use]
    pub(crate) fn some_text(&self, key: Key<kinds::Text>) -> Option<&str> {
        Some(self.text(key)).filter(|t| !t.is_empty())
    }

    /// A boolean.
    #[must_use]
    pub(crate) fn flag(&self, key: Key<kinds::Bool>) -> bool {
        if let Value::Bool(value) = self.values[key.place] { value } else { unreachable!("keys are typed") }
    }

    /// An integer.
    #[must_use]
    pub(crate) fn int(&self, key: Key<kinds::Int>) -> i64 {
        if let Value::Int(value) = self.values[key.place] { value } else { unreachable!("keys are typed") }
    }

    /// A number.
    #[must_use]
    pub(crate) fn float(&self, key: Key<kinds::Float>) -> f64 {
        if let Value::Float(value) = self.values[key.place] { value } else { unreachable!("keys are typed") }
    }

    /// A span as it was given.
    #[must_use]
    pub(crate) fn signed(&self, key: Key<kinds::Duration>) -> &go::Signed {
        let Value::Duration(value) = &self.values[key.place] else { unreachable!("keys are typed") };
        value
    }

    /// A span; negative ones count as none.
    #[must_use]
    pub(crate) fn duration(&self, key: Key<kinds::Duration>) -> Duration {
        self.signed(key).at_least_zero()
    }

    /// An old flag's value takes the place of an unset variable.
    pub(crate) fn default_text(&mut self, key: Key<kinds::Text>, value: &str) {
        if self.env.get(key.name()).is_none() && !value.is_empty() {
            self.values[key.place] = Value::Text(value.to_owned());
            self.env.vars.insert(key.name().to_owned(), value.to_owned());
        }
    }

    /// A value of any type from an old source, in the place of an unset variable; whether it could be read and can be meant.
    pub(crate) fn default_of<T>(&mut self, key: Key<T>, text: &str) -> bool {
        let var = &VARS[key.place];
        let value = read(var.kind, text).filter(|value| wrong(var, value).is_none());
        let Some(value) = value else { return false };
        if self.env.get(var.name).is_none() {
            self.values[key.place] = value;
        }
        true
    }

    /// The value of a row of the table, for tests that go through all of them.
    #[cfg(test)]
    pub(crate) fn shown(&self, name: &str) -> String {
        let place = VARS.iter().position(|v| v.name == name).expect("a row of the table");
        format!("{:?}", self.values[place])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_amount_can_be_is_told_at_the_start_and_is_the_default() {
        for var in VARS.iter().filter(|var| var.ours && matches!(var.kind, Kind::Int | Kind::Duration)) {
            let below = if var.kind == Kind::Int { "-1" } else { "-1s" };
            let (settings, warnings) = Settings::read(&Env::of(&[(var.name, below)]));
            let told = format!("value `{below}` for {}, expecting zero or more", var.name);
            assert!(warnings.len() == 1 && warnings[0].contains(&told), "{warnings:?}");
            assert_eq!(settings.shown(var.name), format!("{:?}", read(var.kind, var.default).unwrap()));
            let (_, warnings) = Settings::read(&Env::of(&[(var.name, "0")]));
            assert_eq!(warnings.len(), usize::from(ABOVE_ZERO.contains(&var.name)), "{warnings:?}");
        }
        let theirs = Settings::read(&Env::of(&[("SECRET_TTL", "-1s"), ("ISTIO_GPRC_MAXSTREAMS", "-1")]));
        assert!(theirs.1.is_empty(), "{:?}", theirs.1);
        let (mut settings, _) = Settings::read(&Env::of(&[]));
        let key = crate::config::env::var::ENVOY_PARENT_SHUTDOWN_DURATION;
        assert_eq!((settings.default_of(key, "-1s"), settings.default_of(key, "1s")), (false, true));
        assert_eq!(settings.duration(key), Duration::from_secs(1));
    }
}
