//! How a stream ended: by whom, what the other side is told, and how it is counted.

use std::time::Duration;

use tonic::Status;

use super::end_status::{self, Class};
use super::frames::Error;

/// Who ended the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// Istiod, or the way to it.
    Istiod,
    /// Envoy, or the way to it.
    Envoy,
    /// The agent: a newer stream, or the end of the agent.
    Agent,
}

impl Leg {
    /// For people, and the value of the metrics' label `leg`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Istiod => "istiod",
            Self::Envoy => "Envoy",
            Self::Agent => "the agent",
        }
    }
}

/// How a stream ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) by: Leg,
    pub(super) status: Status,
    pub(super) class: Class,
    /// Istiod has sent the stream away before it looked at it (an end in order, as HTTP/2 has it).
    pub(super) untouched: bool,
}

impl Ended {
    pub(super) fn new(by: Leg, status: Status, class: Class) -> Self {
        Self { by, status, class, untouched: false }
    }

    pub(super) fn istiod(status: Status) -> Self {
        let class = end_status::class(&status);
        Self::new(Leg::Istiod, status, class)
    }

    pub(super) fn istiod_failed(error: &h2::Error) -> Self {
        let (status, class) = end_status::of_upstream(error);
        Self { untouched: end_status::is_untouched(error), ..Self::new(Leg::Istiod, status, class) }
    }

    pub(super) fn envoy(status: Status) -> Self {
        let class = end_status::class(&status);
        Self::new(Leg::Envoy, status, class)
    }
}

/// The status of a direction that cannot go on.
pub(super) fn of_gate(error: &Error) -> Status {
    match error {
        Error::TooLarge { .. } => Status::resource_exhausted(error.to_string()),
        Error::Compressed => Status::unimplemented(error.to_string()),
        Error::Flag(_) | Error::Malformed(_) => Status::internal(error.to_string()),
    }
}

/// A leg has stood still for longer than is allowed.
pub(super) fn stalled(by: Leg, after: Duration) -> Ended {
    let text = format!("{} has stood still for {after:?} (XDS_STALL_TIMEOUT)", by.name());
    Ended::new(by, Status::unavailable(text), Class::Unexpected)
}
