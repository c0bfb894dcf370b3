//! istiod's table of names (NDS), for tests and benches that play istiod.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use envoy_types::pb::google::protobuf::Any;
use prost::Message;

/// Its type URL.
pub const TYPE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";

/// The table, by host.
#[derive(Clone, PartialEq, Message)]
pub struct NameTable {
    /// Hosts with what is known of each.
    #[prost(btree_map = "string, message", tag = "1")]
    pub table: BTreeMap<String, NameInfo>,
}

/// What is known of a host.
#[derive(Clone, PartialEq, Message)]
pub struct NameInfo {
    /// Its addresses.
    #[prost(string, repeated, tag = "1")]
    pub ips: Vec<String>,
    /// Where it is registered: `Kubernetes`, `External`.
    #[prost(string, tag = "2")]
    pub registry: String,
    /// Its name without namespace and domain.
    #[prost(string, tag = "3")]
    pub shortname: String,
    /// Its namespace.
    #[prost(string, tag = "4")]
    pub namespace: String,
}

impl NameInfo {
    /// A Kubernetes service with one address; its short name is the host's first label.
    #[must_use]
    pub fn service(host: &str, namespace: &str, ip: &str) -> Self {
        Self {
            ips: vec![ip.to_owned()],
            registry: "Kubernetes".to_owned(),
            shortname: host.split('.').next().unwrap_or_default().to_owned(),
            namespace: namespace.to_owned(),
        }
    }
}

/// A response with these hosts; its nonce is its version too.
#[must_use]
pub fn response(nonce: &str, hosts: impl IntoIterator<Item = (String, NameInfo)>) -> DiscoveryResponse {
    let table = NameTable { table: hosts.into_iter().collect() };
    DiscoveryResponse {
        type_url: TYPE.to_owned(),
        nonce: nonce.to_owned(),
        version_info: nonce.to_owned(),
        resources: vec![Any { type_url: TYPE.to_owned(), value: table.encode_to_vec() }],
        ..DiscoveryResponse::default()
    }
}
