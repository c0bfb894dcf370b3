//! One Envoy stream, as both directions of its relay and the stand-in for istiod know it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::time::Instant;
use tonic::Status;

use super::held::Held;
use super::memory::Memory;
use super::own::{Own, Queue};
use super::protocol::Protocol;
use super::record::Recorder;
use super::shared::Shared;
use super::trouble;
use crate::base::seldom::Seldom;

/// A client may open streams as fast as it likes.
static CONNECTED: Seldom = Seldom::new(60);

/// What both directions share.
pub(super) struct Stream<'a> {
    pub(super) id: u64,
    pub(super) protocol: Protocol,
    pub(super) shared: &'a Shared,
    /// It is that of the agent's own Envoy.
    pub(super) own: bool,
    pub(super) queue: &'a Queue,
    /// Set by the first message from istiod: from then on the stream cannot move any more.
    pub(super) committed: &'a AtomicBool,
    /// Set by the first request for listeners, after which the agent sends its own.
    pub(super) first_listeners: &'a AtomicBool,
    /// Set by the first request that goes to istiod.
    pub(super) asked: &'a AtomicBool,
    /// Set where the last good configuration has been told that istiod has answered.
    pub(super) counted: &'a AtomicBool,
    /// Set while Envoy does not know that istiod is being dialled.
    pub(super) held: Option<&'a Held>,
    /// The number of the attempt at istiod, by which the last good configuration knows it; 0: it does not.
    pub(super) attempt: &'a AtomicU64,
    /// The client's own bound.
    pub(super) until: Option<Instant>,
}

impl<'a> Stream<'a> {
    /// Whether what becomes of it is the workload's; else nobody but its client is told.
    pub(super) fn is_workloads(&self) -> bool {
        self.shared.is_workloads(self.id)
    }

    // What keeps the last good configuration, which is told of the workload's Envoy only.
    fn memory(&self) -> Option<&'a Memory> {
        self.shared.memory.as_deref().filter(|_| self.shared.is_envoys(self.id))
    }

    /// How an attempt at istiod ended.
    pub(super) fn judge(&self, status: &Status) {
        if let Some(memory) = self.memory() {
            memory.judge(status);
        }
    }

    /// The way to istiod is closed. That of another stream which is the workload's then may stand.
    pub(super) fn down(&self, why: Option<String>) {
        if self.is_workloads() && !self.shared.goes_on_without(self.id) {
            self.shared.state.upstream_down(why);
        }
    }

    /// Envoy asks for listeners. Gives the agent's own requests, which follow its first.
    pub(super) fn asks(&self) -> Vec<Own> {
        if self.first_listeners.swap(true, Ordering::Relaxed) {
            return Vec::new();
        }
        self.shared.asks(self.id);
        self.shared.own(self.protocol)
    }

    /// Istiod's first message has come.
    pub(super) fn came_alive(&self) {
        self.shared.came_alive(self.id);
        if let Some(memory) = self.memory() {
            memory.answered();
            self.counted.store(true, Ordering::Relaxed);
        }
        if self.is_workloads() {
            self.told_connected();
        }
        if let Some(held) = self.held {
            held.end("healed");
        }
    }

    /// An open way to istiod is over.
    pub(super) fn over(&self) {
        if self.counted.swap(false, Ordering::Relaxed)
            && let Some(memory) = &self.shared.memory
        {
            memory.ended();
        }
    }

    /// What notes this stream for the last good configuration, where that is kept.
    pub(super) fn recorder(&self, of: fn(&'a Memory, u64, Protocol) -> Recorder<'a>) -> Option<Recorder<'a>> {
        let attempt = self.attempt.load(Ordering::Relaxed);
        let memory = self.shared.memory.as_deref().filter(|_| attempt > 0)?;
        Some(of(memory, attempt, self.protocol))
    }

    /// The relay begins. Whether the last good configuration is that of this stream is seen once, for both directions.
    pub(super) fn feeds(&self) {
        let Some(memory) = &self.shared.memory else { return };
        let attempt = self.attempt.load(Ordering::Relaxed);
        if attempt > 0 && self.shared.is_noted(self.id) {
            memory.feeds(attempt);
        } else {
            self.attempt.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the last good configuration would be that of this stream, and it was begun when it was that of another, which is
    /// over: the next epoch has ended before this one.
    pub(super) fn is_left(&self) -> bool {
        let unfed = || self.shared.memory.as_ref().is_some_and(|memory| memory.is_unfed());
        self.own && unfed() && self.shared.is_noted(self.id)
    }

    // Says that istiod has answered, in the Go agent's words.
    fn told_connected(&self) {
        let now = self.shared.state.snapshot();
        let peer = now.upstream.peer.unwrap_or_default();
        let took = now.stream.and_then(|s| s.timeline.first_response).unwrap_or_default();
        let text = format!("{} ({peer}), first answer after {took} ms", self.shared.upstream.address());
        if let Some(more) = CONNECTED.may() {
            tracing::info!(target: "xdsproxy", id = self.id, "connected to upstream XDS server: {text}{more}");
        }
        self.shared.troubles.connected(text);
    }

    /// Says that istiod has not answered yet; nothing once it has. Gives whether that has to wait, since nobody has asked it
    /// for anything.
    pub(super) fn told_silent(&self) -> bool {
        if self.committed.load(Ordering::Relaxed) {
            return false;
        }
        let asked = self.asked.load(Ordering::Relaxed);
        if asked && self.is_workloads() {
            self.shared.told(trouble::silent(self.shared.upstream.address()));
        }
        !asked
    }

    /// It has lived for a while.
    pub(super) fn settled(&self) {
        if self.committed.load(Ordering::Relaxed) && self.is_workloads() {
            self.shared.troubles.settled();
        }
    }
}
