//! One stream: requests in, responses and pushes out, until either side ends it.
//!
//! Written once for both forms of the protocol; [`Protocol`] is what differs. The stream is pulled by the connection
//! it belongs to, so it needs no task of its own, and it is gone as soon as the client is.
//!
//! A stream waits most of its life, and whoever floods the socket has thousands: what is not needed while it waits
//! (messages, buffers, the work on an answer) is not kept with it.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{select_all, try_join_all};
use hyper::body::Incoming;
use memchr::memmem;
use prost::Message;
use tonic::{Code, Status};

use super::answers::{Answers, Pieces, Talk, Turn};
use super::asked::{Asked, CAUSE, Named, all_named, failed};
use super::encode::Encoder;
use super::metrics::{Metrics, Open};
use super::protocol::{Protocol, Sotw};
use super::session::{Action, Request, Session, cost};
use crate::base::quote::cut;
use crate::base::seldom::Seldom;
use crate::base::tasks::{Panicked, Stop, caught};
use crate::net::clients::Using;
use crate::net::grpc;
use crate::net::grpc::messages::{Counted, Messages};
use crate::secrets::{Change, Fetched, ResourceName, Secret, SecretSource, Updates};

/// Any client can cause these, as often as it likes.
static UNREADABLE: Seldom = Seldom::new(60);
static REFUSED: Seldom = Seldom::new(60);

/// Longest answer, by its secrets, in bytes: one file of the greatest length that is read. Envoy asks for each secret on a
/// stream of its own.
pub(super) const LONGEST: usize = 16 << 20;

/// A text of so many bytes, which is a certificate or two, is not copied for each stream.
const LONG: usize = 4096;

/// Requests of one stream that are answered beside each other: one that names what is not there yet holds up no other.
const AT_ONCE: usize = 4;
/// While there are so many, those that come wait for their turn, and what a client leaves is heard. When their names take
/// more than this, in bytes, no more is read.
const WAITING: usize = 8192;

/// What streams of one server share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) encoder: Encoder,
    pub(super) metrics: Metrics,
    pub(super) keepalive: (Duration, Duration),
    pub(super) peers: super::peers::Peers,
    pub(super) stop: Stop,
}

/// Serves one stream.
pub(super) fn serve<P: Protocol>(
    shared: Arc<Shared>,
    source: Arc<dyn SecretSource>,
    body: Incoming,
    call: Call,
) -> Answers {
    Answers::many(Box::new(Conversation::<P> {
        inbound: Messages::new(body, call.using.share()),
        names: Counted::of(call.using.share()),
        closed: false,
        pending: Vec::new(),
        waiting: Vec::new(),
        call,
        _open: shared.metrics.opened(),
        shared,
        source,
        session: Session::default(),
        following: Vec::new(),
        unrevoked: Vec::new(),
        handed_over: None,
        protocol: PhantomData,
    }))
}

/// One answer without a stream, with its frame.
pub(super) async fn fetch(
    shared: &Shared,
    source: &dyn SecretSource,
    body: Incoming,
    call: &Call,
) -> Result<Pieces, Status> {
    let message = Messages::new(body, call.using.share()).next().await?;
    let request = Sotw::request(message.ok_or_else(|| Status::internal("grpc: no request has come"))?);
    if request.node.as_deref().is_none_or(str::is_empty) {
        return Err(node_missing());
    }
    let names = all_named(source, request.names)?;
    let mut held = Counted::of(call.using.share());
    if !held.count(names.iter().map(|(text, _)| cost(text)).sum()) {
        return Err(too_many());
    }
    let secrets = try_join_all(names.into_iter().map(async |(text, name)| match source.fetch(name).await {
        Ok(fetched) => Ok((text, fetched.secret)),
        Err(error) => Err(failed(&text, error.as_ref())),
    }))
    .await?;
    bounded(&secrets)?;
    shared.encoder.prepare(&secrets).await;
    encoded(&Sotw::response(&shared.encoder, &secrets, &nonce()), &secrets)
}

/// A stream holds its answer until the client has taken it.
fn bounded(secrets: &[(String, Secret)]) -> Result<(), Status> {
    let size = |(_, secret): &(String, Secret)| match secret {
        Secret::Identity(identity) => identity.chain.len() + identity.key.len(),
        Secret::Roots(roots) => roots.pem.len(),
    };
    if secrets.iter().map(size).sum::<usize>() <= LONGEST {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "the secrets of one answer take more than {LONGEST} bytes; ask for them on more streams"
    )))
}

/// In pieces: what is long in it is shared, since a client may wait for it on thousands of streams and take nothing.
fn encoded(message: &impl Message, secrets: &[(String, Secret)]) -> Result<Pieces, Status> {
    let whole = grpc::framed(&message.encode_to_vec());
    let whole = whole.ok_or_else(|| Status::internal("the answer is too large"))?;
    let (mut pieces, mut rest) = (Pieces::new(), &whole[..]);
    for (_, secret) in secrets {
        let text = secret.text();
        if text.len() >= LONG
            && let Some(at) = memmem::find(rest, &text)
        {
            pieces.push_back(Bytes::copy_from_slice(&rest[..at]));
            rest = &rest[at + text.len()..];
            pieces.push_back(text);
        }
    }
    if pieces.is_empty() {
        return Ok([whole].into());
    }
    pieces.push_back(Bytes::copy_from_slice(rest));
    Ok(pieces)
}

/// What belongs to one call: its bound, and its share of the connection.
pub(super) struct Call {
    pub(super) until: Option<tokio::time::Instant>,
    pub(super) using: Using,
}

/// A name that is followed, as it was asked for.
struct Followed {
    name: ResourceName,
    text: String,
    updates: Box<Updates>,
}

struct Conversation<P: Protocol> {
    inbound: Messages<P::In, Incoming>,
    /// What the names take that are followed, asked for or wait: a part of what its client may hold.
    names: Counted,
    /// The client sends no more.
    closed: bool,
    /// Answers to what was asked, in its order; at most [`AT_ONCE`].
    pending: Vec<Asked>,
    /// What was asked for beside them, in its order.
    waiting: Vec<Vec<Named>>,
    call: Call,
    shared: Arc<Shared>,
    source: Arc<dyn SecretSource>,
    session: Session,
    // In the order of ResourceName: of two that changed at once, ROOTCA is sent first. A list, since it mostly has one
    // entry: the node of a tree has room for eleven, which were half of what a stream costs.
    following: Vec<Followed>,
    /// Roots that were sent last when it was not known whether there is a revocation list.
    unrevoked: Vec<String>,
    handed_over: Option<Instant>,
    _open: Open,
    protocol: PhantomData<fn() -> P>,
}

/// What a stream has waited for.
enum Event {
    Stopped,
    Exceeded,
    Request(Box<Request>),
    Closed,
    Unreadable(Status),
    Asked(Result<Vec<(Named, Fetched)>, Status>),
    /// What a root was answered without.
    Revoked,
    News(usize, Option<Change>),
}

impl<P: Protocol> Talk for Conversation<P> {
    fn turn(mut self: Box<Self>) -> Turn {
        Box::pin(async move {
            if let Some(at) = self.handed_over.take() {
                self.shared.metrics.sent(at.elapsed());
            }
            let outcome = match caught("sds stream", self.talk()).await {
                Ok(outcome) => outcome,
                Err(Panicked) => Some(Err(Status::internal("a defect in the agent ended this stream"))),
            };
            if matches!(outcome, Some(Ok(_))) {
                self.handed_over = Some(Instant::now());
            }
            (outcome, self as Box<dyn Talk>)
        })
    }
}

impl<P: Protocol> Conversation<P> {
    async fn talk(&mut self) -> Option<Result<Pieces, Status>> {
        loop {
            self.ask_waiting();
            if let Err(status) = self.count() {
                return Some(Err(status));
            }
            match self.event().await {
                Event::Stopped => return Some(Err(stopping())),
                Event::Exceeded => return Some(Err(grpc::exceeded())),
                Event::Request(request) => {
                    if let Err(status) = self.act(&request) {
                        return Some(Err(status));
                    }
                }
                Event::Asked(Err(missing)) => return Some(Err(missing)),
                Event::Asked(Ok(fetched)) => {
                    let secrets = self.followed(fetched);
                    return Some(Box::pin(self.respond(&secrets)).await);
                }
                Event::Revoked => {
                    let roots = self.unrevoked();
                    if self.shared.encoder.crl.file().is_some() && !roots.is_empty() {
                        // The look has just ended: another would only let a newer root pass by.
                        return Some(self.answer(&roots));
                    }
                }
                Event::Closed if self.pending.is_empty() => return None,
                // What was asked for is answered all the same.
                Event::Closed => self.closed = true,
                Event::Unreadable(status) => return self.unreadable(status).map(Err),
                Event::News(at, change) => {
                    let text = self.following[at].text.clone();
                    return Some(match change {
                        Some(Change::Updated(secret)) => Box::pin(self.respond(&[(text, secret)])).await,
                        Some(Change::Failed(error)) => Err(failed(&text, error.as_ref())),
                        None => Err(stopping()),
                    });
                }
            }
        }
    }

    async fn event(&mut self) -> Event {
        if self.closed && self.pending.is_empty() {
            return Event::Closed;
        }
        let reading = !self.closed && self.has_room();
        // A request that waits goes before a push, an answer before the next request.
        tokio::select! {
            biased;
            () = self.shared.stop.cancelled() => Event::Stopped,
            () = grpc::over(self.call.until) => Event::Exceeded,
            asked = answered(&mut self.pending) => Event::Asked(asked),
            // In a box, as hardly any stream ever waits for it.
            () = async { Box::pin(self.shared.encoder.crl.known()).await }, if !self.unrevoked.is_empty() => Event::Revoked,
            event = poll_fn(|cx| self.inbound.poll_next(cx).map(|read| match read {
                Ok(Some(message)) => Event::Request(Box::new(P::request(message))),
                Ok(None) => Event::Closed,
                Err(status) => Event::Unreadable(status),
            })), if reading => event,
            (at, change) = news(&mut self.following) => Event::News(at, change),
        }
    }

    /// How a stream ends whose next request cannot be read; `None` when its client is gone.
    fn unreadable(&self, status: Status) -> Option<Status> {
        if matches!(status.code(), Code::Cancelled | Code::Unavailable | Code::Unknown) {
            return None;
        }
        self.shared.metrics.receive_failed();
        if let Some(more) = UNREADABLE.may() {
            tracing::warn!(target: "sds", "a stream ends: its request cannot be read: {}{more}", status.message());
        }
        Some(status)
    }

    fn act(&mut self, request: &Request) -> Result<(), Status> {
        let action = P::act(&mut self.session, request);
        self.leave();
        match action {
            Action::Nothing => {}
            Action::Refused(reason) => {
                self.shared.metrics.rejected();
                let reason = cut(&reason, CAUSE);
                if let Some(more) = REFUSED.may_hold(reason.len()) {
                    tracing::warn!(target: "sds", "Envoy refuses a secret: {reason}{more}");
                }
            }
            Action::Stale => {
                self.shared.metrics.stale();
                tracing::debug!(target: "sds", "a request refers to an older response and is ignored");
            }
            Action::NodeMissing => return Err(node_missing()),
            // What names nothing does not wait.
            Action::Respond(names) => self.ask(all_named(&*self.source, names)?),
        }
        Ok(())
    }

    fn ask(&mut self, names: Vec<Named>) {
        // Who asks for nothing is answered at once.
        if names.is_empty() || self.pending.len() < AT_ONCE {
            self.pending.push(Asked::of(&*self.source, names));
        } else if !self.waiting.contains(&names) {
            self.waiting.push(names);
        }
    }

    fn ask_waiting(&mut self) {
        while self.pending.len() < AT_ONCE && !self.waiting.is_empty() {
            let names = self.waiting.remove(0);
            self.pending.push(Asked::of(&*self.source, names));
        }
        // A stream waits most of its life.
        if self.waiting.is_empty() {
            self.waiting = Vec::new();
        }
    }

    fn has_room(&self) -> bool {
        self.waits() < WAITING
    }

    fn waits(&self) -> usize {
        self.waiting.iter().flatten().map(|(text, _)| cost(text)).sum()
    }

    /// Counts what the names take.
    fn count(&mut self) -> Result<(), Status> {
        let pending: usize = self.pending.iter().map(Asked::size).sum();
        if self.names.count(self.session.size() + pending + self.waits()) {
            return Ok(());
        }
        Err(too_many())
    }

    /// Follows what was asked for.
    fn followed(&mut self, fetched: Vec<(Named, Fetched)>) -> Vec<(String, Secret)> {
        let follow = |((text, name), fetched): (Named, Fetched)| {
            self.follow(name, text.clone(), fetched.updates);
            (text, fetched.secret)
        };
        fetched.into_iter().map(follow).collect()
    }

    async fn respond(&mut self, secrets: &[(String, Secret)]) -> Result<Pieces, Status> {
        tokio::select! {
            () = self.shared.encoder.prepare(secrets) => {}
            () = self.shared.stop.cancelled() => return Err(stopping()),
        }
        self.answer(secrets)
    }

    fn answer(&mut self, secrets: &[(String, Secret)]) -> Result<Pieces, Status> {
        bounded(secrets)?;
        // With what is sent now they have it, or have it not again.
        self.unrevoked.retain(|name| secrets.iter().all(|(sent, _)| sent != name));
        if !self.shared.encoder.crl.is_known() {
            let roots = secrets.iter().filter(|(_, secret)| matches!(secret, Secret::Roots(_)));
            self.unrevoked.extend(roots.map(|(name, _)| name.clone()));
        }
        let nonce = nonce();
        self.session.sent(&nonce);
        encoded(&P::response(&self.shared.encoder, secrets, &nonce), secrets)
    }

    /// Those that are still followed, as they are now, which so is no news any more; none after this.
    fn unrevoked(&mut self) -> Vec<(String, Secret)> {
        let names = std::mem::take(&mut self.unrevoked);
        let sent = self.following.iter_mut().filter(|one| names.contains(&one.text));
        sent.filter_map(|one| Some((one.text.clone(), one.updates.value()?))).collect()
    }

    /// Forgets what the client has left.
    fn leave(&mut self) {
        let left = self.session.left();
        if left.is_empty() {
            return;
        }
        self.following.retain(|one| !left.contains(&one.text));
        for names in &mut self.waiting {
            names.retain(|(text, _)| !left.contains(text));
        }
        self.waiting.retain(|names| !names.is_empty());
        // A name that is never answered would hold a place, and what was asked for with it, for ever.
        self.pending.retain_mut(|asked| asked.leave(&left));
    }

    fn follow(&mut self, name: ResourceName, text: String, updates: Updates) {
        let one = Followed { name, text, updates: Box::new(updates) };
        match self.following.binary_search_by(|other| other.name.cmp(&one.name)) {
            Ok(at) => self.following[at] = one,
            Err(at) => self.following.insert(at, one),
        }
    }
}

fn too_many() -> Status {
    Status::resource_exhausted("the agent holds too many names for its clients; ask for fewer")
}

/// The first answer that is there; for ever, where nothing was asked.
async fn answered(pending: &mut Vec<Asked>) -> Result<Vec<(Named, Fetched)>, Status> {
    poll_fn(|cx| {
        for at in 0..pending.len() {
            if let Poll::Ready(answer) = pending[at].poll(cx) {
                drop(pending.remove(at));
                if pending.is_empty() {
                    // A stream waits most of its life.
                    *pending = Vec::new();
                }
                return Poll::Ready(answer);
            }
        }
        Poll::Pending
    })
    .await
}

// Which one has changed, and how.
async fn news(following: &mut [Followed]) -> (usize, Option<Change>) {
    if following.is_empty() {
        return std::future::pending().await;
    }
    let each = following.iter_mut().map(|one| Box::pin(one.updates.next()));
    // Polled in order.
    let (change, at, _) = select_all(each).await;
    (at, change)
}

fn nonce() -> String {
    uuid::Uuid::new_v4().to_string()
}

fn node_missing() -> Status {
    Status::invalid_argument("missing node information")
}

fn stopping() -> Status {
    Status::unavailable("the agent is stopping")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::{Identity, Roots};

    #[test]
    fn what_is_long_is_shared_and_the_bytes_are_the_same() {
        let roots = |pem: Vec<u8>| Secret::Roots(Arc::new(Roots { pem }));
        let identity =
            |chain: Vec<u8>| Secret::Identity(Arc::new(Identity { chain, key: b"key".to_vec().into() }));
        let named = |all: Vec<Secret>| all.into_iter().map(|one| ("a".to_owned(), one)).collect::<Vec<_>>();
        let encoder = Encoder::default();
        for (secrets, count) in [
            (named(vec![roots(vec![7; LONG - 1])]), 1),
            (named(vec![roots(vec![7; LONG])]), 3),
            (named(vec![identity(vec![8; LONG]), roots(vec![7; 100]), roots(vec![9; LONG])]), 5),
        ] {
            let message = Sotw::response(&encoder, &secrets, "n");
            let pieces = encoded(&message, &secrets).unwrap();
            assert_eq!(pieces.len(), count);
            let all: Vec<u8> = pieces.iter().flatten().copied().collect();
            assert_eq!(all, grpc::framed(&message.encode_to_vec()).unwrap());
            let last = secrets.last().unwrap().1.text();
            assert_eq!(pieces.iter().any(|piece| piece.as_ptr() == last.as_ptr()), count > 1);
        }
    }
}
