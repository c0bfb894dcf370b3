//! Clients beside the workload's own: what becomes of them is told to them, and to nobody else.

use super::*;
use crate::trouble::Kind;
use crate::xds::state::{Freshness, Snapshot};

// Envoy has clusters of istiod's, and has accepted them.
async fn serving(rig: &mut Rig) -> (Envoy, Istiod) {
    let (mut envoy, mut istiod) = rig.configured().await;
    envoy.send(&DiscoveryRequest { response_nonce: "1".to_owned(), ..request(CDS) }).await;
    assert_eq!(istiod.request().await.response_nonce, "1");
    rig.eventually("it is accepted", || rig.handle.snapshot().types[0].state == Freshness::Synced).await;
    (envoy, istiod)
}

// A client of the gRPC library asks for clusters.
async fn client(rig: &Rig) -> Envoy {
    let mut client = rig.envoy(Protocol::Sotw).await;
    client.send(&proxyless_request("client".to_owned(), CDS)).await;
    client
}

// All that is told of the workload, as it was.
fn told(rig: &Rig) -> (String, Option<Kind>, bool) {
    let Snapshot { stream, upstream, types, nacks } = rig.handle.snapshot();
    let types: Vec<_> =
        types.iter().map(|t| (t.name, t.state, t.requests, t.responses, t.rejected)).collect();
    let told = format!("{stream:?} {upstream:?} {types:?} {nacks:?}");
    (told, rig.troubles.verdict().map(|trouble| trouble.kind), rig.handle.is_away())
}

#[tokio::test]
async fn what_istiod_says_to_a_client_beside_envoy_is_not_said_to_the_workload() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = serving(&mut rig).await;
    let before = told(&rig);
    assert_eq!((before.1, before.2), (None, false));
    let mut refused = client(&rig).await;
    rig.istiod().await.end(Code::InvalidArgument);
    assert_eq!(refused.status().await.0, Code::InvalidArgument);
    assert_eq!(told(&rig), before);
    // One that is served, rejects, asks for listeners and is cut off.
    let mut client = client(&rig).await;
    let mut beside = rig.istiod().await;
    beside.request().await;
    beside.push(&response(CDS, "9", &[1, 1])).await;
    client.response().await;
    let error_detail = Some(rpc::Status { code: 3, message: "not I".to_owned(), ..Default::default() });
    client.send(&DiscoveryRequest { response_nonce: "9".to_owned(), error_detail, ..request(CDS) }).await;
    client.send(&request(types::LISTENER)).await;
    beside.request().await;
    assert_eq!(beside.request().await.type_url, types::LISTENER);
    client.send(&request("late")).await;
    assert_eq!(beside.request().await.type_url, "late", "the agent's own requests are not made here");
    assert_eq!(rig.metric("xds_nacks", Some("CDS")), 1.0);
    beside.cut.cancel();
    assert_eq!(client.status().await.0, Code::Unavailable);
    assert_eq!(told(&rig), before);
    istiod.push(&response(CDS, "2", &[1])).await;
    assert_eq!(envoy.response().await.nonce, "2");
}

#[tokio::test]
async fn an_outage_that_only_a_client_beside_envoy_meets_is_not_the_workloads() {
    let mut rig = Rig::new().await;
    let _serving = serving(&mut rig).await;
    let before = told(&rig);
    rig.way.open.store(false, Ordering::SeqCst);
    assert_eq!(client(&rig).await.status().await.0, Code::Unavailable);
    assert_eq!(told(&rig), before);
    // It is held as Envoy would be, by a hold of its own.
    let mut held = client(&rig).await;
    rig.eventually("it is dialled for", || rig.metric("xds_dials", Some("failed")) >= 3.0).await;
    assert!(!rig.handle.is_away());
    rig.way.open.store(true, Ordering::SeqCst);
    let mut istiod = rig.istiod().await;
    istiod.push(&response(CDS, "9", &[1])).await;
    assert_eq!(held.response().await.nonce, "9");
    assert_eq!(told(&rig), before);
}

#[tokio::test]
async fn a_client_beside_envoy_that_is_refused_takes_no_memory_away_and_keeps_none_young() {
    let file = tempfile::tempdir().unwrap();
    let disk = memory::Disk { file: file.path().join("config"), max_age: Duration::from_secs(3600) };
    let replay = Replay { after: Duration::ZERO, most: 1 << 20, disk: Some(disk), left: None };
    let mut rig = Rig::with(|c| c.replay = Some(replay)).await;
    rig.filled(&["c".to_owned()]).await;
    let memory = rig.handle.memory().unwrap();
    rig.eventually("it is kept", || memory.is_whole()).await;
    let mut envoy = rig.envoy(Protocol::Delta).await;
    envoy.send(&delta_request(CDS)).await;
    let mut istiod = rig.istiod().await;
    istiod.delta().await;
    istiod.push(&delta(CDS, "1", &["c".to_owned()], "1")).await;
    while envoy.delta().await.nonce != "1" {}
    let mut refused = client(&rig).await;
    rig.istiod().await.end(Code::PermissionDenied);
    assert_eq!(refused.status().await.0, Code::PermissionDenied);
    assert!(memory.is_whole());
    // A stream of Envoy's that lives has no age; one beside it that outlives it does not count.
    let mut client = client(&rig).await;
    let mut beside = rig.istiod().await;
    beside.push(&response(CDS, "9", &[1])).await;
    client.response().await;
    assert_eq!(memory.left(), None);
    drop(envoy);
    istiod.ended().await;
    rig.eventually("it has an age", || memory.left().is_some()).await;
    drop(client);
    beside.ended().await;
    assert!(memory.left().is_some());
}

// A client of the gRPC library is served, where there is no Envoy.
async fn proxyless(rig: &mut Rig) -> (Envoy, Istiod) {
    let mut client = client(rig).await;
    let mut istiod = rig.istiod().await;
    istiod.request().await;
    istiod.push(&response(CDS, "1", &[1])).await;
    client.response().await;
    client.send(&DiscoveryRequest { response_nonce: "1".to_owned(), ..request(CDS) }).await;
    istiod.request().await;
    rig.eventually("it is accepted", || rig.handle.snapshot().types[0].state == Freshness::Synced).await;
    (client, istiod)
}

#[tokio::test]
async fn whoever_comes_and_goes_cuts_nobody_off() {
    let mut rig = Rig::new().await;
    let (mut served, mut istiod) = proxyless(&mut rig).await;
    let before = told(&rig);
    // One that says nothing, one that asks as an Envoy would, and one that istiod refuses.
    for [asks, refused] in [[false, false], [true, false], [true, true]] {
        let mut visitor = rig.envoy(Protocol::Sotw).await;
        if asks {
            visitor.send(&request(CDS)).await;
        }
        let mut beside = rig.istiod().await;
        if refused {
            beside.end(Code::InvalidArgument);
            assert_eq!(visitor.status().await.0, Code::InvalidArgument);
        } else {
            drop(visitor);
            beside.ended().await;
        }
        rig.eventually("it has gone", || rig.handle.shared().open() == 1).await;
        assert_eq!(told(&rig), before, "{asks} {refused}");
    }
    // One that istiod answers is the workload for as long as it is there.
    let mut envoy = rig.envoy(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    let mut beside = rig.istiod().await;
    beside.push(&response(CDS, "9", &[1])).await;
    envoy.response().await;
    drop(envoy);
    beside.ended().await;
    rig.eventually("it has gone", || rig.handle.shared().open() == 1).await;
    let upstream = rig.handle.snapshot().upstream;
    assert!(upstream.connected_since.is_some() && upstream.down_since.is_none(), "{upstream:?}");
    istiod.push(&response(CDS, "2", &[1])).await;
    assert_eq!(served.response().await.nonce, "2");
}

#[tokio::test]
async fn what_the_agent_has_asked_for_it_takes_though_a_client_is_silent_beside() {
    let mut rig = Rig::new().await;
    let (mut served, mut istiod) = proxyless(&mut rig).await;
    served.send(&request(types::LISTENER)).await;
    let asked = [istiod.request().await.type_url, istiod.request().await.type_url];
    assert_eq!(asked, [types::LISTENER, types::PROXY_CONFIG], "the agent's own follows");
    let _silent = rig.envoy(Protocol::Sotw).await;
    let _beside = rig.istiod().await;
    let mut bundle = response(types::PROXY_CONFIG, "2", &[1]);
    bundle.resources[0].value = b"\x92\x02\x03pem".to_vec();
    istiod.push(&bundle).await;
    let answer = istiod.request().await;
    assert_eq!((answer.response_nonce.as_str(), answer.error_detail), ("2", None));
    assert_eq!(*rig.bundle.borrow(), ["pem"]);
}

#[tokio::test]
async fn a_client_that_is_held_beside_envoy_is_not_told_as_envoy() {
    let mut rig = Rig::new().await;
    let _serving = serving(&mut rig).await;
    let before = told(&rig);
    rig.way.open.store(false, Ordering::SeqCst);
    assert_eq!(client(&rig).await.status().await.0, Code::Unavailable);
    let _held = client(&rig).await;
    rig.eventually("it is dialled for", || rig.metric("xds_dials", Some("failed")) >= 3.0).await;
    assert_eq!(rig.metric("xds_held_streams", None), 0.0);
    assert_eq!(told(&rig), before);
}

// The agent's own Envoy is served.
async fn own(rig: &mut Rig) -> (Envoy, Istiod) {
    let mut own = rig.epoch(1).await;
    own.send(&delta_request(CDS)).await;
    let mut istiod = rig.istiod().await;
    istiod.delta().await;
    istiod.push(&delta(CDS, "1", &["c".to_owned()], "1")).await;
    own.delta().await;
    (own, istiod)
}

#[tokio::test]
async fn nobody_is_in_the_place_of_an_own_envoy_that_is_cut_off() {
    let mut rig = Rig::new().await;
    let (mut own, istiod) = own(&mut rig).await;
    let mut client = client(&rig).await;
    let mut beside = rig.istiod().await;
    beside.push(&response(CDS, "9", &[1])).await;
    client.response().await;
    istiod.cut.cancel();
    assert_eq!(own.status().await.0, Code::Unavailable);
    rig.eventually("it is told", || rig.handle.snapshot().upstream.down_since.is_some()).await;
}

#[tokio::test]
async fn the_way_is_down_where_the_next_epoch_waits_for_it_as_well() {
    let mut rig = Rig::new().await;
    let (mut old, istiod) = own(&mut rig).await;
    rig.way.open.store(false, Ordering::SeqCst);
    assert_eq!(rig.epoch(2).await.status().await.0, Code::Unavailable);
    let mut held = rig.epoch(2).await;
    held.send(&delta_request(CDS)).await;
    rig.eventually("it is held", || rig.metric("xds_held_streams", None) == 1.0).await;
    assert!(!rig.handle.is_away() && rig.handle.snapshot().upstream.down_since.is_none());
    istiod.cut.cancel();
    assert_eq!(old.status().await.0, Code::Unavailable);
    rig.eventually("it is told", || rig.handle.snapshot().upstream.down_since.is_some()).await;
}

#[tokio::test]
async fn an_istiod_that_nobody_has_asked_is_not_silent() {
    let troubles = crate::trouble::Troubles::default();
    let shared = books(Config::new(PathBuf::new()), Metrics::new(), troubles.reporter("xdsproxy"));
    let (queue, flag) = (Arc::<own::Queue>::default(), AtomicBool::new(false));
    let (asked, attempt) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    let stop = Stop::new();
    let of = |id| stream::Stream {
        id,
        protocol: Protocol::Sotw,
        shared: &shared,
        own: false,
        queue: &queue,
        committed: &flag,
        first_listeners: &flag,
        asked: &asked,
        counted: &flag,
        held: None,
        attempt: &attempt,
        until: None,
    };
    let (client, _, _) = shared.register(Protocol::Sotw, None, &queue, &stop);
    let (envoy, _, _) = shared.register(Protocol::Sotw, Some(1), &queue, &stop);
    assert!(of(envoy).told_silent(), "it has to wait");
    asked.store(true, Ordering::SeqCst);
    assert!(!of(client).told_silent());
    assert_eq!(troubles.verdict(), None);
    assert!(!of(envoy).told_silent());
    assert_eq!(troubles.verdict().unwrap().kind, Kind::IstiodSilent);
}

#[tokio::test]
async fn what_a_stream_has_met_is_over_with_it_where_another_has_what_istiod_says() {
    let troubles = crate::trouble::Troubles::default();
    let shared = books(Config::new(PathBuf::new()), Metrics::new(), troubles.reporter("xdsproxy"));
    let (queue, stop) = (Arc::<own::Queue>::default(), Stop::new());
    let of = |own| shared.register(Protocol::Sotw, Some(own), &queue, &stop).0;
    let refused = |id| {
        let status = tonic::Status::permission_denied("no");
        shared.failed_on(id, &status, trouble::ended("istiod", &status));
        assert!(troubles.verdict().is_some());
    };
    let (old, new) = (of(1), of(2));
    refused(new);
    shared.left(new);
    assert!(troubles.verdict().is_some(), "no other one is served");
    shared.came_alive(old);
    refused(new);
    shared.left(new);
    assert_eq!(troubles.verdict(), None);
    refused(old);
    shared.left(old);
    assert!(troubles.verdict().is_some(), "it had been answered, and is the one that was");
}

#[tokio::test]
async fn for_want_of_a_token_istiod_has_refused_nothing() {
    let replay = Replay { after: Duration::ZERO, most: 1 << 20, disk: None, left: None };
    let mut rig = Rig::with(|c| c.replay = Some(replay)).await;
    rig.tokens.gone.store(true, Ordering::SeqCst);
    let (code, text) = rig.envoy(Protocol::Delta).await.status().await;
    assert_eq!(code, Code::Unauthenticated, "as the gRPC library has it");
    let told = rig.troubles.verdict().unwrap();
    assert_eq!(told.kind, Kind::TokenNotHad);
    assert!(told.detail.ends_with(&text) && !told.detail.contains("refuses"), "{}", told.detail);
    rig.tokens.gone.store(false, Ordering::SeqCst);
    rig.filled(&["c".to_owned()]).await;
    assert_eq!(rig.troubles.verdict(), None);
    rig.tokens.gone.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let mut envoy = rig.envoy(Protocol::Delta).await;
        envoy.send(&delta_request(CDS)).await;
        assert!(envoy.delta().await.nonce.starts_with("memory-"));
    }
}
