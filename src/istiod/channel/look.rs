//! The same dial for a diagnosis: every address by itself, how far it came, and what the server showed.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout_at};

use super::{Aim, Connection, Connector, Progress, Target};
use crate::base::both::both;
use crate::istiod::{Error, Phase};
use crate::tls::client::Seen;

/// What was found.
#[derive(Debug)]
pub(crate) struct Look {
    /// The name that the certificate must carry; none in plain text.
    pub server_name: Option<String>,
    /// What the roots are called.
    pub roots: String,
    /// The addresses in the order in which they are dialled, each with what became of it.
    pub peers: Vec<Peer>,
}

/// One address.
#[derive(Debug)]
pub(crate) struct Peer {
    /// The address (the proxy's, where one is used).
    pub address: SocketAddr,
    /// How far the dial came.
    pub reached: Phase,
    /// The connection, or why there is none.
    pub outcome: Result<Connection, Error>,
    /// The server's certificates in DER, its own first.
    pub chain: Vec<Vec<u8>>,
}

impl Connector {
    /// Dials every address at once, within `limit` in all.
    ///
    /// # Errors
    /// When there is no address to dial: roots, address or name.
    pub(crate) async fn look(&self, limit: Duration) -> Result<Look, Error> {
        let inner = &*self.inner;
        let until = Instant::now() + limit;
        let timeout = |phase| Error::Timeout { address: inner.config.address.clone(), after: limit, phase };
        let aim = Aim::new(&inner.config)?;
        let found = timeout_at(until, both(inner.trust(&aim), aim.resolve())).await;
        let (tls, addresses) = found.map_err(|_| timeout(Phase::Resolve))??;
        let dials = addresses.into_iter().map(|address| async move {
            let seen = Arc::new(Seen::default());
            let progress = Progress(Mutex::new((Phase::Connect, Instant::now())));
            let dial = async {
                let aim = Aim::new(&inner.config)?;
                let target = Target { tls: inner.trust(&aim).await?, aim, seen: Some(seen.clone()) };
                inner.dial(&target, address, &progress).await
            };
            let outcome = match timeout_at(until, dial).await {
                Ok(outcome) => outcome,
                Err(_) => Err(timeout(progress.get().0)),
            };
            let reached = progress.get().0;
            Peer { address, reached, outcome, chain: seen.chain() }
        });
        let peers = join_all(dials).await;
        let server_name = tls.map(|tls| tls.name);
        let roots = inner.roots.as_ref().map(|roots| roots.name()).unwrap_or_default();
        Ok(Look { server_name, roots, peers })
    }
}
