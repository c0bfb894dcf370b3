//! A whole session of the relay against a model: the input is what both sides write, where it is cut, and in
//! which steps both read. What arrives is what was written, in order and once; the agent's own requests
//! stand where they must.
#![no_main]

use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::protobuf::Any;
use futures_util::future::BoxFuture;
use h2::{RecvStream, SendStream};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::base::tasks::Stop;
use pilot_agent::testing::base::{clock, metrics::Metrics};
use pilot_agent::testing::istiod::auth::{self, CallHeaders, Token, TokenSource};
use pilot_agent::testing::istiod::{Connection, Error, Stream};
use pilot_agent::testing::xds::frames::frame;
use pilot_agent::testing::xds::{Config, Parts, Protocol, Server, TrustBundle, Upstream, types};
use prost::Message;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::signal::unix::{SignalKind, signal};

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

#[derive(Debug, Arbitrary)]
struct Input {
    requests: Vec<(u8, u16)>,
    responses: Vec<(u8, u16)>,
    // Sizes of pieces, and how often the others go first.
    up: Vec<(u16, u8)>,
    down: Vec<(u16, u8)>,
    reading: Vec<u8>,
}

#[derive(Debug)]
struct Way(std::net::SocketAddr);

impl Upstream for Way {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
        Box::pin(async {
            let io = TcpStream::connect(self.0).await.expect("the listener is there");
            let (peer, authority) = (self.0, "istiod".to_owned());
            Ok(Connection { io: Stream::Plain(io), peer, authority, scheme: "http" })
        })
    }

    fn address(&self) -> &str {
        "127.0.0.1:15012"
    }
}

#[derive(Debug)]
struct NoToken;

impl TokenSource for NoToken {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, auth::Error>> {
        Box::pin(async { Ok(None) })
    }
}

async fn steps(count: u8) {
    for _ in 0..count % 8 {
        tokio::task::yield_now().await;
    }
}

async fn send(stream: &mut SendStream<Bytes>, frames: Vec<Bytes>, cuts: &[(u16, u8)]) {
    let mut bytes = Bytes::from(frames.concat());
    let mut cuts = cuts.iter().copied().chain(std::iter::repeat((u16::MAX, 0)));
    while !bytes.is_empty() {
        let (size, pause) = cuts.next().expect("endless");
        steps(pause).await;
        let mut piece = bytes.split_to(usize::from(size).clamp(1, bytes.len()));
        while !piece.is_empty() {
            stream.reserve_capacity(piece.len());
            let room = match stream.capacity() {
                0 => std::future::poll_fn(|cx| stream.poll_capacity(cx)).await.expect("open").expect("open"),
                room => room,
            };
            stream.send_data(piece.split_to(room.min(piece.len())), false).expect("open");
        }
    }
}

async fn next(body: &mut RecvStream, buffer: &mut BytesMut) -> Bytes {
    loop {
        if let Some(head) = buffer.get(..5) {
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            if buffer.len() >= 5 + length {
                buffer.advance(5);
                return buffer.split_to(length).freeze();
            }
        }
        let data = body.data().await.expect("more is to come").expect("nothing breaks here");
        let _ = body.flow_control().release_capacity(data.len());
        buffer.extend_from_slice(&data);
    }
}

fn request(n: usize, kind: u8, size: u16) -> DiscoveryRequest {
    let type_url = [CDS, types::LISTENER, types::HEALTH, "other"][usize::from(kind % 4)].to_owned();
    // A report on health of over 64 KB passes or not, as its pieces come: the relay waits no longer to know the type.
    let name = format!("{n}{}", "n".repeat(usize::from(size).min(65_000)));
    DiscoveryRequest { node: Some(Default::default()), type_url, resource_names: vec![name], ..Default::default() }
}

fn response(n: usize, kind: u8, size: u16) -> DiscoveryResponse {
    let type_url = [CDS, types::PROXY_CONFIG, "other"][usize::from(kind % 3)].to_owned();
    let body = Any { type_url: type_url.clone(), value: vec![0; usize::from(size)] };
    let resources = if kind < 128 { vec![body] } else { Vec::new() };
    DiscoveryResponse { version_info: "v".to_owned(), resources, type_url, nonce: n.to_string(), ..Default::default() }
}

/// What is written, and what must arrive of it.
struct Model {
    requests: Vec<DiscoveryRequest>,
    responses: Vec<DiscoveryResponse>,
    /// What istiod is asked, but for answers to what is the agent's own.
    upward: Vec<DiscoveryRequest>,
}

impl Model {
    fn of(input: &Input) -> Self {
        let requests: Vec<_> =
            input.requests.iter().take(12).enumerate().map(|(n, (k, s))| request(n, *k, *s)).collect();
        let responses: Vec<_> =
            input.responses.iter().take(12).enumerate().map(|(n, (k, s))| response(n, *k, *s)).collect();
        let (mut upward, mut asked) = (Vec::new(), false);
        for request in &requests {
            if request.type_url == types::HEALTH && !asked {
                continue;
            }
            upward.push(request.clone());
            if request.type_url == types::LISTENER && !asked {
                asked = true;
                upward.push(DiscoveryRequest { type_url: types::PROXY_CONFIG.to_owned(), ..Default::default() });
            }
        }
        Self { requests, responses, upward }
    }

    /// What Envoy is given.
    fn downward(&self) -> Vec<&DiscoveryResponse> {
        self.responses.iter().filter(|r| types::for_envoy(&r.type_url)).collect()
    }

    /// The nonces that the agent itself answers.
    fn answers(&self) -> Vec<&str> {
        let own = |r: &&DiscoveryResponse| r.type_url == types::PROXY_CONFIG && !r.resources.is_empty();
        self.responses.iter().filter(own).map(|r| r.nonce.as_str()).collect()
    }
}

/// The relay's parts, with which it dials `istiod`.
fn parts(istiod: std::net::SocketAddr, wake: tokio::sync::watch::Receiver<u64>) -> Parts {
    Parts {
        upstream: Arc::new(Way(istiod)),
        tokens: Arc::new(NoToken),
        headers: CallHeaders::default(),
        taps: Vec::new(),
        convert: None,
        wake,
        metrics: Metrics::new(),
        clock: Arc::new(clock::System),
        trouble: Default::default(),
    }
}

async fn session(input: Input) {
    let model = Model::of(&input);
    let (downward, answers) = (model.downward(), model.answers());
    let Model { requests, responses, upward } = &model;
    let dir = tempfile::tempdir().expect("a scratch directory");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (tap, _bundle) = TrustBundle::tap(Vec::new());
    let (_news, wake) = tokio::sync::watch::channel(0);
    let parts = Parts { taps: vec![tap], ..parts(listener.local_addr().expect("bound"), wake) };
    let server = Server::new(Config::new(dir.path().join("XDS")), parts);
    let socket = server.bind().expect("a socket");
    let stop = Stop::new();
    let serving = server.serve(socket, stop.clone());

    let playing = async {
        let io = UnixStream::connect(dir.path().join("XDS")).await.expect("it listens");
        let (mut client, envoy) = h2::client::handshake(io).await.expect("HTTP/2");
        let head = http::Request::post(format!("http://xds{}", Protocol::Sotw.path()))
            .header("content-type", "application/grpc")
            .body(())
            .expect("a request");
        let (answer, mut sink) = client.send_request(head, false).expect("open");
        let accepted = async {
            let (io, _) = listener.accept().await.expect("the relay dials");
            let mut istiod = h2::server::handshake(io).await.expect("HTTP/2");
            let stream = istiod.accept().await.expect("a stream").expect("a stream");
            (istiod, stream)
        };
        let mut envoy = std::pin::pin!(envoy);
        let (mut istiod, (opened, mut respond)) = tokio::select! {
            accepted = accepted => accepted,
            _ = &mut envoy => panic!("Envoy's connection ended"),
        };
        let mut body = opened.into_body();
        let head = http::Response::builder().header("content-type", "application/grpc").body(()).expect("a response");
        let mut stream = respond.send_response(head, false).expect("open");
        let mut paces = input.reading.iter().copied().cycle();
        let paces = std::cell::RefCell::new(move || paces.next().unwrap_or(0));
        let pace = || (paces.borrow_mut())();
        let asking = send(&mut sink, requests.iter().map(|r| frame(r)).collect(), &input.up);
        let pushing = send(&mut stream, responses.iter().map(|r| frame(r)).collect(), &input.down);
        let taking = async {
            let (mut buffer, mut ours, mut theirs) = (BytesMut::new(), answers.iter(), upward.iter());
            for _ in 0..upward.len() + answers.len() {
                let request = DiscoveryRequest::decode(next(&mut body, &mut buffer).await).expect("a request");
                if request.response_nonce.is_empty() {
                    assert!(theirs.next() == Some(&request));
                } else {
                    assert_eq!(ours.next(), Some(&request.response_nonce.as_str()));
                }
                steps(pace()).await;
            }
        };
        let reading = async {
            if downward.is_empty() {
                return;
            }
            let (mut body, mut buffer) = (answer.await.expect("an answer").into_body(), BytesMut::new());
            for response in &downward {
                let got = DiscoveryResponse::decode(next(&mut body, &mut buffer).await).expect("a response");
                assert!(got == **response);
                steps(pace()).await;
            }
        };
        tokio::select! {
            _ = async { tokio::join!(asking, pushing, taking, reading) } => {}
            _ = &mut envoy => panic!("Envoy's connection ended"),
            _ = istiod.accept() => panic!("the upstream connection ended"),
        }
        stop.cancel();
    };
    tokio::join!(serving, playing);
}

fuzz_target!(|input: Input| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        // Rust programs ignore SIGPIPE, but a fuzz target's `main` is not Rust's; a handler does as well.
        let _pipe = signal(SignalKind::pipe()).expect("a signal handler");
        let limit = std::time::Duration::from_secs(20);
        tokio::time::timeout(limit, session(input)).await.expect("the session is stuck");
    });
});
