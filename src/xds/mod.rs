//! The ADS relay: Envoy (or a proxyless gRPC client) on a unix socket, istiod upstream.
//!
//! Configuration reaches Envoy as fast as if the agent were not there, with a memory that does not
//! depend on how big the mesh is, and it never silently stops.
//!
//! ```text
//! Envoy ── unix socket, HTTP/2 ──► server ─► session ─► relay ──► istiod: one connection per stream
//!                                   │          │          ├ inbox   Envoy's requests + the agent's own
//!                                   │          │          └ frames ◄ rules, scan   responses, cut through
//!                                   │          └ hold     dials again while istiod is away
//!                                   │          └ stand_in  answers from memory while istiod is away (memory, replay)
//!                                   └ reflection
//! ```
//!
//! **Bytes, not messages.** Both sides speak raw HTTP/2 (`h2`, the library below hyper and tonic, used
//! directly because flow control must run end to end: a window is given back to istiod only when the
//! bytes it covered have gone to Envoy). `frames` walks gRPC's frames, `scan` the top-level fields, and
//! a message's bytes go on as they arrive, once its type is known. Only types that the agent handles
//! itself are gathered whole, for the [`Tap`]s.
//!
//! **Promises.** Bytes arrive unchanged and in order. A message that is cut never ends as a good one.
//! Neither direction waits for the other (see `relay`). When one leg dies the other is told at once, with
//! the status the Go agent would give. One stream at a time: a newer one ends the older with OK. While
//! istiod is away Envoy sees one failure and is then held, so that configuration is back as soon as
//! istiod is (see `hold`). Every end is counted; every rejection of Envoy's is kept for
//! [`Handle::snapshot`]. A socket whose file was removed is bound again.
//!
//! | file | is about |
//! |---|---|
//! | `server`, `shared`, `session` | the socket, whose stream is whose, one stream from its beginning to its end |
//! | `upstream`, `hold`, `spread`, `keepalive` | the stream to istiod: opened, tried again while istiod is away, in turn with the mesh, found dead |
//! | `relay`, `inbox`, `down` | both directions |
//! | `sink` | writing within flow control; how long a leg may stall (`XDS_STALL_TIMEOUT`) |
//! | `frames`, `scan`, `rules`, `types` | pure: what goes by, and which of it passes |
//! | `pieces` | bytes that are kept for a while, however small the pieces they came in |
//! | `own`, `tap`, `ecds` | the agent's own requests, types that it handles, Wasm conversions |
//! | `memory`, `record`, `stand_in` | the last good configuration (`XDS_REPLAY`) |
//! | `state`, `meters`, `trouble`, `end_status`, `ended` | what is shown, counted and reported |
//!
//! Uses `istiod` for connections and credentials, and `replay` for what is kept.

mod down;
mod ecds;
mod end_status;
mod ended;
pub(crate) mod frames;
mod held;
pub(crate) mod hold;
mod inbox;
mod keepalive;
mod memory;
mod meters;
mod own;
mod pieces;
pub(crate) mod probe;
pub(crate) mod protocol;
mod record;
mod reflection;
mod relay;
mod reply;
pub(crate) mod rules;
pub(crate) mod scan;
mod server;
mod session;
mod shared;
mod sink;
mod spread;
mod stand_in;
pub(crate) mod state;
mod stream;
mod subscribed;
pub(crate) mod tap;
mod trouble;
pub mod types;
mod upstream;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::base::clock::Clock;
use crate::base::files::Watches;
use crate::base::metrics::Metrics;
use crate::istiod::auth::{CallHeaders, TokenSource};
use crate::trouble::Reporter;

pub(crate) use ecds::map_resources;
pub(crate) use keepalive::Keepalive;
pub(crate) use memory::{Config as Replay, Disk};
pub use protocol::Protocol;
pub(crate) use server::Handle;
pub use server::Server;
pub use tap::TrustBundle;
pub(crate) use tap::{Convert, Tap};
pub use upstream::Upstream;

/// The relay's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where Envoy finds the server: `<configPath>/XDS`.
    pub socket: PathBuf,
    /// Concurrent streams per connection (`ISTIO_GPRC_MAXSTREAMS`, default 100,000).
    pub max_streams: u32,
    /// Largest request accepted from Envoy, in bytes (`ISTIO_GPRC_MAXRECVMSGSIZE`). The Go agent's
    /// default of 4 MiB freezes the configuration of big meshes; ours is 64 MiB.
    pub max_request: u64,
    /// Pings on both legs.
    pub keepalive: Keepalive,
    /// Istiod knows this proxy by its token: what is wrong with that is told beside a way that fails.
    pub needs_token: bool,
    /// Somebody else starts the workload's Envoy (`ENVOY_EXTERNAL`).
    pub expects_envoy: bool,
    /// How long a stream is held while istiod is away (`XDS_HOLD_TIMEOUT`, default 10 minutes; zero
    /// fails each stream at once, as the Go agent does).
    pub hold: Duration,
    /// Over how long the agents of a mesh come back after istiod was away (`XDS_RECONNECT_SPREAD`, unset by default). Only
    /// where streams are held.
    pub spread: Option<Duration>,
    /// Ends a stream of which a leg has not moved for so long (`XDS_STALL_TIMEOUT`, 5 min unless set).
    pub stall: Option<Duration>,
    /// How old a stream to istiod may become, a tenth more or less (`XDS_STREAM_MAX_AGE`, unset by default).
    pub max_age: Option<Duration>,
    /// Keeps the last good configuration for an Envoy that comes while istiod is away (`XDS_REPLAY`, off by default).
    pub replay: Option<Replay>,
    /// The agent's list of watched files.
    pub(crate) watches: Watches,
}

impl Config {
    /// The defaults, for a socket at `socket`.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            max_streams: 100_000,
            max_request: 64 << 20,
            keepalive: Keepalive::default(),
            needs_token: false,
            expects_envoy: false,
            hold: Duration::from_secs(600),
            spread: None,
            stall: None,
            max_age: None,
            replay: None,
            watches: Watches::default(),
        }
    }
}

/// What the relay is made of.
pub struct Parts {
    /// The way to istiod; an `istiod::Connector` is one.
    pub upstream: Arc<dyn Upstream>,
    /// Tokens, read at each attempt.
    pub tokens: Arc<dyn TokenSource>,
    /// Metadata of each call.
    pub headers: CallHeaders,
    /// Types the agent handles itself, in the order in which they are asked for.
    pub taps: Vec<Arc<dyn Tap>>,
    /// Converts extension configs, where that is on.
    pub convert: Option<Arc<dyn Convert>>,
    /// Changes when a token or root file has changed: a held stream is then tried again at once.
    pub wake: watch::Receiver<u64>,
    /// Where the metrics go.
    pub metrics: Metrics,
    /// Dates of the status document.
    pub clock: Arc<dyn Clock>,
    /// Who is told of what is wrong with the way to istiod, and with configuration.
    pub trouble: Reporter,
}

#[cfg(test)]
mod tests;
