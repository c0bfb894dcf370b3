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
async fn an_end_without_a_code_is_unknown_and_its_text_goes_on() {
    let mut rig = Rig::with(|c| c.hold = Duration::ZERO).await;
    for answered in [false, true] {
        let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
        if answered {
            istiod.open();
        }
        istiod.end_with(None);
        assert_eq!(envoy.status().await, (Code::Unknown, "by script".to_owned()), "{answered}");
    }
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
    let (mut envoy, istiod) = rig.configured().await;
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

#[tokio::test]
async fn a_clients_own_deadline_ends_its_call_wherever_it_is() {
    const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let mut rig = Rig::new().await;
    let late = (Code::DeadlineExceeded, "context deadline exceeded".to_owned());
    // While it waits for istiod's first word.
    let mut envoy = rig.client(Protocol::Sotw.path(), Some("2S")).await;
    let mut istiod = rig.istiod().await;
    assert_eq!(envoy.status().await, late);
    istiod.ended().await;
    // In the middle of its life.
    let mut envoy = rig.client(Protocol::Sotw.path(), Some("2000m")).await;
    let mut istiod = rig.istiod().await;
    istiod.push(&response(CDS, "1", &[1])).await;
    assert_eq!(envoy.status().await, late);
    istiod.ended().await;
    assert_eq!(rig.client(REFLECTION, Some("50m")).await.status().await, late);
    rig.eventually("the ends are counted", || {
        rig.metric("istiod_connection_terminations", Some("cancelled")) == 2.0
            && rig.metric("envoy_connection_terminations", Some("cancelled")) == 2.0
    })
    .await;
    assert_eq!(rig.metric("envoy_connection_terminations", Some("error")), 0.0);
    // While it is held.
    rig.way.open.store(false, Ordering::SeqCst);
    assert_eq!(rig.envoy(Protocol::Sotw).await.status().await.0, Code::Unavailable);
    assert_eq!(rig.client(Protocol::Sotw.path(), Some("50m")).await.status().await, late);
    // One that cannot be read.
    let (code, text) = rig.client(Protocol::Sotw.path(), Some("soon")).await.status().await;
    assert_eq!((code, text.as_str()), (Code::Internal, "malformed grpc-timeout: \"soon\""));
}

#[tokio::test]
async fn what_is_not_served_is_named() {
    let rig = Rig::new().await;
    for (path, text) in [
        (
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/Fetch",
            "unknown method Fetch for service envoy.service.discovery.v3.AggregatedDiscoveryService",
        ),
        (
            "/grpc.reflection.v1.ServerReflection/X",
            "unknown method X for service grpc.reflection.v1.ServerReflection",
        ),
        ("/grpc.health.v1.Health/Check", "unknown service grpc.health.v1.Health"),
        ("/Check", "malformed method name: \"Check\""),
    ] {
        let (code, got) = rig.client(path, None).await.status().await;
        assert_eq!((code, got.as_str()), (Code::Unimplemented, text));
    }
}

#[tokio::test]
async fn a_leg_that_stands_still_is_counted_and_ends_the_stream_if_that_is_wanted() {
    let mut rig = Rig::with(|c| c.stall = Some(Duration::from_secs(1))).await;
    let stalled = |rig: &Rig, leg| rig.metric("xds_stalls", Some(leg));
    let ends = |status: (Code, String), leg: &str| {
        assert_eq!(status.0, Code::Unavailable, "{}", status.1);
        assert!(status.1.starts_with(leg) && status.1.ends_with("(XDS_STALL_TIMEOUT)"), "{}", status.1);
    };
    // Envoy does not read what is more than all windows hold.
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    let large = response(CDS, "1", &[3_000_000]);
    istiod.push(&large).await;
    rig.eventually("Envoy's leg is counted", || stalled(&rig, "Envoy") == 1.0).await;
    ends(envoy.status().await, "Envoy");
    istiod.ended().await;
    // Istiod does not read.
    let (mut envoy, _istiod) = rig.pair(Protocol::Sotw).await;
    let long = DiscoveryRequest { resource_names: vec!["n".repeat(3_000_000)], ..request(CDS) };
    envoy.send(&long).await;
    ends(envoy.status().await, "istiod");
    assert_eq!(stalled(&rig, "istiod"), 1.0);
    // Istiod falls silent in the middle of a message.
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    write(istiod.open(), frames::frame(&large).slice(..60_000)).await;
    ends(envoy.status().await, "istiod");
    assert_eq!(stalled(&rig, "istiod"), 2.0);
    // Between two messages it may be silent for ever: the sign is that the stream still works.
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    istiod.push(&response(CDS, "1", &[1])).await;
    envoy.response().await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    istiod.push(&response(CDS, "2", &[1])).await;
    assert_eq!(envoy.response().await.nonce, "2");
}

#[tokio::test]
async fn a_byte_now_and_then_in_the_middle_of_a_message_keeps_no_stream() {
    let mut rig = Rig::with(|c| c.stall = Some(Duration::from_secs(1))).await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    let large = frames::frame(&response(CDS, "1", &[60_000]));
    let dripping = async {
        for at in 0..100 {
            write(istiod.open(), large.slice(at..=at)).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let (code, text) = tokio::select! {
        status = envoy.status() => status,
        () = dripping => panic!("it lives on"),
    };
    assert_eq!(code, Code::Unavailable);
    assert!(text.starts_with("istiod") && text.ends_with("(XDS_STALL_TIMEOUT)"), "{text}");
}

#[tokio::test]
async fn a_reader_that_is_slow_for_longer_than_the_limit_gets_all() {
    const LIMIT: Duration = Duration::from_secs(4);
    let mut rig = Rig::with(|c| c.stall = Some(LIMIT)).await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    istiod.push(&response(CDS, "1", &[1])).await;
    envoy.response().await;
    let large = response(CDS, "2", &[300_000]);
    let Envoy { body, mut buffer, .. } = envoy;
    let mut body = body.unwrap();
    let (began, whole) = (std::time::Instant::now(), frames::frame(&large).len());
    // A steady, slow reader: what passes is mostly waited for.
    let reading = async {
        while buffer.len() < whole {
            let Some(data) = body.data().await else {
                panic!("ended after {:?}: {:?}", began.elapsed(), body.trailers().await);
            };
            let data = data.expect("the stream is whole");
            let _ = body.flow_control().release_capacity(data.len());
            buffer.extend_from_slice(&data);
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    };
    tokio::join!(istiod.push(&large), reading);
    assert!(began.elapsed() > LIMIT, "the reader was not slow");
    assert_eq!(rig.metric("xds_stalls", Some("Envoy")), 0.0);
}

#[tokio::test(start_paused = true)]
async fn a_stall_in_several_waits_is_counted_once_when_it_ends_the_stream() {
    let metrics = Metrics::new();
    let mut config = Config::new(PathBuf::new());
    config.stall = Some(Duration::from_secs(5));
    let shared = books(config, metrics.clone(), Default::default());
    let counted = || metrics.registry().gather().iter().filter(|f| f.name() == "xds_stalls").count();
    // Four of the five seconds were waited for before.
    for (mut noticed, expected) in [(true, 0), (false, 1)] {
        let left = Some(Duration::from_secs(1));
        let wait = std::future::pending::<()>();
        let done = sink::watched(&shared, ended::Leg::Envoy, "read nothing", left, &mut noticed, wait).await;
        assert_eq!((done, counted()), (Err(Duration::from_secs(1)), expected));
    }
}
