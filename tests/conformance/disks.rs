//! Files that never answer: a FIFO in the place of a file is read without end until somebody writes.

use rustix::process::{Signal, kill_process};
use tokio::net::unix::pipe::{OpenOptions, Sender};

use crate::support::client::secret_request;
use crate::support::{MockIstiod, TestAgent, eventually};

const WATCHED: &str = "watched.pem";

/// An agent whose Envoy is restarted when a file changes, and the file does not answer.
async fn stuck(mock: &MockIstiod) -> (TestAgent, Sender) {
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let watched = dir.path().join(WATCHED);
    std::fs::write(&watched, "one").unwrap();
    let mut agent = TestAgent::with()
        .istiod(mock)
        .env("ENVOY_HOT_RESTART", "true")
        .env("ENVOY_RECOVERY", "true")
        .env("ENVOY_RESTART_ON_FILES", watched.to_str().unwrap())
        .start_in(dir);
    agent.wait_ready().await;
    let fifo = agent.path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::fs::rename(&fifo, &watched).unwrap();
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    // There is no such end before somebody reads.
    let end = || async { OpenOptions::new().open_sender(&watched).ok() };
    let sender = eventually("the file is read", end).await;
    (agent, sender)
}

async fn serves(agent: &mut TestAgent) {
    for _ in 0..20 {
        assert_eq!(agent.get("/healthz/ready").await.expect("an answer").status, 200);
    }
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.expect("a certificate");
}

#[tokio::test]
async fn a_watched_file_that_does_not_answer_delays_the_restart_only() {
    let mock = MockIstiod::start().await;
    let (mut agent, sender) = stuck(&mock).await;
    serves(&mut agent).await;
    assert!(!agent.log().contains("takes over"));
    std::fs::remove_file(agent.path(WATCHED)).unwrap();
    drop(sender);
    agent.wait_log("epoch 1 takes over").await;
    agent.stop().await;
}

#[tokio::test]
async fn an_envoy_that_dies_meanwhile_is_started_with_what_is_known() {
    let mock = MockIstiod::start().await;
    let (mut agent, sender) = stuck(&mock).await;
    let first = agent.envoy_pid().await;
    kill_process(first, Signal::SEGV).unwrap();
    eventually("another Envoy", || async { agent.envoy().filter(|pid| *pid != first) }).await;
    agent.wait_log("Envoy is started with its last configuration").await;
    agent.wait_ready().await;
    serves(&mut agent).await;
    agent.stop().await;
    drop(sender);
}
