//! istiod → Envoy: bytes are judged and go on as they come; what is the agent's own stays here.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use tonic::Status;

use super::ecds::Conversions;
use super::end_status::Class;
use super::ended::{Ended, Leg, of_gate, stalled};
use super::frames::{End, Gate, Out, Verdict};
use super::own::Own;
use super::pieces::with_more;
use super::record::Recorder;
use super::reply::Reply;
use super::rules::Responses;
use super::sink::{Broken, Progress, Sink};
use super::stream::Stream;
use super::upstream::Answer;
use super::{end_status, tap, types};
use crate::base::heap;
use crate::base::quote::{cut, shown};
use crate::base::seldom::Seldom;
use crate::net::grpc::{is_grpc, status_at_end};

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
/// Likewise, of one that goes on alone.
const LEFT: &str =
    "the next epoch is gone, and the stream is opened anew so that what comes is kept (XDS_REPLAY)";

// Ready when a stream with this bound has to make room, a tenth sooner or later, so that a mesh does not move at once.
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
    Left,
    Converted(Bytes),
    Refused(Own),
}

/// istiod → Envoy.
pub(super) async fn down(stream: &Stream<'_>, reply: &mut Reply, response: Answer) -> Ended {
    let body = match accepted(reply, response).await {
        Ok(body) => body,
        Err(ended) => return ended,
    };
    let shared = stream.shared;
    let mut way = Down {
        stream,
        body,
        gate: Gate::new(Responses {
            protocol: stream.protocol,
            own: shared.taps.iter().map(|t| t.type_url()).collect(),
            convert: shared.convert.is_some(),
        }),
        conversions: Conversions::new(stream.protocol, shared.convert.clone()),
        out: Vec::new(),
        brought: 0,
        sink: Sink { stream: reply, leg: Leg::Envoy, shared, progress: Default::default() },
        progress: Progress::default(),
        recorder: stream.recorder(Recorder::responses),
    };
    let mut aged = pin!(old_age(shared.config.max_age));
    loop {
        let taken = match way.next(aged.as_mut()).await {
            Ok(event) => way.take(event).await,
            Err(ended) => Err(ended),
        };
        if let Err(ended) = taken {
            return ended;
        }
    }
}

/// The body of an answer that is a stream; every other answer is its end.
async fn accepted(reply: &mut Reply, mut response: Answer) -> Result<RecvStream, Ended> {
    let headers = poll_fn(|cx| {
        if let Poll::Ready(result) = Pin::new(&mut response).poll(cx) {
            return Poll::Ready(Ok(result));
        }
        reply.poll_gone(cx).map(Err)
    });
    let answer = match headers.await {
        Err(gone) => return Err(Ended::envoy(gone)),
        Ok(Err(error)) => return Err(Ended::istiod_failed(&error)),
        Ok(Ok(answer)) => answer,
    };
    let (parts, mut body) = answer.into_parts();
    let content_type = parts.headers.get(http::header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    if let Some(status) = end_status::of_head(&parts.headers, &mut body) {
        return Err(Ended::istiod(status));
    }
    if parts.status != http::StatusCode::OK || !is_grpc(&parts.headers) {
        return Err(Ended::istiod(end_status::of_http(parts.status, content_type)));
    }
    if body.is_end_stream() {
        return Err(Ended::istiod(status_at_end(&parts.headers)));
    }
    Ok(body)
}

/// The way of one stream's responses.
struct Down<'a> {
    stream: &'a Stream<'a>,
    body: RecvStream,
    gate: Gate<Responses>,
    conversions: Conversions,
    /// What a piece becomes; kept for its allocation.
    out: Vec<Out>,
    /// Bytes that istiod has sent.
    brought: u64,
    sink: Sink<'a, &'a mut Reply>,
    /// Of istiod, in the middle of a message.
    progress: Progress,
    recorder: Option<Recorder<'a>>,
}

impl Down<'_> {
    /// Waits for what comes next. In the middle of a message istiod must go on; between two it may be silent for hours.
    async fn next(&mut self, mut aged: Pin<&mut impl Future<Output = ()>>) -> Result<Event, Ended> {
        let Self { stream, body, gate, conversions, sink, progress, .. } = self;
        let (gate, shared) = (&*gate, stream.shared);
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
                Poll::Ready(Some(Ok(_))) if gate.between() && stream.is_left() => {
                    return Poll::Ready(Event::Left);
                }
                Poll::Ready(Some(Ok(data))) => return Poll::Ready(Event::Data(data)),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Event::Failed(error)),
                Poll::Ready(None) => return Poll::Ready(Event::End),
                Poll::Pending => {}
            }
            sink.stream.poll_gone(cx).map(Event::EnvoyGone)
        });
        if gate.whole() {
            return Ok(event.await);
        }
        let what = "sent next to nothing in the middle of a message";
        let watched = progress.watched(shared, Leg::Istiod, what, event).await;
        watched.map_err(|after| stalled(Leg::Istiod, after))
    }

    async fn take(&mut self, event: Event) -> Result<(), Ended> {
        match event {
            Event::Data(data) => self.data(data).await,
            Event::Converted(response) => self.pass_on(super::frames::frame_bytes(&response)).await,
            Event::Refused(own) => {
                self.stream.queue.put(own);
                Ok(())
            }
            Event::EnvoyGone(status) => Err(Ended::envoy(status)),
            Event::Failed(error) => Err(Ended::istiod_failed(&error)),
            Event::End => {
                let trailers = self.body.trailers().await;
                Err(finished(trailers, self.gate.whole()))
            }
            Event::Aged => {
                self.stream.shared.meters.aged();
                Err(Ended::new(Leg::Agent, Status::unavailable(AGED), Class::Expected))
            }
            Event::Left => Err(Ended::new(Leg::Agent, Status::unavailable(LEFT), Class::Expected)),
        }
    }

    async fn data(&mut self, data: Bytes) -> Result<(), Ended> {
        commit(self.stream);
        let data = with_more(&mut self.body, data).await;
        let before = self.brought;
        self.brought += data.len() as u64;
        self.progress.moved += data.len();
        self.stream.shared.passing.more(data.len());
        if before < MUCH && self.brought >= MUCH {
            heap::keep(KEPT);
        }
        let mut out = std::mem::take(&mut self.out);
        let walked = self.gate.push(&data, &mut out);
        for item in out.drain(..) {
            match item {
                Out::End(end) => {
                    self.progress = Progress::default();
                    response_ended(self.stream, end, &mut self.conversions).await;
                }
                Out::Bytes(bytes) => self.pass_on(bytes).await?,
            }
        }
        self.out = out;
        if let Err(error) = walked {
            return Err(Ended::istiod(of_gate(&error)));
        }
        // Now that the bytes have gone on, istiod may send as many more.
        let _ = self.body.flow_control().release_capacity(data.len());
        Ok(())
    }

    async fn pass_on(&mut self, bytes: Bytes) -> Result<(), Ended> {
        // Before Envoy can answer it.
        if let Some(recorder) = &mut self.recorder {
            recorder.push(&bytes);
        }
        let opened = self.sink.stream.open();
        let sent = match opened {
            Ok(()) => self.sink.send(bytes).await,
            Err(error) => Err(Broken::Gone(error)),
        };
        sent.map_err(|broken| match broken {
            Broken::Gone(error) => Ended::envoy(end_status::of_downstream(&error)),
            Broken::Stalled(after) => stalled(Leg::Envoy, after),
        })
    }
}

fn commit(stream: &Stream<'_>) {
    if !stream.committed.swap(true, std::sync::atomic::Ordering::Relaxed) {
        stream.came_alive();
    }
}

fn finished(trailers: Result<Option<http::HeaderMap>, h2::Error>, whole: bool) -> Ended {
    let status = match trailers {
        Err(error) => return Ended::istiod_failed(&error),
        Ok(Some(trailers)) => status_at_end(&trailers),
        Ok(None) => Status::internal("server closed the stream without sending trailers"),
    };
    if status.code() == tonic::Code::Ok && !whole {
        // Never let half a message end as a good stream.
        return Ended::istiod(Status::internal("unexpected EOF: the stream ended inside a message"));
    }
    Ended::istiod(status)
}

async fn response_ended(stream: &Stream<'_>, end: End, conversions: &mut Conversions) {
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
    let is_workloads = stream.is_workloads();
    if is_workloads {
        shared.state.response(&type_url, &end.facts, end.length);
        shared.troubles.pushed(&type_url, &end.facts.version, end.facts.count);
    }
    if end.verdict != Verdict::Collect {
        return;
    }
    let nonce = end.facts.nonce;
    if let Some(tap) = shared.taps.iter().find(|t| t.type_url() == type_url) {
        // The agent asks on a stream that is nearer to the workload, and what this client has is nothing to it.
        let heard = shared.is_heard(stream.id);
        let applied = match end.body {
            _ if !heard => Some(Ok(())),
            Some(body) => tap::apply(tap, stream.protocol, body).await,
            None => Some(Err(format!("{} bytes are more than the agent takes", end.length).into())),
        };
        let Some(applied) = applied else { return };
        let error = applied.err().map(|why| why.to_string());
        if is_workloads {
            shared.state.taken(&type_url, &nonce, error.is_some());
        }
        match &error {
            _ if !heard => {}
            Some(reason) => shared.troubles.rejected("the agent", &type_url, &end.facts.version, &[], reason),
            None => shared.troubles.accepted(&type_url),
        }
        let frame = stream.protocol.answer(&type_url, &end.facts.version, &nonce, error.as_deref());
        stream.queue.put(Own { type_url: tap.type_url(), frame, health: false });
    } else if let Some(body) = end.body {
        if let Err(crowded) = conversions.begin(nonce.clone(), body) {
            stream.queue.put(refusal(stream, &nonce, &crowded.to_string()));
        }
    } else {
        let own = refusal(stream, &nonce, &format!("{} bytes are more than the agent converts", end.length));
        stream.queue.put(own);
    }
}

// Names the version that Envoy last said it has, which is what the Go agent does.
fn refusal(stream: &Stream<'_>, nonce: &str, reason: &str) -> Own {
    let shown = cut(reason, CAUSE);
    if let Some(more) = REFUSED.may_hold(shown.len()) {
        tracing::warn!(target: "xdsproxy", "refused ECDS from istiod: {shown}{more}");
    }
    if stream.is_workloads() {
        stream.shared.state.taken(types::ECDS, nonce, true);
    }
    let version = stream.shared.ecds_version.lock().expect("no panic holds this lock").clone();
    let frame = stream.protocol.answer(types::ECDS, &version, nonce, Some(reason));
    Own { type_url: types::ECDS, frame, health: false }
}
