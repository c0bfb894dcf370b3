use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::google::rpc;
use futures_util::future::BoxFuture;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, Response};
use prost::Message;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::base::clock;
use crate::base::tasks::{Group, Stop};
use crate::istiod::auth::{self, Token};
use crate::istiod::{Connection, Error, Stream};

mod herd;

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const SOON: Duration = Duration::from_secs(10);

/// Plain TCP to a test's istiod, with a switch that makes the dial fail.
#[derive(Debug)]
struct Way {
    address: String,
    open: AtomicBool,
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
struct Tokens;

impl TokenSource for Tokens {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, auth::Error>> {
        Box::pin(async { Ok(Token::new("secret")) })
    }
}

/// A relay between a test that plays Envoy and a test that plays istiod.
struct Rig {
    group: Group,
    way: Arc<Way>,
    handle: Handle,
    metrics: Metrics,
    socket: PathBuf,
    news: watch::Sender<u64>,
    streams: mpsc::UnboundedReceiver<Istiod>,
    bundle: watch::Receiver<String>,
    _dir: tempfile::TempDir,
}

/// istiod's side of one stream.
struct Istiod {
    headers: http::HeaderMap,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    stream: Option<SendStream<Bytes>>,
    // Ends the connection as a crash would.
    cut: Stop,
    buffer: BytesMut,
}

/// Envoy's side of one stream.
struct Envoy {
    sink: SendStream<Bytes>,
    response: Option<h2::client::ResponseFuture>,
    body: Option<RecvStream>,
    trailers: Option<http::HeaderMap>,
    buffer: BytesMut,
}

impl Rig {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("XDS");
        let group = Group::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, streams) = mpsc::unbounded_channel();
        group.run("istiod", accept(listener, sender, group.clone()));
        let way = Arc::new(Way { address, open: AtomicBool::new(true) });
        let mut config = Config::new(socket.clone());
        change(&mut config);
        let (news, wake) = watch::channel(0);
        let (tap, bundle) = TrustBundle::tap();
        let metrics = Metrics::new();
        let parts = Parts {
            upstream: way.clone(),
            tokens: Arc::new(Tokens),
            headers: CallHeaders::default(),
            taps: vec![tap],
            convert: None,
            wake,
            metrics: metrics.clone(),
            clock: Arc::new(clock::System),
        };
        let server = Server::new(config, parts);
        let handle = server.handle();
        let (listener, file) = server.bind().unwrap().into_parts();
        let stop = group.token();
        group.spawn("xds", async move {
            let _file = file;
            server.serve(listener, stop).await
        });
        Self { group, way, handle, metrics, socket, news, streams, bundle, _dir: dir }
    }

    async fn envoy(&self, protocol: Protocol) -> Envoy {
        let io = UnixStream::connect(&self.socket).await.unwrap();
        let (mut send, connection) =
            h2::client::Builder::new().initial_window_size(1 << 20).handshake(io).await.unwrap();
        self.group.run("envoy", async move {
            let _ = connection.await;
        });
        let request = Request::post(format!("http://xds-grpc{}", protocol.path()))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        let (response, sink) = send.send_request(request, false).unwrap();
        Envoy { sink, response: Some(response), body: None, trailers: None, buffer: BytesMut::new() }
    }

    async fn istiod(&mut self) -> Istiod {
        tokio::time::timeout(SOON, self.streams.recv()).await.expect("a stream comes").unwrap()
    }

    async fn pair(&mut self, protocol: Protocol) -> (Envoy, Istiod) {
        let envoy = self.envoy(protocol).await;
        (envoy, self.istiod().await)
    }

    fn metric(&self, name: &str, label: Option<&str>) -> f64 {
        let families = self.metrics.registry().gather();
        let Some(family) = families.iter().find(|f| f.name() == name) else { return 0.0 };
        let found = family
            .get_metric()
            .iter()
            .find(|m| label.is_none_or(|l| m.get_label().iter().any(|p| p.value() == l)));
        found.map_or(0.0, |m| m.get_counter().get_value() + m.get_gauge().get_value())
    }

    async fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        let until = tokio::time::Instant::now() + SOON;
        while !holds() {
            assert!(tokio::time::Instant::now() < until, "{what} did not come to be");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn accept(listener: TcpListener, streams: mpsc::UnboundedSender<Istiod>, group: Group) {
    loop {
        let (io, _) = listener.accept().await.unwrap();
        let streams = streams.clone();
        group.run("istiod connection", async move {
            let mut http2 = match h2::server::Builder::new().initial_window_size(1 << 16).handshake(io).await
            {
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

async fn next_frame(body: &mut RecvStream, buffer: &mut BytesMut) -> Option<Bytes> {
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

async fn write(stream: &mut SendStream<Bytes>, mut bytes: Bytes) {
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
    fn open(&mut self) -> &mut SendStream<Bytes> {
        if self.stream.is_none() {
            let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            self.stream = Some(self.respond.send_response(response, false).unwrap());
        }
        self.stream.as_mut().unwrap()
    }

    async fn push(&mut self, message: &impl Message) {
        let frame = frames::frame(message);
        write(self.open(), frame).await;
    }

    async fn request(&mut self) -> DiscoveryRequest {
        let frame = tokio::time::timeout(SOON, next_frame(&mut self.body, &mut self.buffer)).await;
        DiscoveryRequest::decode(frame.expect("a request comes").expect("the stream is open")).unwrap()
    }

    async fn ended(&mut self) {
        let rest = async { while next_frame(&mut self.body, &mut self.buffer).await.is_some() {} };
        tokio::time::timeout(SOON, rest).await.expect("the upstream stream ends");
    }

    fn end(mut self, code: Code) {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from(code as i32));
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
    async fn send(&mut self, message: &impl Message) {
        let frame = frames::frame(message);
        write(&mut self.sink, frame).await;
    }

    async fn body(&mut self) -> Result<&mut RecvStream, h2::Error> {
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

    async fn raw(&mut self) -> Option<Bytes> {
        self.body().await.ok()?;
        let frame = next_frame(self.body.as_mut().unwrap(), &mut self.buffer);
        tokio::time::timeout(SOON, frame).await.expect("a response or an end comes")
    }

    async fn response(&mut self) -> DiscoveryResponse {
        DiscoveryResponse::decode(self.raw().await.expect("the stream is open")).unwrap()
    }

    async fn status(&mut self) -> (Code, String) {
        while self.raw().await.is_some() {}
        if self.trailers.is_none() {
            self.trailers = self.body.as_mut().unwrap().trailers().await.unwrap();
        }
        let status = tonic::Status::from_header_map(self.trailers.as_ref().unwrap()).unwrap();
        (status.code(), status.message().to_owned())
    }
}

fn request(type_url: &str) -> DiscoveryRequest {
    DiscoveryRequest { type_url: type_url.to_owned(), ..Default::default() }
}

fn response(type_url: &str, nonce: &str, sizes: &[usize]) -> DiscoveryResponse {
    let any = |size: &usize| Any { type_url: type_url.to_owned(), value: vec![7; *size] };
    DiscoveryResponse {
        version_info: format!("v{nonce}"),
        resources: sizes.iter().map(any).collect(),
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        ..Default::default()
    }
}

#[tokio::test]
async fn requests_and_responses_pass_both_ways() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    assert_eq!(istiod.headers["authorization"], "Bearer secret");
    assert_eq!(istiod.headers["clusterid"], "");
    envoy.send(&request(CDS)).await;
    assert_eq!(istiod.request().await, request(CDS));
    for (nonce, sizes) in
        [("1", vec![10, 20]), ("2", vec![]), ("3", vec![3_000_000, 5]), ("4", vec![40_000; 50])]
    {
        let sent = response(CDS, nonce, &sizes);
        let (got, ()) = tokio::join!(envoy.response(), istiod.push(&sent));
        assert_eq!(got, sent);
    }
    let view = rig.handle.snapshot();
    assert_eq!((view.types[0].name, view.types[0].nonce.as_str()), ("CDS", "4"));
    istiod.end(Code::Ok);
    assert_eq!(envoy.status().await.0, Code::Ok);
    rig.eventually("both ends are counted", || {
        rig.metric("istiod_connection_terminations", Some("cancelled")) == 1.0
            && rig.metric("envoy_connection_terminations", Some("cancelled")) == 1.0
    })
    .await;
    assert_eq!(rig.metric("xds_proxy_responses", None), 4.0);
}

#[tokio::test]
async fn each_status_reaches_envoy_and_is_counted() {
    let mut rig = Rig::with(|c| c.hold = Duration::ZERO).await;
    for code in 1..17 {
        let code = Code::from(code);
        let (mut envoy, mut istiod) = rig.pair(Protocol::Delta).await;
        envoy.send(&request(CDS)).await;
        istiod.request().await;
        istiod.end(code);
        assert_eq!(envoy.status().await, (code, "by script".to_owned()));
    }
    rig.eventually("all ends are counted", || {
        rig.metric("istiod_connection_terminations", Some("cancelled")) == 2.0
            && rig.metric("istiod_connection_terminations", Some("error")) == 14.0
            && rig.metric("envoy_connection_terminations", Some("cancelled")) == 16.0
    })
    .await;
}

#[tokio::test]
async fn a_message_cut_upstream_never_ends_as_a_good_one() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    let whole = frames::frame(&response(CDS, "1", &[100_000]));
    write(istiod.open(), whole.slice(..60_000)).await;
    istiod.end(Code::Ok);
    let (code, text) = envoy.status().await;
    assert_eq!(code, Code::Internal, "{text}");
}

#[tokio::test]
async fn a_connection_that_breaks_is_unavailable_at_once() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
    istiod.push(&response(CDS, "1", &[1])).await;
    envoy.response().await;
    istiod.cut.cancel();
    assert_eq!(envoy.status().await.0, Code::Unavailable);
}

#[tokio::test]
async fn the_agents_own_requests_follow_the_first_listeners() {
    let mut rig = Rig::new().await;
    rig.handle.report_health(Some("down".to_owned()));
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    rig.handle.report_health(None);
    rig.handle.report_health(Some("down again".to_owned()));
    envoy.send(&request(types::LISTENER)).await;
    envoy.send(&request(types::LISTENER)).await;
    let mut types = VecDeque::new();
    for _ in 0..5 {
        let got = istiod.request().await;
        types.push_back((got.type_url, got.error_detail.map(|e| e.message)));
    }
    let plain = |t: &str| (t.to_owned(), None);
    assert_eq!(
        types,
        [
            plain(CDS),
            plain(types::LISTENER),
            plain(types::PROXY_CONFIG),
            (types::HEALTH.to_owned(), Some("down again".to_owned())),
            plain(types::LISTENER),
        ]
    );
    istiod.push(&response(types::PROXY_CONFIG, "p", &[])).await;
    let mut pushed = response(types::PROXY_CONFIG, "q", &[1]);
    pushed.resources[0].value = b"\x92\x02\x03pem".to_vec();
    istiod.push(&pushed).await;
    let ack = istiod.request().await;
    assert_eq!((ack.type_url.as_str(), ack.response_nonce.as_str()), (types::PROXY_CONFIG, "q"));
    assert_eq!((ack.version_info.as_str(), ack.error_detail), ("vq", None));
    assert_eq!(*rig.bundle.borrow(), "pem");
    pushed.resources[0].value = b"\xff\xff".to_vec();
    istiod.push(&pushed).await;
    assert_eq!(istiod.request().await.error_detail.unwrap().code, 13);
    assert_eq!(*rig.bundle.borrow(), "pem", "a bad bundle takes nothing away");
}

#[tokio::test]
async fn a_newer_stream_ends_the_older_with_ok() {
    let mut rig = Rig::new().await;
    let (mut first, mut first_up) = rig.pair(Protocol::Sotw).await;
    let (mut second, mut second_up) = rig.pair(Protocol::Delta).await;
    assert_eq!(first.status().await.0, Code::Ok);
    first_up.ended().await;
    second.send(&request(CDS)).await;
    second_up.request().await;
    assert_eq!(rig.handle.snapshot().stream.unwrap().protocol, Protocol::Delta);
}

#[tokio::test]
async fn a_request_above_the_limit_ends_the_stream_and_the_next_works() {
    let mut rig = Rig::with(|c| c.max_request = 1000).await;
    let (mut envoy, _istiod) = rig.pair(Protocol::Sotw).await;
    let large = DiscoveryRequest { resource_names: vec!["n".repeat(2000)], ..request(CDS) };
    envoy.send(&large).await;
    let (code, text) = envoy.status().await;
    assert_eq!(code, Code::ResourceExhausted);
    assert!(text.contains("larger than max"), "{text}");
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
}

#[tokio::test]
async fn rejections_are_kept() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
    istiod.push(&response(CDS, "1", &[1])).await;
    envoy.response().await;
    let error_detail =
        Some(rpc::Status { code: 13, message: "no such thing".to_owned(), ..Default::default() });
    let nack = DiscoveryRequest { response_nonce: "1".to_owned(), error_detail, ..request(CDS) };
    envoy.send(&nack).await;
    assert_eq!(istiod.request().await, nack);
    let view = rig.handle.snapshot();
    assert_eq!((view.nacks[0].message.as_str(), view.nacks[0].version.as_str()), ("no such thing", "v1"));
    assert_eq!(view.types[0].state, state::Freshness::Rejected);
    assert_eq!(rig.metric("xds_nacks", Some("CDS")), 1.0);
}

#[tokio::test]
async fn the_first_failure_is_told_and_the_next_stream_is_held_until_istiod_is_back() {
    let mut rig = Rig::new().await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut told = rig.envoy(Protocol::Sotw).await;
    assert_eq!(told.status().await.0, Code::Unavailable);
    let mut held = rig.envoy(Protocol::Sotw).await;
    held.send(&request(CDS)).await;
    rig.eventually("the stream is held and dialled for", || rig.metric("xds_dials", Some("failed")) >= 2.0)
        .await;
    assert_eq!(rig.metric("xds_held_streams", None), 1.0);
    assert!(rig.handle.snapshot().upstream.held_since.is_some());
    rig.way.open.store(true, Ordering::SeqCst);
    rig.news.send(1).unwrap();
    let mut istiod = rig.istiod().await;
    assert_eq!(istiod.request().await, request(CDS));
    let sent = response(CDS, "1", &[1]);
    istiod.push(&sent).await;
    assert_eq!(held.response().await, sent);
    assert_eq!(rig.handle.snapshot().upstream.failures, 0);
    istiod.end(Code::Unavailable);
    assert_eq!(held.status().await.0, Code::Unavailable, "a stream that has been served is not held");
}

#[tokio::test]
async fn a_refused_token_is_told_once_and_then_tried_with_the_same_requests() {
    let mut rig = Rig::new().await;
    let (mut told, istiod) = rig.pair(Protocol::Sotw).await;
    istiod.end(Code::Unauthenticated);
    assert_eq!(told.status().await.0, Code::Unauthenticated);
    let mut held = rig.envoy(Protocol::Sotw).await;
    held.send(&request(CDS)).await;
    held.send(&request(types::LISTENER)).await;
    for _ in 0..2 {
        let mut istiod = rig.istiod().await;
        for expected in [CDS, types::LISTENER, types::PROXY_CONFIG] {
            assert_eq!(istiod.request().await, request(expected));
        }
        istiod.end(Code::PermissionDenied);
    }
    let mut istiod = rig.istiod().await;
    for expected in [CDS, types::LISTENER, types::PROXY_CONFIG] {
        assert_eq!(istiod.request().await, request(expected));
    }
    let sent = response(CDS, "1", &[1]);
    istiod.push(&sent).await;
    assert_eq!(held.response().await, sent);
    held.send(&request("late")).await;
    assert_eq!(istiod.request().await, request("late"));
}

#[tokio::test]
async fn a_hold_ends_and_envoy_is_told_then() {
    let rig = Rig::with(|c| c.hold = Duration::from_millis(50)).await;
    rig.way.open.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        let mut envoy = rig.envoy(Protocol::Sotw).await;
        assert_eq!(envoy.status().await.0, Code::Unavailable);
    }
    assert_eq!(rig.metric("xds_holds", Some("told")), 1.0);
}

#[tokio::test]
async fn both_directions_stalled_lose_nothing_and_do_not_wedge() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
    istiod.push(&response(CDS, "0", &[1])).await;
    envoy.response().await;
    let big = response(CDS, "1", &[500_000]);
    let long = DiscoveryRequest { resource_names: vec!["x".repeat(3000)], ..request(CDS) };
    let Istiod { mut body, stream, .. } = istiod;
    let mut stream = stream.unwrap();
    let Envoy { mut sink, body: responses, .. } = envoy;
    let mut responses = responses.unwrap();
    let mut pushes = Box::pin(async {
        for _ in 0..20 {
            write(&mut stream, frames::frame(&big)).await;
        }
    });
    let mut requests = Box::pin(async {
        for _ in 0..1000 {
            write(&mut sink, frames::frame(&long)).await;
        }
    });
    // Neither reads while both write far more than all windows hold.
    let stalled = async { tokio::join!(&mut pushes, &mut requests) };
    assert!(
        tokio::time::timeout(Duration::from_millis(300), stalled).await.is_err(),
        "it must have come to a halt"
    );
    let (mut down, mut up) = (BytesMut::new(), BytesMut::new());
    let reading = async {
        let down = async {
            for _ in 0..20 {
                let got = next_frame(&mut responses, &mut down).await.unwrap();
                assert_eq!(DiscoveryResponse::decode(got).unwrap(), big);
            }
        };
        let up = async {
            for _ in 0..1000 {
                let got = next_frame(&mut body, &mut up).await.unwrap();
                assert_eq!(DiscoveryRequest::decode(got).unwrap(), long);
            }
        };
        tokio::join!(down, up, pushes, requests)
    };
    tokio::time::timeout(Duration::from_secs(60), reading).await.expect("it goes on where it stopped");
}

#[tokio::test]
async fn stopping_tells_envoy_and_leaves_nothing() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    rig.group.token().cancel();
    assert_eq!(envoy.status().await.0, Code::Unavailable);
    istiod.ended().await;
    drop((envoy, istiod));
    rig.eventually("the server is gone", || !rig.group.running().contains(&"xds".to_owned())).await;
    assert!(!rig.socket.exists());
}
