//! Acts as Envoy: opens SDS and ADS streams on the agent's unix sockets, message by message, as bytes if wanted.

use std::marker::PhantomData;
use std::path::Path;

use bytes::{Buf, BufMut, Bytes};
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::Secret;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::secret::Type;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::LIMIT;

pub const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
const SDS: &str = "/envoy.service.secret.v3.SecretDiscoveryService";
const ADS: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService";

/// Messages as they are on the wire, so that a test can compare bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// A client on one of the agent's sockets.
#[derive(Debug, Clone)]
pub struct EnvoyClient {
    channel: Channel,
    headers: MetadataMap,
}

impl EnvoyClient {
    /// Connects; the socket must be there.
    pub async fn connect(socket: &Path) -> Result<Self, tonic::transport::Error> {
        let socket = socket.to_owned();
        // Envoy names the cluster in :authority.
        let endpoint = Endpoint::from_static("http://xds-grpc");
        let connect = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        Ok(Self { channel: endpoint.connect_with_connector(connect).await?, headers: MetadataMap::new() })
    }

    /// The same connection, with this metadata on each call.
    pub fn with_headers(&self, headers: &[(&'static str, &str)]) -> Self {
        let mut map = MetadataMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().expect("a header's value"));
        }
        Self { channel: self.channel.clone(), headers: map }
    }

    pub fn stream_secrets(&self) -> Duplex<DiscoveryRequest, DiscoveryResponse> {
        self.open(&format!("{SDS}/StreamSecrets"))
    }

    pub fn delta_secrets(&self) -> Duplex<DeltaDiscoveryRequest, DeltaDiscoveryResponse> {
        self.open(&format!("{SDS}/DeltaSecrets"))
    }

    pub async fn fetch_secrets(&self, request: &DiscoveryRequest) -> Result<DiscoveryResponse, Status> {
        let path = format!("{SDS}/FetchSecrets");
        let call = self.unary(&path, request);
        tokio::time::timeout(LIMIT, call).await.expect("FetchSecrets never answered")
    }

    pub fn ads(&self) -> Duplex<DiscoveryRequest, DiscoveryResponse> {
        self.open(&format!("{ADS}/StreamAggregatedResources"))
    }

    pub fn delta_ads(&self) -> Duplex<DeltaDiscoveryRequest, DeltaDiscoveryResponse> {
        self.open(&format!("{ADS}/DeltaAggregatedResources"))
    }

    async fn unary(&self, path: &str, request: &DiscoveryRequest) -> Result<DiscoveryResponse, Status> {
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
        let path = PathAndQuery::try_from(path).expect("a path");
        let message = Bytes::from(request.encode_to_vec());
        let reply = grpc.unary(self.request(message), path, Raw).await?.into_inner();
        Ok(DiscoveryResponse::decode(reply).expect("a DiscoveryResponse"))
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        *request.metadata_mut() = self.headers.clone();
        request
    }

    fn open<Q, A>(&self, path: &str) -> Duplex<Q, A> {
        // Unbounded: it holds what the test sends before the agent reads, a handful of messages.
        let (requests, outgoing) = mpsc::unbounded_channel::<Bytes>();
        let (incoming, responses) = mpsc::channel(1);
        let path = PathAndQuery::try_from(path).expect("a path");
        let mut grpc = tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        let mut driver = JoinSet::new();
        let headers = self.headers.clone();
        driver.spawn(async move {
            let call = async {
                grpc.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
                let requests = UnboundedReceiverStream::new(outgoing);
                let mut request = Request::new(requests);
                *request.metadata_mut() = headers;
                let mut stream = grpc.streaming(request, path, Raw).await?.into_inner();
                while let Some(message) = stream.message().await? {
                    if incoming.send(Ok(message)).await.is_err() {
                        return Ok(());
                    }
                }
                Ok::<_, Status>(())
            };
            let ended = call.await.err().unwrap_or_else(|| Status::ok("the stream ended"));
            let _ = incoming.send(Err(ended)).await;
        });
        Duplex { requests: Some(requests), responses, _driver: driver, kinds: PhantomData }
    }
}

/// A stream in both directions; dropping it closes it.
pub struct Duplex<Q, A> {
    requests: Option<mpsc::UnboundedSender<Bytes>>,
    responses: mpsc::Receiver<Result<Bytes, Status>>,
    _driver: JoinSet<()>,
    kinds: PhantomData<fn(Q) -> A>,
}

impl<Q: Message, A: Message + Default> Duplex<Q, A> {
    pub fn send(&self, request: &Q) {
        self.send_raw(request.encode_to_vec().into());
    }

    /// Sends these bytes as one message.
    pub fn send_raw(&self, message: Bytes) {
        let requests = self.requests.as_ref().expect("not half-closed");
        // A stream that has ended tells so when it is read.
        let _ = requests.send(message);
    }

    /// Half-closes: no more requests.
    pub fn finish(&mut self) {
        self.requests = None;
    }

    /// The next response, or how the stream ended ([`tonic::Code::Ok`] for a clean end).
    ///
    /// # Panics
    /// When nothing comes within [`LIMIT`].
    pub async fn next(&mut self) -> Result<A, Status> {
        self.next_raw().await.map(|raw| A::decode(raw).expect("the response decodes"))
    }

    /// As [`Duplex::next`], as bytes.
    pub async fn next_raw(&mut self) -> Result<Bytes, Status> {
        let next = tokio::time::timeout(LIMIT, self.responses.recv()).await.expect("no response in time");
        next.unwrap_or_else(|| Err(Status::ok("the stream ended")))
    }

    /// Nothing has come so far.
    pub fn is_silent(&mut self) -> bool {
        matches!(self.responses.try_recv(), Err(mpsc::error::TryRecvError::Empty))
    }

    /// Reads until the stream ends.
    pub async fn end(&mut self) -> Status {
        loop {
            if let Err(status) = self.next_raw().await {
                return status;
            }
        }
    }
}

/// Envoy's node, as the agent's bootstrap gives it.
pub fn node(id: &str) -> Node {
    Node { id: id.to_owned(), ..Node::default() }
}

/// The first request for a secret.
pub fn secret_request(name: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(node("sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local")),
        type_url: SECRET.to_owned(),
        resource_names: vec![name.to_owned()],
        ..DiscoveryRequest::default()
    }
}

/// Accepts `response`.
pub fn ack(response: &DiscoveryResponse, names: &[&str]) -> DiscoveryRequest {
    DiscoveryRequest {
        type_url: response.type_url.clone(),
        version_info: response.version_info.clone(),
        response_nonce: response.nonce.clone(),
        resource_names: names.iter().map(ToString::to_string).collect(),
        ..DiscoveryRequest::default()
    }
}

/// A secret's content, as PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pem {
    Identity { chain: String, key: String },
    Roots(String),
}

/// Secrets of a response by name.
pub fn secrets(response: &DiscoveryResponse) -> Vec<(String, Pem)> {
    response
        .resources
        .iter()
        .map(|any| {
            assert_eq!(any.type_url, SECRET);
            let secret = Secret::decode(&any.value[..]).expect("a Secret");
            (secret.name.clone(), pem(&secret))
        })
        .collect()
}

fn pem(secret: &Secret) -> Pem {
    use envoy_types::pb::envoy::config::core::v3::DataSource;
    let text = |source: &Option<DataSource>| match source.as_ref().and_then(|s| s.specifier.as_ref()) {
        Some(Specifier::InlineBytes(bytes)) => String::from_utf8(bytes.clone()).expect("PEM is text"),
        Some(Specifier::InlineString(text)) => text.clone(),
        other => panic!("not inline: {other:?}"),
    };
    match secret.r#type.as_ref().expect("a kind of secret") {
        Type::TlsCertificate(tls) => {
            Pem::Identity { chain: text(&tls.certificate_chain), key: text(&tls.private_key) }
        }
        Type::ValidationContext(context) => Pem::Roots(text(&context.trusted_ca)),
        other => panic!("unexpected kind of secret: {other:?}"),
    }
}
