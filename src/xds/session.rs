//! The life of one Envoy stream: registered, dialled for (and held, if need be), relayed, ended.

use std::future::{pending, poll_fn};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use h2::RecvStream;
use h2::server::SendResponse;
use tokio::time::Instant;
use tonic::Status;

use super::end_status::Class;
use super::ended::{Ended, Leg};
use super::held::Held;
use super::hold::{self, Due, holdable};
use super::inbox::Inbox;
use super::own::Queue;
use super::protocol::Protocol;
use super::relay::exchange;
use super::reply::Reply;
use super::shared::Shared;
use super::stand_in::{self, Answered, Sides};
use super::stream::Stream;
use super::trouble;
use super::upstream::{self, Link, Unopened};
use crate::base::quote::cut;
use crate::base::seldom::Seldom;
use crate::base::tasks::{Panicked, Stop, caught};
use crate::istiod;
use crate::net::grpc;
use crate::trouble::Report;

/// Any client can cause these, as often as it likes.
static ENDS: Seldom = Seldom::new(60);
/// Longest cause in a line.
const CAUSE: usize = 2048;
/// How long a stream's first request is waited for where another stream is open, or it is held.
const FIRST_REQUEST: Duration = Duration::from_secs(1);
/// Clients of the gRPC library give a resource 15 s, and do not tell why it did not come: the cause must be
/// there before.
const PROXYLESS_HOLD: Duration = Duration::from_secs(10);

/// Serves one stream to its end, `until` the client's own bound at most. `own`: it is that one's of the agent's own Envoys. `stop` is
/// the server's.
pub(super) async fn serve(
    shared: Arc<Shared>,
    protocol: Protocol,
    own: Option<u64>,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    until: Option<Instant>,
    stop: Stop,
) {
    let queue = Arc::new(Queue::default());
    let (id, replaced, overlaps) = shared.register(protocol, own, &queue, &stop);
    let _registered = Registered { shared: &shared, id };
    let may_hold = shared.holds() || own.is_none() && shared.fails_others();
    let mut inbox = Inbox::new(body, protocol, shared.config.max_request, own.is_some() || may_hold);
    if overlaps && own.is_none() && shared.has_own() {
        inbox.is_no_envoy();
    }
    // Where it matters who is asking, the first request is waited for, which comes at once.
    let proxyless = (overlaps || may_hold) && inbox.is_proxyless(FIRST_REQUEST).await;
    if overlaps || proxyless {
        shared.settle(id, proxyless);
    }
    if inbox.is_known() && !proxyless {
        shared.known(id);
    }
    let held = (may_hold && shared.holds_on(id)).then(|| Held::new(&shared, id));
    if held.is_some() && !proxyless && inbox.is_bare() {
        shared.starts();
    }
    let hold = if proxyless { shared.config.hold.min(PROXYLESS_HOLD) } else { shared.config.hold };
    let mut reply = Reply::new(respond);
    let session = EnvoyStream {
        stream: Stream {
            id,
            protocol,
            shared: &shared,
            own: own.is_some(),
            queue: &queue,
            committed: &AtomicBool::new(false),
            first_listeners: &AtomicBool::new(false),
            asked: &AtomicBool::new(false),
            counted: &AtomicBool::new(false),
            held: held.as_ref(),
            attempt: &AtomicU64::new(0),
            until,
        },
        inbox,
        reply: &mut reply,
        ends_at: held.as_ref().map(|_| Instant::now() + hold),
        replaced,
        again: false,
        memory: Box::pin(pending()),
    };
    let status = match caught("xds stream", session.run(&stop)).await {
        Ok(status) => status,
        Err(Panicked) => Status::internal("a defect in the agent ended this stream"),
    };
    reply.finish(&status);
}

/// A stream's place on the books, until it is dropped.
struct Registered<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.shared.unregister(self.id);
    }
}

/// An open way to istiod: cut off without an end of its own, it is closed on the books all the same.
struct Open<'a> {
    stream: &'a Stream<'a>,
    ended: bool,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if let Some(memory) = &self.stream.shared.memory {
            memory.over(self.stream.attempt.load(Ordering::Relaxed));
        }
        self.stream.over();
        if !self.ended {
            let ended = Ended::new(Leg::Agent, Status::ok(""), Class::Expected);
            count(self.stream.shared, &ended);
            self.stream.down(None);
        }
    }
}

// How a stream is over, and how its hold ended.
type Over = (Ended, &'static str);

struct EnvoyStream<'a> {
    stream: Stream<'a>,
    inbox: Inbox,
    reply: &'a mut Reply,
    // Set when the stream may be held, and then the end of that.
    ends_at: Option<Instant>,
    replaced: Stop,
    // It was tried again, since istiod had not looked at it.
    again: bool,
    // Memory could stand in now, and could not before. Told once, which ends the stream.
    memory: BoxFuture<'static, ()>,
}

impl EnvoyStream<'_> {
    async fn run(mut self, stop: &Stop) -> Status {
        let (ended, result) = self.attempts().await;
        if let Some(held) = self.stream.held {
            held.end(result);
        }
        if ended.by == Leg::Envoy {
            self.stream.shared.left(self.stream.id);
        }
        let mut status = ended.status.clone();
        if ended.by == Leg::Agent && stop.is_cancelled() {
            status = Status::unavailable("the agent is stopping");
        }
        log(self.stream.id, &ended);
        status
    }

    // Attempts until one is over for good; with the way the hold ended, if there was one.
    async fn attempts(&mut self) -> Over {
        let shared = self.stream.shared;
        let mut wake = shared.wake.clone();
        wake.mark_unchanged();
        let mut answered = match self.stood_in().await {
            Ok(answered) => answered,
            Err(ended) => {
                if ended.by != Leg::Istiod {
                    count(shared, &ended);
                }
                self.stream.down(reason(&ended));
                return (ended, "given up");
            }
        };
        loop {
            if answered.is_none()
                && self.ends_at.is_some()
                && let Some(due) = self.due()
            {
                match self.or_gone(hold::wait(due, &mut wake, &*shared.upstream)).await {
                    Ok(()) => {}
                    Err(ended) => return (ended, "given up"),
                }
            }
            wake.mark_unchanged();
            let opened = match answered.take() {
                Some(link) => Ok(Ok(link)),
                None => self.dial().await,
            };
            let next = match opened {
                Err(ended) => return (ended, "given up"),
                Ok(Err(unopened)) => self.unopened(unopened),
                Ok(Ok(link)) => {
                    let ended = self.relay(link).await;
                    self.relayed(ended)
                }
            };
            if let ControlFlow::Break(over) = next {
                return over;
            }
        }
    }

    // A stream to istiod, under a number of its own in the store.
    async fn dial(&mut self) -> Result<Result<Link, Unopened>, Ended> {
        let shared = self.stream.shared;
        let attempt = shared.memory.as_ref().map_or(0, |memory| memory.next_stream());
        self.stream.attempt.store(attempt, Ordering::Relaxed);
        let is_workloads = self.stream.is_workloads();
        let late = |error: istiod::Error| {
            if is_workloads {
                shared.told(error.report());
            }
        };
        let (way, tokens) = (&*shared.upstream, &*shared.tokens);
        let open = upstream::open(way, tokens, &shared.headers, self.stream.protocol, &late);
        self.or_gone(open).await
    }

    // Istiod was not reached, or did not take the stream.
    fn unopened(&self, unopened: Unopened) -> ControlFlow<Over> {
        let Unopened { status, roots, report } = unopened;
        let shared = self.stream.shared;
        shared.meters.dial("failed");
        self.stream.judge(&status);
        // The stream was never open: no class, and nothing of Envoy's side is counted.
        if roots {
            shared.meters.failure();
        } else {
            shared.meters.istiod_ended(Class::Unexpected);
        }
        let report = match report {
            Some(report) => *report,
            None => trouble::ended(shared.upstream.address(), &status),
        };
        let told = upstream::told(&status, &report);
        // Roots may come back as istiod may.
        if self.may_go_on(&status, report, roots || holdable(&status)) {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break((Ended::new(Leg::Istiod, told, Class::Unexpected), "told"))
    }

    // A stream to istiod has ended: where it had brought nothing yet, the next attempt may take its place.
    fn relayed(&mut self, ended: Ended) -> ControlFlow<Over> {
        let shared = self.stream.shared;
        let committed = self.stream.committed.load(Ordering::Relaxed);
        if ended.untouched && !committed && !self.again && self.inbox.movable() {
            self.again = true;
            tracing::debug!(target: "xdsproxy", stream = self.stream.id, "tried again: {}", ended.status.message());
            return ControlFlow::Continue(());
        }
        count(shared, &ended);
        if ended.by == Leg::Istiod {
            self.stream.judge(&ended.status);
        }
        if committed {
            self.stream.down(reason(&ended));
            if ended.by == Leg::Istiod && self.stream.is_workloads() {
                shared.troubles.lost(shared.upstream.address(), &ended.status);
                if !self.inbox.proxyless() && !shared.has_others(self.stream.id) {
                    shared.broke();
                }
            }
            return ControlFlow::Break((ended, "healed"));
        }
        if ended.by != Leg::Istiod {
            self.stream.down(None);
            return ControlFlow::Break((ended, "given up"));
        }
        if !holdable(&ended.status) {
            // Istiod is there and says no: for Envoy to know, and no failure of the way.
            shared.answered_badly(self.stream.id, &ended.status);
            return ControlFlow::Break((ended, "told"));
        }
        let report = trouble::ended(shared.upstream.address(), &ended.status);
        if self.may_go_on(&ended.status, report, true) {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break((ended, "told"))
    }

    // While istiod is away memory may answer Envoy; gives the way to istiod once that does.
    async fn stood_in(&mut self) -> Result<Option<Link>, Ended> {
        let (shared, protocol) = (self.stream.shared, self.stream.protocol);
        let Some(memory) = &shared.memory else { return Ok(None) };
        let can_serve = memory.can_serve(protocol).await;
        if !can_serve && self.ends_at.is_some() && !self.inbox.proxyless() {
            self.memory = Box::pin(memory.clone().comes_to_serve(protocol));
        }
        if !can_serve || self.is_proxyless().await {
            return Ok(None);
        }
        let sides = Sides {
            stream: &self.stream,
            inbox: &mut self.inbox,
            reply: self.reply,
            replaced: &self.replaced,
        };
        let Answered { link, attempt } = stand_in::run(sides, memory).await?;
        self.stream.attempt.store(attempt, Ordering::Relaxed);
        Ok(Some(link))
    }

    // Waits for the first request, which tells.
    async fn is_proxyless(&mut self) -> bool {
        let known = self.inbox.is_known();
        let proxyless = self.inbox.is_proxyless(FIRST_REQUEST).await;
        match self.inbox.is_known() {
            true if known => {}
            true if proxyless => self.stream.shared.settle(self.stream.id, true),
            true => self.stream.shared.known(self.stream.id),
            false => {}
        }
        proxyless
    }

    async fn relay(&mut self, link: Link) -> Ended {
        let shared = self.stream.shared;
        shared.meters.dial("opened");
        if self.stream.is_workloads() {
            shared.state.upstream_open(link.peer.to_string(), link.token_expires);
        }
        tracing::debug!(target: "xdsproxy", stream = self.stream.id, "connected to {} at {}",
            shared.upstream.address(), link.peer);
        self.stream.feeds();
        let mut open = Open { stream: &self.stream, ended: false };
        let (stream, memory) = (&self.stream, &mut self.memory);
        let stood_in_for = async {
            memory.await;
            if stream.committed.load(Ordering::Relaxed) {
                return pending().await;
            }
            kept()
        };
        let ended = tokio::select! {
            biased;
            ended = exchange(stream, &mut self.inbox, self.reply, link, &self.replaced) => ended,
            ended = stood_in_for => ended,
        };
        open.ended = true;
        ended
    }

    // Counts a failed attempt, and tells whether Envoy is spared it.
    fn may_go_on(&self, status: &Status, report: Report, holdable: bool) -> bool {
        let shared = self.stream.shared;
        let delay = shared.failed_on(self.stream.id, status, report);
        let Some(ends_at) = self.ends_at else { return false };
        let in_time = self.due().is_none_or(|due| due.at < ends_at);
        let again = holdable && self.inbox.movable() && in_time;
        if again {
            tracing::debug!(target: "xdsproxy", stream = self.stream.id,
                "held; next attempt in {delay:?} after: {}", status.message());
        }
        again
    }

    // When istiod may be dialled next for this stream.
    fn due(&self) -> Option<Due> {
        let due = self.stream.shared.due_on(self.stream.id)?;
        Some(if self.inbox.proxyless() { due.soon() } else { due })
    }

    // While the agent works for the stream, Envoy may leave, its time may be over, and a newer stream may take
    // its place.
    async fn or_gone<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Ended> {
        let (reply, memory) = (&mut *self.reply, &mut self.memory);
        let until = self.stream.until;
        tokio::select! {
            biased;
            gone = poll_fn(|cx| reply.poll_gone(cx)) => Err(Ended::envoy(gone)),
            () = self.replaced.cancelled() => {
                Err(Ended::new(Leg::Agent, Status::ok(""), Class::Expected))
            }
            () = grpc::over(until) => Err(Ended::envoy(grpc::exceeded())),
            done = work => Ok(done),
            () = memory => Err(kept()),
        }
    }
}

// For the next stream that Envoy opens memory stands in.
fn kept() -> Ended {
    let status = Status::unavailable("the last good configuration (XDS_REPLAY) can be used from now on");
    Ended::new(Leg::Agent, status, Class::Expected)
}

fn reason(ended: &Ended) -> Option<String> {
    (ended.class == Class::Unexpected).then(|| ended.status.message().to_owned())
}

// Whichever side ends the stream, the other side's reader ends with it, which the Go agent counts too.
fn count(shared: &Shared, ended: &Ended) {
    let class_of = |leg| if ended.by == leg { ended.class } else { Class::Expected };
    shared.meters.istiod_ended(class_of(Leg::Istiod));
    shared.meters.envoy_ended(class_of(Leg::Envoy));
}

fn log(id: u64, ended: &Ended) {
    let (code, text) = (ended.status.code(), ended.status.message());
    let side = ended.by.name();
    // What istiod does is reported as a trouble.
    match ended.class {
        _ if ended.by == Leg::Istiod => {
            tracing::debug!(target: "xdsproxy", stream = id, "ended by {side}: {code:?} {text}")
        }
        Class::Expected => {
            tracing::debug!(target: "xdsproxy", stream = id, "ended by {side}: {code:?} {text}")
        }
        Class::Unexpected => {
            let text = cut(text, CAUSE);
            if let Some(more) = ENDS.may_hold(text.len()) {
                tracing::warn!(target: "xdsproxy", stream = id, "ended by {side}: {code:?} {text}{more}")
            }
        }
    }
}
