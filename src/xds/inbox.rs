//! Envoy → istiod: Envoy's half of a stream, which may outlive one upstream connection.
//!
//! As long as istiod has not answered, a held stream may move to another upstream connection; then
//! everything sent so far is sent again, word for word. So nothing that was read from Envoy may live
//! only in the future that writes it: it is in [`Inbox`] until it has been sent, and kept there while it
//! may have to be sent again.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use memchr::memmem;
use tonic::Status;

use super::ended::{Ended, Leg, of_gate, stalled};
use super::frames::{End, Error, Gate, Out, Verdict, frame_bytes};
use super::own::Own;
use super::pieces::{Pieces, with_more};
use super::protocol::Protocol;
use super::record::{Messages, Recorder};
use super::rules::Requests;
use super::scan::{Facts, Malformed};
use super::sink::{Broken, Sink};
use super::state::Answer;
use super::stream::Stream;
use super::subscribed::Subscribed;
use super::{end_status, types};
use crate::base::quote::{cut, shown};
use crate::base::seldom::Seldom;
use crate::replay::Strip;

/// Any client can cause these, as often as it likes.
static TOO_LARGE: Seldom = Seldom::new(60);
static REJECTED: Seldom = Seldom::new(60);

/// Longest reason of a rejection in a line.
const CAUSE: usize = 2048;

/// Requests kept for another attempt at most, in bytes; a stream that has sent more cannot be held any
/// further when its upstream fails. First requests of a large mesh are about 1 MB.
const REPLAY: usize = 4 << 20;
/// Of any client's stream that is not held: the first requests of most.
const LITTLE: usize = 8 << 10;

/// What Envoy sends on one stream.
pub(super) struct Inbox {
    body: RecvStream,
    gate: Gate<Requests>,
    subscribed: Subscribed,
    // Read, and not yet sent.
    pending: VecDeque<Item>,
    // Window to give back to Envoy once `pending` is empty.
    owed: usize,
    failed: Option<Error>,
    // Sent, and kept while it may have to be sent again.
    replay: Option<Pieces>,
    replay_length: usize,
    most: usize,
    ended: bool,
    // After a hand-over: what must not reach istiod.
    strip: Option<(Strip, Messages)>,
    // The beginning of what Envoy has sent, as long as it may tell who is asking.
    beginning: Option<BytesMut>,
    proxyless: bool,
}

/// What the node of a proxyless client says of itself: the entry `GENERATOR: "grpc"` of its metadata, as every
/// encoder writes it.
const PROXYLESS: &[u8] = b"\x0a\x09GENERATOR\x12\x06\x1a\x04grpc";
/// How far it is looked for.
const LOOK: usize = 64 * 1024;

enum Item {
    Bytes(Bytes),
    // Frames, or the rest of one, that the last good configuration knows of.
    Told(Bytes),
    End(End),
    Own(Own),
}

impl Inbox {
    /// Of a stream that has just been opened. `movable`: it may have to change its upstream, however much it has sent.
    pub(super) fn new(body: RecvStream, protocol: Protocol, limit: u64, movable: bool) -> Self {
        Self {
            body,
            gate: Gate::new(Requests { protocol, limit, listeners_asked: false }),
            subscribed: Subscribed::default(),
            pending: VecDeque::new(),
            owed: 0,
            failed: None,
            replay: Some(Pieces::default()),
            replay_length: 0,
            most: if movable { REPLAY } else { LITTLE },
            ended: false,
            strip: None,
            beginning: Some(BytesMut::new()),
            proxyless: false,
        }
    }

    /// Whether the first request is that of a client which is no Envoy. Waits for it, at most so long.
    pub(super) async fn is_proxyless(&mut self, within: Duration) -> bool {
        let first = async {
            while self.beginning.is_some() && self.failed.is_none() {
                let Some(Ok(data)) = poll_fn(|cx| self.body.poll_data(cx)).await else {
                    self.ended = true;
                    return;
                };
                self.accept(&data);
                // What is looked at has a bound of its own, and all of it may have to come.
                self.release();
            }
        };
        let _ = tokio::time::timeout(within, first).await;
        self.proxyless
    }

    /// Its client counts as one that is no Envoy, whatever it says.
    pub(super) fn is_no_envoy(&mut self) {
        (self.proxyless, self.beginning) = (true, None);
    }

    /// Whether the client is one, as far as it has been read.
    pub(super) fn proxyless(&self) -> bool {
        self.proxyless
    }

    /// Whether enough of it has been read for that.
    pub(super) fn is_known(&self) -> bool {
        self.beginning.is_none()
    }

    /// Whether the first request, if it is there, is that of a client without any configuration.
    pub(super) fn is_bare(&self) -> bool {
        let first = self.pending.iter().find_map(|item| match item {
            Item::End(end) => Some(&end.facts),
            _ => None,
        });
        first.is_some_and(Facts::is_bare)
    }

    /// What was read of Envoy so far, to be read by the stand-in; the last request in it may be a part of one. Envoy may
    /// send as much again.
    ///
    /// # Errors
    /// When Envoy has sent what is no request.
    pub(super) fn taken_back(&mut self) -> Result<Bytes, Ended> {
        let part = match self.failed.take() {
            Some(error) => Err(error),
            None => self.gate.take_back(),
        };
        let part = part.map_err(|error| refused(&error))?;
        let mut all = BytesMut::new();
        for item in self.pending.drain(..) {
            if let Item::Bytes(bytes) = item {
                all.extend_from_slice(&bytes);
            }
        }
        part.iter().for_each(|bytes| all.extend_from_slice(bytes));
        self.release();
        Ok(all.freeze())
    }

    fn release(&mut self) {
        let _ = self.body.flow_control().release_capacity(std::mem::take(&mut self.owed));
    }

    /// What Envoy says next.
    pub(super) async fn next_data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        if self.ended {
            return None;
        }
        match poll_fn(|cx| self.body.poll_data(cx)).await {
            Some(Ok(data)) => Some(Ok(with_more(&mut self.body, data).await)),
            other => other,
        }
    }

    /// So many bytes of it have been dealt with.
    pub(super) fn give_back(&mut self, bytes: usize) {
        let _ = self.body.flow_control().release_capacity(bytes);
    }

    /// The stand-in has told istiod all that Envoy has said, but for what is `unsent`; what Envoy says from now on goes to
    /// istiod, but for what is meant for the stand-in.
    pub(super) fn handed_over(
        &mut self,
        unsent: impl IntoIterator<Item = Bytes>,
        strip: Option<Strip>,
        messages: Messages,
        listeners: bool,
    ) {
        self.replay = None;
        self.pending.extend(unsent.into_iter().map(Item::Told));
        match strip {
            Some(strip) => self.strip = Some((strip, messages)),
            // The stand-in has given back the window of that.
            None => self.admit(&messages.rest()),
        }
        self.gate.rules_mut().listeners_asked |= listeners;
    }

    fn whole(&self) -> bool {
        self.gate.whole() && self.strip.as_ref().is_none_or(|(_, messages)| messages.is_between())
    }

    /// Whether another upstream connection can take over.
    pub(super) fn movable(&self) -> bool {
        self.replay.is_some()
    }

    fn note(&self, recorder: &mut Option<Recorder<'_>>, bytes: &Bytes) {
        if let Some(recorder) = recorder.as_mut().filter(|_| !self.proxyless) {
            recorder.push(bytes);
        }
    }

    fn keep(&mut self, bytes: &Bytes) {
        let Some(kept) = &mut self.replay else { return };
        self.replay_length += bytes.len();
        if self.replay_length > self.most {
            self.replay = None;
        } else {
            kept.push(bytes.clone());
        }
    }

    fn accept(&mut self, data: &Bytes) {
        self.owed += data.len();
        let Some((strip, messages)) = &mut self.strip else { return self.admit(data) };
        let pushed = messages.push(data).map(|all| {
            let passed = all.into_iter().map(|message| strip.pass(message));
            passed.collect::<Vec<_>>()
        });
        match pushed {
            Ok(passed) => {
                for message in passed {
                    match message {
                        Ok(Some(message)) => self.admit(&frame_bytes(&message)),
                        Ok(None) => {}
                        Err(_) => self.failed = Some(Malformed::Length.into()),
                    }
                }
            }
            Err(length) => {
                let limit = self.gate.rules().limit;
                self.failed = Some(Error::TooLarge { length, limit, type_url: String::new() });
            }
        }
    }

    fn admit(&mut self, data: &Bytes) {
        if let Some(mut beginning) = self.beginning.take() {
            let seen = (beginning.len() + 1).saturating_sub(PROXYLESS.len());
            beginning.extend_from_slice(data);
            self.proxyless = memmem::find(&beginning[seen..], PROXYLESS).is_some();
            self.beginning = (!self.proxyless && beginning.len() < LOOK).then_some(beginning);
        }
        let mut out = Vec::new();
        self.failed = self.gate.push(data, &mut out).err().or(self.failed.take());
        if out.iter().any(|out| matches!(out, Out::End(_))) {
            // The node comes with the first request, or not at all.
            self.beginning = None;
        }
        self.pending.extend(out.into_iter().map(|o| match o {
            Out::Bytes(bytes) => Item::Bytes(bytes),
            Out::End(end) => Item::End(end),
        }));
    }

    // The agent's own requests follow Envoy's first request for listeners at once.
    fn follow(&mut self, own: impl DoubleEndedIterator<Item = Own>) {
        for own in own.rev() {
            self.pending.push_front(Item::Own(own));
        }
    }
}

/// How the direction ended.
pub(super) enum UpEnd {
    /// The stream is over.
    Over(Ended),
    /// Writing failed; the reader of the other direction may know why.
    Broken(h2::Error),
}

enum Input {
    Own,
    Data(Option<Result<Bytes, h2::Error>>),
    Reset(h2::Error),
}

struct Upward(SendStream<Bytes>);

impl AsMut<SendStream<Bytes>> for Upward {
    fn as_mut(&mut self) -> &mut SendStream<Bytes> {
        &mut self.0
    }
}

/// Runs the direction until a leg ends.
pub(super) async fn up(stream: &Stream<'_>, inbox: &mut Inbox, sink: SendStream<Bytes>) -> UpEnd {
    match run(stream, inbox, sink).await {
        Ok(ended) => UpEnd::Over(ended),
        Err(Broken::Gone(error)) => UpEnd::Broken(error),
        Err(Broken::Stalled(after)) => UpEnd::Over(stalled(Leg::Istiod, after)),
    }
}

async fn run(stream: &Stream<'_>, inbox: &mut Inbox, sink: SendStream<Bytes>) -> Result<Ended, Broken> {
    let mut sink =
        Sink { stream: Upward(sink), leg: Leg::Istiod, shared: stream.shared, progress: Default::default() };
    let mut recorder = stream.recorder(Recorder::requests);
    // The stand-in may have read it.
    told_known(stream, inbox);
    for bytes in inbox.replay.as_ref().map(Pieces::all).unwrap_or_default() {
        inbox.note(&mut recorder, &bytes);
        sink.send(bytes).await?;
    }
    loop {
        if inbox.replay.is_some() && stream.committed.load(Ordering::Relaxed) {
            inbox.replay = None;
        }
        while let Some(item) = inbox.pending.pop_front() {
            match item {
                Item::Bytes(bytes) => {
                    inbox.keep(&bytes);
                    inbox.note(&mut recorder, &bytes);
                    sink.send(bytes).await?;
                }
                Item::Told(bytes) => sink.send(bytes).await?,
                Item::Own(own) => send_own(stream, inbox, &mut sink, own).await?,
                Item::End(end) => ended(stream, inbox, &end),
            }
        }
        if let Some(error) = inbox.failed.take() {
            return Ok(refused(&error));
        }
        inbox.release();
        let between = inbox.gate.between();
        if between && let Some(own) = stream.queue.take() {
            send_own(stream, inbox, &mut sink, own).await?;
            continue;
        }
        match next(stream, inbox, &mut sink, between).await {
            Input::Own => {}
            Input::Reset(error) => return Err(Broken::Gone(error)),
            Input::Data(Some(Ok(data))) => {
                let known = inbox.is_known();
                let data = with_more(&mut inbox.body, data).await;
                inbox.accept(&data);
                if !known {
                    told_known(stream, inbox);
                }
            }
            Input::Data(Some(Err(error))) => return Ok(Ended::envoy(end_status::of_downstream(&error))),
            Input::Data(None) => {
                let _ = sink.stream.0.send_data(Bytes::new(), true);
                let whole = inbox.whole();
                return Ok(Ended::envoy(if whole {
                    Status::ok("")
                } else {
                    Status::internal("unexpected EOF")
                }));
            }
        }
    }
}

// Whose stream it is, once that is known.
fn told_known(stream: &Stream<'_>, inbox: &Inbox) {
    match inbox.is_known() {
        true if inbox.proxyless => stream.shared.settle(stream.id, true),
        true => stream.shared.known(stream.id),
        false => {}
    }
}

async fn next(stream: &Stream<'_>, inbox: &mut Inbox, sink: &mut Sink<'_, Upward>, between: bool) -> Input {
    let mut more = pin!(stream.queue.more());
    poll_fn(|cx| {
        if between && more.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Input::Own);
        }
        if inbox.ended {
            return Poll::Ready(Input::Data(None));
        }
        if let Poll::Ready(data) = inbox.body.poll_data(cx) {
            return Poll::Ready(Input::Data(data));
        }
        match sink.stream.0.poll_reset(cx) {
            // Go servers reset without an error once their status is out: the reader has it.
            Poll::Ready(Ok(Reason::NO_ERROR)) | Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(reason)) => Poll::Ready(Input::Reset(reason.into())),
            Poll::Ready(Err(error)) => Poll::Ready(Input::Reset(error)),
        }
    })
    .await
}

fn refused(error: &Error) -> Ended {
    if let Error::TooLarge { length, limit, type_url } = error {
        let type_url = if type_url.is_empty() { "of unknown type" } else { type_url };
        if let Some(more) = TOO_LARGE.may() {
            tracing::error!(target: "xdsproxy", "a request {} of {length} bytes from Envoy is above the limit of \
                {limit} bytes, so the stream ends; raise ISTIO_GPRC_MAXRECVMSGSIZE{more}", shown(type_url));
        }
    }
    Ended::envoy(of_gate(error))
}

async fn send_own(
    stream: &Stream<'_>,
    inbox: &mut Inbox,
    sink: &mut Sink<'_, Upward>,
    own: Own,
) -> Result<(), Broken> {
    if own.health && !inbox.gate.rules().listeners_asked {
        // The agent keeps it, and sends it once Envoy has asked for listeners.
        return Ok(());
    }
    stream.shared.meters.request();
    inbox.keep(&own.frame);
    sink.send(own.frame).await
}

fn ended(stream: &Stream<'_>, inbox: &mut Inbox, end: &End) {
    let shared = stream.shared;
    shared.meters.request_size(end.length);
    if end.verdict == Verdict::Drop {
        return;
    }
    shared.meters.request();
    stream.asked.store(true, Ordering::Relaxed);
    let type_url = end.facts.type_url.as_deref().unwrap_or_default();
    let short = types::short(type_url);
    tracing::debug!(target: "xdsproxy", stream = stream.id, "request {short} of {} bytes, nonce {}",
        end.length, end.facts.nonce);
    if !stream.is_workloads() {
        told_beside(stream, short, &end.facts);
        return;
    }
    if type_url == types::ECDS && stream.protocol == Protocol::Sotw && !end.facts.version.is_empty() {
        end.facts.version.clone_into(&mut shared.ecds_version.lock().expect("no panic holds this lock"));
    }
    // What one client of many has, or has dropped, tells nothing of the others.
    if !inbox.proxyless && inbox.subscribed.begins(&end.facts) {
        shared.begins_anew();
    }
    match shared.state.request(type_url, &end.facts) {
        Answer::Nack { fresh, count, version } => {
            shared.meters.nack(short);
            let names: &[String] = if stream.protocol == Protocol::Delta { &end.facts.names } else { &[] };
            let message = end.facts.error_message.trim_end();
            shared.troubles.rejected("Envoy", type_url, &version, names, message);
            let why = cut(message, CAUSE);
            if fresh
                && count > 1
                && let Some(more) = REJECTED.may_hold(why.len())
            {
                tracing::warn!(target: "xdsproxy", "Envoy rejected {} version {:?}, {count} times by now: {why}{more}",
                    shown(short), shown(&version));
            }
        }
        Answer::Ack => {
            shared.troubles.accepted(type_url);
            if type_url == types::LISTENER {
                shared.configured(true);
            }
        }
        Answer::None if type_url == types::LISTENER && end.facts.is_bare() => shared.configured(false),
        Answer::None => {}
    }
    if !inbox.proxyless && inbox.subscribed.drops(stream.protocol, type_url, &end.facts) {
        shared.dropped(type_url);
    }
    if type_url == types::LISTENER {
        inbox.follow(stream.asks().into_iter());
    }
}

// What a client beside the workload's own rejects, or has, is no matter of the workload's, whose own the agent's requests
// are, too.
fn told_beside(stream: &Stream<'_>, short: &str, facts: &Facts) {
    if !facts.rejected {
        return;
    }
    stream.shared.meters.nack(short);
    let why = cut(facts.error_message.trim_end(), CAUSE);
    if let Some(more) = REJECTED.may_hold(why.len()) {
        tracing::warn!(target: "xdsproxy", stream = stream.id, "a client beside the workload's own rejected {}: {why}{more}",
            shown(short));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::tasks::Group;

    // What Envoy sends on a stream of its own, in memory.
    async fn inbox(group: &Group) -> Inbox {
        let (client, server) = tokio::io::duplex(1 << 16);
        group.run("envoy", async move {
            let (mut send, connection) = h2::client::handshake(client).await.unwrap();
            let _stream = send.send_request(http::Request::new(()), false).unwrap();
            connection.await.unwrap();
        });
        let mut http2 = h2::server::handshake(server).await.unwrap();
        let (request, _) = http2.accept().await.unwrap().unwrap();
        Inbox::new(request.into_body(), Protocol::Delta, 1 << 20, true)
    }

    #[tokio::test]
    async fn window_is_given_back_once_for_what_was_handed_over() {
        let group = Group::new();
        let mut inbox = inbox(&group).await;
        // The stand-in has read, and given back, a part of a request.
        let mut messages = Messages::new(1 << 20);
        let frame = frame_bytes(&Bytes::from_static(&[7; 100]));
        assert_eq!(messages.push(&frame[..50]).unwrap().len(), 0);
        inbox.handed_over([], None, messages, false);
        assert_eq!(inbox.owed, 0);
        // What comes from now on is owed.
        inbox.accept(&frame.slice(50..));
        assert_eq!(inbox.owed, frame.len() - 50);
    }
}
