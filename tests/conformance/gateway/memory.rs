//! What is held is bound by what Envoy asks for, not by what the namespace holds.

use mock_istiod::apiserver::ApiServer;

use super::{SOCKET, fields, from_api, is, next, pair};
use crate::support::client::secret_request;
use crate::support::{LIMIT, MockIstiod, eventually_within};

/// What three secrets of two thousand may take, kB.
const ALLOWED: usize = 3 << 10;

#[tokio::test]
async fn three_secrets_of_two_thousand_take_little() {
    let mock = MockIstiod::start().await;
    let api = ApiServer::start(&mock.authority(), "S3CRET-ONE").await;
    let (one, two) = (pair(&mock, "one"), pair(&mock, "two"));
    for n in 0..2000 {
        api.put(&format!("secret-{n}"), &fields(&one));
    }
    let mut agent = from_api(&mock, &api).start();
    let client = agent.client(SOCKET).await;
    agent.wait_ready().await;
    let (idle, all) = (agent.memory("RssAnon"), agent.memory("VmRSS"));
    let mut streams = Vec::new();
    for n in [7, 700, 1700] {
        let mut stream = client.stream_secrets();
        stream.send(&secret_request(&format!("secret-{n}")));
        assert!(is(&next(&mut stream).await, &one));
        streams.push(stream);
    }
    // All of the namespace changes; only what was asked for is looked at.
    for n in 0..2000 {
        api.put(&format!("secret-{n}"), &fields(&two));
    }
    for stream in &mut streams {
        assert!(is(&next(stream).await, &two));
    }
    let (held, whole) = (agent.memory("RssAnon"), agent.memory("VmRSS"));
    println!("3 of 2,000 secrets: {idle} kB, then {held} kB of memory; {all} kB, then {whole} kB resident");
    assert!(held < idle + ALLOWED, "{idle} kB, then {held} kB");
    assert!(api.asked().iter().all(|target| target.contains("fieldSelector=metadata.name")));
    agent.stop().await;
}

#[tokio::test]
async fn a_secret_without_room_is_served_once_others_have_made_some() {
    let mock = MockIstiod::start().await;
    let api = ApiServer::start(&mock.authority(), "S3CRET-ONE").await;
    // 32 of these fit into 32 MB.
    let large = mock.root_pem().repeat(1_040_000 / mock.root_pem().len());
    for n in 0..33 {
        api.put(&format!("s{n}-cacert"), &[("ca.crt", large.as_bytes())]);
    }
    let mut agent = from_api(&mock, &api).start();
    let client = agent.client(SOCKET).await;
    let mut streams = Vec::new();
    for n in 0..32 {
        let mut stream = client.stream_secrets();
        stream.send(&secret_request(&format!("s{n}-cacert")));
        next(&mut stream).await;
        streams.push(stream);
    }
    let mut last = client.stream_secrets();
    last.send(&secret_request("s32-cacert"));
    agent.wait_log("would take more than 32 MB").await;
    api.put("s0-cacert", &[("ca.crt", mock.root_pem().as_bytes())]);
    next(&mut streams[0]).await;
    // It is looked for with the round of half a minute.
    eventually_within(LIMIT * 3, "there is room", async || {
        agent.log().contains("over: GatewaySecret s32-cacert").then_some(())
    })
    .await;
    next(&mut last).await;
    agent.stop().await;
}
