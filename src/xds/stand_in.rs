//! Envoy's stream while istiod is away: answered from memory, and handed over when istiod has answered.
//!
//! Istiod is asked in Envoy's name on a connection of its own; until its answer begins, Envoy hears what memory says,
//! or nothing. So an istiod that accepts and is silent, or refuses late, is as good as one that is away, and Envoy
//! never sees a stream end because of it. What memory answers is at [`crate::replay`].

mod asking;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use self::asking::Heard;
pub(super) use self::asking::ask;
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
use crate::base::seldom::Seldom;
use crate::base::tasks::Stop;
use crate::istiod;
use crate::net::grpc;
use crate::replay::StandIn;
use crate::replay::read::Unread;
use crate::trouble::Report;

/// A client may reject without pause.
static REJECTED: Seldom = Seldom::new(10);

/// Istiod answers: the way to it, and the attempt by which the store knows it; 0: it does not.
pub(super) struct Answered {
    pub(super) link: Link,
    pub(super) attempt: u64,
}

// Where the way to istiod stands.
enum Way<'a> {
    // Envoy has not asked for anything, or the last attempt has failed.
    Idle,
    Dialling(BoxFuture<'a, Result<Link, Unopened>>),
    Asking {
        answer: BoxFuture<'a, Result<Heard, Status>>,
        // Takes the next requests once all before them are on their way. Until then what Envoy asks for is only in the
        // stand-in, which has a bound: what Envoy takes back again is never queued, and as Envoy may go on writing, its
        // answers to memory are heard however long istiod reads nothing.
        more: mpsc::Sender<Vec<Bytes>>,
        // Envoy has said something since it was told.
        news: bool,
        attempt: u64,
        _feeding: Option<Feeding<'a>>,
    },
}

// From its first request on the store knows this attempt instead of another's; the relay, to which it is handed over, says so
// again.
struct Feeding<'a> {
    memory: &'a Memory,
    attempt: u64,
}

impl<'a> Feeding<'a> {
    fn of(memory: &'a Memory, attempt: u64) -> Self {
        memory.feeds(attempt);
        Self { memory, attempt }
    }
}

impl Drop for Feeding<'_> {
    fn drop(&mut self) {
        self.memory.over(self.attempt);
    }
}

enum Event {
    Data(Option<Result<Bytes, h2::Error>>),
    Due,
    Opened(Result<Link, Unopened>),
    Answered(Result<Heard, Status>),
    Room,
    Said,
    Over(Ended),
}

// The way to Envoy. What is written stays a future until all of it is: Envoy may take long to read it.
enum Mouth<'a> {
    Silent(&'a mut Reply),
    Speaking(BoxFuture<'a, Result<&'a mut Reply, Ended>>),
}

impl Mouth<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        match self {
            Self::Silent(reply) => reply.poll_gone(cx).map(|gone| Event::Over(Ended::envoy(gone))),
            Self::Speaking(words) => Poll::Ready(match ready!(words.as_mut().poll(cx)) {
                Ok(reply) => {
                    *self = Self::Silent(reply);
                    Event::Said
                }
                Err(ended) => Event::Over(ended),
            }),
        }
    }
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
pub(super) async fn run(sides: Sides<'_>, memory: &Arc<Memory>) -> Result<Answered, Ended> {
    let Sides { stream, inbox, reply, replaced } = sides;
    let (shared, protocol) = (stream.shared, stream.protocol);
    let mark = format!("memory-{:08x}-", rand::random::<u32>());
    let mut envoy = StandIn::new(protocol.mode(), mark);
    let mut messages = Messages::new(shared.config.max_request);
    let (mut speaks, mut serving): (bool, Option<Serving>) = (false, None);
    let tried = AtomicU64::new(*shared.wake.borrow());
    let mut way = Way::Idle;
    let mut mouth = Mouth::Silent(reply);
    let mut due = pin!(tokio::time::sleep(silence(shared, memory)));
    let mut is_due = false;
    let mut over = pin!(over(stream.until, replaced, memory));
    read(&mut envoy, &mut messages, &inbox.taken_back()?)?;
    loop {
        pass_on(stream, memory, &mut envoy, &mut way);
        if matches!(way, Way::Idle) && envoy.is_asked() {
            way = Way::Dialling(Box::pin(dial(shared, protocol, &tried)));
        }
        speaks |= is_due && envoy.is_asked();
        if speaks {
            (mouth, envoy) = say(mouth, shared, memory, envoy, &mut serving, over.as_mut()).await?;
        }
        match next(&mut mouth, inbox, &mut way, due.as_mut(), is_due, over.as_mut()).await {
            Event::Over(ended) => return Err(ended),
            Event::Said | Event::Room => {}
            Event::Data(Some(Ok(data))) => {
                read(&mut envoy, &mut messages, &data)?;
                if let Way::Asking { news, .. } = &mut way {
                    *news = true;
                }
                inbox.give_back(data.len());
            }
            Event::Data(Some(Err(error))) => return Err(Ended::envoy(end_status::of_downstream(&error))),
            Event::Data(None) => return Err(Ended::envoy(Status::ok(""))),
            Event::Due => is_due = true,
            Event::Opened(Ok(link)) => way = asked(stream, memory, &mut envoy, link),
            Event::Opened(Err(Unopened { status, roots, report })) => {
                shared.meters.dial("failed");
                let report =
                    report.map_or_else(|| trouble::ended(shared.upstream.address(), &status), |r| *r);
                failed(shared, memory, &status, report, roots || holdable(&status))?;
                (way, is_due) = (Way::Idle, true);
            }
            Event::Answered(Err(status)) => {
                let report = trouble::ended(shared.upstream.address(), &status);
                failed(shared, memory, &status, report, holdable(&status))?;
                (way, is_due) = (Way::Idle, true);
            }
            Event::Answered(Ok((mut link, mut unsent))) => {
                let Way::Asking { attempt, .. } = way else { unreachable!("only who was asked answers") };
                unsent.extend(asked_since(stream, memory, &mut envoy, attempt));
                finish(&mut mouth, &mut link, over).await?;
                hand_over(stream, inbox, unsent, envoy, messages);
                if let Some(serving) = serving {
                    tracing::info!(target: "xdsproxy", stream = stream.id,
                        "istiod is back: Envoy's stream is handed over to it");
                    serving.handed_over();
                }
                return Ok(Answered { link, attempt });
            }
        }
    }
}

// What ends Envoy's stream whatever else goes on: another stream in its place, its own bound, or the age of what is kept.
async fn over(until: Option<Instant>, replaced: &Stop, memory: &Memory) -> Ended {
    tokio::select! {
        biased;
        () = replaced.cancelled() => Ended::new(Leg::Agent, Status::ok(""), Class::Expected),
        () = grpc::over(until) => Ended::envoy(grpc::exceeded()),
        () = memory.too_old() => too_old(),
    }
}

// A message to Envoy that was begun goes to its end.
async fn finish(
    mouth: &mut Mouth<'_>,
    link: &mut Link,
    mut over: Pin<&mut impl Future<Output = Ended>>,
) -> Result<(), Ended> {
    let mut driven = true;
    while let Mouth::Speaking(_) = mouth {
        tokio::select! {
            biased;
            event = poll_fn(|cx| mouth.poll(cx)) => if let Event::Over(ended) = event { return Err(ended) },
            ended = &mut over => return Err(ended),
            // How it ended is found out by the relay.
            _ = &mut link.driver, if driven => driven = false,
        }
    }
    Ok(())
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
        if let Some(rejected) = envoy.request(&message).map_err(|unread| unread_as(&unread))?
            && let Some(more) = REJECTED.may()
        {
            tracing::warn!(target: "xdsproxy", "Envoy rejected {} from memory, which it had accepted before{more}",
                types::short(&rejected));
        }
        if envoy.holds_too_much() {
            return Err(too_much());
        }
    }
    Ok(())
}

// The frames of what Envoy has asked for since istiod was told last.
fn asked_since(stream: &Stream<'_>, memory: &Memory, envoy: &mut StandIn, attempt: u64) -> Vec<Bytes> {
    let more = envoy.more();
    more.iter().for_each(|message| told(stream, memory, attempt, message));
    more.iter().map(|message| frame_bytes(message)).collect()
}

// Tells istiod what is new, if it has been told all that was.
fn pass_on(stream: &Stream<'_>, memory: &Memory, envoy: &mut StandIn, way: &mut Way<'_>) {
    let Way::Asking { more, news, attempt, .. } = way else { return };
    if !*news {
        return;
    }
    match more.try_reserve() {
        Ok(room) => {
            let frames = asked_since(stream, memory, envoy, *attempt);
            if !frames.is_empty() {
                room.send(frames);
            }
        }
        Err(mpsc::error::TrySendError::Full(())) => return,
        // It has just answered.
        Err(mpsc::error::TrySendError::Closed(())) => {}
    }
    *news = false;
}

// On a fresh stream istiod is asked for all that Envoy has asked for.
fn asked<'a>(stream: &Stream<'_>, memory: &'a Memory, envoy: &mut StandIn, link: Link) -> Way<'a> {
    // Of two epochs only one is noted.
    let attempt = if stream.shared.is_noted(stream.id) { memory.next_stream() } else { 0 };
    let feeding = (attempt > 0).then(|| Feeding::of(memory, attempt));
    let first = envoy.hand_over();
    first.iter().for_each(|message| told(stream, memory, attempt, message));
    let first = first.iter().map(|message| frame_bytes(message)).collect();
    let (more, queue) = mpsc::channel(1);
    let answer = Box::pin(ask(link, first, queue));
    Way::Asking { answer, more, news: false, attempt, _feeding: feeding }
}

// From here on the relay reads what Envoy writes; what memory was told of it goes along.
fn hand_over(
    stream: &Stream<'_>,
    inbox: &mut Inbox,
    unsent: VecDeque<Bytes>,
    envoy: StandIn,
    messages: Messages,
) {
    let listeners = envoy.types().any(|of| of == types::LISTENER);
    let strip = (!envoy.is_silent()).then(|| envoy.end());
    inbox.handed_over(unsent, strip, messages, listeners);
    if listeners {
        stream.asks().into_iter().for_each(|own| stream.queue.put(own));
    }
}

fn too_old() -> Ended {
    let status = Status::unavailable("the last good configuration is too old (XDS_REPLAY_MAX_AGE)");
    Ended::new(Leg::Agent, status, Class::Unexpected)
}

fn too_large(length: u64) -> Ended {
    let text = format!("a request of {length} bytes is larger than ISTIO_GPRC_MAXRECVMSGSIZE allows");
    Ended::envoy(Status::resource_exhausted(text))
}

fn too_much() -> Ended {
    let most = StandIn::MOST >> 20;
    let text = format!(
        "Envoy asks for more than {most} MiB of names while istiod is away, which is more than is kept"
    );
    Ended::envoy(Status::resource_exhausted(text))
}

fn unread_as(unread: &Unread) -> Ended {
    match unread {
        Unread::TooMuch => too_much(),
        Unread::Malformed(_) => {
            Ended::envoy(Status::internal("grpc: failed to unmarshal the received message"))
        }
    }
}

// A request goes to istiod in Envoy's name.
fn told(stream: &Stream<'_>, memory: &Memory, attempt: u64, message: &Bytes) {
    let (shared, protocol) = (stream.shared, stream.protocol);
    shared.meters.request();
    stream.asked.store(true, Ordering::Relaxed);
    if let Ok((type_url, _)) = crate::replay::read::answers(protocol.mode(), message) {
        shared.state.request(&type_url, &Facts::default());
    }
    if attempt > 0 {
        memory.request(attempt, protocol, message.clone());
    }
}

// The attempt has failed; an error where memory must not stand in for it.
fn failed(
    shared: &Shared,
    memory: &Memory,
    status: &Status,
    report: Report,
    holdable: bool,
) -> Result<(), Ended> {
    shared.meters.istiod_ended(Class::Unexpected);
    shared.failed(status, report);
    if memory.judge(status) && holdable {
        return Ok(());
    }
    Err(Ended::new(Leg::Istiod, status.clone(), Class::Unexpected))
}

// `tried`: which change of token and root files the dial before this has seen. What has changed since is reason to hurry.
async fn dial(shared: &Shared, protocol: super::Protocol, tried: &AtomicU64) -> Result<Link, Unopened> {
    let mut wake = shared.wake.clone();
    let now = *wake.borrow_and_update();
    if now != tried.load(Ordering::Relaxed) {
        wake.mark_changed();
    }
    if let Some(due) = shared.due() {
        hold::wait(due, &mut wake, &*shared.upstream).await;
    }
    tried.store(*shared.wake.borrow(), Ordering::Relaxed);
    let late = |error: istiod::Error| shared.told(error.report());
    upstream::open(&*shared.upstream, &*shared.tokens, &shared.headers, protocol, &late).await
}

// Begins to tell Envoy the next of what memory has for it, if nothing is being told. Until it is known what that is,
// nothing else goes on here.
async fn say<'a>(
    mouth: Mouth<'a>,
    shared: &'a Shared,
    memory: &Arc<Memory>,
    envoy: StandIn,
    serving: &mut Option<Serving>,
    over: Pin<&mut impl Future<Output = Ended>>,
) -> Result<(Mouth<'a>, StandIn), Ended> {
    let Mouth::Silent(reply) = mouth else { return Ok((mouth, envoy)) };
    if !memory.has_answer(&envoy) {
        return Ok((Mouth::Silent(reply), envoy));
    }
    let answered = tokio::select! {
        biased;
        gone = poll_fn(|cx| reply.poll_gone(cx)) => return Err(Ended::envoy(gone)),
        ended = over => return Err(ended),
        answered = memory.answer(envoy) => answered,
    };
    let (envoy, answer) = answered.map_err(|error| {
        Ended::envoy(Status::internal(format!("the last good configuration cannot be read: {error}")))
    })?;
    let Some(answer) = answer else { return Ok((Mouth::Silent(reply), envoy)) };
    // One that has all it asks for goes on with what it has.
    serving.get_or_insert_with(|| memory.serve(shared.upstream.address()));
    reply.open().map_err(|error| Ended::envoy(end_status::of_downstream(&error)))?;
    let words: BoxFuture<'a, _> = Box::pin(async move {
        let mut sink = Sink { stream: &mut *reply, leg: Leg::Envoy, shared, progress: Default::default() };
        match sink.send(frame_bytes(&answer)).await {
            Ok(()) => Ok(reply),
            Err(Broken::Gone(error)) => Err(Ended::envoy(end_status::of_downstream(&error))),
            Err(Broken::Stalled(after)) => Err(stalled(Leg::Envoy, after)),
        }
    });
    Ok((Mouth::Speaking(words), envoy))
}

async fn next(
    mouth: &mut Mouth<'_>,
    inbox: &mut Inbox,
    way: &mut Way<'_>,
    due: Pin<&mut tokio::time::Sleep>,
    is_due: bool,
    over: Pin<&mut impl Future<Output = Ended>>,
) -> Event {
    let step = async {
        match way {
            Way::Idle => std::future::pending().await,
            Way::Dialling(opened) => Event::Opened(opened.await),
            Way::Asking { answer, more, news, .. } => tokio::select! {
                biased;
                heard = answer => Event::Answered(heard),
                _ = more.reserve(), if *news => Event::Room,
            },
        }
    };
    tokio::select! {
        biased;
        event = poll_fn(|cx| mouth.poll(cx)) => event,
        ended = over => Event::Over(ended),
        data = inbox.next_data() => Event::Data(data),
        event = step => event,
        () = due, if !is_due => Event::Due,
    }
}
