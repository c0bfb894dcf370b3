//! Envoy's stream while istiod is away: answered from memory, and handed over when istiod has answered.
//!
//! Istiod is asked in Envoy's name on a connection of its own; until its answer begins, Envoy hears what memory says,
//! or nothing. So an istiod that accepts and is silent, or refuses late, is as good as one that is away, and Envoy
//! never sees a stream end because of it. What memory answers is at [`crate::replay`].

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, ready};
use h2::{Reason, SendStream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use super::end_status::{self, Class};
use super::ended::{Ended, Leg, stalled};
use super::frames::frame_bytes;
use super::hold::{self, holdable};
use super::inbox::Inbox;
use super::memory::{Memory, Serving};
use super::record::Messages;
use super::reply::Reply;
use super::scan::Facts;
use super::shared::Shared;
use super::sink::{Broken, Sink};
use super::stream::Stream;
use super::upstream::{self, Link, Unopened};
use super::{trouble, types};
use crate::base::tasks::Stop;
use crate::istiod;
use crate::istiod::auth::root_cause;
use crate::net::grpc;
use crate::replay::StandIn;
use crate::trouble::Report;

/// How long istiod may take from the opened stream to the beginning of its answer. Its first push comes after a
/// second or two in a large mesh.
const ANSWER: Duration = Duration::from_secs(20);

/// Longer than any stream lives.
const NO_END: Duration = Duration::from_secs(365 * 86_400);

/// Istiod answers: the way to it, and the attempt by which the store knows it.
pub(super) struct Answered {
    pub(super) link: Link,
    pub(super) attempt: u64,
}

// Where the way to istiod stands.
enum Way<'a> {
    // Envoy has not asked for anything, or the last attempt has failed.
    Idle,
    Dialling(BoxFuture<'a, Result<Link, Unopened>>),
    Asking { answer: BoxFuture<'a, Result<Link, Status>>, more: mpsc::UnboundedSender<Bytes>, attempt: u64 },
}

enum Event {
    Data(Option<Result<Bytes, h2::Error>>),
    Due,
    Old,
    Opened(Result<Link, Unopened>),
    Answered(Result<Link, Status>),
    Over(Ended),
}

/// What it needs of an Envoy stream that waits.
pub(super) struct Sides<'a> {
    pub(super) stream: &'a Stream<'a>,
    pub(super) inbox: &'a mut Inbox,
    pub(super) reply: &'a mut Reply,
    /// Cancelled when a newer stream takes its place, or the agent stops.
    pub(super) replaced: &'a Stop,
}

/// Runs until istiod answers, or Envoy's stream is over.
pub(super) async fn run(sides: &mut Sides<'_>, memory: &Arc<Memory>) -> Result<Answered, Ended> {
    let shared = sides.stream.shared;
    let protocol = sides.stream.protocol;
    let mark = format!("memory-{:08x}-", rand::random::<u32>());
    let mut envoy = StandIn::new(protocol.mode(), mark);
    let mut messages = Messages::new(shared.config.max_request);
    let mut serving: Option<Serving> = None;
    let mut way = Way::Idle;
    let mut due = pin!(tokio::time::sleep(silence(shared, memory)));
    let mut is_due = false;
    let mut old = pin!(tokio::time::sleep(memory.left().unwrap_or(NO_END)));
    let mut data = sides.inbox.taken_back().await;
    loop {
        read(&mut envoy, &mut messages, &data)?;
        sides.inbox.give_back(data.len());
        if let Way::Asking { more, attempt, .. } = &way {
            for message in envoy.more() {
                told(sides, memory, *attempt, &message);
                let _ = more.send(frame_bytes(&message));
            }
        }
        if matches!(way, Way::Idle) && envoy.is_asked() {
            way = Way::Dialling(Box::pin(dial(shared, protocol)));
        }
        if is_due && envoy.is_asked() && serving.is_none() {
            serving = Some(memory.serve(shared.upstream.address()));
        }
        if serving.is_some() {
            say(sides, memory, &mut envoy).await?;
        }
        data = Bytes::new();
        match next(sides, &mut way, due.as_mut(), is_due, old.as_mut()).await {
            Event::Over(ended) => return Err(ended),
            Event::Data(Some(Ok(more))) => data = more,
            Event::Data(Some(Err(error))) => return Err(Ended::envoy(end_status::of_downstream(&error))),
            Event::Data(None) => return Err(Ended::envoy(Status::ok(""))),
            Event::Due => is_due = true,
            Event::Old => return Err(too_old()),
            Event::Opened(Ok(link)) => way = asked(sides, memory, &mut envoy, link),
            Event::Opened(Err(Unopened { status, roots, report })) => {
                shared.meters.dial("failed");
                let report =
                    report.map_or_else(|| trouble::ended(shared.upstream.address(), &status), |r| *r);
                failed(sides, memory, &status, report, roots || holdable(&status))?;
                (way, is_due) = (Way::Idle, true);
            }
            Event::Answered(Err(status)) => {
                let report = trouble::ended(shared.upstream.address(), &status);
                failed(sides, memory, &status, report, holdable(&status))?;
                (way, is_due) = (Way::Idle, true);
            }
            Event::Answered(Ok(link)) => {
                let Way::Asking { attempt, .. } = way else { unreachable!("only who was asked answers") };
                hand_over(sides, envoy, messages);
                if let Some(serving) = serving {
                    tracing::info!(target: "xdsproxy", stream = sides.stream.id,
                        "istiod is back: Envoy's stream is handed over to it");
                    serving.handed_over();
                }
                return Ok(Answered { link, attempt });
            }
        }
    }
}

// How long Envoy hears nothing: not at all where istiod is known to be away. An Envoy whose agent waits for its turn has a
// configuration.
fn silence(shared: &Shared, memory: &Memory) -> Duration {
    if shared.has_failed() && shared.holds() {
        return Duration::ZERO;
    }
    shared.put_off().unwrap_or_default() + memory.after()
}

// Takes in what Envoy has written.
fn read(envoy: &mut StandIn, messages: &mut Messages, data: &Bytes) -> Result<(), Ended> {
    for message in messages.push(data).map_err(too_large)? {
        if let Some(rejected) = envoy.request(&message).map_err(|_| no_request())? {
            tracing::warn!(target: "xdsproxy", "Envoy rejected {} from memory, which it had accepted before",
                types::short(&rejected));
        }
    }
    Ok(())
}

// On a fresh stream istiod is asked for all that Envoy has asked for.
fn asked<'a>(sides: &Sides<'_>, memory: &Memory, envoy: &mut StandIn, link: Link) -> Way<'a> {
    let attempt = memory.next_stream();
    let first = envoy.hand_over();
    first.iter().for_each(|message| told(sides, memory, attempt, message));
    let first = first.iter().map(|message| frame_bytes(message)).collect();
    let (more, queue) = mpsc::unbounded_channel();
    Way::Asking { answer: Box::pin(ask(link, first, queue)), more, attempt }
}

// From here on the relay reads what Envoy writes; what memory was told of it goes along.
fn hand_over(sides: &mut Sides<'_>, envoy: StandIn, messages: Messages) {
    let (stream, protocol) = (sides.stream, sides.stream.protocol);
    let listeners = envoy.types().any(|of| of == types::LISTENER);
    let strip = (!envoy.is_silent()).then(|| envoy.end());
    sides.inbox.handed_over(strip, messages, listeners);
    if listeners && !stream.first_listeners.swap(true, Ordering::Relaxed) {
        stream.shared.own(protocol).into_iter().for_each(|own| stream.queue.put(own));
    }
}

fn too_old() -> Ended {
    let status = Status::unavailable("the last good configuration is too old (XDS_REPLAY_MAX_AGE)");
    Ended { by: Leg::Agent, status, class: Class::Unexpected }
}

fn too_large(length: u64) -> Ended {
    let text = format!("a request of {length} bytes is larger than ISTIO_GPRC_MAXRECVMSGSIZE allows");
    Ended::envoy(Status::resource_exhausted(text))
}

fn no_request() -> Ended {
    Ended::envoy(Status::internal("grpc: failed to unmarshal the received message"))
}

// A request goes to istiod in Envoy's name.
fn told(sides: &Sides<'_>, memory: &Memory, attempt: u64, message: &Bytes) {
    let (shared, protocol) = (sides.stream.shared, sides.stream.protocol);
    shared.meters.request();
    if let Ok(request) = crate::replay::read::request(protocol.mode(), message) {
        shared.state.request(&request.type_url, &Facts::default());
    }
    memory.request(attempt, protocol, message.clone());
}

// The attempt has failed; an error where memory must not stand in for it.
fn failed(
    sides: &Sides<'_>,
    memory: &Memory,
    status: &Status,
    report: Report,
    holdable: bool,
) -> Result<(), Ended> {
    let shared = sides.stream.shared;
    shared.meters.istiod_ended(Class::Unexpected);
    shared.failed(status, report);
    if memory.judge(status) && holdable {
        return Ok(());
    }
    Err(Ended { by: Leg::Istiod, status: status.clone(), class: Class::Unexpected })
}

async fn dial(shared: &Shared, protocol: super::Protocol) -> Result<Link, Unopened> {
    let mut wake = shared.wake.clone();
    wake.mark_unchanged();
    if let Some(due) = shared.due() {
        hold::wait(due, &mut wake, &*shared.upstream).await;
    }
    let late = |error: istiod::Error| shared.troubles.failed(root_cause(error.report(), &*shared.tokens));
    upstream::open(&*shared.upstream, &*shared.tokens, &shared.headers, protocol, &late).await
}

// Sends the requests and whatever follows, until the answer begins.
async fn ask(
    link: Link,
    first: Vec<Bytes>,
    mut more: mpsc::UnboundedReceiver<Bytes>,
) -> Result<Link, Status> {
    let Link { mut driver, mut sink, mut response, ping, reads, peer, token_expires } = link;
    let answer = {
        let mut sending = pin!(async {
            for frame in first {
                send(&mut sink, frame).await?;
            }
            while let Some(frame) = more.recv().await {
                send(&mut sink, frame).await?;
            }
            Ok::<(), h2::Error>(())
        });
        let mut sends = true;
        let mut late = pin!(tokio::time::sleep(ANSWER));
        loop {
            tokio::select! {
                biased;
                answer = &mut response => break answer.map_err(|e| end_status::of_upstream(&e).0)?,
                ended = &mut driver => return Err(match ended {
                    Err(error) => end_status::of_upstream(&error).0,
                    Ok(()) => Status::unavailable("error reading from server: EOF"),
                }),
                // What went wrong is told by the answer or the connection.
                _ = &mut sending, if sends => sends = false,
                () = &mut late => {
                    return Err(Status::unavailable(format!("no answer within {ANSWER:?}")));
                }
            }
        }
    };
    if let Some(status) = end_status::of_trailers(answer.headers()).filter(|_| answer.body().is_end_stream())
    {
        return Err(status);
    }
    if answer.status() != http::StatusCode::OK {
        let content_type = answer.headers().get(http::header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
        return Err(end_status::of_http(answer.status(), content_type));
    }
    Ok(Link { driver, sink, response: Either::Right(ready(Ok(answer))), ping, reads, peer, token_expires })
}

async fn send(sink: &mut SendStream<Bytes>, mut bytes: Bytes) -> Result<(), h2::Error> {
    while !bytes.is_empty() {
        sink.reserve_capacity(bytes.len());
        let room = match sink.capacity() {
            0 => match poll_fn(|cx| sink.poll_capacity(cx)).await {
                Some(room) => room?,
                None => return Err(Reason::CANCEL.into()),
            },
            room => room,
        };
        let piece = bytes.split_to(room.min(bytes.len()));
        sink.send_data(piece, false)?;
    }
    Ok(())
}

// Tells Envoy what memory has for it.
async fn say(sides: &mut Sides<'_>, memory: &Memory, envoy: &mut StandIn) -> Result<(), Ended> {
    loop {
        let answer = memory.answer(envoy).map_err(|error| {
            Ended::envoy(Status::internal(format!("the last good configuration cannot be read: {error}")))
        })?;
        let Some(answer) = answer else { return Ok(()) };
        let shared = sides.stream.shared;
        sides.reply.open().map_err(|error| Ended::envoy(end_status::of_downstream(&error)))?;
        let mut sink =
            Sink { stream: &mut *sides.reply, leg: Leg::Envoy, shared, progress: Default::default() };
        sink.send(frame_bytes(&answer)).await.map_err(|broken| match broken {
            Broken::Gone(error) => Ended::envoy(end_status::of_downstream(&error)),
            Broken::Stalled(after) => stalled(Leg::Envoy, after),
        })?;
    }
}

async fn next(
    sides: &mut Sides<'_>,
    way: &mut Way<'_>,
    due: std::pin::Pin<&mut tokio::time::Sleep>,
    is_due: bool,
    old: std::pin::Pin<&mut tokio::time::Sleep>,
) -> Event {
    let until: Option<Instant> = sides.stream.until;
    let (reply, inbox, replaced) = (&mut *sides.reply, &mut *sides.inbox, sides.replaced);
    let step = async {
        match way {
            Way::Idle => std::future::pending().await,
            Way::Dialling(opened) => Event::Opened(opened.await),
            Way::Asking { answer, .. } => Event::Answered(answer.await),
        }
    };
    tokio::select! {
        biased;
        gone = poll_fn(|cx| reply.poll_gone(cx)) => Event::Over(Ended::envoy(gone)),
        () = replaced.cancelled() => {
            Event::Over(Ended { by: Leg::Agent, status: Status::ok(""), class: Class::Expected })
        }
        () = grpc::over(until) => Event::Over(Ended::envoy(grpc::exceeded())),
        data = inbox.next_data() => Event::Data(data),
        event = step => event,
        () = due, if !is_due => Event::Due,
        () = old => Event::Old,
    }
}
