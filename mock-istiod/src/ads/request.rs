//! Requests of either protocol, and their summary for the record.

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use prost::Message;

use crate::grpc::{Code, Status};
use crate::record::AdsRequest;

/// One request of either kind.
pub(super) enum Incoming {
    Sotw(DiscoveryRequest),
    Delta(DeltaDiscoveryRequest),
}

impl Incoming {
    pub(super) fn node(&self) -> Option<&Node> {
        match self {
            Self::Sotw(request) => request.node.as_ref(),
            Self::Delta(request) => request.node.as_ref(),
        }
    }
}

pub(super) fn decode(stream: u64, delta: bool, raw: &Bytes) -> Result<(AdsRequest, Incoming), Status> {
    let bad =
        |e: prost::DecodeError| Status::new(Code::Internal, format!("the request does not decode: {e}"));
    let incoming = if delta {
        Incoming::Delta(DeltaDiscoveryRequest::decode(raw.clone()).map_err(bad)?)
    } else {
        Incoming::Sotw(DiscoveryRequest::decode(raw.clone()).map_err(bad)?)
    };
    let node = incoming.node().map(|node| node.id.clone());
    let request = match &incoming {
        Incoming::Sotw(r) => AdsRequest {
            stream,
            node,
            type_url: r.type_url.clone(),
            version: r.version_info.clone(),
            nonce: r.response_nonce.clone(),
            names: r.resource_names.clone(),
            unsubscribe: Vec::new(),
            initial: Vec::new(),
            nack: r.error_detail.as_ref().map(|e| (e.code, e.message.clone())),
            raw: raw.clone(),
        },
        Incoming::Delta(r) => AdsRequest {
            stream,
            node,
            type_url: r.type_url.clone(),
            version: String::new(),
            nonce: r.response_nonce.clone(),
            names: r.resource_names_subscribe.clone(),
            unsubscribe: r.resource_names_unsubscribe.clone(),
            initial: {
                let mut names: Vec<_> = r.initial_resource_versions.keys().cloned().collect();
                names.sort();
                names
            },
            nack: r.error_detail.as_ref().map(|e| (e.code, e.message.clone())),
            raw: raw.clone(),
        },
    };
    Ok((request, incoming))
}
