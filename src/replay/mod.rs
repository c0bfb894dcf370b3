//! The last good configuration of Envoy, kept in memory (`XDS_REPLAY`), and the server that answers Envoy from it while
//! istiod is away. Pure: no IO, no clock, no channels.
//!
//! | file | is about |
//! |---|---|
//! | `read` | what a message of the discovery protocol says, without decoding what is in its resources |
//! | `blocks` | bytes of resources, compressed in blocks |
//! | `set` | the resources of one type, by name |
//! | `asked` | what Envoy has asked for, and what of that has yet to come |
//! | `store` | what Envoy has accepted, by type and name |
//! | `disk` | the store as a file that is whole or not there |
//! | `stand_in` | one stream of Envoy's answered from the store, and how it is handed over to istiod |
//! | `strip` | Envoy's answers to the stand-in, which must not reach istiod |
//!
//! It promises:
//!
//! * Bytes are kept as they came, never re-encoded, and only once Envoy has accepted the response they came in. What
//!   was rejected never enters; what was removed, or is no longer asked for, leaves.
//! * An Envoy that comes without anything is told what the last Envoy had accepted: clusters before endpoints, listeners,
//!   routes, extensions and the rest, with nonces that istiod never sees.
//! * What Envoy has is never taken away or set back: the last push may have come without its answer being heard, and a file
//!   may be old. Of a type of which it has something it is told only what it asks for by name and has not; in SotW, whose
//!   first request of a type does not say which of its names Envoy has, only what it asks for later.
//! * After the hand-over Envoy has what istiod has: delta streams name what Envoy holds, SotW streams ask for all.
//!
//! Uses only what every part may use.

mod asked;
mod blocks;
pub(crate) mod disk;
pub(crate) mod read;
mod set;
mod stand_in;
mod store;
mod strip;
#[cfg(test)]
mod tests;

pub use stand_in::StandIn;
pub(crate) use store::Store;
pub(crate) use strip::Strip;

/// Which form of the discovery protocol a stream speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// State of the world.
    Sotw,
    /// Delta.
    Delta,
}

/// Type URLs in the order in which Envoy is to hear of them; the rest comes last.
const ORDER: &[&str] = &[
    CLUSTER,
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
    LISTENER,
    "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
    "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
];
const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

/// Its place in [`ORDER`].
fn rank(type_url: &str) -> usize {
    ORDER.iter().position(|known| *known == type_url).unwrap_or(ORDER.len())
}
