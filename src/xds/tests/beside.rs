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
