//! The clients of a unix socket: who they are, how many there may be, and when one has been silent too long.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::Status;

use super::accept::bound;
use super::grpc::messages::Share;
use super::own;
use super::places::{Bounds, Origin, Place, Places};
use super::progress::{Heads, Phase, Progress};
use super::streams::Streams;
use crate::base::heap::Crowd;

/// Connections of one socket. Envoy has one or two, a client of the gRPC library one a channel. A connection that has
/// opened HTTP/2 and says nothing holds up to 90 kB (release build, the XDS socket): all of them stay below 32 MB.
const CONNECTIONS: usize = 320;
/// A connection that does not finish HTTP/2's opening in this time is closed (the Go library's figure).
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(120);

/// A process: its ID, where it is of our namespace, its user, and which of the agent's own Envoys it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Process {
    pid: Option<i32>,
    uid: Option<u32>,
    own: Option<u64>,
}

impl Process {
    fn of(socket: &UnixStream) -> Self {
        let peer = socket.peer_cred().ok();
        let pid = peer.and_then(|p| p.pid());
        Self { pid, uid: peer.map(|p| p.uid()), own: pid.and_then(own::which) }
    }
}

impl Origin for Process {
    fn is_own(&self) -> bool {
        self.own.is_some()
    }
}

/// All clients of a socket. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Clients {
    places: Places<Process>,
    heads: Arc<Heads>,
    table: Streams<Process>,
    shares: Arc<Mutex<HashMap<Process, Weak<Share>>>>,
}

/// One client's connection. It counts as idle while it has no stream.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) progress: Arc<Progress>,
    place: Place<Process>,
    streams: AtomicUsize,
    table: Streams<Process>,
    id: u64,
    share: Arc<Share>,
    /// Whether it is the agent's own Envoy.
    pub(crate) is_own: bool,
    /// Which one: a later epoch has a higher number.
    pub(crate) own: Option<u64>,
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
        let (heads, table) = (Arc::new(Heads::new(0)), Streams::new(streams));
        Self { places: Places::new(bounds), heads, table, shares: Arc::default() }
    }

    /// A place for a new connection; `None` when all are in use.
    pub(crate) fn welcome(&self, socket: &UnixStream) -> Option<Arc<Client>> {
        let origin = Process::of(socket);
        let progress = Arc::new(Progress::new(self.heads.clone()));
        let place = self.places.take(origin, &progress)?;
        let (table, id) = (self.table.clone(), self.table.connection(origin, &progress));
        let (share, own, is_own) = (self.share(origin), origin.own, origin.is_own());
        let streams = AtomicUsize::new(0);
        Some(Arc::new(Client { progress, place, streams, table, id, share, is_own, own }))
    }

    // What all connections of a process hold together; as many as there are connections at most.
    fn share(&self, origin: Process) -> Arc<Share> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = shares.get(&origin).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Share::new(origin.is_own()));
        shares.insert(origin, Arc::downgrade(&share));
        share
    }

    /// There is no descriptor for `socket`: it is closed, and the one that is worth least makes room for the next.
    pub(crate) fn refuse(&self, socket: UnixStream) {
        drop(socket);
        self.places.evict();
    }

    /// Memory is short: those that are worth least end.
    pub(crate) fn shed(&self) {
        if !self.places.shed() {
            self.table.shed();
        }
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

impl Using {
    /// What its process may hold of messages that are not complete.
    pub(crate) fn share(&self) -> Arc<Share> {
        self.client.share.clone()
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
