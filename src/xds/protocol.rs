//! SotW and delta, the two forms of the discovery protocol, behind one type.
//!
//! The relay is written once; what differs is here: the method's path, which message goes in which
//! direction, and the shape of the few requests that the agent makes itself. Those carry only what the
//! Go agent puts in: no node, no names; a type URL, and in answers the nonce, the version (SotW) and the
//! error.

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use envoy_types::pb::google::rpc;

use super::frames;
use super::scan::Message;

/// The service of both methods.
pub(crate) const SERVICE: &str = "envoy.service.discovery.v3.AggregatedDiscoveryService";

/// Which form a stream speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// State of the world: each response holds everything of its type.
    Sotw,
    /// Delta: each response holds what has changed.
    Delta,
}

/// Codes of `google.rpc.Status` in a rejection: the Go agent always says Internal.
const INTERNAL: i32 = 13;

impl Protocol {
    /// The protocol of a method's path.
    #[must_use]
    pub fn of(path: &str) -> Option<Self> {
        match path {
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources" => {
                Some(Self::Sotw)
            }
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources" => {
                Some(Self::Delta)
            }
            _ => None,
        }
    }

    /// The method's path.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Sotw => "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
            Self::Delta => "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources",
        }
    }

    /// What Envoy sends.
    #[must_use]
    pub fn request(self) -> Message {
        match self {
            Self::Sotw => Message::SotwRequest,
            Self::Delta => Message::DeltaRequest,
        }
    }

    /// What istiod sends.
    #[must_use]
    pub fn response(self) -> Message {
        match self {
            Self::Sotw => Message::SotwResponse,
            Self::Delta => Message::DeltaResponse,
        }
    }

    fn framed(self, type_url: &str, version: &str, nonce: &str, error: Option<&str>) -> Bytes {
        let error_detail =
            error.map(|text| rpc::Status { code: INTERNAL, message: text.to_owned(), ..Default::default() });
        match self {
            Self::Sotw => frames::frame(&DiscoveryRequest {
                type_url: type_url.to_owned(),
                version_info: version.to_owned(),
                response_nonce: nonce.to_owned(),
                error_detail,
                ..Default::default()
            }),
            Self::Delta => frames::frame(&DeltaDiscoveryRequest {
                type_url: type_url.to_owned(),
                response_nonce: nonce.to_owned(),
                error_detail,
                ..Default::default()
            }),
        }
    }

    /// The first request for a type that the agent handles itself, framed.
    #[must_use]
    pub(crate) fn initial(self, type_url: &str) -> Bytes {
        self.framed(type_url, "", "", None)
    }

    /// The answer to a response that the agent handled itself, framed. `version` is used by SotW only.
    #[must_use]
    pub fn answer(self, type_url: &str, version: &str, nonce: &str, error: Option<&str>) -> Bytes {
        self.framed(type_url, version, nonce, error)
    }

    /// A health report, framed.
    #[must_use]
    pub fn health(self, unhealthy: Option<&str>) -> Bytes {
        self.framed(super::types::HEALTH, "", "", unhealthy)
    }
}
