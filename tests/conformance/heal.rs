//! An outage and its end with a real Envoy: the configuration pushed meanwhile arrives. How soon is measured by
//! the bench (`--only heal`).

use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::support::agent::TOKEN;
use crate::support::mesh::Loop;
use crate::support::{Envoy, MockIstiod, TestAgent, Token, eventually, root_for};

struct World {
    mock: MockIstiod,
    mesh: Loop,
    agent: TestAgent,
}

impl World {
    async fn new() -> Self {
        let mock = MockIstiod::start().await;
        let mesh = Loop::serve(&mock);
        let agent = TestAgent::with()
            .env("METRICS_DETAILS", "true")
            .env("GRPC_KEEPALIVE_INTERVAL", "1s")
            .env("GRPC_KEEPALIVE_TIMEOUT", "1s")
            .istiod(&mock)
            .envoy(Envoy::Real)
            .start();
        let mut world = Self { mock, mesh, agent };
        world.agent.wait_ready().await;
        world.shows("one").await;
        world
    }

    async fn shows(&self, value: &str) {
        eventually("the pushed route is in effect", || async {
            let reply = self.mesh.ask(&self.mock).await.ok()?;
            (reply.headers.get("x-config")? == value).then_some(())
        })
        .await;
    }

    async fn held(&self) {
        eventually("Envoy's stream is held", || async {
            (self.agent.metric("istio_agent_xds_held_streams").await == Some(1.0)).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_pushed_while_istiod_was_away_arrives() {
    let world = World::new().await;
    world.mock.down().await;
    world.held().await;
    world.mesh.push(&world.mock, "two");
    world.mock.up().await.unwrap();
    world.shows("two").await;
    world.agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_pushed_while_the_token_was_bad_arrives() {
    let world = World::new().await;
    let expires = mock_istiod::jwt::Expiry::Ago(Duration::from_secs(60));
    world.agent.put(TOKEN, Token { expires, ..Token::of("ns", "sa") }.sign());
    world.mock.down().await;
    world.mock.up().await.unwrap();
    world.held().await;
    world.mesh.push(&world.mock, "two");
    world.agent.put(TOKEN, world.mock.mint("ns", "sa"));
    world.shows("two").await;
    world.agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_envoy_is_let_go_and_gets_everything_when_it_goes_on() {
    let mut world = World::new().await;
    let envoy = world.agent.envoy_pid().await;
    kill_process(envoy, Signal::STOP).unwrap();
    world.agent.wait_log("Envoy has not answered a ping").await;
    world.mesh.push(&world.mock, "two");
    kill_process(envoy, Signal::CONT).unwrap();
    world.shows("two").await;
    world.agent.stop().await;
}

/// A user has 128 lists of watches, and all agents of a node are one user.
#[tokio::test]
async fn where_the_system_watches_no_files_this_is_said_once_and_they_are_looked_at() {
    const NONE: &str = "echo 0 > /proc/sys/user/max_inotify_instances && exec \"$@\"";
    if !root_for("a limit of the system's") {
        return;
    }
    let mock = MockIstiod::start().await;
    let before = ["unshare", "--user", "--map-root-user", "sh", "-c", NONE, "sh"].map(ToOwned::to_owned);
    let mut agent = TestAgent::with().istiod(&mock).before(&before).start();
    agent.wait_ready().await;
    agent.wait_log("raise fs.inotify.max_user_instances").await;
    std::fs::remove_file(agent.path("etc/istio/proxy/XDS")).unwrap();
    agent.wait_log("etc/istio/proxy/XDS was removed by somebody; binding it again").await;
    let said = agent.log().text();
    assert_eq!(said.matches("fs.inotify.max_user_instances").count(), 1, "{said}");
    agent.stop().await;
}
