//! Envoy's secret discovery service on unix sockets.
//!
//! [`Server`] binds the sockets at once and serves them until it is told to stop; `session` decides what
//! a request means, without IO; `encode` turns a secret into Envoy's message. Secrets come from a
//! [`SecretSource`](crate::secrets::SecretSource).
//!
//! It promises: a response holds every name asked for or the stream ends with the reason; streams end by
//! themselves at the stop; a socket whose file was removed is bound again; an open stream costs no
//! task of its own. Uses `secrets` (trait and names).
//!
//! | file | is about |
//! |---|---|
//! | `server` | sockets (made by `base::uds`, with the mode that was asked for) and the connections on them |
//! | `peers` | who may connect: `SDS_ALLOWED_UIDS` |
//! | `calls`, `stream`, `answers` | from a connection to a stream, and one stream's life |
//! | `asked` | one of its requests, until all is there that is still wanted of it |
//! | `protocol` | its two forms: what is read of a request, and how an answer is put |
//! | `session`, `encode` | pure: what a request means, and a secret as Envoy's message |
//! | `revoked` | the certificate revocation list beside every root |
//! | `metrics` | what is counted |

mod answers;
mod asked;
mod calls;
pub(crate) mod encode;
mod metrics;
mod peers;
mod protocol;
mod revoked;
pub(crate) mod server;
pub(crate) mod session;
mod stream;

pub(crate) use calls::Callers;
pub(crate) use encode::{KeyAccelerator, PrivateKeyProvider};
pub(crate) use server::Server;

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::base::files::Watches;
use crate::base::uds;

/// Where a socket is, and the mode of its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// The file.
    pub path: PathBuf,
    /// Who may connect, beside root: whoever may write to it.
    pub mode: u32,
}

impl From<PathBuf> for Address {
    /// With mode 0666: Envoy may run as another user.
    fn from(path: PathBuf) -> Self {
        Self { path, mode: uds::SHARED }
    }
}

/// What the server is told.
#[derive(Debug, Clone, Default)]
pub(crate) struct Config {
    /// Where to listen. The parents are made with mode 0750.
    pub sockets: Vec<Address>,
    /// `ProxyConfig.privateKeyProvider`.
    pub private_key_provider: Option<PrivateKeyProvider>,
    /// The certificate revocation list that every root names if the file exists at that moment;
    /// `None` with `PILOT_ENABLE_CA_CRL=false`.
    pub crl: Option<PathBuf>,
    /// After how long without a read a client is pinged, and how long it has to answer; `None`: 30 s and 10 s.
    pub keepalive: Option<(std::time::Duration, std::time::Duration)>,
    /// Users that may connect beside the agent's own (`SDS_ALLOWED_UIDS`); `None`: everybody.
    pub allowed: Option<BTreeSet<u32>>,
    /// The agent's list of watched files.
    pub watches: Watches,
}
