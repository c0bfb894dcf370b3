//! The discovery relay: what passes and what does not, how streams end, faults on either leg, healing.
//!
//! The test plays Envoy on the XDS socket and istiod behind it; both protocols wherever they could differ.

use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource as Wrapped,
};
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::google::rpc;
use mock_istiod::{AdsStream, Fault, bulk};
use prost::Message;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::support::agent::{TOKEN, XDS};
use crate::support::builder::Builder;
use crate::support::client::{Duplex, EnvoyClient, node};
use crate::support::{Code, LIMIT, MockIstiod, TestAgent, eventually, root_for};

pub const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const PCDS: &str = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";

pub type Sotw = Duplex<DiscoveryRequest, DiscoveryResponse>;
pub type Delta = Duplex<DeltaDiscoveryRequest, DeltaDiscoveryResponse>;

pub struct World {
    pub mock: MockIstiod,
    pub streams: UnboundedReceiver<AdsStream>,
    pub agent: TestAgent,
}

impl World {
    pub async fn new() -> Self {
        Self::with(|b| b).await
    }

    pub async fn with(change: impl FnOnce(Builder) -> Builder) -> Self {
        let mock = MockIstiod::start().await;
        let streams = mock.take_streams();
        let agent = change(TestAgent::with().env("METRICS_DETAILS", "true").istiod(&mock)).start();
        Self { mock, streams, agent }
    }

    pub async fn envoy(&mut self) -> EnvoyClient {
        self.agent.xds().await
    }

    pub async fn istiod(&mut self) -> AdsStream {
        let stream = tokio::time::timeout(LIMIT, self.streams.recv()).await;
        stream.expect("the agent never opened its stream").expect("the mock is there")
    }

    pub async fn sotw(&mut self) -> (Sotw, AdsStream) {
        let envoy = self.envoy().await.ads();
        (envoy, self.istiod().await)
    }

    /// A stream of Envoy's that has asked before istiod is reached.
    pub async fn delta_asking(&mut self, first: &DeltaDiscoveryRequest) -> (Delta, AdsStream) {
        let envoy = self.envoy().await.delta_ads();
        envoy.send(first);
        (envoy, self.istiod().await)
    }

    pub async fn delta(&mut self) -> (Delta, AdsStream) {
        let envoy = self.envoy().await.delta_ads();
        (envoy, self.istiod().await)
    }
}

pub async fn request(stream: &mut AdsStream) -> mock_istiod::record::AdsRequest {
    let request = tokio::time::timeout(LIMIT, stream.requests.recv()).await;
    request.expect("no request in time").expect("the stream is open")
}

pub async fn ended(mut stream: AdsStream) {
    let rest = async { while stream.requests.recv().await.is_some() {} };
    tokio::time::timeout(LIMIT, rest).await.expect("the upstream stream never ended");
}

/// Looks until a figure is there and does not change any more.
async fn settled<T: PartialEq + Copy, F: Future<Output = Option<T>>>(what: &str, look: impl Fn() -> F) {
    eventually(&format!("{what} comes to a halt"), || async {
        let before = look().await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        (look().await? == before).then_some(())
    })
    .await;
}

pub fn ask(type_url: &str) -> DiscoveryRequest {
    DiscoveryRequest { node: Some(node("sidecar~1")), type_url: type_url.to_owned(), ..Default::default() }
}

fn ask_delta(type_url: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(node("sidecar~1")),
        type_url: type_url.to_owned(),
        ..Default::default()
    }
}

pub fn answer(type_url: &str, nonce: &str, size: usize) -> DiscoveryResponse {
    DiscoveryResponse {
        version_info: "1".to_owned(),
        type_url: type_url.to_owned(),
        nonce: nonce.to_owned(),
        resources: vec![Any { type_url: type_url.to_owned(), value: vec![1; size] }],
        ..Default::default()
    }
}

#[tokio::test]
async fn bytes_pass_unchanged_in_both_protocols() {
    let mut world = World::new().await;
    let unknown = [0xc2, 0x3e, 0x03, b'a', b'b', b'c'];
    let (mut envoy, mut istiod) = world.sotw().await;
    let sent = [&ask(CDS).encode_to_vec()[..], &unknown].concat();
    envoy.send_raw(sent.clone().into());
    assert_eq!(request(&mut istiod).await.raw, sent);
    for size in [0, 10, 70_000, 3_000_000] {
        let sent = [&unknown[..], &answer(CDS, "n", size).encode_to_vec()].concat();
        istiod.responses.message(&sent).await.unwrap();
        assert!(envoy.next_raw().await.unwrap() == sent);
    }
    let (mut envoy, mut istiod) = world.delta().await;
    let sent = [&ask_delta(CDS).encode_to_vec()[..], &unknown].concat();
    envoy.send_raw(sent.clone().into());
    assert_eq!(request(&mut istiod).await.raw, sent);
    let bodyless = Wrapped { name: "heartbeat".to_owned(), ..Default::default() };
    let removal = DeltaDiscoveryResponse {
        resources: vec![bodyless],
        removed_resources: vec!["gone".to_owned()],
        type_url: CDS.to_owned(),
        ..Default::default()
    };
    let sent = [&removal.encode_to_vec()[..], &unknown].concat();
    istiod.responses.message(&sent).await.unwrap();
    assert_eq!(envoy.next_raw().await.unwrap(), sent);
}

#[tokio::test]
async fn the_call_carries_token_and_cluster_and_is_open_before_envoy_speaks() {
    let mut world = World::with(|b| b.env("XDS_HEADER_X-Two", "a=b=c")).await;
    let (_envoy, istiod) = world.sotw().await;
    let header = |name: &str| {
        let found = istiod.opened.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    };
    assert!(header("authorization").unwrap().starts_with("Bearer "));
    assert_eq!(header("clusterid"), Some("Kubernetes"));
    assert_eq!(header("x-two"), Some("a=b=c"));
    assert_eq!(istiod.opened.authority, "istiod.istio-system.svc");
}

#[tokio::test]
async fn types_that_envoy_must_not_see_are_dropped_without_an_answer() {
    let mut world = World::new().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
    let prefix = "type.googleapis.com/";
    let dropped = ["istio.workload.Address", "istio.security.Authorization", "other.Thing"]
        .map(|t| format!("{prefix}{t}"));
    for type_url in dropped.iter().map(String::as_str).chain([PCDS, "istio.io/debug/syncz"]) {
        istiod.responses.sotw(&answer(type_url, "x", 3)).await.unwrap();
    }
    let passed = ["istio.workload.Workload", "envoy.some.future.v9.Thing"].map(|t| format!("{prefix}{t}"));
    for type_url in &passed {
        istiod.responses.sotw(&answer(type_url, "y", 3)).await.unwrap();
        assert_eq!(&envoy.next().await.unwrap().type_url, type_url);
    }
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS, "nothing was answered in between");
}

#[tokio::test]
async fn the_agents_own_subscription_follows_listeners_and_is_answered() {
    let mut world = World::with(|b| b.env("PROXY_CONFIG_XDS_AGENT", "true")).await;
    let (envoy, mut istiod) = world.delta().await;
    for type_url in [CDS, LDS] {
        envoy.send(&ask_delta(type_url));
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        let request = request(&mut istiod).await;
        seen.push((request.type_url, request.node.is_some()));
    }
    assert_eq!(seen, [(CDS.to_owned(), true), (LDS.to_owned(), true), (PCDS.to_owned(), false)]);
    let push = |nonce: &str, value: &'static [u8]| {
        let body = Any { type_url: PCDS.to_owned(), value: value.to_vec() };
        DeltaDiscoveryResponse {
            resources: vec![Wrapped { resource: Some(body), ..Default::default() }],
            type_url: PCDS.to_owned(),
            nonce: nonce.to_owned(),
            ..Default::default()
        }
    };
    istiod.responses.delta(&push("bad", b"\xff\xff")).await.unwrap();
    let nack = request(&mut istiod).await;
    assert_eq!((nack.nonce.as_str(), nack.nack.unwrap().0), ("bad", 13));
    istiod.responses.delta(&push("good", b"")).await.unwrap();
    let ack = request(&mut istiod).await;
    assert_eq!((ack.nonce.as_str(), ack.is_ack()), ("good", true));
}

#[tokio::test]
async fn statuses_pass_and_a_cut_message_is_no_good_end() {
    let mut world = World::new().await;
    for code in [Code::Ok, Code::Aborted, Code::NotFound, Code::DataLoss] {
        let (mut envoy, mut istiod) = world.delta().await;
        envoy.send(&ask_delta(CDS));
        request(&mut istiod).await;
        istiod.responses.end(mock_istiod::Status::new(code, "by script")).await.unwrap();
        assert_eq!(envoy.end().await.code() as i32, code as i32);
    }
    let (mut envoy, istiod) = world.sotw().await;
    let frame = bulk::sotw(bulk::Kind::Clusters, 200_000, "n");
    istiod.responses.raw(frame.slice(..100_000)).await.unwrap();
    istiod.responses.end(mock_istiod::Status::ok()).await.unwrap();
    assert_ne!(envoy.end().await.code(), tonic::Code::Ok);
}

#[tokio::test]
async fn a_newer_stream_replaces_an_older_one() {
    let mut world = World::new().await;
    let (mut first, first_up) = world.sotw().await;
    let (second, mut second_up) = world.delta().await;
    assert_eq!(first.end().await.code(), tonic::Code::Ok);
    ended(first_up).await;
    second.send(&ask_delta(CDS));
    request(&mut second_up).await;
}

#[tokio::test]
async fn when_one_leg_dies_the_other_ends() {
    let mut world = World::new().await;
    let (envoy, istiod) = world.sotw().await;
    drop(envoy);
    ended(istiod).await;
    let (mut envoy, istiod) = world.sotw().await;
    envoy.finish();
    assert_eq!(envoy.end().await.code(), tonic::Code::Ok, "a half-close is a clean end");
    ended(istiod).await;
    let (mut envoy, istiod) = world.sotw().await;
    istiod.responses.drop_connection().await.unwrap();
    assert_eq!(envoy.end().await.code(), tonic::Code::Unavailable);
    let (mut envoy, istiod) = world.sotw().await;
    istiod.responses.sotw(&answer(CDS, "1", 1)).await.unwrap();
    envoy.next().await.unwrap();
    world.mock.down().await;
    assert_eq!(envoy.end().await.code(), tonic::Code::Unavailable);
}

#[tokio::test]
async fn goaway_lets_the_stream_go_on() {
    let mut world = World::new().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
    istiod.responses.go_away().await.unwrap();
    istiod.responses.sotw(&answer(CDS, "1", 100)).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "1");
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
}

#[tokio::test]
async fn a_two_way_flood_loses_nothing_and_does_not_wedge() {
    const PUSHES: usize = 60;
    const REQUESTS: usize = 3000;
    let mut world = World::new().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    let long = DiscoveryRequest { resource_names: vec!["x".repeat(3000)], ..ask(CDS) };
    for _ in 0..REQUESTS {
        envoy.send(&long);
    }
    let frame = bulk::sotw(bulk::Kind::Clusters, 1_000_000, "n");
    let responses = istiod.responses.clone();
    let mut pushing = tokio::task::JoinSet::new();
    let sent = frame.clone();
    pushing.spawn(async move {
        for _ in 0..PUSHES {
            responses.raw(sent.clone()).await.unwrap();
        }
    });
    // Nobody reads until both directions have come to a halt: the agent counts no request any more.
    let agent = &world.agent;
    settled("the flood", || async { agent.metric("istio_agent_xds_proxy_requests").await }).await;
    let (mut pushes, mut requests) = (0, 0);
    let reading = async {
        while pushes < PUSHES || requests < REQUESTS {
            tokio::select! {
                response = envoy.next_raw(), if pushes < PUSHES => {
                    assert!(response.unwrap() == frame[5..]);
                    pushes += 1;
                }
                request = istiod.requests.recv(), if requests < REQUESTS => {
                    assert_eq!(request.unwrap().names[0].len(), 3000);
                    requests += 1;
                }
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), reading).await.expect("the relay is wedged");
}

#[tokio::test]
async fn a_stopped_reader_bounds_the_memory() {
    let mut world = World::new().await;
    let (mut envoy, istiod) = world.sotw().await;
    istiod.responses.sotw(&answer(CDS, "0", 1)).await.unwrap();
    envoy.next().await.unwrap();
    let rss = || world.agent.memory("VmRSS");
    let before = rss();
    // The client's own window is 64 KB: everything above waits in istiod if the relay holds no more than
    // its windows.
    let frame = bulk::sotw(bulk::Kind::Clusters, 100 << 20, "n");
    let responses = istiod.responses.clone();
    let mut pushing = tokio::task::JoinSet::new();
    let sent = frame.clone();
    pushing.spawn(async move { responses.raw(sent).await });
    settled("the push", || async { Some(rss()) }).await;
    let during = rss();
    assert!(during < before + 6 * 1024, "{before} KiB before, {during} KiB while Envoy did not read");
    assert!(envoy.next_raw().await.unwrap() == frame[5..]);
    let after = rss();
    assert!(after < before + 6 * 1024, "{before} KiB before, {after} KiB after 100 MB");
}

#[tokio::test]
async fn requests_above_the_limit_end_their_stream_only() {
    let mut world = World::with(|b| b.env("ISTIO_GPRC_MAXRECVMSGSIZE", "100000")).await;
    let (mut envoy, istiod) = world.sotw().await;
    envoy.send(&DiscoveryRequest { resource_names: vec!["n".repeat(200_000)], ..ask(CDS) });
    assert_eq!(envoy.end().await.code(), tonic::Code::ResourceExhausted);
    ended(istiod).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&DiscoveryRequest { resource_names: vec!["n".repeat(90_000)], ..ask(CDS) });
    assert_eq!(request(&mut istiod).await.names[0].len(), 90_000);
    world.agent.wait_log(CDS).await;
}

#[tokio::test]
async fn while_istiod_is_away_envoy_is_told_once_and_then_held() {
    let mut world = World::new().await;
    world.mock.down().await;
    let mut told = world.envoy().await.ads();
    assert_eq!(told.end().await.code(), tonic::Code::Unavailable);
    let mut held = world.envoy().await.ads();
    held.send(&ask(CDS));
    eventually("the stream is held", || async {
        (world.agent.metric("istio_agent_xds_held_streams").await == Some(1.0)).then_some(())
    })
    .await;
    world.mock.up().await.unwrap();
    let mut istiod = world.istiod().await;
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    istiod.responses.sotw(&answer(CDS, "1", 1)).await.unwrap();
    assert_eq!(held.next().await.unwrap().nonce, "1");
}

#[tokio::test]
async fn a_token_that_turns_good_is_used_at_once() {
    let mut world = World::new().await;
    world.mock.ads().always(vec![Fault::refuse(Code::Unauthenticated)]);
    let mut told = world.envoy().await.delta_ads();
    assert_eq!(told.end().await.code(), tonic::Code::Unauthenticated);
    let mut held = world.envoy().await.delta_ads();
    held.send(&ask_delta(CDS));
    eventually("the stream is held", || async {
        (world.agent.metric("istio_agent_xds_held_streams").await == Some(1.0)).then_some(())
    })
    .await;
    world.mock.ads().clear();
    world.agent.put(TOKEN, world.mock.mint("ns", "sa"));
    let mut istiod = world.istiod().await;
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    let response =
        DeltaDiscoveryResponse { type_url: CDS.to_owned(), nonce: "1".to_owned(), ..Default::default() };
    istiod.responses.delta(&response).await.unwrap();
    assert_eq!(held.next().await.unwrap().nonce, "1");
}

#[tokio::test]
async fn without_a_hold_each_stream_fails_as_with_the_go_agent() {
    let mut world = World::with(|b| b.env("XDS_HOLD_TIMEOUT", "0")).await;
    world.mock.down().await;
    for _ in 0..3 {
        let mut envoy = world.envoy().await.ads();
        assert_eq!(envoy.end().await.code(), tonic::Code::Unavailable);
    }
}

#[tokio::test]
async fn rejections_are_told_in_the_log_and_in_the_metrics() {
    let mut world = World::new().await;
    let (mut envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
    istiod.responses.sotw(&answer(CDS, "1", 1)).await.unwrap();
    envoy.next().await.unwrap();
    let error_detail =
        Some(rpc::Status { code: 13, message: "duplicate cluster".to_owned(), ..Default::default() });
    envoy.send(&DiscoveryRequest { response_nonce: "1".to_owned(), error_detail, ..ask(CDS) });
    assert_eq!(request(&mut istiod).await.nack.unwrap().1, "duplicate cluster");
    world.agent.wait_log("duplicate cluster").await;
    assert_eq!(world.agent.metric("istio_agent_xds_nacks{type=\"CDS\"}").await, Some(1.0));
}

#[tokio::test]
async fn the_socket_is_open_to_all_and_gone_at_the_end() {
    use std::os::unix::fs::PermissionsExt;
    let mut world = World::new().await;
    let (mut envoy, istiod) = world.sotw().await;
    let path = world.agent.path(XDS);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    world.agent.signal(rustix::process::Signal::TERM);
    envoy.end().await;
    ended(istiod).await;
    world.agent.wait_exit().await;
    assert!(!path.exists());
}

#[tokio::test]
async fn the_file_of_host_names_leads_to_a_name_with_a_dot_at_its_end() {
    if !root_for("another file of host names") {
        return;
    }
    let mock = MockIstiod::start().await;
    let address = format!("istiod.istio-system.svc.:{}", mock.address().port());
    let bind = "mount --bind hosts /etc/hosts && exec \"$@\"";
    let agent = TestAgent::with()
        .istiod(&mock)
        .proxy_config("discoveryAddress", address)
        .file("hosts", "127.0.0.1 istiod.istio-system.svc\n")
        .before(&["unshare", "--mount", "sh", "-c", bind, "sh"].map(ToOwned::to_owned))
        .start();
    let mut world = World { streams: mock.take_streams(), mock, agent };
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    assert_eq!(request(&mut istiod).await.type_url, CDS);
}
