//! What stands before both sockets: who is let in, which calls are calls, how long names are told, and that whoever floods
//! is seen.

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use http::{HeaderMap, Request, StatusCode};
use prost::Message;
use rustix::process::{Resource, Rlimit, prlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::ads::{CDS, World, answer, ask, ended, request};
use crate::support::agent::{SDS, XDS};
use crate::support::builder::Builder;
use crate::support::client::{node, secret_request};
use crate::support::mesh::Loop;
use crate::support::{Code, Envoy, LIMIT, MockIstiod, TestAgent, eventually};

const CALLS: [(&str, &str); 2] = [
    (SDS, "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"),
    (XDS, "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"),
];

/// One call without a message, on a connection of its own.
async fn call(
    agent: &TestAgent,
    socket: &str,
    request: Request<()>,
) -> Result<(StatusCode, HeaderMap), h2::Error> {
    let io = UnixStream::connect(agent.path(socket)).await.unwrap();
    let (send, connection) = h2::client::handshake(io).await?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        let _ = connection.await;
    });
    let mut send = send.ready().await?;
    // Open, as a stream is.
    let (response, _body) = send.send_request(request, false)?;
    let (head, mut body) = response.await?.into_parts();
    if head.headers.contains_key("grpc-status") || head.status != StatusCode::OK {
        return Ok((head.status, head.headers));
    }
    while body.data().await.transpose()?.is_some() {}
    Ok((head.status, body.trailers().await?.unwrap_or_default()))
}

fn post(path: &str) -> http::request::Builder {
    Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
}

/// What a client says first, with empty settings.
fn preface() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(4, 0, 0, &[])[..]].concat()
}

/// The header block of a call.
fn head(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    let fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")];
    let all = fields.into_iter().chain([("content-type", "application/grpc")]).chain(more.iter().copied());
    for (name, value) in all {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

async fn kind_of_next(io: &mut UnixStream) -> std::io::Result<u8> {
    let mut head = [0; 9];
    io.read_exact(&mut head).await?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    io.read_exact(&mut payload).await?;
    Ok(head[3])
}

#[tokio::test]
async fn both_sockets_take_the_same_calls() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    agent.xds().await;
    for (socket, path) in CALLS {
        let get = Request::get(format!("http://localhost{path}")).header("content-type", "application/grpc");
        assert_eq!(call(&agent, socket, get.body(()).unwrap()).await.unwrap().0, 405, "{socket}");
        let text = Request::post(format!("http://localhost{path}")).header("content-type", "text/plain");
        assert_eq!(call(&agent, socket, text.body(()).unwrap()).await.unwrap().0, 415, "{socket}");
        for (request, code, text) in [
            (post(path).header("grpc-timeout", "100m"), "4", "context deadline exceeded"),
            (post(path).header("grpc-timeout", "soon"), "13", "malformed grpc-timeout"),
            (post(path).header("x-thing-bin", "%%%"), "13", "malformed binary metadata"),
            (post("/some.Service/Method"), "12", "unknown service some.Service"),
            (post(&format!("/{}/Method", "x".repeat(60_000))), "12", "unknown service xxx"),
        ] {
            let (status, trailers) = call(&agent, socket, request.body(()).unwrap()).await.unwrap();
            let message = trailers["grpc-message"].to_str().unwrap();
            assert_eq!(
                (status.as_u16(), trailers["grpc-status"].to_str().unwrap()),
                (200, code),
                "{message}"
            );
            assert!(
                message.replace("%20", " ").contains(text) && message.len() < 2000,
                "{socket}: {message}"
            );
        }
    }
    agent.stop().await;
}

#[tokio::test]
async fn header_lists_may_be_long_and_come_in_small_pieces() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    agent.xds().await;
    for (socket, path) in CALLS {
        let mut request = post(path).header("grpc-timeout", "50m");
        for n in 0..5 {
            request = request.header(format!("x-long-{n}"), "v".repeat(60_000));
        }
        let (_, trailers) = call(&agent, socket, request.body(()).unwrap()).await.unwrap();
        assert_eq!(trailers["grpc-status"], "4", "{socket}");

        // A byte a frame.
        let block = head(path, &[("grpc-timeout", "50m")]);
        let mut bytes = preface();
        for (at, byte) in block.iter().enumerate() {
            let (kind, last) = (if at == 0 { 1 } else { 9 }, at + 1 == block.len());
            bytes.extend(frame(kind, if last { 4 } else { 0 }, 1, &[*byte]));
        }
        let mut io = UnixStream::connect(agent.path(socket)).await.unwrap();
        io.write_all(&bytes).await.unwrap();
        loop {
            let kind = kind_of_next(&mut io).await.unwrap_or_else(|e| panic!("{socket}: {e}"));
            assert_ne!(kind, 7, "{socket}: the connection is given up");
            if kind == 1 {
                break;
            }
        }
    }
    agent.stop().await;
}

/// One message of a stream, as gRPC frames it.
fn message(request: &impl Message) -> bytes::Bytes {
    let body = request.encode_to_vec();
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[0][..], &length, &body].concat().into()
}

#[tokio::test]
async fn a_header_list_beyond_the_bound_costs_its_own_stream_only() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    agent.xds().await;
    for (socket, path) in CALLS {
        let io = UnixStream::connect(agent.path(socket)).await.unwrap();
        let (send, connection) = h2::client::handshake(io).await.unwrap();
        let mut driver = JoinSet::new();
        driver.spawn(async move { connection.await.unwrap_or_else(|e| panic!("the connection ends: {e}")) });
        let mut send = send.ready().await.unwrap();
        let (neighbour, mut body) = send.send_request(post(path).body(()).unwrap(), false).unwrap();

        let mut long = post(path);
        for n in 0..7 {
            long = long.header(format!("x-long-{n}"), "v".repeat(60_000));
        }
        let mut send = send.ready().await.unwrap();
        let (refused, _body) = send.send_request(long.body(()).unwrap(), false).unwrap();
        match tokio::time::timeout(LIMIT, refused).await.expect("the long one is answered") {
            Ok(head) => assert_ne!(head.status(), StatusCode::OK, "{socket}"),
            Err(error) => assert!(!error.is_go_away() && !error.is_io(), "{socket}: {error}"),
        }

        // The stream that was there before is served, and so is one that comes after.
        if socket == SDS {
            body.send_data(message(&secret_request("default")), false).unwrap();
            let mut answer = tokio::time::timeout(LIMIT, neighbour).await.expect("an answer").unwrap();
            let data = tokio::time::timeout(LIMIT, answer.body_mut().data()).await.expect("a secret");
            assert!(data.unwrap().unwrap().len() > 1000);
        } else {
            body.send_data(message(&ask(CDS)), false).unwrap();
            eventually("istiod is asked", || async {
                mock.record().ads_requests().iter().any(|asked| asked.type_url == CDS).then_some(())
            })
            .await;
        }
        let mut send = send.ready().await.unwrap();
        let (next, _) = send.send_request(post("/some.Service/Method").body(()).unwrap(), true).unwrap();
        let head = tokio::time::timeout(LIMIT, next).await.expect("an answer").unwrap();
        assert_eq!(head.headers()["grpc-status"], "12", "{socket}");
    }
    agent.stop().await;
}

#[tokio::test]
async fn a_very_long_name_is_not_told_at_length() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request(&"n".repeat(900_000)));
    let status = stream.end().await;
    assert_eq!(status.code(), tonic::Code::Unknown);
    assert!(status.message().len() < 4000, "{} bytes", status.message().len());
    agent.wait_log("unknown resource").await;
    assert!(agent.log().text().lines().all(|line| line.len() < 8000));
    agent.stop().await;
}

#[tokio::test]
async fn silent_connections_do_not_keep_envoy_out() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    agent.xds().await;
    let mut silent = Vec::new();
    for (socket, _) in CALLS {
        for _ in 0..2000 {
            silent.push(UnixStream::connect(agent.path(socket)).await.unwrap());
        }
    }
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    let open = std::fs::read_dir(format!("/proc/{}/fd", agent.pid().as_raw_pid())).unwrap().count();
    assert!(open < 1200, "{open} descriptors");
    drop(silent);
    agent.stop().await;
}

#[tokio::test]
async fn details_that_are_no_base64_do_not_break_the_stream() {
    let mut world = World::new().await;
    let (mut envoy, istiod) = world.sotw().await;
    istiod.responses.sotw(&answer(CDS, "1", 10)).await.unwrap();
    let status = mock_istiod::Status::new(Code::ResourceExhausted, "").details_bin("!!! no base64");
    istiod.responses.end(status).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "1");
    let status = envoy.end().await;
    assert_eq!(status.code(), tonic::Code::Internal, "{status:?}");
    assert!(status.message().contains("malformed grpc-status-details-bin"), "{status:?}");
    eventually("the stream is off the books", || async {
        let page = world.agent.get("/debug/agentz").await.ok()?.text();
        let document: serde_json::Value = serde_json::from_str(&page).ok()?;
        document.pointer("/config/stream").is_none_or(serde_json::Value::is_null).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_client_that_answers_no_ping_is_taken_off_the_books() {
    let quick = |b: Builder| b.env("GRPC_KEEPALIVE_INTERVAL", "1s").env("GRPC_KEEPALIVE_TIMEOUT", "1s");
    let mut world = World::with(quick).await;
    drop((world.agent.sds().await, world.agent.xds().await));
    let mut open = Vec::new();
    for (socket, path) in CALLS {
        let mut io = UnixStream::connect(world.agent.path(socket)).await.unwrap();
        io.write_all(&[preface(), frame(1, 4, 1, &head(path, &[]))].concat()).await.unwrap();
        open.push((socket, io));
    }
    let istiod = world.istiod().await;
    let xds = || async {
        let page = world.agent.get("/debug/agentz").await.ok()?.text();
        let document: serde_json::Value = serde_json::from_str(&page).ok()?;
        Some(document.pointer("/config/stream").is_some_and(|stream| !stream.is_null()))
    };
    eventually("the stream is on the books", || async { xds().await?.then_some(()) }).await;
    let sds = || world.agent.metric("istio_agent_sds_streams");
    eventually("so is the other", || async { (sds().await? >= 1.0).then_some(()) }).await;
    for (socket, io) in &mut open {
        let mut pinged = false;
        let closed = async {
            while let Ok(kind) = kind_of_next(io).await {
                pinged |= kind == 6;
            }
        };
        tokio::time::timeout(LIMIT, closed).await.unwrap_or_else(|_| panic!("{socket} was never closed"));
        assert!(pinged, "{socket}");
    }
    ended(istiod).await;
    eventually("both are off the books", || async { (!xds().await? && sds().await? == 0.0).then_some(()) })
        .await;
    let terminations = "istio_agent_envoy_connection_terminations{type=\"cancelled\"}";
    assert!(world.agent.metric(terminations).await.unwrap_or_default() >= 1.0, "the end is counted");
}

#[tokio::test]
async fn zero_means_what_the_go_library_takes_and_neither_pings_without_pause_nor_no_stream() {
    let names = ["GRPC_KEEPALIVE_INTERVAL", "GRPC_KEEPALIVE_TIMEOUT", "ISTIO_GPRC_MAXSTREAMS"];
    let mut world = World::with(|b| names.into_iter().fold(b, |b, name| b.env(name, "0"))).await;
    drop((world.agent.sds().await, world.agent.xds().await));
    for (socket, path) in CALLS {
        let mut io = UnixStream::connect(world.agent.path(socket)).await.unwrap();
        io.write_all(&[preface(), frame(1, 4, 1, &head(path, &[]))].concat()).await.unwrap();
        let pinged = async { while kind_of_next(&mut io).await.expect("the connection stays") != 6 {} };
        assert!(tokio::time::timeout(Duration::from_secs(2), pinged).await.is_err(), "{socket}");
    }
    ended(world.istiod().await).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    assert_eq!(request(&mut istiod).await.type_url, CDS);
}

fn proxyless() -> DiscoveryRequest {
    let grpc = Value { kind: Some(Kind::StringValue("grpc".to_owned())) };
    let metadata = Struct { fields: [("GENERATOR".to_owned(), grpc)].into() };
    DiscoveryRequest { node: Some(Node { metadata: Some(metadata), ..node("sidecar~1") }), ..ask(CDS) }
}

#[tokio::test]
async fn streams_of_proxyless_clients_stand_side_by_side() {
    let mut world = World::new().await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let (envoy, mut istiod) = {
            let envoy = world.envoy().await.ads();
            envoy.send(&proxyless());
            (envoy, world.istiod().await)
        };
        request(&mut istiod).await;
        streams.push((envoy, istiod));
    }
    for (envoy, istiod) in &mut streams {
        istiod.responses.sotw(&answer(CDS, "1", 10)).await.unwrap();
        assert_eq!(envoy.next().await.unwrap().nonce, "1");
    }
    // Envoy's rule stays for Envoy.
    let (mut first, _istiod) = world.sotw().await;
    let second = world.envoy().await.ads();
    second.send(&ask(CDS));
    first.end().await;
    for (envoy, istiod) in &mut streams {
        istiod.responses.sotw(&answer(CDS, "2", 10)).await.unwrap();
        assert_eq!(envoy.next().await.unwrap().nonce, "2");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_strangers_stand_beside_the_own_envoys() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let mut agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).start();
    agent.wait_ready().await;
    let client = agent.xds().await;
    let mut strangers = Vec::new();
    for _ in 0..2 {
        let mut stream = client.ads();
        let node = Some(node("sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local"));
        stream.send(&DiscoveryRequest { node, ..ask(CDS) });
        stream.next().await.expect("what Envoy is given");
        strangers.push(stream);
    }
    mesh.push(&mock, "two");
    eventually("a push arrives", || async {
        let reply = mesh.ask(&mock).await.ok()?;
        (reply.headers.get("x-config")? == "two").then_some(())
    })
    .await;
    assert_eq!(mock.record().ads_streams().len(), 3, "Envoy has not come again");
    drop(strangers);
    agent.stop().await;
}

#[tokio::test]
async fn the_65th_stream_of_proxyless_clients_ends_the_first_and_never_envoys() {
    let mut world = World::new().await;
    let (mut envoys, istiod_of_envoy) = world.sotw().await;
    envoys.send(&ask(CDS));
    let client = world.envoy().await;
    let mut streams = Vec::new();
    for _ in 0..65 {
        let stream = client.ads();
        stream.send(&proxyless());
        let mut istiod = world.istiod().await;
        request(&mut istiod).await;
        streams.push((stream, istiod));
    }
    let (mut first, istiod) = streams.remove(0);
    first.end().await;
    ended(istiod).await;
    for (stream, istiod) in &mut streams {
        istiod.responses.sotw(&answer(CDS, "2", 10)).await.unwrap();
        assert_eq!(stream.next().await.unwrap().nonce, "2");
    }
    istiod_of_envoy.responses.sotw(&answer(CDS, "3", 10)).await.unwrap();
    assert_eq!(envoys.next().await.unwrap().nonce, "3");
}

async fn held(world: &World, count: f64) {
    let found = || async { world.agent.metric("istio_agent_xds_held_streams").await };
    eventually("streams are held", || async { (found().await == Some(count)).then_some(()) }).await;
}

#[tokio::test]
async fn a_held_proxyless_client_is_told_the_cause_while_envoy_is_held_on() {
    let mut world = World::new().await;
    world.mock.down().await;
    // Whoever comes first is told at once.
    assert_eq!(world.envoy().await.ads().end().await.code(), tonic::Code::Unavailable);
    let mut proxyless_one = world.envoy().await.ads();
    proxyless_one.send(&proxyless());
    let mut envoys = world.envoy().await.ads();
    envoys.send(&ask(CDS));
    held(&world, 2.0).await;
    // Its own limit for resources is 15 s, after which it would tell nothing of this.
    let status = proxyless_one.end().await;
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(status.message().contains("cannot connect to"), "{status:?}");
    held(&world, 1.0).await;
    world.mock.up().await.unwrap();
    let mut istiod = world.istiod().await;
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    istiod.responses.sotw(&answer(CDS, "1", 1)).await.unwrap();
    assert_eq!(envoys.next().await.unwrap().nonce, "1");
}

#[tokio::test]
async fn without_descriptors_clients_are_refused_and_later_served() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.sds().await;
    agent.xds().await;
    agent.wait_ready().await;
    let pid = agent.pid();
    let limit = |most| {
        let limit = Rlimit { current: Some(most), maximum: Some(1024) };
        prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    };
    let open = std::fs::read_dir(format!("/proc/{}/fd", agent.pid().as_raw_pid())).unwrap().count();
    limit(open as u64 + 8);
    let mut silent = Vec::new();
    for (socket, _) in CALLS {
        for _ in 0..60 {
            silent.push(UnixStream::connect(agent.path(socket)).await.unwrap());
        }
    }
    for name in ["sds", "xds"] {
        agent.wait_log(&format!("the {name} listener cannot accept")).await;
    }
    // Whoever comes last is served all the same: who is worth less makes room.
    eventually("a client is served", || async {
        let io = UnixStream::connect(agent.path(SDS)).await.ok()?;
        let (send, connection) = h2::client::handshake(io).await.ok()?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            let _ = connection.await;
        });
        let request = post("/some.Service/Method").body(()).unwrap();
        let (response, _) = send.ready().await.ok()?.send_request(request, true).ok()?;
        (response.await.ok()?.headers()["grpc-status"] == "12").then_some(())
    })
    .await;
    limit(1024);
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    let told = agent.log().text().lines().filter(|line| line.contains("cannot accept")).count();
    assert!(told < 10, "{told} lines");
    drop(silent);
    agent.stop().await;
}

#[tokio::test]
async fn the_memory_of_a_flood_of_streams_is_given_back() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    let before = agent.memory("VmRSS");
    let message = message(&secret_request("default"));
    let io = UnixStream::connect(agent.path(SDS)).await.unwrap();
    let (send, connection) =
        h2::client::Builder::new().initial_connection_window_size(1 << 30).handshake(io).await.unwrap();
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        let _ = connection.await;
    });
    let mut open = Vec::new();
    for _ in 0..5000 {
        let mut send = send.clone().ready().await.unwrap();
        let (response, mut body) = send.send_request(post(CALLS[0].1).body(()).unwrap(), false).unwrap();
        body.send_data(message.clone(), false).unwrap();
        let mut answer = response.await.unwrap().into_body();
        assert!(answer.data().await.unwrap().is_ok());
        open.push((body, answer));
    }
    let peak = agent.memory("VmRSS");
    assert!(peak > before + 8 * 1024, "{before} kB before, {peak} kB with 5,000 streams");
    drop(open);
    eventually("the memory is back", || async { (agent.memory("VmRSS") < before + 8 * 1024).then_some(()) })
        .await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_no_pause_are_counted() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("METRICS_DETAILS", "true").start();
    agent.wait_ready().await;
    let turns = "istio_agent_socket_turns_total{listener=\"sds\"}";
    assert_eq!(agent.metric(turns).await, None, "nobody has come");
    let mut clients = JoinSet::new();
    for _ in 0..32 {
        let client = agent.sds().await;
        clients.spawn(async move { while client.fetch_secrets(&secret_request("ROOTCA")).await.is_ok() {} });
    }
    eventually("their turns are counted", || agent.metric(turns)).await;
    clients.shutdown().await;
    agent.stop().await;
}
