//! What can go wrong at the API server, one by one: each is outlived, and what was served stays.

use mock_istiod::apiserver::{ApiFault, ApiServer};
use mock_istiod::pki::Pair;

use super::{ACCOUNT, SOCKET, Stream, fields, from_api, is, next, pair};
use crate::support::client::{EnvoyClient, ack, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent, eventually};

/// An Envoy that was given the secret `web`.
struct Followed {
    mock: MockIstiod,
    api: ApiServer,
    agent: TestAgent,
    client: EnvoyClient,
    stream: Stream,
    first: Pair,
}

impl Followed {
    async fn start() -> Self {
        let mock = MockIstiod::start().await;
        let api = ApiServer::start(&mock.authority(), "S3CRET-ONE").await;
        let first = pair(&mock, "first");
        api.put("web", &fields(&first));
        let mut agent = from_api(&mock, &api)
            .env("INGRESS_GATEWAY_FALLBACK_SECRET", "")
            .arg("--log_output_level=all:debug")
            .start();
        let client = agent.client(SOCKET).await;
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("web"));
        let response = stream.next().await.unwrap();
        assert!(is(&secrets(&response)[0].1, &first));
        stream.send(&ack(&response, &["web"]));
        let world = Self { mock, api, agent, client, stream, first };
        world.watched_from(world.api.version()).await;
        world
    }

    /// Waits for a watch that goes on from this version.
    async fn watched_from(&self, version: u64) {
        let end = format!("&resourceVersion={version}");
        eventually(&end, async || {
            let asked = self.api.asked();
            asked.iter().any(|target| target.contains("watch=true") && target.ends_with(&end)).then_some(())
        })
        .await;
    }

    /// A new pair reaches the stream, and a second stream is given it too.
    async fn a_change_arrives(&mut self, name: &str) {
        let changed = pair(&self.mock, name);
        self.api.put("web", &fields(&changed));
        assert!(is(&next(&mut self.stream).await, &changed), "{name}");
    }

    async fn what_was_served_stays(&self) {
        let mut again = self.client.stream_secrets();
        again.send(&secret_request("web"));
        assert!(is(&next(&mut again).await, &self.first));
    }

    async fn stop(self) {
        assert_eq!(self.api.faults_left(), 0, "every fault was met");
        for secret in ["S3CRET", "PRIVATE KEY"] {
            assert!(!self.agent.log().contains(secret));
        }
        self.agent.stop().await;
    }
}

#[tokio::test]
async fn a_watch_is_resumed_where_it_ended_and_misses_nothing() {
    let mut world = Followed::start().await;
    let lists = world.api.lists();
    // The change happens between two watches.
    world.api.next([ApiFault::Status(503)]);
    world.api.restart();
    world.a_change_arrives("while nobody watched").await;
    let from = world.api.version();
    world.api.restart();
    world.watched_from(from).await;
    world.a_change_arrives("after it").await;
    assert!(world.api.lists() <= lists + 1, "a watch that ends in order is resumed without a list");
    world.stop().await;
}

#[tokio::test]
async fn bookmarks_move_the_version_forward() {
    let mut world = Followed::start().await;
    let lists = world.api.lists();
    let other = pair(&world.mock, "other");
    for n in 0..20 {
        world.api.put(&format!("other-{n}"), &fields(&other));
    }
    // Nothing of ours has changed; only bookmarks can have brought it this far. One may still be on its way.
    let newest = world.api.version();
    eventually("a watch from the newest version", async || {
        world.api.restart();
        let end = format!("&resourceVersion={newest}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        world.api.asked().iter().any(|target| target.ends_with(&end)).then_some(())
    })
    .await;
    assert_eq!(world.api.lists(), lists);
    world.a_change_arrives("after bookmarks").await;
    world.stop().await;
}

#[tokio::test]
async fn a_version_that_is_gone_begins_with_a_list() {
    let mut world = Followed::start().await;
    for fault in [ApiFault::Gone, ApiFault::Status(410)] {
        let lists = world.api.lists();
        world.api.next([fault]);
        world.api.restart();
        eventually("a list", async || (world.api.lists() > lists).then_some(())).await;
        world.a_change_arrives(&format!("{fault:?}")).await;
    }
    world.stop().await;
}

#[tokio::test]
async fn a_refusal_names_what_is_missing() {
    let mut world = Followed::start().await;
    world.api.next([ApiFault::Status(403)]);
    world.api.restart();
    world.agent.wait_log("not allowed to watch secrets in namespace ns").await;
    world.what_was_served_stays().await;
    world.a_change_arrives("once it is allowed").await;
    world.stop().await;
}

#[tokio::test]
async fn a_slow_server_is_waited_for_and_holds_up_nobody_else() {
    let mut world = Followed::start().await;
    // One name's request is never answered; the other's comes drop by drop.
    world.api.next([ApiFault::Hang]);
    let stuck = world.client.stream_secrets();
    stuck.send(&secret_request("stuck"));
    eventually("the request that hangs", async || (world.api.faults_left() == 0).then_some(())).await;
    let slow = pair(&world.mock, "slow");
    world.api.put("slow", &fields(&slow));
    world.api.next([ApiFault::Slow, ApiFault::Slow]);
    let mut stream = world.client.stream_secrets();
    stream.send(&secret_request("slow"));
    let response = stream.next().await.unwrap();
    assert!(is(&secrets(&response)[0].1, &slow));
    stream.send(&ack(&response, &["slow"]));
    eventually("the slow watch", async || (world.api.faults_left() == 0).then_some(())).await;
    let later = pair(&world.mock, "later");
    world.api.put("slow", &fields(&later));
    assert!(is(&next(&mut stream).await, &later), "an event in two dozen pieces");
    world.a_change_arrives("beside it").await;
    world.stop().await;
}

#[tokio::test]
async fn an_event_that_is_cut_in_the_middle_comes_again_whole() {
    let mut world = Followed::start().await;
    world.api.next([ApiFault::Cut, ApiFault::Cut]);
    world.api.restart();
    eventually("the next watch", async || (world.api.faults_left() == 1).then_some(())).await;
    // It and the one after it end in the middle of this event.
    world.a_change_arrives("cut twice").await;
    world.stop().await;
}

#[tokio::test]
async fn garbage_is_told_and_not_repeated() {
    let mut world = Followed::start().await;
    world.api.next([ApiFault::Garbage, ApiFault::Garbage]);
    world.api.restart();
    world.agent.wait_log("its list cannot be read").await;
    world.what_was_served_stays().await;
    world.a_change_arrives("after garbage").await;
    world.stop().await;
}

#[tokio::test]
async fn a_token_that_was_rotated_is_read_anew() {
    let mut world = Followed::start().await;
    world.api.rotate("S3CRET-TWO");
    world.api.restart();
    world.agent.wait_log("(401)").await;
    world.what_was_served_stays().await;
    let document = world.agent.get("/debug/agentz").await.unwrap().text();
    assert!(document.contains("\"GatewaySecret\""), "the status document names the trouble: {document}");
    assert_eq!(world.agent.get("/healthz/ready").await.unwrap().status.as_u16(), 200, "readiness stays");
    world.agent.put(&format!("{ACCOUNT}/token"), "S3CRET-TWO");
    world.a_change_arrives("with the new token").await;
    world.stop().await;
}

#[tokio::test]
async fn a_missing_secret_is_told_wherever_one_looks_and_is_over_when_it_is_made() {
    let mock = MockIstiod::start().await;
    let api = ApiServer::start(&mock.authority(), "S3CRET-ONE").await;
    let mut agent = from_api(&mock, &api).env("READINESS_STRICT", "true").start();
    let client = agent.client(SOCKET).await;
    agent.wait_ready().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("web"));
    let reply = eventually("readiness tells", async || {
        agent.get("/healthz/ready?verbose").await.ok().filter(|reply| reply.status.as_u16() == 503)
    })
    .await;
    let said = reply.headers["x-not-ready"].to_str().unwrap().to_owned();
    assert!(said.contains("gateway secret web: there is no such secret"), "{said}");
    let document: serde_json::Value =
        serde_json::from_slice(&agent.get("/debug/agentz").await.unwrap().body).unwrap();
    assert_eq!(document["verdict"]["kind"], "GatewaySecret", "{document}");
    let made = pair(&mock, "made");
    api.put("web", &fields(&made));
    assert!(is(&next(&mut stream).await, &made));
    agent.wait_ready().await;
    agent.wait_log("over: GatewaySecret web").await;
    agent.stop().await;
}
