//! What the fields of the discovery messages mean to the relay, by number.

/// Which message is scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// `DiscoveryRequest`
    SotwRequest,
    /// `DeltaDiscoveryRequest`
    DeltaRequest,
    /// `DiscoveryResponse`
    SotwResponse,
    /// `DeltaDiscoveryResponse`
    DeltaResponse,
    /// Anything else: only its shape is checked.
    Other,
}

/// What was found so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The message's own type URL.
    pub type_url: Option<String>,
    /// Type URL of the first resource that has a body: known early, and nearly always the same.
    pub hint: Option<String>,
    /// `version_info` or `system_version_info`.
    pub version: String,
    /// `nonce` or `response_nonce`.
    pub nonce: String,
    /// Number of resources (responses) or of names asked for (requests).
    pub count: u64,
    /// Number of removed resources, or of names unsubscribed.
    pub removed: u64,
    /// Number of resources that a client has from an earlier stream (delta requests; in others the version tells).
    pub known: u64,
    /// The first names of a request.
    pub names: Vec<String>,
    /// Whether a request carries `error_detail`, that is, a rejection.
    pub rejected: bool,
    /// Its code.
    pub error_code: i32,
    /// Its message.
    pub error_message: String,
}

impl Facts {
    /// Whether a request is the first of its type from a client that has nothing of it.
    #[must_use]
    pub fn is_bare(&self) -> bool {
        self.version.is_empty() && self.nonce.is_empty() && self.known == 0 && !self.rejected
    }
}

// The messages that the scanner steps into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Top(Message),
    Resource,
    Any,
    Status,
}

// Where a captured text goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    Type,
    Hint,
    Version,
    Nonce,
    Name,
    Error,
}

// What a field means to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    Text(Slot),
    Enter(Kind),
    Resource(Option<Kind>),
    Removed,
    Known,
    Code,
    Other,
}

pub(super) fn field(kind: Kind, number: u32, hinted: bool) -> Field {
    use Field::{Code, Enter, Known, Other, Removed, Text};
    let step = |kind| Field::Resource((!hinted).then_some(kind));
    match (kind, number) {
        (Kind::Top(Message::SotwRequest), 1) => Text(Slot::Version),
        (Kind::Top(Message::SotwRequest), 3) => Text(Slot::Name),
        (Kind::Top(Message::SotwRequest), 4) => Text(Slot::Type),
        (Kind::Top(Message::SotwRequest), 5) => Text(Slot::Nonce),
        (Kind::Top(Message::SotwRequest), 6) => Enter(Kind::Status),
        (Kind::Top(Message::DeltaRequest), 2) => Text(Slot::Type),
        (Kind::Top(Message::DeltaRequest), 3) => Text(Slot::Name),
        (Kind::Top(Message::DeltaRequest), 4) => Removed,
        (Kind::Top(Message::DeltaRequest), 5) => Known,
        (Kind::Top(Message::DeltaRequest), 6) => Text(Slot::Nonce),
        (Kind::Top(Message::DeltaRequest), 7) => Enter(Kind::Status),
        (Kind::Top(Message::SotwResponse), 1) => Text(Slot::Version),
        (Kind::Top(Message::SotwResponse), 2) => step(Kind::Any),
        (Kind::Top(Message::DeltaResponse), 1) => Text(Slot::Version),
        (Kind::Top(Message::DeltaResponse), 2) => step(Kind::Resource),
        (Kind::Top(Message::DeltaResponse), 6) => Removed,
        (Kind::Top(Message::SotwResponse | Message::DeltaResponse), 4) => Text(Slot::Type),
        (Kind::Top(Message::SotwResponse | Message::DeltaResponse), 5) => Text(Slot::Nonce),
        (Kind::Resource, 2) if !hinted => Enter(Kind::Any),
        (Kind::Any, 1) if !hinted => Text(Slot::Hint),
        (Kind::Status, 1) => Code,
        (Kind::Status, 2) => Text(Slot::Error),
        _ => Other,
    }
}
