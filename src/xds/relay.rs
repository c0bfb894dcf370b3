//! Two legs, two directions, one stream.
//!
//! [`exchange`] runs both directions of an open upstream stream as two futures of one task that know
//! nothing of each other's progress:
//!
//! * `down` takes istiod's bytes, judges each message ([`super::frames`]) and writes to Envoy. It alone
//!   writes downstream.
//! * `up` takes Envoy's bytes and the agent's own requests and writes to istiod. It alone writes upstream.
//!
//! **Why nothing can wedge.** The Go agent keeps an unbounded queue of requests, because with bounded
//! queues its response handler (wanting to enqueue an ACK) waited for its request sender, which waited
//! for istiod to read, which waited for the agent to take responses. Here the cycle is cut elsewhere:
//! the only thing `down` hands to `up` is the agent's own answers, through a queue whose `put` never waits
//! ([`super::own`]); everything else `down` waits for is Envoy reading, and everything `up` waits for is
//! istiod reading. Envoy's requests need no queue at all: while istiod does not read, they stay in Envoy
//! (HTTP/2 flow control), and responses go on flowing. So each direction stops only for its own reader,
//! and memory is bounded by the windows of both connections.
//!
//! **When one leg dies** the other is told at once, also when it is blocked: each side watches, besides
//! the bytes it moves, the reset of the stream that it reads from.

use std::pin::pin;
use std::time::Duration;

use tonic::Status;

use super::down::down;
use super::ended::{Ended, Leg};
use super::inbox::{Inbox, UpEnd, up};
use super::keepalive;
use super::memory::Memory;
use super::own::Queue;
use super::protocol::Protocol;
use super::record::Recorder;
use super::reply::Reply;
use super::server::Shared;
use super::session::Held;
use super::status::Class;
use super::trouble;
use super::upstream::Link;
use crate::base::seldom::Seldom;
use crate::base::tasks::Stop;
use crate::net::grpc;

/// A client may open streams as fast as it likes.
static CONNECTED: Seldom = Seldom::new(60);

/// How long the reader's true status is waited for when the connection or the writer has failed already.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long the closing of a finished connection may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// What both directions share.
pub(super) struct Stream<'a> {
    pub(super) id: u64,
    pub(super) protocol: Protocol,
    pub(super) shared: &'a Shared,
    pub(super) queue: &'a Queue,
    /// Set by the first message from istiod: from then on the stream cannot move any more.
    pub(super) committed: &'a std::sync::atomic::AtomicBool,
    /// Set by the first request for listeners, after which the agent sends its own.
    pub(super) first_listeners: &'a std::sync::atomic::AtomicBool,
    /// Set while Envoy does not know that istiod is being dialled.
    pub(super) held: Option<&'a Held>,
    /// The number of the attempt at istiod, by which the last good configuration knows it; 0: it does not.
    pub(super) attempt: &'a std::sync::atomic::AtomicU64,
    /// The client's own bound.
    pub(super) until: Option<tokio::time::Instant>,
}

impl<'a> Stream<'a> {
    /// What notes this stream for the last good configuration, where that is kept.
    pub(super) fn recorder(&self, of: fn(&'a Memory, u64, Protocol) -> Recorder<'a>) -> Option<Recorder<'a>> {
        let attempt = self.attempt.load(std::sync::atomic::Ordering::Relaxed);
        let memory = self.shared.memory.as_deref().filter(|_| attempt > 0)?;
        Some(of(memory, attempt, self.protocol))
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

    // Only before istiod's first answer.
    fn told_silent(&self) {
        if !self.committed.load(std::sync::atomic::Ordering::Relaxed) {
            self.shared.troubles.failed(trouble::silent(self.shared.upstream.address()));
        }
    }
}

/// Runs both directions until one leg ends, and closes the upstream connection.
pub(super) async fn exchange(
    stream: &Stream<'_>,
    inbox: &mut Inbox,
    reply: &mut Reply,
    link: Link,
    stop: &Stop,
) -> Ended {
    let Link { mut driver, sink, response, ping, reads, .. } = link;
    let ended = {
        let mut down = pin!(down(stream, reply, response));
        let mut up = pin!(up(stream, inbox, sink));
        let mut alive = pin!(keepalive::watch(ping, &reads, stream.shared.config.keepalive.upstream()));
        let mut settings = pin!(keepalive::first_word(&reads));
        let mut late = pin!(grpc::over(stream.until));
        let (mut driving, mut sending, mut speechless) = (true, true, true);
        let mut silent = pin!(tokio::time::sleep(trouble::SILENT));
        let mut settled = pin!(tokio::time::sleep(trouble::SETTLED));
        let (mut waits, mut young) = (true, true);
        // Set when the upstream has failed and only its reader may still know better.
        let mut verdict: Option<Ended> = None;
        let mut last_words = pin!(tokio::time::sleep(Duration::ZERO));
        loop {
            tokio::select! {
                biased;
                // First, so that everything the socket holds is moved in one go.
                result = &mut driver, if driving => {
                    driving = false;
                    let error = result.err();
                    verdict.get_or_insert_with(|| match &error {
                        Some(error) => Ended::istiod_failed(error),
                        None => Ended::istiod(Status::unavailable("error reading from server: EOF")),
                    });
                    last_words.as_mut().reset(tokio::time::Instant::now() + LAST_WORDS);
                }
                ended = &mut down => break ended,
                result = &mut up, if sending => match result {
                    UpEnd::Over(ended) => break ended,
                    UpEnd::Broken(error) => {
                        sending = false;
                        verdict.get_or_insert_with(|| Ended::istiod_failed(&error));
                        last_words.as_mut().reset(tokio::time::Instant::now() + LAST_WORDS);
                    }
                },
                () = &mut last_words, if verdict.is_some() => break verdict.take().expect("just seen"),
                () = &mut alive => break Ended {
                    by: Leg::Istiod,
                    status: Status::unavailable("keepalive ping failed to receive ACK within timeout"),
                    class: Class::Unexpected,
                },
                heard = &mut settings, if speechless => {
                    speechless = false;
                    if !heard {
                        break Ended {
                            by: Leg::Istiod,
                            status: Status::unavailable("the server accepted the connection but does not speak HTTP/2"),
                            class: Class::Unexpected,
                        };
                    }
                }
                () = &mut silent, if waits => {
                    waits = false;
                    stream.told_silent();
                }
                () = &mut settled, if young => {
                    young = false;
                    if stream.committed.load(std::sync::atomic::Ordering::Relaxed) {
                        stream.shared.troubles.settled();
                    }
                }
                () = &mut late => break Ended::envoy(grpc::exceeded()),
                () = stop.cancelled() => break Ended { by: Leg::Agent, status: Status::ok(""), class: Class::Expected },
            }
        }
    };
    // Dropping the stream's halves above has queued a reset (or the end was clean); the connection gets
    // a moment to say goodbye.
    let _ = tokio::time::timeout(FAREWELL, &mut driver).await;
    ended
}
