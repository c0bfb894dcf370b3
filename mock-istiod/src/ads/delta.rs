//! Incremental: each answer holds what changed since the last. No IO.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as Wrapped,
};
use prost::Message;

use super::{Answer, nonce, order, ordered};
use crate::record::AdsResponse;
use crate::resources::{CLUSTER, ENDPOINTS, View};

/// What a client knows, by type.
#[derive(Debug, Default)]
pub struct State {
    watches: BTreeMap<String, Watch>,
}

#[derive(Debug, Default)]
struct Watch {
    wildcard: bool,
    names: BTreeSet<String>,
    /// Name to version of what the client has.
    held: BTreeMap<String, String>,
}

impl State {
    /// Answers a request, or not.
    pub fn request(&mut self, stream: u64, request: &DeltaDiscoveryRequest, view: &View) -> Vec<Answer> {
        let type_url = &request.type_url;
        let first = !self.watches.contains_key(type_url);
        let watch = self.watches.entry(type_url.clone()).or_default();
        if first {
            watch.wildcard = request.resource_names_subscribe.is_empty();
            watch.held =
                request.initial_resource_versions.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        }
        for name in &request.resource_names_unsubscribe {
            if name == "*" {
                watch.wildcard = false;
            }
            watch.names.remove(name);
            if !watch.wildcard {
                watch.held.remove(name);
            }
        }
        let mut missing = Vec::new();
        for name in &request.resource_names_subscribe {
            if name == "*" {
                watch.wildcard = true;
                continue;
            }
            watch.names.insert(name.clone());
            // A name that is asked for anew is answered, known or not, unless the client said what it has.
            if !first {
                watch.held.remove(name);
            }
            if view.get(type_url, name).is_none() {
                missing.push(name.clone());
            }
        }
        if !first && request.resource_names_subscribe.is_empty() {
            return Vec::new();
        }
        self.answer(stream, type_url, view, first, missing).into_iter().collect()
    }

    /// Pushes what has changed.
    pub fn changed(&mut self, stream: u64, view: &View) -> Vec<Answer> {
        let mut answers = Vec::new();
        let mut clusters_changed = false;
        for type_url in ordered(self.watches.keys()) {
            if type_url == ENDPOINTS && clusters_changed {
                // A cluster that changed warms again and waits for its endpoints, changed or not.
                if let Some(watch) = self.watches.get_mut(&type_url) {
                    watch.held.values_mut().for_each(String::clear);
                }
            }
            let answer = self.answer(stream, &type_url, view, false, Vec::new());
            clusters_changed |= type_url == CLUSTER && answer.is_some();
            answers.extend(answer);
        }
        answers
    }

    fn answer(
        &mut self,
        stream: u64,
        type_url: &str,
        view: &View,
        first: bool,
        mut removed: Vec<String>,
    ) -> Option<Answer> {
        let watch = self.watches.get_mut(type_url)?;
        let wanted = |name: &str| watch.wildcard || watch.names.contains(name);
        let resources: Vec<_> = view
            .all(type_url)
            .filter(|resource| {
                wanted(&resource.name) && watch.held.get(&resource.name) != Some(&resource.version)
            })
            .collect();
        let gone: Vec<String> =
            watch.held.keys().filter(|name| view.get(type_url, name).is_none()).cloned().collect();
        for name in gone {
            watch.held.remove(&name);
            if !removed.contains(&name) {
                removed.push(name);
            }
        }
        for resource in &resources {
            watch.held.insert(resource.name.clone(), resource.version.clone());
        }
        // The first answer lets a client begin even when there is nothing; types unknown here stay silent.
        let known = view.has(type_url) || order(type_url) < 5;
        if resources.is_empty() && removed.is_empty() && !(first && known) {
            return None;
        }
        if !known {
            return None;
        }
        let response = DeltaDiscoveryResponse {
            system_version_info: view.version(type_url, &BTreeSet::new()),
            resources: resources
                .iter()
                .map(|resource| Wrapped {
                    name: resource.name.clone(),
                    version: resource.version.clone(),
                    resource: Some(resource.any()),
                    ..Wrapped::default()
                })
                .collect(),
            type_url: type_url.to_owned(),
            removed_resources: removed.clone(),
            nonce: nonce(),
            ..DeltaDiscoveryResponse::default()
        };
        let summary = AdsResponse {
            stream,
            type_url: type_url.to_owned(),
            version: response.system_version_info.clone(),
            nonce: response.nonce.clone(),
            resources: resources.len(),
            removed,
        };
        Some(Answer { summary, message: response.encode_to_vec() })
    }
}
