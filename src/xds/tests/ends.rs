//! How streams end.

use super::*;

#[tokio::test]
async fn each_status_reaches_envoy_and_is_counted() {
    let mut rig = Rig::with(|c| c.hold = Duration::ZERO).await;
    for code in 1..17 {
        let code = Code::from(code);
        let (mut envoy, mut istiod) = rig.pair(Protocol::Delta).await;
        envoy.send(&request(CDS)).await;
        istiod.request().await;
        istiod.end(code);
        assert_eq!(envoy.status().await, (code, "by script".to_owned()));
    }
    rig.eventually("all ends are counted", || {
        rig.metric("istiod_connection_terminations", Some("cancelled")) == 2.0
            && rig.metric("istiod_connection_terminations", Some("error")) == 14.0
            && rig.metric("envoy_connection_terminations", Some("cancelled")) == 16.0
    })
    .await;
}

#[tokio::test]
async fn a_message_cut_upstream_never_ends_as_a_good_one() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    let whole = frames::frame(&response(CDS, "1", &[100_000]));
    write(istiod.open(), whole.slice(..60_000)).await;
    istiod.end(Code::Ok);
    let (code, text) = envoy.status().await;
    assert_eq!(code, Code::Internal, "{text}");
}

#[tokio::test]
async fn a_connection_that_breaks_is_unavailable_at_once() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
    istiod.push(&response(CDS, "1", &[1])).await;
    envoy.response().await;
    istiod.cut.cancel();
    assert_eq!(envoy.status().await.0, Code::Unavailable);
}

#[tokio::test]
async fn a_newer_stream_ends_the_older_with_ok() {
    let mut rig = Rig::new().await;
    let (mut first, mut first_up) = rig.pair(Protocol::Sotw).await;
    let (mut second, mut second_up) = rig.pair(Protocol::Delta).await;
    assert_eq!(first.status().await.0, Code::Ok);
    first_up.ended().await;
    second.send(&request(CDS)).await;
    second_up.request().await;
    assert_eq!(rig.handle.snapshot().stream.unwrap().protocol, Protocol::Delta);
}

#[tokio::test]
async fn a_request_above_the_limit_ends_the_stream_and_the_next_works() {
    let mut rig = Rig::with(|c| c.max_request = 1000).await;
    let (mut envoy, _istiod) = rig.pair(Protocol::Sotw).await;
    let large = DiscoveryRequest { resource_names: vec!["n".repeat(2000)], ..request(CDS) };
    envoy.send(&large).await;
    let (code, text) = envoy.status().await;
    assert_eq!(code, Code::ResourceExhausted);
    assert!(text.contains("larger than max"), "{text}");
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
}

#[tokio::test]
async fn stopping_tells_envoy_and_leaves_nothing() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    rig.group.token().cancel();
    assert_eq!(envoy.status().await.0, Code::Unavailable);
    istiod.ended().await;
    drop((envoy, istiod));
    rig.eventually("the server is gone", || !rig.group.running().contains(&"xds".to_owned())).await;
    assert!(!rig.socket.exists());
}
