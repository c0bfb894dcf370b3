//! The last good configuration (`XDS_REPLAY`): an Envoy that comes while istiod is away has it, and is handed over to
//! istiod without its stream ending.

mod limits;
mod same;

use std::collections::BTreeMap;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::google::rpc;
use mock_istiod::{AdsStream, Fault};
use prost::Message;
use rustix::process::{Signal, kill_process};

use super::ads::{CDS, Delta, Sotw, World, ask, ended, request};
use crate::support::builder::Builder;
use crate::support::client::node;
use crate::support::mesh::Loop;
use crate::support::{Code, Envoy, MockIstiod, TestAgent, eventually};

pub const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const SERVING: &str = "istio_agent_xds_replay_serving";
const STREAMS: &str = "istio_agent_xds_replay_streams";

async fn world() -> World {
    World::with(|b| b.env("XDS_REPLAY", "memory").env("XDS_REPLAY_AFTER", "200ms")).await
}

pub fn ask_delta(type_url: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(node("sidecar~1")),
        type_url: type_url.to_owned(),
        ..Default::default()
    }
}

pub fn answer_delta(type_url: &str, nonce: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: type_url.to_owned(),
        response_nonce: nonce.to_owned(),
        ..Default::default()
    }
}

// A resource with a field that nobody knows, which must come back.
pub fn resource(type_url: &str, name: &str, version: &str) -> Resource {
    let mut value = vec![0x0a, u8::try_from(name.len()).unwrap()];
    value.extend_from_slice(name.as_bytes());
    value.extend_from_slice(&[0xc2, 0x3e, 0x03, b'a', b'b', b'c']);
    Resource {
        name: name.to_owned(),
        version: version.to_owned(),
        resource: Some(Any { type_url: type_url.to_owned(), value }),
        ..Default::default()
    }
}

pub fn delta(
    type_url: &str,
    nonce: &str,
    resources: &[Resource],
    removed: &[&str],
) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        resources: resources.to_vec(),
        removed_resources: removed.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

/// Istiod says this, and Envoy accepts it or not.
async fn told(envoy: &mut Delta, istiod: &mut AdsStream, response: &DeltaDiscoveryResponse, accepts: bool) {
    istiod.responses.delta(response).await.unwrap();
    assert_eq!(&envoy.next().await.unwrap(), response);
    let mut answer = answer_delta(&response.type_url, &response.nonce);
    if !accepts {
        answer.error_detail = Some(rpc::Status { code: 13, message: "no".to_owned(), ..Default::default() });
    }
    envoy.send(&answer);
    assert_eq!(request(istiod).await.nonce, response.nonce);
}

/// Envoy has accepted clusters `a` and `b`, rejected a change of `a`, accepted that `b` went, and a listener; then it
/// went itself.
async fn filled(world: &mut World) {
    let (mut envoy, mut istiod) = world.delta().await;
    envoy.send(&ask_delta(CDS));
    request(&mut istiod).await;
    let clusters = [resource(CDS, "a", "1"), resource(CDS, "b", "1")];
    told(&mut envoy, &mut istiod, &delta(CDS, "c1", &clusters, &[]), true).await;
    told(&mut envoy, &mut istiod, &delta(CDS, "c2", &[resource(CDS, "a", "2")], &[]), false).await;
    told(&mut envoy, &mut istiod, &delta(CDS, "c3", &[], &["b"]), true).await;
    envoy.send(&ask_delta(LDS));
    request(&mut istiod).await;
    told(&mut envoy, &mut istiod, &delta(LDS, "l1", &[resource(LDS, "l", "1")], &[]), true).await;
    drop(envoy);
    ended(istiod).await;
}

#[tokio::test]
async fn what_envoy_accepted_is_answered_and_istiod_is_told_what_it_has() {
    let mut world = world().await;
    filled(&mut world).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    for type_url in [CDS, LDS] {
        envoy.send(&ask_delta(type_url));
        let response = envoy.next().await.unwrap();
        let expected = if type_url == CDS { resource(CDS, "a", "1") } else { resource(LDS, "l", "1") };
        assert_eq!((response.type_url.as_str(), &response.resources[..]), (type_url, &[expected][..]));
        assert!(response.nonce.starts_with("memory-") && response.removed_resources.is_empty());
        envoy.send(&answer_delta(type_url, &response.nonce));
    }
    assert_eq!(world.agent.metric(SERVING).await, Some(1.0));
    let why = world.agent.get("/healthz/ready?verbose").await.unwrap().text();
    assert!(why.contains("ServingFromMemory") && why.contains("served from memory since"), "{why}");
    world.mock.up().await.unwrap();
    let mut istiod = world.istiod().await;
    for (n, type_url) in [CDS, LDS].iter().enumerate() {
        let asked = DeltaDiscoveryRequest::decode(&request(&mut istiod).await.raw[..]).unwrap();
        assert_eq!((asked.type_url.as_str(), asked.node.is_some()), (*type_url, n == 0));
        assert_eq!(asked.response_nonce, "");
        let name = if n == 0 { "a" } else { "l" };
        let has: BTreeMap<_, _> = asked.initial_resource_versions.into_iter().collect();
        assert_eq!(has, [(name.to_owned(), "1".to_owned())].into());
    }
    // The same stream goes on, with istiod.
    let news = delta(CDS, "i1", &[resource(CDS, "a", "3")], &[]);
    istiod.responses.delta(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    envoy.send(&answer_delta(CDS, "i1"));
    assert_eq!(request(&mut istiod).await.nonce, "i1");
    assert_eq!(world.agent.metric(SERVING).await, Some(0.0));
    assert_eq!(world.agent.metric(&format!("{STREAMS}{{result=\"handed over\"}}")).await, Some(1.0));
    assert!(!world.agent.get("/healthz/ready?verbose").await.unwrap().text().contains("ServingFromMemory"));
    // What it brought is kept in turn.
    drop(envoy);
    ended(istiod).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    assert_eq!(envoy.next().await.unwrap().resources, [resource(CDS, "a", "3")]);
    world.agent.stop().await;
}

#[tokio::test]
async fn what_envoy_accepted_is_handed_to_the_next_program() {
    let mut world = World::with(|b| {
        b.env("XDS_REPLAY", "memory").env("XDS_REPLAY_AFTER", "200ms").env("AGENT_UPGRADE", "true")
    })
    .await;
    filled(&mut world).await;
    world.agent.wait_ready().await;
    world.mock.down().await;
    let said = world.agent.run(&["upgrade"]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    assert_eq!(envoy.next().await.unwrap().resources, [resource(CDS, "a", "1")]);
    world.agent.stop().await;
}

#[tokio::test]
async fn an_istiod_that_accepts_and_is_silent_is_stood_in_for() {
    let mut world = world().await;
    filled(&mut world).await;
    let (mut envoy, mut istiod) = world.delta_asking(&ask_delta(CDS)).await;
    let asked = request(&mut istiod).await;
    assert_eq!(asked.raw, ask_delta(CDS).encode_to_vec(), "word for word");
    let response = envoy.next().await.unwrap();
    assert_eq!(response.resources, [resource(CDS, "a", "1")], "from memory");
    // Asked for meanwhile; istiod must not wait for it, as it may be what it waits for.
    envoy.send(&ask_delta(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    assert_eq!(envoy.next().await.unwrap().resources, [resource(LDS, "l", "1")]);
    let news = delta(CDS, "i1", &[resource(CDS, "a", "4")], &[]);
    istiod.responses.delta(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    // Late answers to memory stay with the agent; what is asked for in them does not.
    envoy.send(&answer_delta(CDS, &response.nonce));
    let more = DeltaDiscoveryRequest {
        resource_names_subscribe: vec!["x".to_owned()],
        ..answer_delta(CDS, &response.nonce)
    };
    envoy.send(&more);
    let passed = DeltaDiscoveryRequest::decode(&request(&mut istiod).await.raw[..]).unwrap();
    assert_eq!(
        (passed.resource_names_subscribe, passed.response_nonce),
        (vec!["x".to_owned()], String::new())
    );
    world.agent.stop().await;
}

#[tokio::test]
async fn an_istiod_that_refuses_is_not_stood_in_for() {
    let mut world = world().await;
    filled(&mut world).await;
    world.mock.ads().next(Fault::refuse(Code::PermissionDenied));
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    assert_eq!(envoy.end().await.code(), tonic::Code::PermissionDenied);
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    eventually("the stream is held", || async {
        world.agent.metric("istio_agent_xds_held_streams").await.filter(|n| *n == 1.0)
    })
    .await;
    assert!(envoy.is_silent());
    assert_eq!(world.agent.metric(SERVING).await, None);
    world.agent.stop().await;
}

#[tokio::test]
async fn half_a_configuration_is_none() {
    let mut world = world().await;
    let (mut envoy, mut istiod) = world.delta().await;
    envoy.send(&ask_delta(CDS));
    request(&mut istiod).await;
    told(&mut envoy, &mut istiod, &delta(CDS, "c1", &[resource(CDS, "a", "1")], &[]), true).await;
    drop(envoy);
    ended(istiod).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    assert_eq!(
        envoy.end().await.code(),
        tonic::Code::Unavailable,
        "clusters without listeners are no configuration"
    );
    world.agent.stop().await;
}

fn sotw(type_url: &str, nonce: &str, version: &str, names: &[&str]) -> DiscoveryResponse {
    DiscoveryResponse {
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        version_info: version.to_owned(),
        resources: names.iter().filter_map(|name| resource(type_url, name, "").resource).collect(),
        ..Default::default()
    }
}

fn ack(response: &DiscoveryResponse) -> DiscoveryRequest {
    DiscoveryRequest {
        type_url: response.type_url.clone(),
        version_info: response.version_info.clone(),
        response_nonce: response.nonce.clone(),
        ..Default::default()
    }
}

async fn pushed(envoy: &mut Sotw, istiod: &mut AdsStream, response: &DiscoveryResponse) {
    istiod.responses.sotw(response).await.unwrap();
    assert_eq!(&envoy.next().await.unwrap(), response);
    envoy.send(&ack(response));
    assert_eq!(request(istiod).await.nonce, response.nonce);
}

#[tokio::test]
async fn in_the_older_protocol_istiod_is_asked_for_everything() {
    let mut world = world().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    for (type_url, nonce) in [(CDS, "c1"), (LDS, "l1")] {
        envoy.send(&ask(type_url));
        request(&mut istiod).await;
        pushed(&mut envoy, &mut istiod, &sotw(type_url, nonce, "7", &["a", "b"])).await;
    }
    pushed(&mut envoy, &mut istiod, &sotw(CDS, "c2", "8", &["b", "c"])).await;
    drop(envoy);
    ended(istiod).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.ads();
    let mut last = Vec::new();
    for (type_url, version, names) in [(CDS, "8", ["b", "c"]), (LDS, "7", ["a", "b"])] {
        envoy.send(&ask(type_url));
        let response = envoy.next().await.unwrap();
        let expected = sotw(type_url, &response.nonce, version, &names);
        assert_eq!(response, expected);
        envoy.send(&ack(&response));
        last.push(response);
    }
    world.mock.up().await.unwrap();
    let mut istiod = world.istiod().await;
    for type_url in [CDS, LDS] {
        let asked = DiscoveryRequest::decode(&request(&mut istiod).await.raw[..]).unwrap();
        assert_eq!((asked.type_url.as_str(), asked.version_info.as_str()), (type_url, ""));
        assert_eq!(asked.response_nonce, "");
    }
    let news = sotw(CDS, "i1", "9", &["c"]);
    istiod.responses.sotw(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    // Of listeners Envoy knows no nonce but memory's, and asks for other ones with it.
    envoy.send(&DiscoveryRequest { resource_names: vec!["z".to_owned()], ..ack(&last[1]) });
    let asked = DiscoveryRequest::decode(&request(&mut istiod).await.raw[..]).unwrap();
    assert_eq!((asked.resource_names, asked.response_nonce.as_str()), (vec!["z".to_owned()], ""));
    assert_eq!(asked.version_info, "");
    world.agent.stop().await;
}

// How long nothing is said that must not be.
const QUIET: Duration = Duration::from_secs(2);

// Of a push whose answer nobody has heard Envoy has everything, whatever an agent has noted of it.
#[tokio::test]
async fn what_envoy_has_is_left_alone_while_istiod_is_away() {
    let mut world = world().await;
    let (mut envoy, mut istiod) = world.delta().await;
    for (type_url, nonce, name) in [(CDS, "c1", "a"), (LDS, "l1", "l")] {
        envoy.send(&ask_delta(type_url));
        request(&mut istiod).await;
        let news = delta(type_url, nonce, &[resource(type_url, name, "1")], &[]);
        told(&mut envoy, &mut istiod, &news, true).await;
    }
    let news = delta(CDS, "c2", &[resource(CDS, "a", "2"), resource(CDS, "c", "2")], &[]);
    istiod.responses.delta(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    world.mock.down().await;
    envoy.end().await;
    let mut has = BTreeMap::from([(CDS, vec![("a", "2"), ("c", "2")]), (LDS, vec![("l", "1")])]);
    let mut envoy = world.envoy().await.delta_ads();
    for (type_url, all) in &has {
        let has = all.iter().map(|(name, version)| ((*name).to_owned(), (*version).to_owned()));
        envoy
            .send(&DeltaDiscoveryRequest { initial_resource_versions: has.collect(), ..ask_delta(type_url) });
    }
    while let Ok(Ok(response)) = tokio::time::timeout(QUIET, envoy.next()).await {
        let has = has.get_mut(response.type_url.as_str()).unwrap();
        assert!(response.removed_resources.is_empty(), "{response:?}");
        let same = |r: &Resource| has.contains(&(r.name.as_str(), r.version.as_str()));
        assert!(response.resources.iter().all(same), "{response:?}");
    }
    // Istiod's word is another matter.
    world.mock.up().await.unwrap();
    let mut istiod = world.istiod().await;
    let asked = DeltaDiscoveryRequest::decode(&request(&mut istiod).await.raw[..]).unwrap();
    assert_eq!(asked.initial_resource_versions.len(), 2);
    let news = delta(CDS, "i1", &[resource(CDS, "a", "3")], &["c"]);
    istiod.responses.delta(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    world.agent.stop().await;
}

#[tokio::test]
async fn and_so_it_is_in_the_older_protocol() {
    let mut world = world().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    for (type_url, nonce) in [(CDS, "c1"), (LDS, "l1")] {
        envoy.send(&ask(type_url));
        request(&mut istiod).await;
        pushed(&mut envoy, &mut istiod, &sotw(type_url, nonce, "7", &["a"])).await;
    }
    let news = sotw(CDS, "c2", "8", &["a", "c"]);
    istiod.responses.sotw(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    world.mock.down().await;
    envoy.end().await;
    let mut envoy = world.envoy().await.ads();
    for (type_url, version) in [(CDS, "8"), (LDS, "7")] {
        envoy.send(&DiscoveryRequest { version_info: version.to_owned(), ..ask(type_url) });
    }
    while let Ok(Ok(response)) = tokio::time::timeout(QUIET, envoy.next()).await {
        assert_eq!((response.type_url.as_str(), response.version_info.as_str()), (LDS, "7"));
        envoy.send(&ack(&response));
    }
    world.mock.up().await.unwrap();
    let mut istiod = world.istiod().await;
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    let news = sotw(CDS, "i1", "9", &["c"]);
    istiod.responses.sotw(&news).await.unwrap();
    assert_eq!(envoy.next().await.unwrap(), news);
    world.agent.stop().await;
}

async fn crash(sotw: bool) {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let builder = TestAgent::with()
        .istiod(&mock)
        .env("METRICS_DETAILS", "true")
        .env("XDS_REPLAY", "memory")
        .env("ENVOY_RECOVERY", "true")
        .env("ISTIO_DELTA_XDS", (!sotw).to_string());
    let mut agent = builder.envoy(Envoy::Real).start();
    agent.wait_ready().await;
    let shows = |value: &'static str| {
        let mock = &mock;
        eventually(value, move || async move {
            let reply = mesh.ask(mock).await.ok()?;
            (reply.headers.get("x-config")? == value).then_some(())
        })
    };
    shows("one").await;
    mock.down().await;
    let before = agent.envoy_pid().await;
    kill_process(before, Signal::KILL).unwrap();
    eventually("another Envoy runs", || async {
        let now = agent.envoy_pid().await;
        (now != before).then_some(())
    })
    .await;
    // Mutual TLS, with istiod away.
    shows("one").await;
    assert_eq!(agent.metric(SERVING).await, Some(1.0));
    agent.wait_ready().await;
    mesh.push(&mock, "two");
    mock.up().await.unwrap();
    shows("two").await;
    assert_eq!(agent.metric(&format!("{STREAMS}{{result=\"handed over\"}}")).await, Some(1.0));
    mesh.push(&mock, "three");
    shows("three").await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envoy_that_crashes_while_istiod_is_away_serves_again() {
    crash(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn and_so_does_one_of_the_older_protocol() {
    crash(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_beside_the_own_envoy_that_istiod_refuses_takes_nothing_from_the_workload() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let builder = TestAgent::with()
        .istiod(&mock)
        .env("METRICS_DETAILS", "true")
        .env("XDS_REPLAY", "memory")
        .env("ENVOY_RECOVERY", "true");
    let mut agent = builder.envoy(Envoy::Real).start();
    agent.wait_ready().await;
    eventually("traffic flows", || async { mesh.ask(&mock).await.ok() }).await;
    for (code, told) in [
        (Code::InvalidArgument, tonic::Code::InvalidArgument),
        (Code::Unavailable, tonic::Code::Unavailable),
        (Code::PermissionDenied, tonic::Code::PermissionDenied),
    ] {
        mock.ads().always(vec![Fault::refuse(code)]);
        let mut stranger = agent.xds().await.ads();
        stranger.send(&ask(CDS));
        // After the first failure in a row it is held, as Envoy would be.
        let end = tokio::time::timeout(std::time::Duration::from_secs(2), stranger.end()).await;
        assert!(end.is_ok_and(|end| end.code() == told) || code == Code::PermissionDenied, "{code:?}");
        drop(stranger);
        mock.ads().clear();
        let page = agent.get("/debug/agentz").await.unwrap().text();
        let page: serde_json::Value = serde_json::from_str(&page).unwrap();
        assert_eq!(page["troubles"], serde_json::json!([]), "{code:?}");
        let types = page["config"]["types"].as_array().unwrap();
        assert!(types.iter().all(|of| of["state"] != "stale"), "{code:?}: {types:?}");
    }
    mock.down().await;
    let before = agent.envoy_pid().await;
    kill_process(before, Signal::KILL).unwrap();
    eventually("another Envoy serves", || async {
        let now = agent.envoy_pid().await;
        (now != before).then_some(())?;
        mesh.ask(&mock).await.ok()
    })
    .await;
    assert_eq!(agent.metric(SERVING).await, Some(1.0));
    agent.stop().await;
}

/// Serves once, is killed with its Envoy, and is started again in the same folder, with istiod away for good.
async fn killed(change: impl Fn(Builder) -> Builder) -> (MockIstiod, Loop, TestAgent) {
    let (mock, mesh, agent, _) = killed_with(|builder| builder, change).await;
    (mock, mesh, agent)
}

/// As [`killed`], with a change at the first start, too; gives what every later start begins with.
async fn killed_with(
    first: impl Fn(Builder) -> Builder,
    change: impl Fn(Builder) -> Builder,
) -> (MockIstiod, Loop, TestAgent, impl Fn() -> Builder) {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let disk = TestAgent::with().istiod(&mock).env("METRICS_DETAILS", "true").env("XDS_REPLAY", "disk");
    let disk = disk.env("IDENTITY_PERSIST", "true").envoy(Envoy::Real);
    let builder = move || disk.clone();
    let mut agent = first(builder()).start();
    agent.wait_ready().await;
    eventually("traffic flows", || async { mesh.ask(&mock).await.ok() }).await;
    let file = agent.path(FILE);
    eventually("the configuration is written", || async { file.exists().then_some(()) }).await;
    let key = if agent.environment().contains_key("IDENTITY_PERSIST_KEY") { "key.sealed" } else { "key.pem" };
    let key = std::fs::metadata(agent.path("etc/istio/proxy/last-good/identity").join(key)).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&key.permissions()) & 0o777, 0o600);
    mock.down().await;
    agent.signal(Signal::KILL);
    agent.wait_exit().await;
    eventually("Envoy is gone, too", || async { agent.processes().is_empty().then_some(()) }).await;
    let again = change(builder()).start_in(agent.take_dir());
    (mock, mesh, again, builder)
}

const FILE: &str = "etc/istio/proxy/last-good/config";

#[tokio::test(flavor = "multi_thread")]
async fn agent_and_envoy_that_are_killed_serve_again_without_istiod() {
    let (mock, mesh, mut agent) = killed(|builder| builder).await;
    // Mutual TLS, with a certificate and a configuration of before.
    eventually("traffic flows again", || async { mesh.ask(&mock).await.ok() }).await;
    agent.wait_ready().await;
    assert_eq!(agent.metric(SERVING).await, Some(1.0));
    mesh.push(&mock, "two");
    mock.up().await.unwrap();
    eventually("istiod is heard again", || async {
        let reply = mesh.ask(&mock).await.ok()?;
        (reply.headers.get("x-config")? == "two").then_some(())
    })
    .await;
    agent.stop().await;
}
