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

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};
use tonic::Status;

use super::ecds::Conversions;
use super::frames::{End, Error, Gate, Out, Verdict};
use super::inbox::{Inbox, UpEnd, up};
use super::own::{Own, Queue};
use super::protocol::Protocol;
use super::reply::Reply;
use super::rules::Responses;
use super::server::Shared;
use super::session::Held;
use super::status::{self, Class};
use super::upstream::Link;
use super::{keepalive, tap, types};
use crate::base::tasks::Stop;

/// A leg that does not move for so long, although bytes wait to be written, is worth a warning (the Go
/// agent's figure for a slow write to Envoy).
const STALL_NOTICE: Duration = Duration::from_secs(10);
/// How long the reader's true status is waited for when the connection or the writer has failed already.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long the closing of a finished connection may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// Who ended the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// Istiod, or the way to it.
    Istiod,
    /// Envoy, or the way to it.
    Envoy,
    /// The agent: a newer stream, or the end of the agent.
    Agent,
}

/// How a stream ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) by: Leg,
    pub(super) status: Status,
    pub(super) class: Class,
}

impl Ended {
    fn istiod(status: Status) -> Self {
        let class = status::class(&status);
        Self { by: Leg::Istiod, status, class }
    }

    fn istiod_failed(error: &h2::Error) -> Self {
        let (status, class) = status::of_upstream(error);
        Self { by: Leg::Istiod, status, class }
    }

    pub(super) fn envoy(status: Status) -> Self {
        let class = status::class(&status);
        Self { by: Leg::Envoy, status, class }
    }
}

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
}

/// Why a write did not happen.
pub(super) enum Broken {
    Gone(h2::Error),
    Stalled(Duration),
}

/// Writes to one leg within its flow control, and notices when nothing moves.
pub(super) struct Sink<'a, S> {
    pub(super) stream: S,
    pub(super) leg: &'static str,
    pub(super) shared: &'a Shared,
}

impl<S: AsMut<SendStream<Bytes>>> Sink<'_, S> {
    pub(super) async fn send(&mut self, mut bytes: Bytes) -> Result<(), Broken> {
        while !bytes.is_empty() {
            let stream = self.stream.as_mut();
            stream.reserve_capacity(bytes.len());
            let room = match stream.capacity() {
                0 => self.room().await?,
                room => room,
            };
            let piece = bytes.split_to(room.min(bytes.len()));
            self.stream.as_mut().send_data(piece, false).map_err(Broken::Gone)?;
        }
        Ok(())
    }

    async fn room(&mut self) -> Result<usize, Broken> {
        let stream = self.stream.as_mut();
        let capacity = poll_fn(|cx| {
            loop {
                return match stream.poll_capacity(cx) {
                    Poll::Ready(Some(Ok(0))) => continue,
                    Poll::Ready(Some(Ok(room))) => Poll::Ready(Ok(room)),
                    Poll::Ready(Some(Err(error))) => Poll::Ready(Err(Broken::Gone(error))),
                    Poll::Ready(None) => Poll::Ready(Err(Broken::Gone(Reason::CANCEL.into()))),
                    Poll::Pending => Poll::Pending,
                };
            }
        });
        watched(self.shared, self.leg, capacity).await.unwrap_or_else(|after| Err(Broken::Stalled(after)))
    }
}

// Waits for something that must move. A stall is counted and logged once; it ends the wait only if a
// limit is set.
async fn watched<T>(
    shared: &Shared,
    leg: &'static str,
    wait: impl Future<Output = T>,
) -> Result<T, Duration> {
    let mut wait = pin!(wait);
    let limit = shared.config.stall;
    let notice = limit.map_or(STALL_NOTICE, |l| l.min(STALL_NOTICE));
    if let Ok(done) = tokio::time::timeout(notice, &mut wait).await {
        return Ok(done);
    }
    let began = tokio::time::Instant::now();
    shared.meters.stall(leg);
    tracing::warn!(target: "xdsproxy", "{leg} has taken no byte for {notice:?} although some wait; the stream goes on");
    let result = match limit {
        None => Ok(wait.await),
        Some(limit) => tokio::time::timeout(limit.saturating_sub(notice), wait).await.map_err(|_| limit),
    };
    if result.is_ok() {
        tracing::info!(target: "xdsproxy", "{leg} moves again after {:?}", began.elapsed() + notice);
    }
    result
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
        let mut alive = pin!(keepalive::watch(ping, &reads, stream.shared.config.keepalive));
        let mut settings = pin!(keepalive::first_word(&reads));
        let (mut driving, mut sending, mut speechless) = (true, true, true);
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
                () = stop.cancelled() => break Ended { by: Leg::Agent, status: Status::ok(""), class: Class::Expected },
            }
        }
    };
    // Dropping the stream's halves above has queued a reset (or the end was clean); the connection gets
    // a moment to say goodbye.
    let _ = tokio::time::timeout(FAREWELL, &mut driver).await;
    ended
}

enum Event {
    Data(Bytes),
    End,
    Failed(h2::Error),
    EnvoyGone(Status),
    Converted(Bytes),
    Refused(Own),
}

/// istiod → Envoy.
async fn down(stream: &Stream<'_>, reply: &mut Reply, mut response: h2::client::ResponseFuture) -> Ended {
    let headers = poll_fn(|cx| {
        if let Poll::Ready(result) = std::pin::Pin::new(&mut response).poll(cx) {
            return Poll::Ready(Ok(result));
        }
        reply.poll_gone(cx).map(Err)
    });
    let answer = match headers.await {
        Err(gone) => return Ended::envoy(gone),
        Ok(Err(error)) => return Ended::istiod_failed(&error),
        Ok(Ok(answer)) => answer,
    };
    let (parts, mut body) = answer.into_parts();
    let content_type = parts.headers.get(http::header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let grpc = content_type.is_some_and(|t| t.starts_with("application/grpc"));
    if let Some(status) = status::of_trailers(&parts.headers).filter(|_| body.is_end_stream()) {
        return Ended::istiod(status);
    }
    if parts.status != http::StatusCode::OK || !grpc {
        return Ended::istiod(status::of_http(parts.status, content_type));
    }
    let shared = stream.shared;
    let mut gate = Gate::new(Responses {
        protocol: stream.protocol,
        own: shared.taps.iter().map(|t| t.type_url()).collect(),
        convert: shared.convert.is_some(),
    });
    let mut conversions = Conversions::new(stream.protocol, shared.convert.clone());
    let mut out = Vec::new();
    let mut sink = Sink { stream: reply, leg: "Envoy", shared };
    loop {
        let event = poll_fn(|cx| {
            if gate.between()
                && let Poll::Ready(done) = conversions.poll(cx)
            {
                return Poll::Ready(match done {
                    Ok(response) => Event::Converted(response),
                    Err((nonce, reason)) => Event::Refused(refusal(stream, &nonce, &reason)),
                });
            }
            match body.poll_data(cx) {
                Poll::Ready(Some(Ok(data))) => return Poll::Ready(Event::Data(data)),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Event::Failed(error)),
                Poll::Ready(None) => return Poll::Ready(Event::End),
                Poll::Pending => {}
            }
            sink.stream.poll_gone(cx).map(Event::EnvoyGone)
        });
        // In the middle of a message istiod must go on; between two it may be silent for hours.
        let event = if gate.whole() {
            event.await
        } else {
            match watched(shared, "istiod, in the middle of a message,", event).await {
                Ok(event) => event,
                Err(after) => return stalled("istiod", after),
            }
        };
        match event {
            Event::EnvoyGone(status) => return Ended::envoy(status),
            Event::Failed(error) => return Ended::istiod_failed(&error),
            Event::Refused(own) => stream.queue.put(own),
            Event::Converted(response) => {
                if let Err(ended) = to_envoy(&mut sink, super::frames::frame_bytes(&response)).await {
                    return ended;
                }
            }
            Event::End => {
                let trailers = body.trailers().await;
                return finished(trailers, gate.whole());
            }
            Event::Data(data) => {
                commit(stream);
                let walked = gate.push(&data, &mut out);
                for item in out.drain(..) {
                    match item {
                        Out::End(end) => response_ended(stream, end, &mut conversions),
                        Out::Bytes(bytes) => {
                            if let Err(ended) = to_envoy(&mut sink, bytes).await {
                                return ended;
                            }
                        }
                    }
                }
                if let Err(error) = walked {
                    return Ended::istiod(of_gate(&error));
                }
                // Now that the bytes have gone on, istiod may send as many more.
                let _ = body.flow_control().release_capacity(data.len());
            }
        }
    }
}

pub(super) fn of_gate(error: &Error) -> Status {
    match error {
        Error::TooLarge { .. } => Status::resource_exhausted(error.to_string()),
        Error::Compressed => Status::unimplemented(error.to_string()),
        Error::Flag(_) | Error::Malformed(_) => Status::internal(error.to_string()),
    }
}

pub(super) fn stalled(leg: &str, after: Duration) -> Ended {
    let status = Status::unavailable(format!("{leg} has not moved a byte for {after:?} (XDS_STALL_TIMEOUT)"));
    Ended { by: if leg == "Envoy" { Leg::Envoy } else { Leg::Istiod }, status, class: Class::Unexpected }
}

fn commit(stream: &Stream<'_>) {
    if !stream.committed.swap(true, std::sync::atomic::Ordering::Relaxed) {
        stream.shared.came_alive();
        if let Some(held) = stream.held {
            held.end("healed");
        }
    }
}

async fn to_envoy(sink: &mut Sink<'_, &mut Reply>, bytes: Bytes) -> Result<(), Ended> {
    let opened = sink.stream.open();
    let sent = match opened {
        Ok(()) => sink.send(bytes).await,
        Err(error) => Err(Broken::Gone(error)),
    };
    sent.map_err(|broken| match broken {
        Broken::Gone(error) => Ended::envoy(status::of_downstream(&error)),
        Broken::Stalled(after) => stalled("Envoy", after),
    })
}

fn finished(trailers: Result<Option<http::HeaderMap>, h2::Error>, whole: bool) -> Ended {
    let status = match trailers {
        Err(error) => return Ended::istiod_failed(&error),
        Ok(trailers) => trailers.and_then(|t| status::of_trailers(&t)),
    };
    let status =
        status.unwrap_or_else(|| Status::internal("server closed the stream without sending trailers"));
    if status.code() == tonic::Code::Ok && !whole {
        // Never let half a message end as a good stream.
        return Ended::istiod(Status::internal("unexpected EOF: the stream ended inside a message"));
    }
    Ended::istiod(status)
}

fn response_ended(stream: &Stream<'_>, end: End, conversions: &mut Conversions) {
    let shared = stream.shared;
    shared.meters.response();
    let type_url = end.facts.type_url.clone().unwrap_or_default();
    tracing::debug!(target: "xdsproxy", stream = stream.id, "response {} of {} bytes, {} resources, nonce {}",
        types::short(&type_url), end.length, end.facts.count, end.facts.nonce);
    match end.verdict {
        Verdict::Drop => {
            tracing::error!(target: "xdsproxy",
                "Skipping forwarding type url {type_url} to Envoy as is not a valid Envoy type");
            return;
        }
        Verdict::Pass if !types::for_envoy(&type_url) => {
            tracing::warn!(target: "xdsproxy", "a response of type {type_url} went to Envoy because its first resource \
                is of type {}; Envoy will refuse it", end.facts.hint.as_deref().unwrap_or("none"));
        }
        Verdict::Collect | Verdict::Pass | Verdict::Undecided => {}
    }
    shared.state.response(&type_url, &end.facts, end.length);
    if end.verdict != Verdict::Collect {
        return;
    }
    let nonce = end.facts.nonce;
    if let Some(tap) = shared.taps.iter().find(|t| t.type_url() == type_url) {
        let applied = match end.body {
            Some(body) => tap::apply(&**tap, stream.protocol, body),
            None => Some(Err(format!("{} bytes are more than the agent takes", end.length))),
        };
        let Some(applied) = applied else { return };
        let error = applied.err();
        if let Some(reason) = &error {
            tracing::warn!(target: "xdsproxy", "refused {} from istiod: {reason}", types::short(&type_url));
        }
        let frame = stream.protocol.answer(&type_url, &end.facts.version, &nonce, error.as_deref());
        stream.queue.put(Own { type_url: tap.type_url(), frame, health: false });
    } else if let Some(body) = end.body {
        conversions.begin(nonce, body);
    } else {
        let own = refusal(stream, &nonce, &format!("{} bytes are more than the agent converts", end.length));
        stream.queue.put(own);
    }
}

// Names the version that Envoy last said it has, which is what the Go agent does.
fn refusal(stream: &Stream<'_>, nonce: &str, reason: &str) -> Own {
    tracing::warn!(target: "xdsproxy", "refused ECDS from istiod: {reason}");
    let version = stream.shared.ecds_version.lock().expect("no panic holds this lock").clone();
    let frame = stream.protocol.answer(types::ECDS, &version, nonce, Some(reason));
    Own { type_url: types::ECDS, frame, health: false }
}
