//! The shape of what is shown: the relay's part of the status document. No resources, no secrets.

use serde::Serialize;

use crate::xds::protocol::Protocol;

/// How fresh the configuration of one type is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Freshness {
    /// Asked for, and nothing has come yet.
    Never,
    /// Passed on, and Envoy has not answered yet.
    Sent,
    /// Envoy took the last response.
    Synced,
    /// Envoy (or the agent, for its own types) rejected the last response.
    Rejected,
    /// Istiod is not connected: what Envoy has may be out of date.
    Stale,
}

impl Freshness {
    /// The value of the metrics' label `state`.
    #[must_use]
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Sent => "sent",
            Self::Synced => "synced",
            Self::Rejected => "rejected",
            Self::Stale => "stale",
        }
    }
}

/// One type, for people.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TypeView {
    /// Short name.
    pub name: &'static str,
    /// Type URL.
    pub type_url: String,
    /// How fresh.
    pub state: Freshness,
    /// Since when it is stale, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stale_since: Option<u64>,
    /// Version of the last response.
    pub version: String,
    /// Nonce of the last response.
    pub nonce: String,
    /// Requests sent, responses received, responses that Envoy rejected.
    pub requests: u64,
    /// See `requests`.
    pub responses: u64,
    /// See `requests`.
    pub rejected: u64,
    /// Size of the last response in bytes.
    pub bytes: u64,
    /// Resources in the last response.
    pub resources: u64,
    /// Seconds since the last response.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "responseAgeSeconds")]
    pub response_age_s: Option<u64>,
    /// Seconds since Envoy took a response.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "acceptedAgeSeconds")]
    pub accepted_age_s: Option<u64>,
}

/// One rejection.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Nack {
    /// Short name of the type.
    pub name: &'static str,
    /// Type URL.
    pub type_url: String,
    /// Resource names in Envoy's request, the first few (SotW: the subscription).
    pub resources: Vec<String>,
    /// Envoy's words.
    pub message: String,
    /// Version of the rejected response.
    pub version: String,
    /// First and last time, in seconds since 1970.
    pub first: u64,
    /// See `first`.
    pub last: u64,
    /// How often.
    pub count: u64,
}

/// Envoy's stream.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StreamView {
    /// Number of the stream since the agent's start.
    pub id: u64,
    /// SotW or delta.
    pub protocol: Protocol,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// What has happened on it, in milliseconds since then.
    pub timeline: Timeline,
}

/// The phases of a stream, in milliseconds since Envoy opened it; of several attempts upstream the last.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Timeline {
    /// Istiod was connected, and the stream to it open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_opened: Option<u64>,
    /// Istiod's first bytes came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_response: Option<u64>,
    /// Envoy took its first configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_accepted: Option<u64>,
}

/// The way to istiod.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpstreamView {
    /// As configured.
    pub address: String,
    /// When the token sent last expires, in seconds since 1970; none without a token, or where it is no JWT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_expires: Option<u64>,
    /// The address that answered last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Since when it is connected, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connected_since: Option<u64>,
    /// Since when it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub down_since: Option<u64>,
    /// Failed attempts in a row.
    pub failures: u32,
    /// Why the last one failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Since when Envoy's stream is held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_since: Option<u64>,
    /// Milliseconds from the last failure, or the end of the last stream, to the next attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "nextAttemptMilliseconds")]
    pub next_attempt_ms: Option<u64>,
}

/// Everything, for `/debug/agentz`.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Snapshot {
    /// Envoy's stream, if one is open.
    pub stream: Option<StreamView>,
    /// The way to istiod.
    pub upstream: UpstreamView,
    /// Per type.
    pub types: Vec<TypeView>,
    /// Rejections, newest last.
    pub nacks: Vec<Nack>,
}
