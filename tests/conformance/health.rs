//! Health of the application on a VM: probed by the agent, told to istiod on the discovery stream.

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use serde_json::{Value, json};

use super::ads::{CDS, World, ask, request};
use crate::support::builder::Builder;
use crate::support::client::node;
use crate::support::eventually;

const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

fn probing(probe: Value) -> impl FnOnce(Builder) -> Builder {
    |builder| builder.proxy_config("readinessProbe", probe)
}

/// Healthy as long as there is a file `well` in the working directory.
fn by_file() -> Value {
    json!({"periodSeconds": 1, "exec": {"command": ["test", "-e", "well"]}})
}

fn ask_delta(type_url: &str) -> DeltaDiscoveryRequest {
    let node = Some(node("sidecar~1"));
    DeltaDiscoveryRequest { node, type_url: type_url.to_owned(), ..Default::default() }
}

/// The next request is a report: `None` is healthy.
async fn report(istiod: &mut mock_istiod::AdsStream) -> Option<(i32, String)> {
    let report = request(istiod).await;
    assert_eq!(report.type_url, HEALTH);
    assert_eq!((report.node, report.nonce.as_str(), report.names.len()), (None, "", 0));
    report.nack
}

#[tokio::test]
async fn changes_are_told_in_order_and_the_last_again_on_each_new_stream_after_listeners() {
    let mut world = World::with(probing(by_file())).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    assert_eq!(request(&mut istiod).await.type_url, CDS, "nothing is told before listeners are asked for");
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    assert_eq!(report(&mut istiod).await.expect("it is not well").0, 13);
    world.agent.put("well", "");
    assert_eq!(report(&mut istiod).await, None);
    std::fs::remove_file(world.agent.path("well")).unwrap();
    let (code, text) = report(&mut istiod).await.expect("it is not well");
    assert_eq!((code, text.as_str()), (13, "exit status 1"));

    drop(envoy);
    let (envoy, mut istiod) = world.delta().await;
    envoy.send(&ask_delta(CDS));
    envoy.send(&ask_delta(LDS));
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    assert_eq!(report(&mut istiod).await, Some((13, "exit status 1".to_owned())));
    world.agent.put("well", "");
    assert_eq!(report(&mut istiod).await, None);
    world.agent.stop().await;
}

#[tokio::test]
async fn without_a_ready_envoy_the_workload_is_not_healthy() {
    let mut world = World::with(|b| probing(by_file())(b.file("well", "").fake("ready", false))).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    let (code, text) = report(&mut istiod).await.expect("Envoy is not ready");
    assert_eq!(code, 13);
    assert!(!text.contains("exit status"), "the application itself is well: {text}");
    world.agent.stop().await;
}

#[tokio::test]
async fn probes_that_cannot_be_meant_do_not_end_the_agent() {
    for probe in [
        json!({}),
        json!({"exec": {"command": []}}),
        json!({"periodSeconds": -1, "exec": {"command": ["true"]}}),
    ] {
        let mut world = World::with(probing(probe.clone())).await;
        let (envoy, mut istiod) = world.sotw().await;
        envoy.send(&ask(LDS));
        assert_eq!(request(&mut istiod).await.type_url, LDS);
        world.agent.wait_ready().await;
        envoy.send(&ask(CDS));
        assert_eq!(request(&mut istiod).await.type_url, CDS, "no report came in between: {probe}");
        world.agent.stop().await;
    }
}

#[tokio::test]
async fn a_long_initial_delay_does_not_hold_up_the_end() {
    let mut world =
        World::with(probing(json!({"initialDelaySeconds": 3600, "tcpSocket": {"port": 1}}))).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    eventually("Envoy is ready", || async {
        world.agent.get("/healthz/ready").await.ok().filter(|reply| reply.status.is_success())
    })
    .await;
    world.agent.stop().await;
}
