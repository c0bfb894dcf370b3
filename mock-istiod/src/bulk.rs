//! Made-up resources by the megabyte, for measurements.

use bytes::{Bytes, BytesMut};
use envoy_types::pb::envoy::config::cluster::v3::Cluster;
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::config::listener::v3::Listener;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryResponse, DiscoveryResponse, Resource as Wrapped,
};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;

use crate::grpc::frame;
use crate::resources::{CLUSTER, ENDPOINTS, LISTENER};

/// What the resources are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Clusters.
    Clusters,
    /// Endpoints.
    Endpoints,
    /// Listeners.
    Listeners,
}

impl Kind {
    /// The type URL.
    #[must_use]
    pub fn type_url(self) -> &'static str {
        match self {
            Self::Clusters => CLUSTER,
            Self::Endpoints => ENDPOINTS,
            Self::Listeners => LISTENER,
        }
    }

    // About a kilobyte each, the size of a cluster in a mesh.
    fn any(self, number: usize) -> Any {
        let name = format!("outbound|8080||service-{number:06}.{:0>900}.svc.cluster.local", "");
        let value = match self {
            Self::Clusters => Cluster { name, ..Cluster::default() }.encode_to_vec(),
            Self::Endpoints => {
                ClusterLoadAssignment { cluster_name: name, ..ClusterLoadAssignment::default() }
                    .encode_to_vec()
            }
            Self::Listeners => Listener { name, ..Listener::default() }.encode_to_vec(),
        };
        Any { type_url: self.type_url().to_owned(), value }
    }
}

/// One state-of-the-world response of about `size` bytes, framed and ready for [`crate::Responses::raw`].
#[must_use]
pub fn sotw(kind: Kind, size: usize, nonce: &str) -> Bytes {
    let one = kind.any(0).encoded_len() + 4;
    let response = DiscoveryResponse {
        version_info: "1".to_owned(),
        type_url: kind.type_url().to_owned(),
        nonce: nonce.to_owned(),
        resources: (0..(size / one).max(1)).map(|number| kind.any(number)).collect(),
        ..DiscoveryResponse::default()
    };
    frame(&response.encode_to_vec())
}

/// One incremental response of about `size` bytes, framed.
#[must_use]
pub fn delta(kind: Kind, size: usize, nonce: &str) -> Bytes {
    let one = kind.any(0).encoded_len() + 4;
    let wrapped = |number| {
        let resource = Some(kind.any(number));
        Wrapped { name: format!("{number}"), version: "1".to_owned(), resource, ..Wrapped::default() }
    };
    let response = DeltaDiscoveryResponse {
        system_version_info: "1".to_owned(),
        type_url: kind.type_url().to_owned(),
        nonce: nonce.to_owned(),
        resources: (0..(size / one).max(1)).map(wrapped).collect(),
        ..DeltaDiscoveryResponse::default()
    };
    frame(&response.encode_to_vec())
}

/// `total` bytes of state-of-the-world responses of about `each` bytes, framed one after the other.
#[must_use]
pub fn many(kind: Kind, total: usize, each: usize) -> Bytes {
    let count = (total / each).max(1);
    let mut out = BytesMut::with_capacity(total + total / 8);
    for number in 0..count {
        out.extend_from_slice(&sotw(kind, each, &number.to_string()));
    }
    out.freeze()
}
