//! The two forms of the protocol, state of the world and incremental: what is read of Envoy's requests, and what they are
//! answered.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse, Resource};
use prost::Message;

use super::encode::{Encoder, SECRET_TYPE, version};
use super::session::{Action, Request, Session};
use crate::secrets::Secret;

/// One of the two forms.
pub(super) trait Protocol: 'static {
    type In: Message + Default + Send + 'static;
    type Out: Message + Send + 'static;
    fn request(message: Self::In) -> Request;
    fn act(session: &mut Session, request: &Request) -> Action;
    fn response(encoder: &Encoder, secrets: &[(String, Secret)], nonce: &str) -> Self::Out;
}

/// Envoy's messages, as far as they are read: whatever else is in them (a node's metadata, details of an error) may take
/// thirty times its bytes.
mod read {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Node {
        #[prost(string, tag = "1")]
        pub(super) id: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Status {
        #[prost(string, tag = "2")]
        pub(super) message: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(in crate::sds) struct DiscoveryRequest {
        #[prost(message, optional, tag = "2")]
        pub(super) node: Option<Node>,
        #[prost(string, repeated, tag = "3")]
        pub(super) resource_names: Vec<String>,
        #[prost(string, tag = "4")]
        pub(super) type_url: String,
        #[prost(string, tag = "5")]
        pub(super) response_nonce: String,
        #[prost(message, optional, tag = "6")]
        pub(super) error_detail: Option<Status>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(in crate::sds) struct DeltaDiscoveryRequest {
        #[prost(message, optional, tag = "1")]
        pub(super) node: Option<Node>,
        #[prost(string, tag = "2")]
        pub(super) type_url: String,
        #[prost(string, repeated, tag = "3")]
        pub(super) resource_names_subscribe: Vec<String>,
        #[prost(string, repeated, tag = "4")]
        pub(super) resource_names_unsubscribe: Vec<String>,
        #[prost(string, tag = "6")]
        pub(super) response_nonce: String,
        #[prost(message, optional, tag = "7")]
        pub(super) error_detail: Option<Status>,
    }
}

/// State of the world.
pub(super) struct Sotw;

/// Incremental.
pub(super) struct Delta;

impl Protocol for Sotw {
    type In = read::DiscoveryRequest;
    type Out = DiscoveryResponse;

    fn request(message: Self::In) -> Request {
        Request {
            names: message.resource_names,
            leave: Vec::new(),
            type_url: message.type_url,
            nonce: message.response_nonce,
            node: message.node.map(|n| n.id),
            error: message.error_detail.map(|e| e.message),
        }
    }

    fn act(session: &mut Session, request: &Request) -> Action {
        session.request(request)
    }

    fn response(encoder: &Encoder, secrets: &[(String, Secret)], nonce: &str) -> Self::Out {
        DiscoveryResponse {
            version_info: next_version(),
            resources: secrets.iter().map(|(name, secret)| encoder.encode(name, secret)).collect(),
            type_url: SECRET_TYPE.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        }
    }
}

impl Protocol for Delta {
    type In = read::DeltaDiscoveryRequest;
    type Out = DeltaDiscoveryResponse;

    fn request(message: Self::In) -> Request {
        Request {
            names: message.resource_names_subscribe,
            leave: message.resource_names_unsubscribe,
            type_url: message.type_url,
            nonce: message.response_nonce,
            node: message.node.map(|n| n.id),
            error: message.error_detail.map(|e| e.message),
        }
    }

    fn act(session: &mut Session, request: &Request) -> Action {
        session.delta(request)
    }

    fn response(encoder: &Encoder, secrets: &[(String, Secret)], nonce: &str) -> Self::Out {
        let resource = |(name, secret): &(String, Secret)| Resource {
            name: name.clone(),
            version: version(secret),
            resource: Some(encoder.encode(name, secret)),
            ..Default::default()
        };
        DeltaDiscoveryResponse {
            system_version_info: next_version(),
            resources: secrets.iter().map(resource).collect(),
            type_url: SECRET_TYPE.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        }
    }
}

/// RFC 3339 time, a slash, and a count of this process's responses.
fn next_version() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let date =
        i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok()).unwrap_or_default();
    format!("{date}/{count}")
}
