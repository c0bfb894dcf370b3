//! A relay between a test that plays Envoy and a test that plays istiod.

use tokio::io::{AsyncRead, AsyncWrite};

use super::*;
use crate::base::eventually::eventually;
use crate::trouble::Reporter;

pub(super) const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
pub(super) const SOON: Duration = Duration::from_secs(10);

/// Plain TCP to a test's istiod, with a switch that makes the dial fail.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) address: String,
    pub(super) open: AtomicBool,
    /// The next connection is sent away as one that comes while istiod ends in order.
    pub(super) away: Arc<AtomicBool>,
}

impl Upstream for Way {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
        Box::pin(async {
            // A closed way is a port where nobody listens.
            let address = if self.open.load(Ordering::SeqCst) { &self.address } else { "127.0.0.1:1" };
            let io = TcpStream::connect(address).await.map_err(|e| Error::Timeout {
                address: e.to_string(),
                after: Duration::ZERO,
                phase: crate::istiod::Phase::Connect,
            })?;
            let peer = io.peer_addr().unwrap();
            Ok(Connection { io: Stream::Plain(io), peer, authority: "istiod".to_owned(), scheme: "http" })
        })
    }

    fn address(&self) -> &str {
        &self.address
    }
}

#[derive(Debug)]
pub(super) struct Tokens;

impl TokenSource for Tokens {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, auth::Error>> {
        Box::pin(async { Ok(Token::new("secret")) })
    }
}

/// What streams share, without anybody who serves them.
pub(super) fn books(config: Config, metrics: Metrics, trouble: Reporter) -> shared::Shared {
    let (_news, wake) = watch::channel(0);
    let way = Way { address: String::new(), open: AtomicBool::new(false), away: Arc::default() };
    let parts = Parts {
        upstream: Arc::new(way),
        tokens: Arc::new(Tokens),
        headers: CallHeaders::default(),
        taps: Vec::new(),
        convert: None,
        wake,
        metrics,
        clock: Arc::new(clock::System),
        trouble,
    };
    shared::Shared::new(config, parts)
}

/// Tokens of a source that may be away.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub(super) gone: AtomicBool,
}

impl TokenSource for Source {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, auth::Error>> {
        Box::pin(async {
            match self.gone.load(Ordering::SeqCst) {
                true => Err(auth::Error::new("HTTP status 503")),
                false => Ok(Token::new("secret")),
            }
        })
    }
}

/// A relay between a test that plays Envoy and a test that plays istiod.
pub(super) struct Rig {
    pub(super) group: Group,
    pub(super) way: Arc<Way>,
    pub(super) tokens: Arc<Source>,
    pub(super) troubles: crate::trouble::Troubles,
    pub(super) handle: Handle,
    pub(super) metrics: Metrics,
    pub(super) socket: PathBuf,
    pub(super) news: watch::Sender<u64>,
    pub(super) streams: mpsc::UnboundedReceiver<Istiod>,
    pub(super) bundle: watch::Receiver<Vec<String>>,
    // Envoys that are alive do not answer any more.
    pub(super) deaf: Stop,
    pub(super) _dir: tempfile::TempDir,
}

/// istiod's side of one stream.
pub(super) struct Istiod {
    pub(super) headers: http::HeaderMap,
    pub(super) body: RecvStream,
    pub(super) respond: SendResponse<Bytes>,
    pub(super) stream: Option<SendStream<Bytes>>,
    // Ends the connection as a crash would.
    pub(super) cut: Stop,
    pub(super) buffer: BytesMut,
}

/// Envoy's side of one stream.
pub(super) struct Envoy {
    pub(super) sink: SendStream<Bytes>,
    pub(super) response: Option<h2::client::ResponseFuture>,
    pub(super) body: Option<RecvStream>,
    pub(super) trailers: Option<http::HeaderMap>,
    pub(super) buffer: BytesMut,
}

impl Rig {
    pub(super) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub(super) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("XDS");
        let group = Group::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, streams) = mpsc::unbounded_channel();
        let away = Arc::new(AtomicBool::new(false));
        group.run("istiod", accept(listener, sender, group.clone(), away.clone()));
        let way = Arc::new(Way { address, open: AtomicBool::new(true), away });
        let mut config = Config::new(socket.clone());
        change(&mut config);
        let (news, wake) = watch::channel(0);
        let (tap, bundle) = TrustBundle::tap(Vec::new());
        let metrics = Metrics::new();
        let (tokens, troubles) = (Arc::<Source>::default(), crate::trouble::Troubles::default());
        let parts = Parts {
            upstream: way.clone(),
            tokens: tokens.clone(),
            headers: CallHeaders::default(),
            taps: vec![tap],
            convert: None,
            wake,
            metrics: metrics.clone(),
            clock: Arc::new(clock::System),
            trouble: troubles.reporter("xdsproxy"),
        };
        let server = Server::new(config, parts);
        let handle = server.handle();
        if let Some(keeper) = server.keeper(std::future::ready("me".to_owned()), group.token()) {
            group.run("keeper", keeper);
        }
        let bound = server.bind().unwrap();
        group.run("xds", server.serve(bound, group.token()));
        Self {
            group,
            way,
            tokens,
            troubles,
            handle,
            metrics,
            socket,
            news,
            streams,
            bundle,
            deaf: Stop::new(),
            _dir: dir,
        }
    }

    pub(super) async fn envoy(&self, protocol: Protocol) -> Envoy {
        self.client(protocol.path(), None).await
    }

    /// A client of any of the socket's methods, with a bound of its own if it has one.
    pub(super) async fn client(&self, path: &str, timeout: Option<&str>) -> Envoy {
        self.over(UnixStream::connect(&self.socket).await.unwrap(), path, timeout).await
    }

    /// A stream of the agent's own Envoy, of which another epoch may have one.
    pub(super) async fn epoch(&self, own: u64) -> Envoy {
        let (client, server) = tokio::io::duplex(1 << 16);
        let (shared, group) = (self.handle.shared(), self.group.clone());
        self.group.run("epoch", async move {
            let mut http2 = h2::server::handshake(server).await.unwrap();
            while let Some(Ok((request, respond))) = http2.accept().await {
                let (shared, stop, body) = (shared.clone(), group.token(), request.into_body());
                let stream = session::serve(shared, Protocol::Delta, Some(own), body, respond, None, stop);
                group.run("stream", stream);
            }
        });
        self.over(client, Protocol::Delta.path(), None).await
    }

    async fn over(
        &self,
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        path: &str,
        timeout: Option<&str>,
    ) -> Envoy {
        let (mut send, connection) =
            // As Envoy's, it has nothing against small frames.
            h2::client::Builder::new()
                .initial_window_size(1 << 20)
                .data_frame_budget(64 << 20)
                .handshake(io)
                .await
                .unwrap();
        let deaf = self.deaf.clone();
        self.group.run("envoy", async move {
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                _ = &mut connection => {}
                () = deaf.cancelled() => std::future::pending().await,
            }
        });
        let mut request = Request::post(format!("http://xds-grpc{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", timeout);
        }
        let (response, sink) = send.send_request(request.body(()).unwrap(), false).unwrap();
        Envoy { sink, response: Some(response), body: None, trailers: None, buffer: BytesMut::new() }
    }

    pub(super) async fn istiod(&mut self) -> Istiod {
        tokio::time::timeout(SOON, self.streams.recv()).await.expect("a stream comes").unwrap()
    }

    /// A pair of which Envoy has had its first clusters.
    pub(super) async fn configured(&mut self) -> (Envoy, Istiod) {
        let (mut envoy, mut istiod) = self.pair(Protocol::Sotw).await;
        envoy.send(&request(CDS)).await;
        istiod.request().await;
        istiod.push(&response(CDS, "1", &[1])).await;
        envoy.response().await;
        (envoy, istiod)
    }

    pub(super) async fn pair(&mut self, protocol: Protocol) -> (Envoy, Istiod) {
        let envoy = self.envoy(protocol).await;
        (envoy, self.istiod().await)
    }

    /// Envoy has accepted clusters of these names and a listener in delta form, and has gone.
    pub(super) async fn filled(&mut self, names: &[String]) {
        let (mut envoy, mut istiod) = self.pair(Protocol::Delta).await;
        for (of, names) in [(CDS, names), (types::LISTENER, &["l".to_owned()][..])] {
            envoy.send(&delta_request(of)).await;
            while istiod.delta().await.type_url != of {}
            let sent = delta(of, of, names, "1");
            tokio::join!(istiod.push(&sent), async { assert_eq!(envoy.delta().await, sent) });
            envoy.send(&delta_answer(of, of)).await;
            while istiod.delta().await.response_nonce != of {}
        }
        drop(envoy);
        istiod.ended().await;
    }

    pub(super) fn metric(&self, name: &str, label: Option<&str>) -> f64 {
        let families = self.metrics.registry().gather();
        let Some(family) = families.iter().find(|f| f.name() == name) else { return 0.0 };
        let found = family
            .get_metric()
            .iter()
            .find(|m| label.is_none_or(|l| m.get_label().iter().any(|p| p.value() == l)));
        found.map_or(0.0, |m| m.get_counter().get_value() + m.get_gauge().get_value())
    }

    pub(super) async fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        eventually(what, async || holds()).await;
    }
}

/// No settings, and GOAWAY without an error, with no stream that was begun.
const AWAY: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0";

pub(super) async fn accept(
    listener: TcpListener,
    streams: mpsc::UnboundedSender<Istiod>,
    group: Group,
    away: Arc<AtomicBool>,
) {
    loop {
        let (mut io, _) = listener.accept().await.unwrap();
        if away.swap(false, Ordering::SeqCst) {
            tokio::io::AsyncWriteExt::write_all(&mut io, AWAY).await.unwrap();
            // Nothing of what comes is lost by an end that resets the connection.
            group.run("istiod that ends", async move {
                let _ = tokio::io::copy(&mut io, &mut tokio::io::sink()).await;
            });
            continue;
        }
        let streams = streams.clone();
        group.run("istiod connection", async move {
            let http2 = h2::server::Builder::new()
                .initial_window_size(1 << 16)
                .data_frame_budget(64 << 20)
                .handshake(io);
            let mut http2 = match http2.await {
                Ok(http2) => http2,
                Err(_) => return,
            };
            let cut = Stop::new();
            loop {
                let accepted = tokio::select! {
                    accepted = http2.accept() => accepted,
                    () = cut.cancelled() => return,
                };
                let Some(Ok((request, respond))) = accepted else { return };
                let (parts, body) = request.into_parts();
                let buffer = BytesMut::new();
                let headers = parts.headers;
                let stream = None;
                let _ = streams.send(Istiod { headers, body, respond, stream, cut: cut.clone(), buffer });
            }
        });
    }
}

pub(super) async fn next_frame(body: &mut RecvStream, buffer: &mut BytesMut) -> Option<Bytes> {
    loop {
        if buffer.len() >= 5 {
            let length = u32::from_be_bytes(buffer[1..5].try_into().unwrap()) as usize;
            if buffer.len() >= 5 + length {
                buffer.advance(5);
                return Some(buffer.split_to(length).freeze());
            }
        }
        let data = body.data().await?.ok()?;
        let _ = body.flow_control().release_capacity(data.len());
        buffer.extend_from_slice(&data);
    }
}

pub(super) async fn write(stream: &mut SendStream<Bytes>, mut bytes: Bytes) {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let room = match stream.capacity() {
            0 => match std::future::poll_fn(|cx| stream.poll_capacity(cx)).await {
                Some(Ok(room)) => room,
                _ => return,
            },
            room => room,
        };
        let piece = bytes.split_to(room.min(bytes.len()));
        if stream.send_data(piece, false).is_err() {
            return;
        }
    }
}

impl Istiod {
    pub(super) fn open(&mut self) -> &mut SendStream<Bytes> {
        if self.stream.is_none() {
            let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            self.stream = Some(self.respond.send_response(response, false).unwrap());
        }
        self.stream.as_mut().unwrap()
    }

    pub(super) async fn push(&mut self, message: &impl Message) {
        let frame = frames::frame(message);
        write(self.open(), frame).await;
    }

    pub(super) async fn request(&mut self) -> DiscoveryRequest {
        let frame = tokio::time::timeout(SOON, next_frame(&mut self.body, &mut self.buffer)).await;
        DiscoveryRequest::decode(frame.expect("a request comes").expect("the stream is open")).unwrap()
    }

    pub(super) async fn delta(&mut self) -> DeltaDiscoveryRequest {
        let frame = tokio::time::timeout(SOON, next_frame(&mut self.body, &mut self.buffer)).await;
        DeltaDiscoveryRequest::decode(frame.expect("a request comes").expect("the stream is open")).unwrap()
    }

    pub(super) async fn ended(&mut self) {
        let rest = async { while next_frame(&mut self.body, &mut self.buffer).await.is_some() {} };
        tokio::time::timeout(SOON, rest).await.expect("the upstream stream ends");
    }

    pub(super) fn end(self, code: Code) {
        self.end_with(Some(code));
    }

    /// Without a code: of trailers that say why and not what.
    pub(super) fn end_with(mut self, code: Option<Code>) {
        let mut trailers = http::HeaderMap::new();
        if let Some(code) = code {
            trailers.insert("grpc-status", http::HeaderValue::from(code as i32));
        }
        trailers.insert("grpc-message", http::HeaderValue::from_static("by%20script"));
        match &mut self.stream {
            Some(stream) => stream.send_trailers(trailers).unwrap(),
            None => {
                let mut response =
                    Response::builder().header("content-type", "application/grpc").body(()).unwrap();
                response.headers_mut().extend(trailers);
                self.respond.send_response(response, true).unwrap();
            }
        }
    }
}

impl Envoy {
    pub(super) async fn send(&mut self, message: &impl Message) {
        let frame = frames::frame(message);
        write(&mut self.sink, frame).await;
    }

    pub(super) async fn body(&mut self) -> Result<&mut RecvStream, h2::Error> {
        if let Some(response) = self.response.take() {
            let response = tokio::time::timeout(SOON, response).await.expect("headers come")?;
            let (parts, body) = response.into_parts();
            if body.is_end_stream() {
                self.trailers = Some(parts.headers);
            }
            self.body = Some(body);
        }
        Ok(self.body.as_mut().unwrap())
    }

    pub(super) async fn raw(&mut self) -> Option<Bytes> {
        self.body().await.ok()?;
        let frame = next_frame(self.body.as_mut().unwrap(), &mut self.buffer);
        tokio::time::timeout(SOON, frame).await.expect("a response or an end comes")
    }

    pub(super) async fn response(&mut self) -> DiscoveryResponse {
        DiscoveryResponse::decode(self.raw().await.expect("the stream is open")).unwrap()
    }

    pub(super) async fn delta(&mut self) -> DeltaDiscoveryResponse {
        DeltaDiscoveryResponse::decode(self.raw().await.expect("the stream is open")).unwrap()
    }

    pub(super) async fn status(&mut self) -> (Code, String) {
        while self.raw().await.is_some() {}
        if self.trailers.is_none() {
            self.trailers = self.body.as_mut().unwrap().trailers().await.unwrap();
        }
        let status = tonic::Status::from_header_map(self.trailers.as_ref().unwrap()).unwrap();
        (status.code(), status.message().to_owned())
    }
}

pub(super) fn request(type_url: &str) -> DiscoveryRequest {
    DiscoveryRequest { type_url: type_url.to_owned(), ..Default::default() }
}

/// A client of the gRPC library with this ID asks.
pub(super) fn proxyless_request(id: String, type_url: &str) -> DiscoveryRequest {
    let generator = Value { kind: Some(value::Kind::StringValue("grpc".to_owned())) };
    let metadata = Some(Struct { fields: [("GENERATOR".to_owned(), generator)].into() });
    DiscoveryRequest { node: Some(Node { id, metadata, ..Default::default() }), ..request(type_url) }
}

pub(super) fn response(type_url: &str, nonce: &str, sizes: &[usize]) -> DiscoveryResponse {
    let any = |size: &usize| Any { type_url: type_url.to_owned(), value: vec![7; *size] };
    DiscoveryResponse {
        version_info: format!("v{nonce}"),
        resources: sizes.iter().map(any).collect(),
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        ..Default::default()
    }
}

pub(super) fn delta_request(type_url: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest { type_url: type_url.to_owned(), ..Default::default() }
}

pub(super) fn delta_answer(type_url: &str, nonce: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest { response_nonce: nonce.to_owned(), ..delta_request(type_url) }
}

pub(super) fn delta(type_url: &str, nonce: &str, names: &[String], version: &str) -> DeltaDiscoveryResponse {
    let resource = |name: &String| Resource {
        name: name.clone(),
        version: version.to_owned(),
        resource: Some(Any { type_url: type_url.to_owned(), value: name.clone().into_bytes() }),
        ..Default::default()
    };
    DeltaDiscoveryResponse {
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        resources: names.iter().map(resource).collect(),
        ..Default::default()
    }
}
