//! Who may connect (`SDS_ALLOWED_UIDS`). The sockets have mode 0666 (0660 at the place of old releases), since Envoy may run
//! as another user; where it is known which, everybody else need not get a key.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::net::UnixStream;

use super::metrics::Metrics;
use crate::base::seldom::Seldom;

/// Lines about peers that are turned away, a minute.
static TOLD: Seldom = Seldom::new(4);

/// The users that may connect. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(super) struct Peers(Option<Arc<BTreeSet<u32>>>);

impl Peers {
    /// Everybody, or these users and the agent's own, as which its Envoy runs.
    pub(super) fn new(allowed: Option<BTreeSet<u32>>) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Self(allowed.map(|uids| Arc::new(uids.into_iter().chain([own]).collect())))
    }

    /// Whether this client may stay; one that may not is counted and told of.
    pub(super) fn admit(&self, client: &UnixStream, metrics: &Metrics) -> bool {
        let Some(allowed) = &self.0 else { return true };
        let peer = client.peer_cred();
        if peer.as_ref().is_ok_and(|peer| allowed.contains(&peer.uid())) {
            return true;
        }
        metrics.turned_away();
        if let Some(more) = TOLD.may() {
            let who = match peer {
                Ok(peer) => format!("user {} (process {})", peer.uid(), peer.pid().unwrap_or_default()),
                Err(error) => format!("a client whose user is not known ({error})"),
            };
            tracing::warn!(target: "sds", "{who} may not connect: SDS_ALLOWED_UIDS does not name it{more}");
        }
        false
    }
}
