//! State of the world: each answer holds all that is subscribed of a type. No IO.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use prost::Message;

use super::{Answer, nonce, ordered};
use crate::record::AdsResponse;
use crate::resources::{CLUSTER, ENDPOINTS, LISTENER, View};

/// What a client knows, by type.
#[derive(Debug, Default)]
pub struct State {
    watches: BTreeMap<String, Watch>,
}

#[derive(Debug, Default)]
struct Watch {
    names: BTreeSet<String>,
    nonce: String,
    version: String,
}

impl State {
    /// Answers a request, or not.
    pub fn request(&mut self, stream: u64, request: &DiscoveryRequest, view: &View) -> Vec<Answer> {
        let names: BTreeSet<String> = request.resource_names.iter().cloned().collect();
        let known = self.watches.entry(request.type_url.clone()).or_default();
        if !request.response_nonce.is_empty() && !known.nonce.is_empty() {
            // About an answer that was overtaken: the client will say again what it wants.
            if request.response_nonce != known.nonce {
                return Vec::new();
            }
            // A refusal, or plain consent.
            if request.error_detail.is_some() || names == known.names {
                return Vec::new();
            }
        }
        known.names = names;
        self.answer(stream, &request.type_url, view).into_iter().collect()
    }

    /// Pushes every type whose subscribed part has changed.
    pub fn changed(&mut self, stream: u64, view: &View) -> Vec<Answer> {
        let mut answers = Vec::new();
        let mut clusters_changed = false;
        for type_url in ordered(self.watches.keys()) {
            let watch = &self.watches[&type_url];
            let fresh = view.version(&type_url, &watch.names) != watch.version;
            // A cluster that changed warms again and waits for its endpoints, changed or not.
            if fresh || (type_url == ENDPOINTS && clusters_changed) {
                clusters_changed |= type_url == CLUSTER;
                answers.extend(self.answer(stream, &type_url, view));
            }
        }
        answers
    }

    fn answer(&mut self, stream: u64, type_url: &str, view: &View) -> Option<Answer> {
        let watch = self.watches.get_mut(type_url)?;
        let resources: Vec<_> = view.select(type_url, &watch.names).collect();
        let version = view.version(type_url, &watch.names);
        // Clusters and listeners are answered even when there are none; of another type silence says "not yet". That
        // the last one has gone is told, except for the agent's own types (istiod sends no empty name table).
        let told = !watch.version.is_empty() && type_url.starts_with("type.googleapis.com/envoy.");
        if resources.is_empty() && !told && type_url != CLUSTER && type_url != LISTENER {
            return None;
        }
        watch.nonce = nonce();
        watch.version.clone_from(&version);
        let response = DiscoveryResponse {
            version_info: version.clone(),
            resources: resources.iter().map(|resource| resource.any()).collect(),
            type_url: type_url.to_owned(),
            nonce: watch.nonce.clone(),
            ..DiscoveryResponse::default()
        };
        let summary = AdsResponse {
            stream,
            type_url: type_url.to_owned(),
            version,
            nonce: watch.nonce.clone(),
            resources: resources.len(),
            removed: Vec::new(),
        };
        Some(Answer { summary, message: response.encode_to_vec() })
    }
}
