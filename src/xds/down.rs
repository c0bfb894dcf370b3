//! istiod → Envoy: bytes are judged and go on as they come; what is the agent's own stays here.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use tonic::Status;

use super::ecds::Conversions;
use super::end_status::Class;
use super::ended::{Ended, Leg, of_gate, stalled};
use super::frames::{End, Gate, Out, Verdict};
use super::own::Own;
use super::record::Recorder;
use super::reply::Reply;
use super::rules::Responses;
use super::sink::{Broken, Sink, watched};
use super::stream::Stream;
use super::upstream::Answer;
use super::{end_status, tap, types};
use crate::base::heap;
use crate::base::quote::{cut, shown};
use crate::base::seldom::Seldom;

/// Istiod can cause these as fast as it can send.
static SKIPPED: Seldom = Seldom::new(60);
static REFUSED: Seldom = Seldom::new(60);
/// Longest cause in a line.
const CAUSE: usize = 1024;

/// A stream that has brought so many bytes may keep [`KEPT`] of freed memory for its buffers; an agent in a small
/// mesh keeps nothing.
const MUCH: u64 = 1 << 20;
/// What is under way of a large message at most: both windows and the buffers of TLS, rounded up.
const KEPT: usize = 768 * 1024;

/// What Envoy is told of a stream that has become too old.
const AGED: &str = "the stream has reached XDS_STREAM_MAX_AGE and is opened anew";

// Ready when a stream with this bound has to make place, a tenth sooner or later, so that a mesh does not move at once.
async fn old_age(most: Option<Duration>) {
    match most {
        Some(most) => tokio::time::sleep(most.mul_f64(rand::random_range(0.9..1.1))).await,
        None => std::future::pending().await,
    }
}

enum Event {
    Data(Bytes),
    End,
    Failed(h2::Error),
    EnvoyGone(Status),
    Aged,
    Converted(Bytes),
    Refused(Own),
}

/// istiod → Envoy.
pub(super) async fn down(stream: &Stream<'_>, reply: &mut Reply, mut response: Answer) -> Ended {
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
    if let Some(status) = end_status::of_trailers(&parts.headers).filter(|_| body.is_end_stream()) {
        return Ended::istiod(status);
    }
    if parts.status != http::StatusCode::OK || !grpc {
        return Ended::istiod(end_status::of_http(parts.status, content_type));
    }
    let shared = stream.shared;
    let mut gate = Gate::new(Responses {
        protocol: stream.protocol,
        own: shared.taps.iter().map(|t| t.type_url()).collect(),
        convert: shared.convert.is_some(),
    });
    let mut conversions = Conversions::new(stream.protocol, shared.convert.clone());
    let mut out = Vec::new();
    let mut brought = 0;
    let mut sink = Sink { stream: reply, leg: Leg::Envoy, shared, progress: Default::default() };
    let mut recorder = stream.recorder(Recorder::responses);
    let mut aged = pin!(old_age(shared.config.max_age));
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
            if gate.between() && aged.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Event::Aged);
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
            let what = "sent no byte in the middle of a message";
            match watched(shared, Leg::Istiod, what, shared.config.stall, event).await {
                Ok(event) => event,
                Err(after) => return stalled(Leg::Istiod, after),
            }
        };
        match event {
            Event::EnvoyGone(status) => return Ended::envoy(status),
            Event::Aged => {
                shared.meters.aged();
                return Ended { by: Leg::Agent, status: Status::unavailable(AGED), class: Class::Expected };
            }
            Event::Failed(error) => return Ended::istiod_failed(&error),
            Event::Refused(own) => stream.queue.put(own),
            Event::Converted(response) => {
                let frame = super::frames::frame_bytes(&response);
                if let Err(ended) = to_envoy(&mut sink, &mut recorder, frame).await {
                    return ended;
                }
            }
            Event::End => {
                let trailers = body.trailers().await;
                return finished(trailers, gate.whole());
            }
            Event::Data(data) => {
                commit(stream);
                let before = brought;
                brought += data.len() as u64;
                if before < MUCH && brought >= MUCH {
                    heap::keep(KEPT);
                }
                let walked = gate.push(&data, &mut out);
                for item in out.drain(..) {
                    match item {
                        Out::End(end) => response_ended(stream, end, &mut conversions),
                        Out::Bytes(bytes) => {
                            if let Err(ended) = to_envoy(&mut sink, &mut recorder, bytes).await {
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

fn commit(stream: &Stream<'_>) {
    if !stream.committed.swap(true, std::sync::atomic::Ordering::Relaxed) {
        stream.shared.came_alive();
        if let Some(memory) = &stream.shared.memory {
            memory.answered();
        }
        stream.told_connected();
        if let Some(held) = stream.held {
            held.end("healed");
        }
    }
}

async fn to_envoy(
    sink: &mut Sink<'_, &mut Reply>,
    recorder: &mut Option<Recorder<'_>>,
    bytes: Bytes,
) -> Result<(), Ended> {
    // Before Envoy can answer it.
    if let Some(recorder) = recorder {
        recorder.push(&bytes);
    }
    let opened = sink.stream.open();
    let sent = match opened {
        Ok(()) => sink.send(bytes).await,
        Err(error) => Err(Broken::Gone(error)),
    };
    sent.map_err(|broken| match broken {
        Broken::Gone(error) => Ended::envoy(end_status::of_downstream(&error)),
        Broken::Stalled(after) => stalled(Leg::Envoy, after),
    })
}

fn finished(trailers: Result<Option<http::HeaderMap>, h2::Error>, whole: bool) -> Ended {
    let status = match trailers {
        Err(error) => return Ended::istiod_failed(&error),
        Ok(trailers) => trailers.and_then(|t| end_status::of_trailers(&t)),
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
            if let Some(more) = SKIPPED.may() {
                tracing::error!(target: "xdsproxy",
                    "Skipping forwarding type url {} to Envoy as is not a valid Envoy type{more}", shown(&type_url));
            }
            return;
        }
        Verdict::Pass if !types::for_envoy(&type_url) => {
            if let Some(more) = SKIPPED.may() {
                let hint = end.facts.hint.as_deref().unwrap_or("none");
                tracing::warn!(target: "xdsproxy", "a response of type {} went to Envoy because its first resource \
                    is of type {}; Envoy will refuse it{more}", shown(&type_url), shown(hint));
            }
        }
        Verdict::Collect | Verdict::Pass | Verdict::Undecided => {}
    }
    shared.state.response(&type_url, &end.facts, end.length);
    shared.troubles.pushed(&type_url, &end.facts.version, end.facts.count);
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
        match &error {
            Some(reason) => shared.troubles.rejected("the agent", &type_url, &end.facts.version, &[], reason),
            None => shared.troubles.accepted(&type_url),
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
    if let Some(more) = REFUSED.may() {
        tracing::warn!(target: "xdsproxy", "refused ECDS from istiod: {}{more}", cut(reason, CAUSE));
    }
    let version = stream.shared.ecds_version.lock().expect("no panic holds this lock").clone();
    let frame = stream.protocol.answer(types::ECDS, &version, nonce, Some(reason));
    Own { type_url: types::ECDS, frame, health: false }
}
