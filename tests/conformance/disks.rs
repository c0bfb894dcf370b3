//! Files that never answer: a FIFO in the place of a file is read without end until somebody writes.

use rustix::process::{Signal, kill_process};
use tokio::net::unix::pipe::{OpenOptions, Sender};

use crate::support::client::secret_request;
use crate::support::{Envoy, MockIstiod, TestAgent, eventually};

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

/// An agent whose Envoy cannot be read from its disk, and another name of the binary.
fn unread(mock: &MockIstiod) -> (TestAgent, std::path::PathBuf) {
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let (binary, other) = (dir.path().join("envoy"), dir.path().join("fifo"));
    assert!(
        std::process::Command::new("mkfifo").args(["-m", "755"]).arg(&binary).status().unwrap().success()
    );
    std::fs::hard_link(&binary, &other).unwrap();
    let agent = TestAgent::with().istiod(mock).envoy(Envoy::Binary(binary)).start_in(dir);
    (agent, other)
}

/// Everything but Envoy is there.
async fn serves_without_envoy(agent: &mut TestAgent) {
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.expect("a certificate");
    for _ in 0..20 {
        assert_eq!(agent.get("/healthz/ready").await.expect("an answer").status, 503);
    }
}

#[tokio::test]
async fn an_envoy_that_cannot_be_read_holds_up_itself_only() {
    let mock = MockIstiod::start().await;
    let (mut agent, fifo) = unread(&mock);
    serves_without_envoy(&mut agent).await;
    let binary = agent.path("envoy");
    agent.wait_log(&format!("{} is not read from its disk", binary.display())).await;
    serves_without_envoy(&mut agent).await;
    // The disk is back.
    let fresh = agent.path("fresh");
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_envoy.py"), &fresh).unwrap();
    std::fs::rename(&fresh, &binary).unwrap();
    drop(eventually("somebody waits for it", || async { OpenOptions::new().open_sender(&fifo).ok() }).await);
    agent.wait_log("has answered: Envoy runs").await;
    agent.wait_ready().await;
    agent.stop().await;
}

#[tokio::test]
async fn an_agent_ends_while_its_envoy_cannot_be_read() {
    let mock = MockIstiod::start().await;
    let (mut agent, _) = unread(&mock);
    serves_without_envoy(&mut agent).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_killed_agent_leaves_nothing_that_waits_for_envoys_binary() {
    let mock = MockIstiod::start().await;
    let (mut agent, _) = unread(&mock);
    agent.wait_log("is not read from its disk").await;
    agent.signal(Signal::KILL);
    agent.wait_exit().await;
    eventually("no process is left", || async { agent.processes().is_empty().then_some(()) }).await;
}
