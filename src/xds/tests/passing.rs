//! What passes, and what the agent takes part in.

use super::*;

#[tokio::test]
async fn requests_and_responses_pass_both_ways() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    assert_eq!(istiod.headers["authorization"], "Bearer secret");
    assert_eq!(istiod.headers["clusterid"], "");
    envoy.send(&request(CDS)).await;
    assert_eq!(istiod.request().await, request(CDS));
    for (nonce, sizes) in
        [("1", vec![10, 20]), ("2", vec![]), ("3", vec![3_000_000, 5]), ("4", vec![40_000; 50])]
    {
        let sent = response(CDS, nonce, &sizes);
        let (got, ()) = tokio::join!(envoy.response(), istiod.push(&sent));
        assert_eq!(got, sent);
    }
    let view = rig.handle.snapshot();
    assert_eq!((view.types[0].name, view.types[0].nonce.as_str()), ("CDS", "4"));
    istiod.end(Code::Ok);
    assert_eq!(envoy.status().await.0, Code::Ok);
    rig.eventually("both ends are counted", || {
        rig.metric("istiod_connection_terminations", Some("cancelled")) == 1.0
            && rig.metric("envoy_connection_terminations", Some("cancelled")) == 1.0
    })
    .await;
    assert_eq!(rig.metric("xds_proxy_responses", None), 4.0);
}

#[tokio::test]
async fn the_agents_own_requests_follow_the_first_listeners() {
    let mut rig = Rig::new().await;
    rig.handle.report_health(Some("down".to_owned()));
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    rig.handle.report_health(None);
    rig.handle.report_health(Some("down again".to_owned()));
    envoy.send(&request(types::LISTENER)).await;
    envoy.send(&request(types::LISTENER)).await;
    let mut types = VecDeque::new();
    for _ in 0..5 {
        let got = istiod.request().await;
        types.push_back((got.type_url, got.error_detail.map(|e| e.message)));
    }
    let plain = |t: &str| (t.to_owned(), None);
    assert_eq!(
        types,
        [
            plain(CDS),
            plain(types::LISTENER),
            plain(types::PROXY_CONFIG),
            (types::HEALTH.to_owned(), Some("down again".to_owned())),
            plain(types::LISTENER),
        ]
    );
    istiod.push(&response(types::PROXY_CONFIG, "p", &[])).await;
    let mut pushed = response(types::PROXY_CONFIG, "q", &[1]);
    pushed.resources[0].value = b"\x92\x02\x03pem".to_vec();
    istiod.push(&pushed).await;
    let ack = istiod.request().await;
    assert_eq!((ack.type_url.as_str(), ack.response_nonce.as_str()), (types::PROXY_CONFIG, "q"));
    assert_eq!((ack.version_info.as_str(), ack.error_detail), ("vq", None));
    assert_eq!(*rig.bundle.borrow(), ["pem"]);
    pushed.resources[0].value = b"\xff\xff".to_vec();
    istiod.push(&pushed).await;
    assert_eq!(istiod.request().await.error_detail.unwrap().code, 13);
    assert_eq!(*rig.bundle.borrow(), ["pem"], "a bad bundle takes nothing away");
}

#[tokio::test]
async fn a_stream_that_has_not_said_whose_it_is_takes_no_verdict_away() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.configured().await;
    envoy.send(&request(types::LISTENER)).await;
    assert_eq!(istiod.request().await.type_url, types::LISTENER);
    assert_eq!(istiod.request().await.type_url, types::PROXY_CONFIG);
    let _client = rig.envoy(Protocol::Sotw).await;
    rig.eventually("it is there", || rig.handle.shared().open() == 2).await;
    rig.handle.report_health(Some("down".to_owned()));
    assert_eq!(istiod.request().await.type_url, types::HEALTH);
}

#[tokio::test]
async fn rejections_are_kept() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.configured().await;
    let error_detail =
        Some(rpc::Status { code: 13, message: "no such thing".to_owned(), ..Default::default() });
    let nack = DiscoveryRequest { response_nonce: "1".to_owned(), error_detail, ..request(CDS) };
    envoy.send(&nack).await;
    assert_eq!(istiod.request().await, nack);
    let view = rig.handle.snapshot();
    assert_eq!((view.nacks[0].message.as_str(), view.nacks[0].version.as_str()), ("no such thing", "v1"));
    assert_eq!(view.types[0].state, state::Freshness::Rejected);
    assert_eq!(rig.metric("xds_nacks", Some("CDS")), 1.0);
}

#[tokio::test]
async fn both_directions_stalled_lose_nothing_and_do_not_wedge() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.pair(Protocol::Sotw).await;
    envoy.send(&request(CDS)).await;
    istiod.request().await;
    istiod.push(&response(CDS, "0", &[1])).await;
    envoy.response().await;
    let big = response(CDS, "1", &[500_000]);
    let long = DiscoveryRequest { resource_names: vec!["x".repeat(3000)], ..request(CDS) };
    let Istiod { mut body, stream, .. } = istiod;
    let mut stream = stream.unwrap();
    let Envoy { mut sink, body: responses, .. } = envoy;
    let mut responses = responses.unwrap();
    let mut pushes = Box::pin(async {
        for _ in 0..20 {
            write(&mut stream, frames::frame(&big)).await;
        }
    });
    let mut requests = Box::pin(async {
        for _ in 0..1000 {
            write(&mut sink, frames::frame(&long)).await;
        }
    });
    // Neither reads while both write far more than all windows hold.
    let stalled = async { tokio::join!(&mut pushes, &mut requests) };
    assert!(
        tokio::time::timeout(Duration::from_millis(300), stalled).await.is_err(),
        "it must have come to a halt"
    );
    let (mut down, mut up) = (BytesMut::new(), BytesMut::new());
    let reading = async {
        let down = async {
            for _ in 0..20 {
                let got = next_frame(&mut responses, &mut down).await.unwrap();
                assert_eq!(DiscoveryResponse::decode(got).unwrap(), big);
            }
        };
        let up = async {
            for _ in 0..1000 {
                let got = next_frame(&mut body, &mut up).await.unwrap();
                assert_eq!(DiscoveryRequest::decode(got).unwrap(), long);
            }
        };
        tokio::join!(down, up, pushes, requests)
    };
    tokio::time::timeout(Duration::from_secs(60), reading).await.expect("it goes on where it stopped");
}

#[tokio::test]
async fn many_small_messages_wait_for_a_slow_envoy() {
    let mut rig = Rig::new().await;
    let (mut envoy, mut istiod) = rig.configured().await;
    // 210 kB: they fit into the window of 256 kB, whatever Envoy takes meanwhile.
    let count = 3000;
    for n in 0..count {
        istiod.push(&response(CDS, &n.to_string(), &[])).await;
    }
    for n in 0..count {
        assert_eq!(envoy.response().await.nonce, n.to_string());
    }
    for n in 0..400 {
        envoy.send(&DiscoveryRequest { response_nonce: format!("{n:040}"), ..request(CDS) }).await;
    }
    for n in 0..400 {
        assert_eq!(istiod.request().await.response_nonce, format!("{n:040}"));
    }
}

/// A message of which each byte is a frame, as long as the connection lasts.
async fn bytewise(stream: &mut h2::SendStream<Bytes>) {
    let large = frames::frame(&response(CDS, "1", &[1_000_000]));
    for at in 0..large.len() {
        stream.reserve_capacity(1);
        if stream.capacity() == 0
            && !matches!(std::future::poll_fn(|cx| stream.poll_capacity(cx)).await, Some(Ok(_)))
        {
            return;
        }
        if stream.send_data(large.slice(at..=at), false).is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn who_sends_a_byte_a_frame_to_one_that_does_not_read_is_cut_off() {
    let mut rig = Rig::new().await;
    let (envoy, mut istiod) = rig.configured().await;
    tokio::time::timeout(SOON, bytewise(istiod.open())).await.expect("istiod's connection ends");
    drop((envoy, istiod));
    let (mut envoy, istiod) = rig.configured().await;
    tokio::time::timeout(SOON, bytewise(&mut envoy.sink)).await.expect("Envoy's connection ends");
    drop((envoy, istiod));
    rig.configured().await;
}
