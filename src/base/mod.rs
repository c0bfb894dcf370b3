//! Knows nothing of Istio: tasks, time, back-off, sockets, files, metrics, logging.
//!
//! Uses no other module of this crate.

pub mod backoff;
pub mod build_info;
pub mod clock;
pub mod error;
pub mod files;
pub mod heap;
pub mod lane;
pub mod logging;
pub mod metrics;
pub mod nearest;
pub mod netlink;
pub mod notify;
pub mod path;
pub mod place;
pub mod quote;
pub mod ready;
pub mod seldom;
pub mod tasks;
pub mod uds;
pub(crate) mod wire;
