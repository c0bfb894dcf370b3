//! `XDS_RECONNECT_SPREAD`: after istiod has ended the stream the next dial waits for this agent's turn.

use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use mock_istiod::AdsStream;

use crate::ads::{CDS, Sotw, World, answer, ask, request};
use crate::support::LIMIT;
use crate::support::agent::TOKEN;

const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

// An agent whose Envoy has clusters and listeners, and istiod's side of it.
async fn configured(spread: &str) -> (World, Sotw, AdsStream) {
    let mut world = World::with(|b| b.env("XDS_RECONNECT_SPREAD", spread)).await;
    let (mut envoy, mut istiod) = world.sotw().await;
    for type_url in [CDS, LDS] {
        envoy.send(&ask(type_url));
        while request(&mut istiod).await.type_url != type_url {}
        istiod.responses.sotw(&answer(type_url, "1", 1)).await.unwrap();
        envoy.next().await.unwrap();
        envoy.send(&has(type_url, "1"));
        while request(&mut istiod).await.type_url != type_url {}
    }
    (world, envoy, istiod)
}

// A request of an Envoy that has something of the type.
fn has(type_url: &str, nonce: &str) -> DiscoveryRequest {
    let (version_info, response_nonce) = ("1".to_owned(), nonce.to_owned());
    DiscoveryRequest { version_info, response_nonce, ..ask(type_url) }
}

async fn broken(world: &mut World, mut envoy: Sotw, istiod: AdsStream) {
    drop(istiod);
    envoy.end().await;
    world.agent.wait_log("dialling again is put off for").await;
}

#[tokio::test]
async fn a_dial_is_put_off_and_a_changed_token_hurries_it() {
    let (mut world, envoy, istiod) = configured("10m").await;
    broken(&mut world, envoy, istiod).await;
    let mut held = world.envoy().await.ads();
    held.send(&has(CDS, ""));
    // Until news counts: a change that comes before the stream waits is none. Its turn may come by itself meanwhile.
    let dialled = async {
        loop {
            world.agent.put(TOKEN, world.mock.mint("ns", "sa"));
            let within = Duration::from_secs(1);
            if let Ok(stream) = tokio::time::timeout(within, world.streams.recv()).await {
                return stream.expect("the mock is there");
            }
        }
    };
    let mut istiod = tokio::time::timeout(LIMIT, dialled).await.expect("a changed token changed nothing");
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    istiod.responses.sotw(&answer(CDS, "2", 1)).await.unwrap();
    assert_eq!(held.next().await.unwrap().nonce, "2");
}

#[tokio::test]
async fn a_dial_that_was_put_off_is_made_when_its_turn_comes() {
    let (mut world, envoy, istiod) = configured("2s").await;
    broken(&mut world, envoy, istiod).await;
    let mut held = world.envoy().await.ads();
    held.send(&has(CDS, ""));
    let mut istiod = world.istiod().await;
    assert_eq!(request(&mut istiod).await.version, "1");
    istiod.responses.sotw(&answer(CDS, "2", 1)).await.unwrap();
    assert_eq!(held.next().await.unwrap().nonce, "2");
}

#[tokio::test]
async fn an_envoy_without_a_configuration_is_not_put_off() {
    let (mut world, envoy, istiod) = configured("10m").await;
    broken(&mut world, envoy, istiod).await;
    let new = world.envoy().await.ads();
    new.send(&ask(CDS));
    let stream = tokio::time::timeout(LIMIT, world.streams.recv()).await;
    let mut istiod = stream.expect("the new Envoy's stream was put off").unwrap();
    assert_eq!(request(&mut istiod).await.version, "");
}
