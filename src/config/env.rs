//! The environment as an argument, and the one table of the variables the agent reads.
//!
//! Every variable stands here once with its type, default and meaning; docs/CONFIG.md is generated from
//! the table, and reading one that is not in it, or as another type, does not compile ([`var`]).

mod settings;
mod table;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::OsString;

pub(crate) use settings::Settings;
#[cfg(test)]
pub(crate) use table::{FAMILIES, OLDER, Var};
pub(crate) use table::{Key, Kind, REDIRECT, VARS, WITHOUT_EFFECT, kinds, var};

/// What names of variables with node metadata as JSON begin with.
const JSON: &str = "ISTIO_METAJSON_";

/// The variables of a process.
#[derive(Clone, Default)]
pub(crate) struct Env {
    vars: BTreeMap<String, String>,
    // Names that begin with [`JSON`], in the order they were given: of equal members the last counts.
    json: Vec<String>,
    // Names whose value is no UTF-8; such a value is not meant for the agent.
    garbled: Vec<String>,
}

impl Env {
    /// The process's own.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub(crate) fn of_process() -> Self {
        Self::from_os(std::env::vars_os())
    }

    /// From raw pairs.
    pub(crate) fn from_os(pairs: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut out = Self::default();
        for (name, value) in pairs {
            let name = name.to_string_lossy().into_owned();
            match value.into_string() {
                Ok(value) => out.set(name, value),
                Err(_) => out.garbled.push(name),
            }
        }
        out
    }

    /// From text pairs.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn of(pairs: &[(&str, &str)]) -> Self {
        let mut out = Self::default();
        pairs.iter().for_each(|(k, v)| out.set((*k).to_owned(), (*v).to_owned()));
        out
    }

    // Of a name that is given twice the first value counts, for C libraries and in Go.
    fn set(&mut self, name: String, value: String) {
        if let Entry::Vacant(place) = self.vars.entry(name) {
            if place.key().starts_with(JSON) {
                self.json.push(place.key().clone());
            }
            place.insert(value);
        }
    }

    /// Those whose value is JSON with node metadata, in the order they were given.
    pub(crate) fn json(&self) -> Vec<(&str, &str)> {
        self.json.iter().filter_map(|name| Some((name.as_str(), self.get(name)?))).collect()
    }

    /// A variable, set-but-empty included.
    #[must_use]
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.vars.get(name).map(String::as_str)
    }

    /// All variables by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.vars.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// All whose name starts with `prefix`, the prefix removed.
    pub(crate) fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.iter().filter_map(move |(k, v)| k.strip_prefix(prefix).map(|k| (k, v)))
    }

    /// As a map.
    #[must_use]
    pub(crate) fn map(&self) -> &BTreeMap<String, String> {
        &self.vars
    }
}

// Any value may be a secret.
impl std::fmt::Debug for Env {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.vars.keys()).finish()
    }
}
