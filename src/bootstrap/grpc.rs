//! The bootstrap of proxyless gRPC: how a gRPC application in the pod reaches istiod through the agent.

use serde_json::{Map, Value, json};

use super::Node;
use crate::base::path;

/// How long a gRPC application uses certificate files before it reads them again.
const REFRESH: &str = "900s";

/// The document. `config_path` is where the agent's ADS socket is; `output_certs` is where it writes
/// certificates, empty if it does not.
#[must_use]
pub(crate) fn generate(node: &Node, config_path: &str, output_certs: &str) -> Value {
    let mut metadata = node.typed.clone();
    metadata.insert("GENERATOR".into(), json!("grpc"));
    let mut sorted: Vec<(String, Value)> = metadata.into_iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    let mut document = Map::new();
    document.insert(
        "xds_servers".into(),
        json!([{
            "server_uri": format!("unix:///{}", path::clean(&format!("{config_path}/XDS"))),
            "channel_creds": [{"type": "insecure"}],
            "server_features": ["xds_v3"],
        }]),
    );
    document.insert(
        "node".into(),
        json!({"id": node.id, "metadata": Map::from_iter(sorted), "locality": node.locality.json()}),
    );
    if !output_certs.is_empty() {
        let file = |name: &str| path::clean(&format!("{output_certs}/{name}"));
        document.insert(
            "certificate_providers".into(),
            json!({"default": {"plugin_name": "file_watcher", "config": {
                "certificate_file": file("cert-chain.pem"),
                "private_key_file": file("key.pem"),
                "ca_certificate_file": file("root-cert.pem"),
                "refresh_interval": REFRESH,
            }}}),
        );
    }
    document
        .insert("server_listener_resource_name_template".into(), json!("xds.istio.io/grpc/lds/inbound/%s"));
    Value::Object(document)
}
