//! One stream: requests in, responses and pushes out, until either side ends it.
//!
//! Written once for both protocols; [`Protocol`] is what differs. The stream is pulled by the connection
//! it belongs to, so it needs no task of its own, and it is gone as soon as the client is.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use futures_util::Stream;
use futures_util::future::{select_all, try_join_all};
use prost::Message;
use tonic::{Code, Status, Streaming};

use super::encode::{Encoder, SECRET_TYPE, version};
use super::metrics::{Metrics, Open};
use super::session::{Action, Request, Session};
use crate::base::error::chain;
use crate::base::quote::{cut, shown};
use crate::base::seldom::Seldom;
use crate::base::tasks::{Panicked, Stop, caught};
use crate::net::clients::Using;
use crate::net::grpc;
use crate::secrets::{Change, ResourceName, Secret, SecretSource, Updates};

/// Any client can cause these, as often as it likes.
static UNREADABLE: Seldom = Seldom::new(60);
static REFUSED: Seldom = Seldom::new(60);
static UNKNOWN: Seldom = Seldom::new(60);
/// Longest text of an error or a refusal that is told or logged.
const CAUSE: usize = 2048;

/// What streams of one server share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) encoder: Encoder,
    pub(super) metrics: Metrics,
    pub(super) keepalive: (Duration, Duration),
    pub(super) peers: super::peers::Peers,
    pub(super) stop: Stop,
}

/// The two protocols.
pub(super) trait Protocol: 'static {
    type In: Message + Default + Send + 'static;
    type Out: Message + Send + 'static;
    fn request(message: Self::In) -> Request;
    fn act(session: &mut Session, request: &Request) -> Action;
    fn response(encoder: &Encoder, secrets: &[(String, Secret)], nonce: &str) -> Self::Out;
}

/// State of the world.
pub(super) struct Sotw;

/// Incremental.
pub(super) struct Delta;

impl Protocol for Sotw {
    type In = DiscoveryRequest;
    type Out = DiscoveryResponse;

    fn request(message: Self::In) -> Request {
        Request {
            names: message.resource_names,
            leave: Vec::new(),
            type_url: message.type_url,
            nonce: message.response_nonce,
            node: message.node.map(|n| n.id),
            error: message.error_detail.map(|e| e.message),
        }
    }

    fn act(session: &mut Session, request: &Request) -> Action {
        session.request(request)
    }

    fn response(encoder: &Encoder, secrets: &[(String, Secret)], nonce: &str) -> Self::Out {
        DiscoveryResponse {
            version_info: next_version(),
            resources: secrets.iter().map(|(name, secret)| encoder.encode(name, secret)).collect(),
            type_url: SECRET_TYPE.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        }
    }
}

impl Protocol for Delta {
    type In = DeltaDiscoveryRequest;
    type Out = DeltaDiscoveryResponse;

    fn request(message: Self::In) -> Request {
        Request {
            names: message.resource_names_subscribe,
            leave: message.resource_names_unsubscribe,
            type_url: message.type_url,
            nonce: message.response_nonce,
            node: message.node.map(|n| n.id),
            error: message.error_detail.map(|e| e.message),
        }
    }

    fn act(session: &mut Session, request: &Request) -> Action {
        session.delta(request)
    }

    fn response(encoder: &Encoder, secrets: &[(String, Secret)], nonce: &str) -> Self::Out {
        let resource = |(name, secret): &(String, Secret)| Resource {
            name: name.clone(),
            version: version(secret),
            resource: Some(encoder.encode(name, secret)),
            ..Default::default()
        };
        DeltaDiscoveryResponse {
            system_version_info: next_version(),
            resources: secrets.iter().map(resource).collect(),
            type_url: SECRET_TYPE.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        }
    }
}

/// RFC 3339 time, a slash, and a count of this process's responses.
fn next_version() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let date =
        i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok()).unwrap_or_default();
    format!("{date}/{count}")
}

/// What a method gives back.
pub(super) type Responses<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Serves one stream.
pub(super) fn serve<P: Protocol>(
    shared: Arc<Shared>,
    source: Arc<dyn SecretSource>,
    inbound: Streaming<P::In>,
    call: Call,
) -> Responses<P::Out> {
    let conversation = Conversation {
        call,
        _open: shared.metrics.opened(),
        shared,
        source,
        session: Session::default(),
        following: Vec::new(),
        handed_over: None,
        over: false,
    };
    Box::pin(futures_util::stream::unfold((conversation, inbound), |(mut conversation, mut inbound)| async {
        let next = conversation.next::<P>(&mut inbound).await?;
        Some((next, (conversation, inbound)))
    }))
}

/// One answer without a stream.
pub(super) async fn fetch(
    shared: &Shared,
    source: &dyn SecretSource,
    message: DiscoveryRequest,
) -> Result<DiscoveryResponse, Status> {
    let request = Sotw::request(message);
    if request.node.as_deref().is_none_or(str::is_empty) {
        return Err(node_missing());
    }
    let fetched = try_join_all(request.names.iter().map(|name| one(source, name))).await?;
    let secrets: Vec<_> = fetched.into_iter().map(|(name, _, secret, _)| (name, secret)).collect();
    shared.encoder.prepare(&secrets).await;
    Ok(Sotw::response(&shared.encoder, &secrets, &nonce()))
}

/// What belongs to one call: its bound, and its share of the connection.
pub(super) struct Call {
    pub(super) until: Option<tokio::time::Instant>,
    pub(super) _using: Using,
}

/// A name that is followed, as it was asked for.
struct Followed {
    name: ResourceName,
    text: String,
    updates: Box<Updates>,
}

struct Conversation {
    call: Call,
    shared: Arc<Shared>,
    source: Arc<dyn SecretSource>,
    session: Session,
    // In the order of ResourceName: of two that changed at once, ROOTCA is sent first. A list, since it mostly has one
    // entry: the node of a tree has room for eleven, which were half of what a stream costs.
    following: Vec<Followed>,
    handed_over: Option<Instant>,
    over: bool,
    _open: Open,
}

impl Conversation {
    async fn next<P: Protocol>(&mut self, inbound: &mut Streaming<P::In>) -> Option<Result<P::Out, Status>> {
        if let Some(at) = self.handed_over.take() {
            self.shared.metrics.sent(at.elapsed());
        }
        if self.over {
            return None;
        }
        let outcome = match caught("sds stream", self.turn::<P>(inbound)).await {
            Ok(outcome) => outcome,
            Err(Panicked) => Some(Err(Status::internal("a defect in the agent ended this stream"))),
        };
        match outcome {
            Some(Ok(_)) => self.handed_over = Some(Instant::now()),
            Some(Err(_)) | None => self.over = true,
        }
        outcome
    }

    async fn turn<P: Protocol>(&mut self, inbound: &mut Streaming<P::In>) -> Option<Result<P::Out, Status>> {
        let shared = Arc::clone(&self.shared);
        let until = self.call.until;
        loop {
            // A request that waits goes before a push.
            tokio::select! {
                biased;
                () = shared.stop.cancelled() => return Some(Err(stopping())),
                () = grpc::over(until) => return Some(Err(grpc::exceeded())),
                message = inbound.message() => match message {
                    Ok(Some(message)) => {
                        let answer = tokio::select! {
                            biased;
                            () = shared.stop.cancelled() => return Some(Err(stopping())),
                            () = grpc::over(until) => return Some(Err(grpc::exceeded())),
                            // Not kept with the stream, which waits most of the time.
                            answer = Box::pin(self.answer::<P>(P::request(message))) => answer,
                        };
                        if let Some(answer) = answer.transpose() {
                            return Some(answer);
                        }
                    }
                    Ok(None) => return None,
                    Err(status) => return self.unreadable(status).map(Err),
                },
                (at, change) = news(&mut self.following) => {
                    let text = &self.following[at].text;
                    match change {
                        Some(Change::Updated(secret)) => {
                            let pushed = [(text.clone(), secret)];
                            return Some(Ok(Box::pin(self.respond::<P>(&pushed)).await));
                        }
                        Some(Change::Failed(error)) => return Some(Err(failed(text, error.as_ref()))),
                        None => return Some(Err(stopping())),
                    }
                }
            }
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
        // The gRPC specification's code for a message above the limit, as other servers give it.
        Some(match status.code() {
            Code::OutOfRange => Status::resource_exhausted(status.message()),
            _ => status,
        })
    }

    async fn answer<P: Protocol>(&mut self, request: Request) -> Result<Option<P::Out>, Status> {
        match P::act(&mut self.session, &request) {
            Action::Nothing => {
                self.drop_unfollowed();
                Ok(None)
            }
            Action::Refused(reason) => {
                self.shared.metrics.rejected();
                if let Some(more) = REFUSED.may() {
                    tracing::warn!(target: "sds", "Envoy refuses a secret: {}{more}", cut(&reason, CAUSE));
                }
                Ok(None)
            }
            Action::Stale => {
                self.shared.metrics.stale();
                tracing::debug!(target: "sds", "a request refers to an older response and is ignored");
                Ok(None)
            }
            Action::NodeMissing => Err(node_missing()),
            Action::Respond(names) => {
                self.drop_unfollowed();
                let source = Arc::clone(&self.source);
                // All or nothing: Envoy would not ask again for a name that was left out.
                let fetched = try_join_all(names.iter().map(|name| one(&*source, name))).await?;
                let mut secrets = Vec::with_capacity(fetched.len());
                for (text, name, secret, updates) in fetched {
                    self.follow(name, text.clone(), updates);
                    secrets.push((text, secret));
                }
                Ok(Some(self.respond::<P>(&secrets).await))
            }
        }
    }

    async fn respond<P: Protocol>(&mut self, secrets: &[(String, Secret)]) -> P::Out {
        self.shared.encoder.prepare(secrets).await;
        let nonce = nonce();
        self.session.sent(&nonce);
        P::response(&self.shared.encoder, secrets, &nonce)
    }

    fn drop_unfollowed(&mut self) {
        let session = &self.session;
        self.following.retain(|one| session.follows(&one.text));
    }

    fn follow(&mut self, name: ResourceName, text: String, updates: Updates) {
        let one = Followed { name, text, updates: Box::new(updates) };
        match self.following.binary_search_by(|other| other.name.cmp(&one.name)) {
            Ok(at) => self.following[at] = one,
            Err(at) => self.following.insert(at, one),
        }
    }
}

async fn one(
    source: &dyn SecretSource,
    text: &str,
) -> Result<(String, ResourceName, Secret, Updates), Status> {
    let name = source.name(text).map_err(|e| {
        let error = crate::secrets::Error::Name(e);
        if let Some(more) = UNKNOWN.may() {
            tracing::warn!(target: "sds", "{}{more}", chain(&error));
        }
        failed(text, &error)
    })?;
    let fetched = source.fetch(name.clone()).await.map_err(|e| failed(text, e.as_ref()))?;
    Ok((text.to_owned(), name, fetched.secret, fetched.updates))
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

fn failed(name: &str, error: &crate::secrets::Error) -> Status {
    // A cause may name a file by the name's own words.
    let cause = chain(error);
    Status::unknown(format!("failed to generate secret for {}: {}", shown(name), cut(&cause, CAUSE)))
}

fn node_missing() -> Status {
    Status::invalid_argument("missing node information")
}

fn stopping() -> Status {
    Status::unavailable("the agent is stopping")
}
