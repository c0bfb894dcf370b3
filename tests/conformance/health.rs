//! Health of the application on a VM: probed by the agent, told to istiod on the discovery stream.

use std::sync::{Arc, Mutex};

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use serde_json::{Value, json};

use super::ads::{CDS, World, ask, request};
use crate::support::builder::Builder;
use crate::support::client::node;
use crate::support::eventually;
use crate::support::web::{Web, json as answer};

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

// Whatever it may hold: `?token=...` is a common way to let nobody but a prober in.
#[tokio::test]
async fn the_query_of_a_probe_is_shown_nowhere() {
    let app = Web::start(|_, _| async { answer(200, &json!({})) }).await;
    let headers = json!([{"name": "x-key", "value": "s3cret"}]);
    let get = json!({"port": app.port, "path": "/h?key=s3cret", "httpHeaders": headers});
    let probe = json!({"httpGet": get, "periodSeconds": 1});
    let kubelets = json!({"/app-health/app/livez": probe}).to_string();
    let mut world = World::with(|b| probing(probe)(b).env("ISTIO_KUBE_APP_PROBERS", kubelets)).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    // At first Envoy may not be ready.
    while report(&mut istiod).await.is_some() {}
    drop(app);
    let (_, text) = report(&mut istiod).await.expect("nobody answers");
    assert!(text.starts_with("Get ") && text.contains("/h?...\": "), "{text}");
    // A few in a row are a trouble.
    for _ in 0..4 {
        assert_eq!(world.agent.get("/app-health/app/livez").await.unwrap().status, 500);
    }
    let page = world.agent.get("/debug/agentz").await.unwrap().text();
    assert!(page.contains("/h?...\\\": ") && page.contains("/h?...: "), "{page}");
    assert!(!page.contains("s3cret"), "{page}");
    let log = world.agent.stop().await;
    assert!(log.contains("/h?...: ") && !log.contains("s3cret"), "{log}");
}

#[tokio::test]
async fn a_probe_says_nothing_of_a_body_that_it_has_not() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    let app = Web::start(move |head, _| {
        notes.lock().unwrap().push(head.headers);
        async { answer(200, &json!({})) }
    })
    .await;
    // An application would wait for the body, and the probe for it.
    let headers =
        [("Content-Length", "5"), ("Trailer", "X-A"), ("Transfer-Encoding", "chunked"), ("X-A", "b")];
    let headers = headers.map(|(name, value)| json!({"name": name, "value": value}));
    let probe = json!({"periodSeconds": 1, "httpGet": {"port": app.port, "httpHeaders": headers}});
    let mut world = World::with(probing(probe)).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    // At first Envoy may not be ready.
    while report(&mut istiod).await.is_some() {}
    let head = seen.lock().unwrap().remove(0);
    assert_eq!(head["x-a"], "b");
    for left_out in ["content-length", "trailer", "transfer-encoding"] {
        assert!(!head.contains_key(left_out), "{head:?}");
    }
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

/// The soft and the hard limit of open files.
fn files(limits: &str) -> (u64, u64) {
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[tokio::test]
async fn the_agent_raises_its_limit_of_files_and_what_it_starts_has_the_one_before() {
    // A moment later, because the limit is given back to what has just been started.
    let command = json!(["sh", "-c", "sleep 1; cat /proc/$$/limits > fresh; mv fresh limits"]);
    let probe = json!({"periodSeconds": 1, "timeoutSeconds": 20, "exec": {"command": command}});
    let limit = ["prlimit", "--nofile=600:4000"];
    let wanted = |b: Builder| probing(probe)(b.env("AGENT_UPGRADE", "true").within(&limit));
    let world = World::with(wanted).await;
    let agent = &world.agent;
    let of = |pid: rustix::process::Pid| {
        files(&std::fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_pid())).unwrap())
    };
    let envoy = agent.envoy_pid().await;
    assert_eq!((of(agent.pid()), of(envoy)), ((4000, 4000), (600, 4000)));
    let read = || async { std::fs::read_to_string(agent.path("limits")).ok() };
    assert_eq!(files(&eventually("the probe has run", read).await), (600, 4000));
    // The next program does the same, and knows what there was.
    let said = agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!((of(agent.pid()), of(envoy)), ((4000, 4000), (600, 4000)));
    std::fs::remove_file(agent.path("limits")).unwrap();
    assert_eq!(files(&eventually("the probe has run again", read).await), (600, 4000));
    world.agent.stop().await;
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
