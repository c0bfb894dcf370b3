//! What istiod tells a single sidecar that speaks mutual TLS with itself: enough to see identity, config and traffic.

use std::collections::BTreeSet;

use mock_istiod::{MockIstiod, Set, json};
use serde_json::Value;

use super::free_port;
use super::http::{self, Reply};

/// The ports of such a sidecar.
#[derive(Debug, Clone, Copy)]
pub struct Loop {
    /// Plain HTTP, from the application.
    pub outbound: u16,
    /// Mutual TLS, from the mesh.
    pub inbound: u16,
    /// Where the application listens, if a test makes one.
    pub app: u16,
}

impl Loop {
    /// Has `mock` serve it.
    pub fn serve(mock: &MockIstiod) -> Self {
        let mesh = Self { outbound: free_port(), inbound: free_port(), app: free_port() };
        mesh.push(mock, "one");
        mesh
    }

    /// Changes what is served: answers carry `x-config: <value>`.
    pub fn push(self, mock: &MockIstiod, value: &str) {
        let text = include_str!("loop.yaml")
            .replace("\"{{outbound}}\"", &self.outbound.to_string())
            .replace("\"{{inbound}}\"", &self.inbound.to_string())
            .replace("\"{{app}}\"", &self.app.to_string())
            .replace("{{identity}}", &mock.identity("ns", "sa"))
            .replace("{{config}}", value);
        let common = json::parse(&text).expect("loop.yaml is understood");
        mock.resources().replace(Set { common, ..Set::default() });
    }

    /// One request, checked: answered by the sidecar's own inbound side, which saw the expected peer.
    pub async fn ask(self, mock: &MockIstiod) -> Result<Reply, String> {
        let reply = http::get(self.outbound, "/").await?;
        let peer = reply.headers.get("x-peer").and_then(|peer| peer.to_str().ok()).unwrap_or_default();
        match reply.status.is_success() && peer == mock.identity("ns", "sa") {
            true => Ok(reply),
            false => Err(format!("{} {:?}, peer {peer:?}", reply.status, reply.text())),
        }
    }
}

/// Serial numbers of the workload certificates that Envoy uses, by its admin port.
pub async fn serials(admin: u16) -> BTreeSet<String> {
    let Ok(reply) = http::get(admin, "/certs").await else { return BTreeSet::new() };
    let certs: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
    let chains = certs["certificates"].as_array().into_iter().flatten();
    chains
        .flat_map(|certificate| certificate["cert_chain"].as_array().into_iter().flatten())
        .filter(|leaf| leaf["subject_alt_names"][0]["uri"].is_string())
        .filter_map(|leaf| leaf["serial_number"].as_str().map(ToOwned::to_owned))
        .collect()
}
