//! The clients of a unix socket: who they are, how many there may be, and when one has been silent too long.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::Status;

use super::accept::bound;
use super::places::{Bounds, Place, Places};
use super::progress::{Heads, Phase, Progress};
use super::streams::Streams;
use crate::base::heap::Crowd;

/// Connections of one socket. Envoy has one or two, a client of the gRPC library one a channel. A connection that has
/// opened HTTP/2 and says nothing holds up to 90 kB (release build, the XDS socket): all of them stay below 32 MB.
const CONNECTIONS: usize = 320;
/// A connection that does not finish HTTP/2's opening in this time is closed (the Go library's figure).
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(120);

/// A process: its ID, where it is of our namespace, and its user.
type Origin = (Option<i32>, Option<u32>);

/// All clients of a socket. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Clients {
    places: Places<Origin>,
    heads: Arc<Heads>,
    table: Streams<Origin>,
}

/// One client's connection. It counts as idle while it has no stream.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) progress: Arc<Progress>,
    place: Place<Origin>,
    streams: AtomicUsize,
    table: Streams<Origin>,
    id: u64,
}

/// A stream of a connection, until it is dropped.
#[derive(Debug)]
pub(crate) struct Using {
    client: Arc<Client>,
    _crowd: Crowd,
}

impl Clients {
    /// For a socket on which there may be so many streams; half of them may be one process's.
    pub(crate) fn new(streams: usize) -> Self {
        let all = bound(CONNECTIONS);
        let bounds = Bounds { all, share: (all * 3 / 4).max(1), asking: all, spare_busy: true };
        Self { places: Places::new(bounds), heads: Arc::new(Heads::new(0)), table: Streams::new(streams) }
    }

    /// A place for a new connection; `None` when all are in use.
    pub(crate) fn welcome(&self, socket: &UnixStream) -> Option<Arc<Client>> {
        let peer = socket.peer_cred().ok();
        let origin = (peer.and_then(|p| p.pid()), peer.map(|p| p.uid()));
        let progress = Arc::new(Progress::new(self.heads.clone()));
        let place = self.places.take(origin, &progress)?;
        let (table, id) = (self.table.clone(), self.table.connection(origin, &progress));
        Some(Arc::new(Client { progress, place, streams: AtomicUsize::new(0), table, id }))
    }

    /// There is no descriptor for `socket`: it is closed, and the one that is worth least makes place for the next.
    pub(crate) fn refuse(&self, socket: UnixStream) {
        drop(socket);
        self.places.evict();
    }
}

impl Client {
    /// A stream begins.
    ///
    /// # Errors
    /// When there are too many: what its client is told.
    pub(crate) fn stream(self: &Arc<Self>) -> Result<Using, Status> {
        self.table.begin(self.id).map_err(|most| {
            Status::resource_exhausted(format!(
                "the agent has too many streams on this socket: {most} at most, half of them of one process"
            ))
        })?;
        if self.streams.fetch_add(1, Relaxed) == 0 {
            self.place.asks();
            self.progress.enter(Phase::Busy);
        }
        Ok(Using { client: self.clone(), _crowd: Crowd::join() })
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        self.client.table.end(self.client.id);
        if self.client.streams.fetch_sub(1, Relaxed) == 1 {
            self.client.progress.enter(Phase::Idle);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.table.forget(self.id);
    }
}
