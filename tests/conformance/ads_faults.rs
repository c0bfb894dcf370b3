//! The discovery relay when istiod or the way to it breaks: what Envoy is told, what is counted, and that the next
//! stream works. What needs dropped packets is in the privileged tests; what needs a real Envoy, in `heal`.

use std::path::Path;
use std::time::{Duration, Instant};

use mock_istiod::{Fault, bulk};

use super::ads::{CDS, World, answer, ask, ended, request};
use super::why::beside;
use crate::support::agent::XDS;
use crate::support::{Code, LIMIT, eventually};

async fn counted(world: &World, name: &str, count: f64) {
    let name = format!("istio_agent_{name}");
    eventually(&format!("{name} is {count}"), || async {
        (world.agent.metric(&name).await == Some(count)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_end_of_a_connections_age_is_expected_and_the_next_stream_works() {
    let mut world = World::new().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    istiod.responses.sotw(&answer(CDS, "1", 10)).await.unwrap();
    envoy.next().await.unwrap();
    // What a Go server does: tells it, waits its grace, closes.
    istiod.responses.go_away().await.unwrap();
    istiod.responses.sotw(&answer(CDS, "2", 10)).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "2");
    // With something of the agent's unread, as its answer to the goodbye, the connection would be reset, not closed.
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
    istiod.responses.drop_connection().await.unwrap();
    assert_eq!(envoy.end().await.code(), tonic::Code::Unavailable);
    counted(&world, "istiod_connection_terminations{type=\"cancelled\"}", 1.0).await;
    counted(&world, "envoy_connection_terminations{type=\"cancelled\"}", 1.0).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
}

#[tokio::test]
async fn a_connection_cut_inside_a_frame_never_ends_as_a_good_stream() {
    let mut world = World::new().await;
    for size in [50_000, 3_000_000] {
        let (mut envoy, istiod) = world.sotw().await;
        istiod.responses.sotw(&answer(CDS, "1", 1)).await.unwrap();
        envoy.next().await.unwrap();
        let frame = bulk::sotw(bulk::Kind::Clusters, size, "n");
        istiod.responses.raw(frame.slice(..size / 2)).await.unwrap();
        istiod.responses.drop_connection().await.unwrap();
        let status = envoy.next_raw().await.expect_err("half a message is none");
        assert_ne!(status.code(), tonic::Code::Ok);
    }
}

#[tokio::test]
async fn a_reset_with_an_error_is_unexpected_and_one_without_is_not() {
    let mut world = World::new().await;
    // NO_ERROR, INTERNAL_ERROR, CANCEL, ENHANCE_YOUR_CALM and what gRPC makes of them.
    let resets =
        [(0, Code::Internal), (2, Code::Internal), (8, Code::Cancelled), (11, Code::ResourceExhausted)];
    for (reason, code) in resets {
        let (mut envoy, istiod) = world.sotw().await;
        istiod.responses.sotw(&answer(CDS, "1", 1)).await.unwrap();
        envoy.next().await.unwrap();
        istiod.responses.reset(reason).await.unwrap();
        assert_eq!(envoy.end().await.code() as i32, code as i32, "reset {reason}");
    }
    counted(&world, "istiod_connection_terminations{type=\"cancelled\"}", 2.0).await;
    counted(&world, "istiod_connection_terminations{type=\"error\"}", 2.0).await;
}

/// Istiod sheds load and says when to come again (`grpc-retry-pushback-ms`).
#[tokio::test]
async fn the_time_that_istiod_names_is_kept() {
    const TIME: Duration = Duration::from_millis(200);
    let too_many =
        |time: &str| mock_istiod::Status::new(Code::ResourceExhausted, "too many streams").pushback(time);
    let mut world = World::new().await;
    let (mut told, istiod) = world.sotw().await;
    let mut refused = Instant::now();
    istiod.responses.end(too_many("200")).await.unwrap();
    assert_eq!(told.end().await.code(), tonic::Code::ResourceExhausted);
    let mut held = world.envoy().await.ads();
    held.send(&ask(CDS));
    // Of its own accord the agent would wait for up to 10, 20, 40 and then 60 s.
    let all = async {
        for _ in 0..8 {
            let mut istiod = world.istiod().await;
            assert!(refused.elapsed() >= TIME, "it came after {:?}", refused.elapsed());
            assert_eq!(request(&mut istiod).await.type_url, CDS);
            refused = Instant::now();
            istiod.responses.end(too_many("200")).await.unwrap();
        }
    };
    tokio::time::timeout(2 * LIMIT, all).await.expect("it waits longer than it was asked to");
    // Below 0: not to be asked again for this stream, so Envoy is told.
    let istiod = world.istiod().await;
    istiod.responses.end(too_many("-1")).await.unwrap();
    assert_eq!(held.end().await.code(), tonic::Code::ResourceExhausted);
}

#[tokio::test]
async fn an_istiod_that_accepts_and_says_nothing_is_given_up() {
    let mut world = World::new().await;
    world.mock.connections().always(vec![Fault::HalfOpen]);
    let mut envoy = world.envoy().await.ads();
    // The bound of one attempt is 20 s, as in the Go agent's library.
    assert_eq!(envoy.end().await.code(), tonic::Code::Unavailable);
    counted(&world, "istiod_connection_terminations{type=\"error\"}", 1.0).await;
    world.mock.connections().clear();
    let held = world.envoy().await.ads();
    held.send(&ask(CDS));
    let mut istiod = world.istiod().await;
    request(&mut istiod).await;
}

#[tokio::test]
async fn an_envoy_that_leaves_ends_the_dial_made_for_it() {
    // Takes connections and never answers the TLS greeting.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("localhost:{}", silent.local_addr().unwrap().port());
    let mut world =
        World::with(|b| b.proxy_config("discoveryAddress", address).env("CA_ADDR", "localhost:1")).await;
    let envoy = world.envoy().await.ads();
    envoy.send(&ask(CDS));
    let (mut dialled, _) = silent.accept().await.unwrap();
    drop(envoy);
    // Well within the 20 s of a dial.
    let mut rest = Vec::new();
    let end = tokio::time::timeout(
        Duration::from_secs(15),
        tokio::io::AsyncReadExt::read_to_end(&mut dialled, &mut rest),
    );
    drop(end.await.expect("the dial goes on for nobody"));
}

/// gRPC servers in Go end a connection with more than one ping in 15 s and nothing under way.
#[tokio::test]
async fn pings_are_answered_however_often_they_come() {
    let mut world = World::new().await;
    drop(world.envoy().await);
    let socket = tokio::net::UnixStream::connect(world.agent.path("etc/istio/proxy/XDS")).await.unwrap();
    let (_client, mut connection) = h2::client::handshake(socket).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    let mut driver = tokio::task::JoinSet::new();
    driver.spawn(connection);
    for nth in 0..100 {
        let pong = tokio::time::timeout(LIMIT, pings.ping(h2::Ping::opaque())).await;
        pong.expect("a pong").unwrap_or_else(|e| panic!("ping {nth}: {e}"));
    }
}

#[tokio::test]
async fn a_silent_stream_stays_and_ends_when_envoy_leaves() {
    let mut world = World::new().await;
    world.mock.ads().always(vec![Fault::HalfOpen]);
    let mut envoy = world.envoy().await.ads();
    envoy.send(&ask(CDS));
    eventually("istiod has the stream", || async {
        (!world.mock.record().ads_streams().is_empty()).then_some(())
    })
    .await;
    assert!(
        tokio::time::timeout(Duration::from_millis(300), envoy.next()).await.is_err(),
        "nobody has spoken"
    );
    world.mock.ads().clear();
    drop(envoy);
    counted(&world, "envoy_connection_terminations{type=\"cancelled\"}", 1.0).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
    drop(envoy);
    ended(istiod).await;
}

#[tokio::test]
async fn a_socket_that_somebody_removes_or_replaces_is_bound_again_and_the_open_stream_stays() {
    let mut world = World::new().await;
    let (mut first, istiod) = world.sotw().await;
    // Envoy's bootstrap lies beside the socket, and is read by now.
    world.agent.wait_ready().await;
    let socket = world.agent.path(XDS);
    let ways: [&dyn Fn(&Path); 3] = [
        &|path: &Path| std::fs::remove_file(path).unwrap(),
        &|path: &Path| {
            std::fs::write(path.with_extension("fresh"), "x").unwrap();
            std::fs::rename(path.with_extension("fresh"), path).unwrap();
        },
        &|path: &Path| std::fs::rename(path.parent().unwrap(), path.with_file_name("../away")).unwrap(),
    ];
    for (n, take_away) in ways.into_iter().enumerate() {
        take_away(&socket);
        drop(world.envoy().await);
        istiod.responses.sotw(&answer(CDS, &n.to_string(), 10)).await.unwrap();
        assert_eq!(first.next().await.unwrap().nonce, n.to_string());
    }
    // One that cannot be made is told, and waited for.
    let folder = socket.parent().unwrap();
    std::fs::rename(folder, folder.with_file_name("again")).unwrap();
    std::fs::write(folder, "").unwrap();
    beside::told(&world.agent, "SocketFolder", "etc/istio/proxy").await;
    std::fs::remove_file(folder).unwrap();
    drop(world.envoy().await);
    world.agent.wait_log("over: SocketFolder").await;
    istiod.responses.sotw(&answer(CDS, "last", 10)).await.unwrap();
    assert_eq!(first.next().await.unwrap().nonce, "last");
}
