//! Who Envoy says it is, and where it runs.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Where Envoy runs, as far as known; empty members are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Locality {
    /// Region.
    pub region: String,
    /// Zone.
    pub zone: String,
    /// Sub-zone.
    pub sub_zone: String,
}

impl Locality {
    pub(crate) fn json(&self) -> Value {
        let parts = [("region", &self.region), ("zone", &self.zone), ("sub_zone", &self.sub_zone)];
        parts.into_iter().filter(|(_, v)| !v.is_empty()).map(|(k, v)| (k.to_owned(), json!(v))).collect()
    }
}

/// Who Envoy says it is.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// `<type>~<ip>~<name>.<namespace>~<domain>`.
    pub id: String,
    /// Envoy's service cluster.
    pub cluster: String,
    /// Where it runs.
    pub locality: Locality,
    /// The fields that Istio gives a meaning, without the empty ones.
    pub typed: Map<String, Value>,
    /// Everything that was given as metadata, also what no field stands for; shows where `typed` has no
    /// member of the name.
    pub raw: Map<String, Value>,
    /// Metadata `ANNOTATIONS`.
    pub annotations: BTreeMap<String, String>,
    /// The addresses of the node without repetitions, its own first.
    pub addresses: Vec<String>,
    /// Platform metadata (`gcp_project` and so on).
    pub platform: BTreeMap<String, String>,
    /// Metadata `ENABLE_HBONE`.
    pub hbone: bool,
}

impl Node {
    /// The metadata that Envoy sends: typed fields, then raw members of other names; sorted.
    #[must_use]
    pub fn metadata(&self) -> Map<String, Value> {
        let mut all: BTreeMap<&String, &Value> = self.raw.iter().collect();
        all.extend(self.typed.iter());
        all.into_iter().map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// `sidecar`, `router`, `waypoint`: the first part of the id.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.id.split('~').next().unwrap_or_default()
    }

    /// A metadata value that is text.
    #[must_use]
    pub(crate) fn raw_text(&self, key: &str) -> Option<&str> {
        self.raw.get(key).and_then(Value::as_str)
    }

    pub(super) fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.get(key).map(String::as_str).filter(|v| !v.is_empty())
    }
}
