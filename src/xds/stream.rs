//! One Envoy stream, as both directions of its relay and the stand-in for istiod know it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::time::Instant;

use super::held::Held;
use super::memory::Memory;
use super::own::Queue;
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
    /// Set while Envoy does not know that istiod is being dialled.
    pub(super) held: Option<&'a Held>,
    /// The number of the attempt at istiod, by which the last good configuration knows it; 0: it does not.
    pub(super) attempt: &'a AtomicU64,
    /// The client's own bound.
    pub(super) until: Option<Instant>,
}

impl<'a> Stream<'a> {
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

    /// Says that istiod has answered, in the Go agent's words.
    pub(super) fn told_connected(&self) {
        let now = self.shared.state.snapshot();
        let peer = now.upstream.peer.unwrap_or_default();
        let took = now.stream.and_then(|s| s.timeline.first_response).unwrap_or_default();
        let text = format!("{} ({peer}), first answer after {took} ms", self.shared.upstream.address());
        if let Some(more) = CONNECTED.may() {
            tracing::info!(target: "xdsproxy", id = self.id, "connected to upstream XDS server: {text}{more}");
        }
        self.shared.troubles.connected(text);
    }

    /// Says that istiod has not answered yet; nothing once it has.
    pub(super) fn told_silent(&self) {
        if !self.committed.load(Ordering::Relaxed) {
            self.shared.told(trouble::silent(self.shared.upstream.address()));
        }
    }
}
