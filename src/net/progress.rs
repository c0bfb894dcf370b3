//! What a connection is doing, for the choice of which one to close at the limit. Written by the connection, read by the
//! accept loop.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Where a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Nothing was read yet.
    New = 0,
    /// A request's head is being read.
    Head = 1,
    /// Answered before, and asks nothing now.
    Idle = 2,
    /// A request's body is waited for.
    Body = 3,
    /// A request waits for a place of its kind.
    Waiting = 4,
    /// A request is being answered.
    Busy = 5,
}

/// The HTTP library's first buffer: each connection that asks has one, however short its heads are.
const FIRST_BUFFER: u64 = 8192;

/// Bytes that heads hold over all connections of a server, and the word that they are too many. A head that is longer than
/// the library's first buffer has made that grow, and it stays so with its connection: it is held until that ends.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    held: AtomicU64,
    most: u64,
    over: Notify,
}

impl Heads {
    /// `most`: bytes of all heads together, above which some must go.
    pub(crate) fn new(most: u64) -> Self {
        Self { most, ..Self::default() }
    }

    /// Whether there is more than allowed.
    pub(crate) fn is_too_much(&self) -> bool {
        self.held.load(Relaxed) > self.most
    }

    /// Waits until there is more than allowed.
    pub(crate) async fn too_much(&self) {
        while !self.is_too_much() {
            self.over.notified().await;
        }
    }
}

/// One connection's state.
#[derive(Debug)]
pub(crate) struct Progress {
    epoch: Instant,
    heads: Arc<Heads>,
    phase: AtomicU8,
    // Milliseconds since `epoch` at which the phase began.
    since: AtomicU64,
    // Milliseconds since `epoch` at which the last answer was done with.
    turn: AtomicU64,
    // Milliseconds since `epoch` at which the head of the latest request began.
    began: AtomicU64,
    // Milliseconds since `epoch` at which a write first found no room, plus one; 0: none waits.
    blocked: AtomicU64,
    // Milliseconds for which writes of the present answer found no room, of those that are over.
    stood: AtomicU64,
    // Bytes of the head that is being read, or was read last.
    head: AtomicU64,
    // Bytes that are held of this connection's heads: the longest counts, as they have one buffer.
    held: AtomicU64,
    task: OnceLock<AbortHandle>,
    cut: AtomicBool,
    // Its client has closed its side.
    left: AtomicBool,
}

impl Progress {
    pub(crate) fn new(heads: Arc<Heads>) -> Self {
        Self {
            epoch: Instant::now(),
            heads,
            phase: AtomicU8::new(Phase::New as u8),
            since: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            began: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            stood: AtomicU64::new(0),
            head: AtomicU64::new(0),
            held: AtomicU64::new(0),
            task: OnceLock::new(),
            cut: AtomicBool::new(false),
            left: AtomicBool::new(false),
        }
    }

    /// The task that serves the connection; ending it ends the connection.
    pub(crate) fn served_by(&self, task: AbortHandle) {
        let _ = self.task.set(task);
    }

    /// Ends the connection.
    pub(crate) fn cut(&self) {
        self.cut.store(true, Relaxed);
        self.release();
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }

    /// Its client has closed its side, and may be gone.
    pub(crate) fn leaves(&self) {
        self.left.store(true, Relaxed);
    }

    /// Whether its client has closed its side.
    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Relaxed)
    }

    /// Whether it was ended by [`Progress::cut`].
    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(Relaxed)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Relaxed) {
            0 => Phase::New,
            1 => Phase::Head,
            2 => Phase::Idle,
            3 => Phase::Body,
            4 => Phase::Waiting,
            _ => Phase::Busy,
        }
    }

    pub(crate) fn enter(&self, phase: Phase) {
        if self.phase() == phase {
            return;
        }
        self.since.store(self.now(), Relaxed);
        self.phase.store(phase as u8, Relaxed);
        if phase != Phase::Head && self.held() <= FIRST_BUFFER {
            self.release();
        }
        match phase {
            Phase::Head => {
                self.began.store(self.now(), Relaxed);
                self.head.store(0, Relaxed);
            }
            Phase::Idle => self.turn.store(self.now(), Relaxed),
            _ => {}
        }
        // A kept connection's moments of waiting do not add up over its answers.
        if matches!(phase, Phase::Head | Phase::Idle) {
            self.stood.store(0, Relaxed);
        }
    }

    /// Bytes of a head were read.
    pub(crate) fn head_bytes(&self, n: usize) {
        let head = self.head.fetch_add(n as u64, Relaxed) + n as u64;
        let more = head.saturating_sub(self.held());
        self.held.fetch_add(more, Relaxed);
        let all = self.heads.held.fetch_add(more, Relaxed) + more;
        if all > self.heads.most {
            self.heads.over.notify_one();
        }
    }

    /// Whether heads hold so much that nothing may be added to them.
    pub(crate) fn heads_are_too_much(&self) -> bool {
        self.heads.is_too_much()
    }

    /// Bytes of its heads.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    fn release(&self) {
        let held = self.held.swap(0, Relaxed);
        self.heads.held.fetch_sub(held, Relaxed);
    }

    /// A write found room (`true`) or none.
    pub(crate) fn wrote(&self, room: bool) {
        if !room {
            let _ = self.blocked.compare_exchange(0, self.now() + 1, Relaxed, Relaxed);
            return;
        }
        let at = self.blocked.swap(0, Relaxed);
        if at != 0 {
            self.stood.fetch_add((self.now() + 1).saturating_sub(at), Relaxed);
        }
    }

    /// For how long it has been where it is.
    pub(crate) fn in_phase(&self) -> Duration {
        Duration::from_millis(self.now().saturating_sub(self.since.load(Relaxed)))
    }

    /// Since the first byte of the request that is being read or answered.
    pub(crate) fn request_age(&self) -> Duration {
        Duration::from_millis(self.now().saturating_sub(self.began.load(Relaxed)))
    }

    /// Since its beginning.
    pub(crate) fn age(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Whether it was never given an answer.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.turn.load(Relaxed) == 0
    }

    /// For how long it has been there without an answer: since the last one, or from its beginning.
    pub(crate) fn unanswered(&self) -> Duration {
        Duration::from_millis(self.now().saturating_sub(self.turn.load(Relaxed)))
    }

    /// For how long its reader has read nothing although data is pending.
    pub(crate) fn blocked(&self) -> Duration {
        let at = self.blocked.load(Relaxed);
        Duration::from_millis(if at == 0 { 0 } else { (self.now() + 1).saturating_sub(at) })
    }

    /// For how long its reader has been waited for in all with the present answer: one that takes a byte now and then
    /// stands, too.
    pub(crate) fn stood(&self) -> Duration {
        self.blocked() + Duration::from_millis(self.stood.load(Relaxed))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.release();
    }
}
