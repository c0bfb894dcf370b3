//! What Envoy rejects, or has a stand-in for, is told for as long as that is so: the rejected thing may go away without
//! anything ever being accepted in its place.

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest, Resource};
use envoy_types::pb::google::rpc::Status;
use mock_istiod::AdsStream;

use super::ads::{Delta, World, answer, ask, ended, request};
use super::replay::{answer_delta, ask_delta, delta, resource};
use super::wasm::{remote, with_folder};
use crate::support::client::ack;
use crate::support::{eventually, free_port, root_for};

const ECDS: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const EDS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn no() -> Option<Status> {
    Some(Status { code: 13, message: "no such thing".to_owned(), ..Status::default() })
}

async fn tells(world: &World, kind: &str) -> bool {
    let page = world.agent.get("/debug/agentz").await.expect("an answer").text();
    let page: serde_json::Value = serde_json::from_str(&page).expect("JSON");
    page["troubles"].as_array().expect("a list").iter().any(|trouble| trouble["kind"] == kind)
}

async fn until(world: &World, kind: &str, told: bool) {
    let what = format!("{kind} is {}", if told { "told" } else { "over" });
    eventually(&what, || async { (tells(world, kind).await == told).then_some(()) }).await;
}

fn subscribe(type_url: &str, more: &[&str], less: &[&str]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        resource_names_subscribe: names(more),
        resource_names_unsubscribe: names(less),
        ..ask_delta(type_url)
    }
}

/// An Envoy that rejects what it has asked for.
async fn rejecting(world: &mut World) -> (Delta, AdsStream) {
    let (mut envoy, mut istiod) = world.delta().await;
    envoy.send(&subscribe(EDS, &["a", "b"], &[]));
    while request(&mut istiod).await.names != ["a", "b"] {}
    istiod.responses.delta(&delta(EDS, "n", &[resource(EDS, "a", "1")], &[])).await.unwrap();
    envoy.next().await.unwrap();
    envoy.send(&DeltaDiscoveryRequest { error_detail: no(), ..answer_delta(EDS, "n") });
    until(world, "ConfigRejected", true).await;
    (envoy, istiod)
}

#[tokio::test]
async fn a_rejection_is_over_when_envoy_asks_for_nothing_of_the_type_any_more() {
    let mut world = World::new().await;
    let (envoy, mut istiod) = rejecting(&mut world).await;
    // The filter that wants it has gone; istiod has nothing to say to that.
    envoy.send(&subscribe(EDS, &[], &["b"]));
    while request(&mut istiod).await.unsubscribe != ["b"] {}
    assert!(tells(&world, "ConfigRejected").await, "the other is still asked for");
    envoy.send(&subscribe(EDS, &[], &["a"]));
    until(&world, "ConfigRejected", false).await;
    let status = world.agent.run(&["status", "--json"]).await.json();
    assert_eq!(status["istiod"]["types"][0]["state"], "synced", "{status}");
}

#[tokio::test]
async fn a_new_envoy_has_rejected_nothing_yet() {
    let mut world = World::new().await;
    let (envoy, istiod) = rejecting(&mut world).await;
    drop(envoy);
    ended(istiod).await;
    assert!(tells(&world, "ConfigRejected").await, "a stream that breaks changes nothing");
    let (envoy, _istiod) = world.delta().await;
    envoy.send(&ask_delta(EDS));
    until(&world, "ConfigRejected", false).await;
}

/// With the older protocol each change of what is asked for names the last response again.
#[tokio::test]
async fn who_asks_for_more_has_not_accepted_what_was_rejected() {
    let mut world = World::new().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    let asks = |wanted: &[&str]| DiscoveryRequest { resource_names: names(wanted), ..ask(EDS) };
    envoy.send(&asks(&["a"]));
    istiod.responses.sotw(&answer(EDS, "1", 1)).await.unwrap();
    let good = envoy.next().await.unwrap();
    envoy.send(&ack(&good, &["a"]));
    istiod.responses.sotw(&answer(EDS, "2", 1)).await.unwrap();
    let bad = envoy.next().await.unwrap();
    envoy.send(&DiscoveryRequest { error_detail: no(), ..ack(&bad, &["a"]) });
    until(&world, "ConfigRejected", true).await;
    envoy.send(&ack(&bad, &["a", "b"]));
    while request(&mut istiod).await.names != ["a", "b"] {}
    istiod.responses.sotw(&answer(EDS, "3", 1)).await.unwrap();
    let other = envoy.next().await.unwrap();
    assert!(tells(&world, "ConfigRejected").await, "nothing was accepted since");
    envoy.send(&ack(&other, &["a", "b"]));
    until(&world, "ConfigRejected", false).await;
}

#[tokio::test]
async fn a_module_that_nobody_wants_any_more_is_no_trouble() {
    if !root_for("a mount namespace") {
        return;
    }
    let mut world = World::with(|b| with_folder(b).env("WASM_HTTP_REQUEST_MAX_RETRIES", "1")).await;
    let (mut envoy, mut istiod) = world.delta().await;
    envoy.send(&subscribe(ECDS, &["f"], &[]));
    while request(&mut istiod).await.names != ["f"] {}
    let filter = remote("f", format!("http://127.0.0.1:{}/none", free_port()), |_, _| {});
    let brought = Resource { resource: Some(filter), ..resource(ECDS, "f", "1") };
    istiod.responses.delta(&delta(ECDS, "n", &[brought], &[])).await.unwrap();
    envoy.next().await.unwrap();
    until(&world, "WasmFailed", true).await;
    envoy.send(&answer_delta(ECDS, "n"));
    envoy.send(&subscribe(ECDS, &[], &["f"]));
    until(&world, "WasmFailed", false).await;
}
