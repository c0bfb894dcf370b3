//! What is left of Envoy when the agent is killed while two of its epochs run.

use rustix::process::Signal;
use serde_json::Value;

use crate::support::mesh::Loop;
use crate::support::{Envoy, MockIstiod, TestAgent, eventually, http};

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_leaves_no_epoch_of_a_hot_restart() {
    let mock = MockIstiod::start().await;
    let _mesh = Loop::serve(&mock);
    let mut agent =
        TestAgent::with().istiod(&mock).envoy(Envoy::Real).env("ENVOY_HOT_RESTART", "true").start();
    agent.wait_ready().await;
    let first = agent.envoy_pid().await;
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    eventually("the second epoch is live", || async {
        let reply = http::get(agent.ports().admin, "/server_info").await.ok()?;
        let info: Value = serde_json::from_slice(&reply.body).ok()?;
        (info["state"] == "LIVE" && info["command_line_options"]["restart_epoch"] == 1).then_some(())
    })
    .await;
    // The first one drains for a minute.
    rustix::process::test_kill_process(first).expect("both run");
    agent.signal(Signal::KILL);
    assert!(agent.wait_exit().await.code().is_none());
    eventually("both are gone", || async { agent.processes().is_empty().then_some(()) }).await;
}
