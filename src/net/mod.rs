//! What every part that listens or asks needs from the network, once, below everybody.
//!
//! | file | is about |
//! |---|---|
//! | `grpc` | statuses, codes, frames, and what a gRPC server looks at first |
//! | `io` | when something was last read from a connection |
//! | `accept` | accepting: back-off, a reserve descriptor, one log line per change |
//! | `clients` | who is on a unix socket, and how many may be |
//! | `places` | a bound of connections, and who makes place at the bound |
//! | `progress` | what a connection is doing, as far as that decides who makes place |
//!
//! It promises that a listener is never stuck: whoever comes gets a place as long as somebody else has one that
//! is worth less, and a process without descriptors refuses instead of looking away. It knows nothing of Istio,
//! and uses `base` only.

pub(crate) mod accept;
pub(crate) mod clients;
pub(crate) mod grpc;
pub(crate) mod io;
pub(crate) mod places;
pub(crate) mod progress;
