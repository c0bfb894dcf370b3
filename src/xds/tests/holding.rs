//! Streams that are held while istiod is away.

use super::*;

#[tokio::test]
async fn the_first_failure_is_told_and_the_next_stream_is_held_until_istiod_is_back() {
    let mut rig = Rig::new().await;
    rig.way.open.store(false, Ordering::SeqCst);
    let mut told = rig.envoy(Protocol::Sotw).await;
    assert_eq!(told.status().await.0, Code::Unavailable);
    let mut held = rig.envoy(Protocol::Sotw).await;
    held.send(&request(CDS)).await;
    rig.eventually("the stream is held and dialled for", || rig.metric("xds_dials", Some("failed")) >= 2.0)
        .await;
    assert_eq!(rig.metric("xds_held_streams", None), 1.0);
    assert!(rig.handle.snapshot().upstream.held_since.is_some());
    rig.way.open.store(true, Ordering::SeqCst);
    rig.news.send(1).unwrap();
    let mut istiod = rig.istiod().await;
    assert_eq!(istiod.request().await, request(CDS));
    let sent = response(CDS, "1", &[1]);
    istiod.push(&sent).await;
    assert_eq!(held.response().await, sent);
    assert_eq!(rig.handle.snapshot().upstream.failures, 0);
    istiod.end(Code::Unavailable);
    assert_eq!(held.status().await.0, Code::Unavailable, "a stream that has been served is not held");
}

#[tokio::test]
async fn a_refused_token_is_told_once_and_then_tried_with_the_same_requests() {
    let mut rig = Rig::new().await;
    let (mut told, istiod) = rig.pair(Protocol::Sotw).await;
    istiod.end(Code::Unauthenticated);
    assert_eq!(told.status().await.0, Code::Unauthenticated);
    let mut held = rig.envoy(Protocol::Sotw).await;
    held.send(&request(CDS)).await;
    held.send(&request(types::LISTENER)).await;
    for _ in 0..2 {
        let mut istiod = rig.istiod().await;
        for expected in [CDS, types::LISTENER, types::PROXY_CONFIG] {
            assert_eq!(istiod.request().await, request(expected));
        }
        istiod.end(Code::PermissionDenied);
    }
    let mut istiod = rig.istiod().await;
    for expected in [CDS, types::LISTENER, types::PROXY_CONFIG] {
        assert_eq!(istiod.request().await, request(expected));
    }
    let sent = response(CDS, "1", &[1]);
    istiod.push(&sent).await;
    assert_eq!(held.response().await, sent);
    held.send(&request("late")).await;
    assert_eq!(istiod.request().await, request("late"));
}

#[tokio::test]
async fn a_stream_that_istiod_has_not_looked_at_is_tried_again_at_once_and_once() {
    let mut rig = Rig::new().await;
    for away in [false, true] {
        rig.way.away.store(away, Ordering::SeqCst);
        let mut envoy = rig.envoy(Protocol::Sotw).await;
        envoy.send(&request(CDS)).await;
        if !away {
            rig.istiod().await.respond.send_reset(h2::Reason::REFUSED_STREAM);
        }
        let mut istiod = rig.istiod().await;
        assert_eq!(istiod.request().await, request(CDS));
        let sent = response(CDS, "1", &[1]);
        istiod.push(&sent).await;
        assert_eq!(envoy.response().await, sent);
    }
    assert!(!rig.way.away.load(Ordering::SeqCst));
    assert_eq!(rig.metric("istiod_connection_terminations", Some("error")), 0.0);
    // Whoever is refused again is told.
    let mut envoy = rig.envoy(Protocol::Sotw).await;
    for _ in 0..2 {
        rig.istiod().await.respond.send_reset(h2::Reason::REFUSED_STREAM);
    }
    assert_eq!(envoy.status().await.0, Code::Unavailable);
}

#[tokio::test]
async fn a_hold_ends_and_envoy_is_told_then() {
    let rig = Rig::with(|c| c.hold = Duration::from_millis(50)).await;
    rig.way.open.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        let mut envoy = rig.envoy(Protocol::Sotw).await;
        assert_eq!(envoy.status().await.0, Code::Unavailable);
    }
    assert_eq!(rig.metric("xds_holds", Some("told")), 1.0);
}

// Something that makes a first request larger than a frame.
fn long() -> String {
    "n".repeat(40_000)
}

#[tokio::test]
async fn an_envoy_without_a_configuration_is_not_put_off_however_long_its_node_is() {
    let mut rig = Rig::with(|c| c.spread = Some(Duration::from_secs(600))).await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(types::LISTENER)).await;
    istiod.request().await;
    istiod.push(&response(types::LISTENER, "1", &[1])).await;
    envoy.response().await;
    envoy.send(&DiscoveryRequest { response_nonce: "1".to_owned(), ..request(types::LISTENER) }).await;
    while istiod.request().await.response_nonce != "1" {}
    istiod.cut.cancel();
    assert_eq!(envoy.status().await.0, Code::Unavailable);
    let mut envoy = rig.envoy(Protocol::Sotw).await;
    let node = Some(Node { id: long(), ..Default::default() });
    envoy.send(&DiscoveryRequest { node, ..request(CDS) }).await;
    assert_eq!(rig.istiod().await.request().await.type_url, CDS);
}

#[tokio::test]
async fn a_proxyless_client_is_known_however_late_its_node_says_so() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.configured().await;
    let mut client = rig.envoy(Protocol::Sotw).await;
    client.send(&proxyless_request(long(), CDS)).await;
    rig.istiod().await.request().await;
    let sent = response(CDS, "2", &[1]);
    istiod.push(&sent).await;
    assert_eq!(envoy.response().await, sent, "Envoy's stream goes on beside it");
}
