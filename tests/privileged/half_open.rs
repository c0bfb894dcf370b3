//! The relay when packets to istiod are dropped without a word: both ends believe in the connection. Everything,
//! the test included, runs in a network namespace of its own.

use std::fs::File;
use std::os::fd::AsFd;

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::time::timeout;

use crate::support::{LIMIT, MockIstiod, TestAgent};
use crate::world::{Backend, World};

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

fn ask() -> DiscoveryRequest {
    DiscoveryRequest { type_url: CDS.to_owned(), ..Default::default() }
}

#[test]
fn a_half_open_connection_to_istiod_ends_and_the_next_stream_heals() {
    let Some(world) = World::new(Backend::Nft, &["10.77.9.2/24"]) else { return };
    // The test's own thread stays outside.
    let inside = std::thread::spawn(move || {
        let namespace = File::open(format!("/var/run/netns/{}", world.name())).expect("just made");
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("root may");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(silence(&world));
    });
    if let Err(panic) = inside.join() {
        std::panic::resume_unwind(panic);
    }
}

async fn silence(world: &World) {
    let mock = MockIstiod::start().await;
    let mut streams = mock.take_streams();
    // 10 s is the least that the leg to istiod takes.
    let mut agent = TestAgent::with()
        .env("GRPC_KEEPALIVE_INTERVAL", "10s")
        .env("GRPC_KEEPALIVE_TIMEOUT", "1s")
        .istiod(&mock)
        .start();
    let mut envoy = agent.xds().await.ads();
    envoy.send(&ask());
    let istiod = timeout(LIMIT, streams.recv()).await.expect("the agent dials").expect("the mock is there");
    let response =
        DiscoveryResponse { type_url: CDS.to_owned(), nonce: "1".to_owned(), ..Default::default() };
    istiod.responses.sotw(&response).await.expect("the stream is open");
    assert_eq!(envoy.next().await.expect("a response").nonce, "1");

    let port = mock.address().port();
    world.inside(&format!("iptables -A INPUT -p tcp --sport {port} -j DROP"));
    world.inside(&format!("iptables -A INPUT -p tcp --dport {port} -j DROP"));
    let status = envoy.end().await;
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");
    // The ping without an answer or the kernel's TCP_USER_TIMEOUT: whichever is first, and it says which.
    let why = status.message();
    assert!(why.contains("keepalive") || why.contains("timed out"), "{status:?}");

    // The next stream waits for the way to come back.
    let mut held = agent.xds().await.ads();
    held.send(&ask());
    world.inside("iptables -F INPUT");
    let istiod =
        timeout(LIMIT, streams.recv()).await.expect("the agent dials again").expect("the mock is there");
    istiod.responses.sotw(&DiscoveryResponse { nonce: "2".to_owned(), ..response }).await.expect("open");
    assert_eq!(held.next().await.expect("a response").nonce, "2");
}
