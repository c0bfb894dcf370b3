//! The aggregated discovery service: a stream is served from the folder's resources, or handed to a test.

pub mod delta;
pub mod sotw;

use std::sync::atomic::Ordering;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use h2::Reason;
use http::request;
use prost::Message;
use tokio::sync::mpsc;

use crate::auth::{Peer, authenticate};
use crate::fault::Fault;
use crate::grpc::{Code, Status, frame};
use crate::record::{AdsOpened, AdsRequest, AdsResponse, Event};
use crate::reply::{Gone, Reply, Requests, Spoil};
use crate::resources::View;
use crate::server::{Command, Shared};

/// The state-of-the-world method's path.
pub const SOTW: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
/// The incremental method's path.
pub const DELTA: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// What agents report their application's health with; never answered.
const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// A stream that a test serves itself.
#[derive(Debug)]
pub struct AdsStream {
    /// How it was opened.
    pub opened: AdsOpened,
    /// Its requests in order. The channel holds one: a test that does not read makes the client's sending block,
    /// as a busy istiod would.
    pub requests: mpsc::Receiver<AdsRequest>,
    /// What goes back. Dropping it ends the stream with OK.
    pub responses: Responses,
}

/// The writing half of a stream in a test's hands.
#[derive(Debug, Clone)]
pub struct Responses(mpsc::Sender<Out>);

#[derive(Debug)]
enum Out {
    Headers,
    Bytes(Bytes),
    End(Status),
    Reset(u32),
    GoAway,
    Drop,
}

/// The stream is gone.
#[derive(Debug, thiserror::Error)]
#[error("the stream has ended")]
pub struct Ended;

impl Responses {
    async fn send(&self, out: Out) -> Result<(), Ended> {
        self.0.send(out).await.map_err(|_| Ended)
    }

    /// Sends the response headers now, before any response.
    ///
    /// # Errors
    /// [`Ended`] if nobody is there, as for every method here.
    pub async fn headers(&self) -> Result<(), Ended> {
        self.send(Out::Headers).await
    }

    /// One message, whatever its bytes.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn message(&self, message: &[u8]) -> Result<(), Ended> {
        self.send(Out::Bytes(frame(message))).await
    }

    /// A state-of-the-world response.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn sotw(&self, response: &DiscoveryResponse) -> Result<(), Ended> {
        self.message(&response.encode_to_vec()).await
    }

    /// An incremental response.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn delta(&self, response: &DeltaDiscoveryResponse) -> Result<(), Ended> {
        self.message(&response.encode_to_vec()).await
    }

    /// Bytes of the body as they are: frames made beforehand, or a part of one.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn raw(&self, bytes: Bytes) -> Result<(), Ended> {
        self.send(Out::Bytes(bytes)).await
    }

    /// Ends the stream with a status.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn end(&self, status: Status) -> Result<(), Ended> {
        self.send(Out::End(status)).await
    }

    /// Resets the stream with an HTTP/2 error code.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn reset(&self, reason: u32) -> Result<(), Ended> {
        self.send(Out::Reset(reason)).await
    }

    /// Tells the connection to go away; the stream may go on.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn go_away(&self) -> Result<(), Ended> {
        self.send(Out::GoAway).await
    }

    /// Drops the connection.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn drop_connection(&self) -> Result<(), Ended> {
        self.send(Out::Drop).await
    }
}

pub(crate) async fn serve(
    shared: &Shared,
    peer: &Peer,
    head: request::Parts,
    requests: Requests,
    mut reply: Reply,
    faults: Vec<Fault>,
    commands: mpsc::UnboundedSender<Command>,
) -> Result<(), Gone> {
    let stream = shared.next_stream.fetch_add(1, Ordering::Relaxed) + 1;
    let identity = authenticate(peer, &head.headers, &shared.trust_domain);
    let opened = AdsOpened {
        stream,
        connection: peer.connection,
        delta: head.uri.path() == DELTA,
        authority: head.uri.authority().map(ToString::to_string).unwrap_or_default(),
        headers: crate::server::pairs(&head.headers),
        identity: identity.as_ref().ok().and_then(|names| names.first().cloned()),
    };
    shared.record.add(Event::AdsOpened(opened.clone()));
    let ended = |how: String| shared.record.add(Event::AdsEnded { stream, how });

    for fault in &faults {
        match fault {
            Fault::Delay(time) => tokio::time::sleep(*time).await,
            Fault::HalfOpen => {
                reply.closed().await;
                ended("the client gave up on the half-open stream".to_owned());
                return Ok(());
            }
            Fault::Refuse(code, message) => {
                let status = Status::new(*code, message.clone());
                ended(format!("{status:?}"));
                return reply.end(&status);
            }
            _ => {}
        }
    }
    // Without TLS istiod takes anybody on ADS.
    let must = shared.ads_auth.load(Ordering::Relaxed) && (peer.tls || shared.plaintext_auth);
    if let (true, Err(reason)) = (must, &identity) {
        tracing::info!(%reason, "stream refused");
        let status = Status::new(Code::Unauthenticated, "authentication failure");
        ended(format!("{status:?}"));
        return reply.end(&status);
    }
    reply.spoil(Spoil::from(&faults));
    if shared.eager_headers.load(Ordering::Relaxed) {
        reply.headers()?;
    }

    let taker = shared.takers.get();
    let result = match taker {
        Some(taker) => handed(shared, opened, taker, requests, &mut reply, &commands).await,
        None => {
            let identities = if must { identity.ok() } else { None };
            let mut session = Session { shared, stream, identities, view: View::default(), node: None };
            session.run(opened.delta, requests, &mut reply).await
        }
    };
    match result {
        Ok(Some(status)) => {
            ended(format!("{status:?}"));
            reply.end(&status)
        }
        Ok(None) => {
            ended("reset by the script".to_owned());
            Ok(())
        }
        Err(gone) => {
            ended(gone.to_string());
            Err(gone)
        }
    }
}

/// Carries a stream between the wire and a test's channels.
async fn handed(
    shared: &Shared,
    opened: AdsOpened,
    taker: mpsc::UnboundedSender<AdsStream>,
    mut requests: Requests,
    reply: &mut Reply,
    commands: &mpsc::UnboundedSender<Command>,
) -> Result<Option<Status>, Gone> {
    let (to_test, from_client) = mpsc::channel(1);
    let (from_test, mut to_client) = mpsc::channel(4);
    let (stream, delta) = (opened.stream, opened.delta);
    if taker.send(AdsStream { opened, requests: from_client, responses: Responses(from_test) }).is_err() {
        return Ok(Some(Status::new(Code::Unavailable, "the test no longer takes streams")));
    }
    let reading = async {
        while let Some(raw) = requests.next().await? {
            let request = read(stream, delta, &raw)?;
            shared.record.add(Event::AdsRequest(request.clone()));
            if to_test.send(request).await.is_err() {
                // The test dropped its receiver; what still comes is only recorded.
                while let Some(raw) = requests.next().await? {
                    shared.record.add(Event::AdsRequest(read(stream, delta, &raw)?));
                }
                break;
            }
        }
        drop(to_test);
        // The client has finished sending; the test decides how the stream ends.
        std::future::pending::<Result<std::convert::Infallible, Gone>>().await
    };
    let writing = async {
        while let Some(out) = to_client.recv().await {
            match out {
                Out::Headers => {
                    reply.headers()?;
                }
                Out::Bytes(bytes) => reply.bytes(bytes).await?,
                Out::End(status) => return Ok(Some(status)),
                Out::Reset(reason) => {
                    reply.reset(Reason::from(reason));
                    return Ok(None);
                }
                Out::GoAway => drop(commands.send(Command::GoAway)),
                Out::Drop => drop(commands.send(Command::Drop)),
            }
        }
        Ok(Some(Status::ok()))
    };
    tokio::select! {
        read = reading => match read {
            Ok(never) => match never {},
            Err(gone) => Err(gone),
        },
        written = writing => written,
    }
}

fn read(stream: u64, delta: bool, raw: &Bytes) -> Result<AdsRequest, Gone> {
    decode(stream, delta, raw).map(|(request, _)| request).map_err(|status| {
        tracing::warn!(?status, "a request that does not decode");
        Gone::from(h2::Error::from(Reason::PROTOCOL_ERROR))
    })
}

/// One request of either kind.
enum Incoming {
    Sotw(DiscoveryRequest),
    Delta(DeltaDiscoveryRequest),
}

impl Incoming {
    fn node(&self) -> Option<&Node> {
        match self {
            Self::Sotw(request) => request.node.as_ref(),
            Self::Delta(request) => request.node.as_ref(),
        }
    }
}

fn decode(stream: u64, delta: bool, raw: &Bytes) -> Result<(AdsRequest, Incoming), Status> {
    let bad =
        |e: prost::DecodeError| Status::new(Code::Internal, format!("the request does not decode: {e}"));
    let incoming = if delta {
        Incoming::Delta(DeltaDiscoveryRequest::decode(raw.clone()).map_err(bad)?)
    } else {
        Incoming::Sotw(DiscoveryRequest::decode(raw.clone()).map_err(bad)?)
    };
    let node = incoming.node().map(|node| node.id.clone());
    let request = match &incoming {
        Incoming::Sotw(r) => AdsRequest {
            stream,
            node,
            type_url: r.type_url.clone(),
            version: r.version_info.clone(),
            nonce: r.response_nonce.clone(),
            names: r.resource_names.clone(),
            unsubscribe: Vec::new(),
            initial: Vec::new(),
            nack: r.error_detail.as_ref().map(|e| (e.code, e.message.clone())),
            raw: raw.clone(),
        },
        Incoming::Delta(r) => AdsRequest {
            stream,
            node,
            type_url: r.type_url.clone(),
            version: String::new(),
            nonce: r.response_nonce.clone(),
            names: r.resource_names_subscribe.clone(),
            unsubscribe: r.resource_names_unsubscribe.clone(),
            initial: {
                let mut names: Vec<_> = r.initial_resource_versions.keys().cloned().collect();
                names.sort();
                names
            },
            nack: r.error_detail.as_ref().map(|e| (e.code, e.message.clone())),
            raw: raw.clone(),
        },
    };
    Ok((request, incoming))
}

/// A stream served from the folder's resources.
struct Session<'a> {
    shared: &'a Shared,
    stream: u64,
    /// Who it may speak for; `None` when nobody is asked.
    identities: Option<Vec<String>>,
    view: View,
    node: Option<String>,
}

/// A response ready to go.
pub struct Answer {
    /// For the record.
    pub summary: AdsResponse,
    /// The message.
    pub message: Vec<u8>,
}

impl Session<'_> {
    async fn run(
        &mut self,
        delta: bool,
        mut requests: Requests,
        reply: &mut Reply,
    ) -> Result<Option<Status>, Gone> {
        let mut changes = self.shared.resources.subscribe();
        let (mut sotw, mut incremental) = (sotw::State::default(), delta::State::default());
        loop {
            let answers = tokio::select! {
                // Requests first: a push to a client that has just told us something new would be outdated.
                biased;
                request = requests.next() => {
                    let Some(raw) = request? else { return Ok(Some(Status::ok())) };
                    let (request, incoming) = match decode(self.stream, delta, &raw) {
                        Ok(decoded) => decoded,
                        Err(status) => return Ok(Some(status)),
                    };
                    let type_url = request.type_url.clone();
                    self.shared.record.add(Event::AdsRequest(request));
                    if type_url == HEALTH {
                        continue;
                    }
                    if self.node.is_none() {
                        if let Err(status) = self.introduce(incoming.node()) {
                            return Ok(Some(status));
                        }
                        self.view = changes.borrow_and_update().view(self.node.as_deref().unwrap_or_default());
                    }
                    match incoming {
                        Incoming::Sotw(request) => sotw.request(self.stream, &request, &self.view),
                        Incoming::Delta(request) => incremental.request(self.stream, &request, &self.view),
                    }
                }
                Ok(()) = changes.changed(), if self.node.is_some() => {
                    self.view = changes.borrow_and_update().view(self.node.as_deref().unwrap_or_default());
                    if delta { incremental.changed(self.stream, &self.view) } else { sotw.changed(self.stream, &self.view) }
                }
            };
            for answer in answers {
                self.shared.record.add(Event::AdsResponse(answer.summary));
                reply.message(&answer.message).await?;
            }
        }
    }

    /// The checks on the first message: who is it, and may the caller say so.
    fn introduce(&mut self, node: Option<&Node>) -> Result<(), Status> {
        let node = node.filter(|node| !node.id.is_empty());
        let node = node.ok_or_else(|| Status::new(Code::InvalidArgument, "missing node information"))?;
        let parts: Vec<&str> = node.id.split('~').collect();
        let [kind, _ip, id, domain] = parts[..] else {
            let text = format!("missing parts in the service node {:?}", node.id);
            return Err(Status::new(Code::InvalidArgument, text));
        };
        if !matches!(kind, "sidecar" | "router" | "waypoint" | "ztunnel") {
            let text = format!(
                "invalid node type (valid types: ztunnel, sidecar, router, waypoint) in {:?}",
                node.id
            );
            return Err(Status::new(Code::InvalidArgument, text));
        }
        if let Some(identities) = &self.identities {
            let text = |key: &str| {
                let fields = &node.metadata.as_ref()?.fields;
                match fields.get(key)?.kind.as_ref()? {
                    envoy_types::pb::google::protobuf::value::Kind::StringValue(text) => Some(text.as_str()),
                    _ => None,
                }
            };
            let namespace = text("NAMESPACE").or_else(|| domain.split('.').next()).unwrap_or_default();
            let account = text("SERVICE_ACCOUNT").filter(|account| !account.is_empty());
            let fits = |identity: &String| {
                let rest = identity.split_once("/ns/").map_or("", |(_, rest)| rest);
                let (ns, sa) = rest.split_once("/sa/").unwrap_or_default();
                ns == namespace && account.is_none_or(|account| account == sa)
            };
            if !identities.iter().any(fits) {
                let account = account.unwrap_or_default();
                let text = format!(
                    "authorization failed: no identities ({identities:?}) matched {namespace}/{account}"
                );
                return Err(Status::new(Code::PermissionDenied, text));
            }
        }
        self.node = Some(id.to_owned());
        Ok(())
    }
}

/// The order in which a change is pushed (istiod's: what is referred to comes before what refers).
fn order(type_url: &str) -> usize {
    const ORDER: [&str; 5] = [
        crate::resources::CLUSTER,
        crate::resources::ENDPOINTS,
        crate::resources::LISTENER,
        crate::resources::ROUTES,
        crate::resources::SECRET,
    ];
    ORDER.iter().position(|known| *known == type_url).unwrap_or(ORDER.len())
}

/// A nonce nobody has seen.
fn nonce() -> String {
    format!("{:016x}", rand::random::<u64>())
}
