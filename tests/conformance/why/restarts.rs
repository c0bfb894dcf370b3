//! Envoys that come and go: readiness follows the process that runs, and what happened is on the list while it matters.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::beside::told;
use crate::support::client::secret_request;
use crate::support::mesh::Loop;
use crate::support::{Code, Envoy, Fault, MockIstiod, TestAgent, eventually, http};

async fn ready(agent: &TestAgent) -> (u16, String) {
    let reply = agent.get("/healthz/ready").await.expect("the status port answers");
    let why = reply.headers.get("x-not-ready").map(|h| h.to_str().unwrap_or_default().to_owned());
    (reply.status.as_u16(), why.unwrap_or_default())
}

async fn another_envoy(agent: &TestAgent, than: Pid) -> Pid {
    eventually("another Envoy", || async { agent.envoy().filter(|pid| *pid != than) }).await
}

#[tokio::test]
async fn an_envoy_that_was_started_again_must_prove_itself_though_nobody_asked_meanwhile() {
    let mock = MockIstiod::start().await;
    let mut agent =
        TestAgent::with().istiod(&mock).env("ENVOY_RECOVERY", "true").fake("unready_by", "unready").start();
    agent.wait_ready().await;
    agent.put("unready", "");
    assert_eq!(ready(&agent).await.0, 200, "what it once said is not asked again");
    let first = agent.envoy_pid().await;
    kill_process(first, Signal::SEGV).unwrap();
    another_envoy(&agent, first).await;
    let (status, why) = ready(&agent).await;
    assert!(status == 503 && !why.is_empty(), "{status} {why}");
    std::fs::remove_file(agent.path("unready")).unwrap();
    agent.wait_ready().await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_hot_restart_without_istiod_the_epoch_that_serves_is_ready() {
    let mock = MockIstiod::start().await;
    let _mesh = Loop::serve(&mock);
    let mut agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real).hot_restarts().start();
    agent.wait_ready().await;
    // The next epoch gets no configuration.
    mock.down().await;
    assert_eq!(agent.post("/debug/hot_restart").await.expect("an answer").text(), "OK");
    eventually("the new epoch answers", || async {
        let reply = http::get(agent.ports().admin, "/server_info").await.ok()?;
        let info: Value = serde_json::from_slice(&reply.body).ok()?;
        (info["command_line_options"]["restart_epoch"] == 1).then_some(())
    })
    .await;
    // The one before serves until this one does.
    let (status, why) = ready(&agent).await;
    assert!(status == 200, "{status} {why}");
    mock.up().await.unwrap();
    agent.wait_log("Envoy epoch 0 exited").await;
    let (status, why) = ready(&agent).await;
    assert!(status == 200, "{status} {why}");
    agent.stop().await;
}

#[tokio::test]
async fn an_envoy_that_is_killed_again_and_again_is_told_until_it_lives() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("ENVOY_RECOVERY", "true").start();
    agent.wait_ready().await;
    let mut envoy = agent.envoy_pid().await;
    for _ in 0..3 {
        kill_process(envoy, Signal::SEGV).unwrap();
        envoy = another_envoy(&agent, envoy).await;
    }
    let (_, document) = (ready(&agent).await, agent.get("/debug/agentz").await.unwrap().text());
    assert!(document.contains("\"EnvoyCrashed\"") && document.contains("segmentation fault"), "{document}");
    agent.wait_log("over: EnvoyCrashed").await;
    agent.wait_ready().await;
    let status = agent.run(&["status"]).await;
    assert!(status.code == Some(0) && status.stdout.contains("3 restarts"), "{}", status.stdout);
    agent.stop().await;
}

/// The agent looks by itself, too: 20 s after its start, when the pause before the next attempt is longer than that look is late.
#[tokio::test]
async fn between_two_crashes_the_crash_is_the_cause_though_nobody_probes() {
    let mock = MockIstiod::start().await;
    let ends = serde_json::json!({"after": 0.1, "status": 7});
    let mut agent = TestAgent::with().istiod(&mock).env("ENVOY_RECOVERY", "true").fake("exit", ends).start();
    agent.wait_log("Envoy is restarted in 12.8s").await;
    agent.wait_log("Envoy is restarted in 25.6s").await;
    let document = agent.get("/debug/agentz").await.unwrap().text();
    assert!(!agent.log().contains("is not running") && !document.contains("EnvoyNotStarted"), "{document}");
    agent.stop().await;
}

#[tokio::test]
async fn an_envoy_that_stands_still_is_told_though_it_was_ready() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.wait_ready().await;
    let envoy = agent.envoy_pid().await;
    kill_process(envoy, Signal::STOP).unwrap();
    told(&agent, "EnvoyAdminSilent", "did not answer").await;
    assert_eq!(ready(&agent).await.0, 200, "as the Go agent has it: what Envoy once said is not asked again");
    kill_process(envoy, Signal::CONT).unwrap();
    let status = agent.run(&["status"]).await;
    assert_eq!(status.code, Some(0), "{}", status.stdout);
    agent.stop().await;
}

#[tokio::test]
async fn what_envoy_alone_knows_reaches_the_log_without_a_probe() {
    let mock = MockIstiod::start().await;
    let live = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 0\n";
    let mut agent = TestAgent::with().istiod(&mock).fake("stats", live).start();
    agent.wait_log("config not fully received").await;
    agent.stop().await;
}

// Strict readiness, both ways.

fn strict(mock: &MockIstiod) -> TestAgent {
    TestAgent::with()
        .istiod(mock)
        .env("READINESS_STRICT", "true")
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("CA_TIMEOUT", "2s")
        .start()
}

async fn expired(agent: &TestAgent) {
    eventually("the certificate is over", || async {
        let document: Value = serde_json::from_str(&agent.get("/debug/agentz").await.ok()?.text()).ok()?;
        let end = document["identity"]["certificate"]["notAfter"].as_u64()?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?.as_secs();
        (end < now).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_certificate_that_nobody_asked_for_never_takes_strict_readiness() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(Duration::from_secs(2)));
    let mut agent = strict(&mock);
    agent.wait_ready().await;
    agent.wait_log("generated new workload certificate").await;
    expired(&agent).await;
    assert_eq!(ready(&agent).await, (200, String::new()));
    let status = agent.run(&["status"]).await;
    assert_eq!(status.code, Some(0), "{}", status.stdout);
    agent.stop().await;
}

#[tokio::test]
async fn a_certificate_that_was_asked_for_and_is_missing_or_over_takes_strict_readiness_with_its_reason() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(Duration::from_secs(3)));
    mock.ca().always(vec![Fault::refuse(Code::PermissionDenied)]);
    let mut agent = strict(&mock);
    let client = agent.sds().await;
    let secrets = client.stream_secrets();
    secrets.send(&secret_request("default"));
    let refused = || async {
        let (status, why) = ready(&agent).await;
        (status == 503 && why.starts_with("CertificateRefused: ") && why.contains("CertificateMissing"))
            .then_some(())
    };
    eventually("never issued", refused).await;
    mock.ca().always(vec![]);
    agent.wait_ready().await;
    mock.ca().always(vec![Fault::refuse(Code::PermissionDenied)]);
    let over = || async {
        let (status, why) = ready(&agent).await;
        (status == 503 && why.starts_with("CertificateRefused: ") && why.contains("CertificateExpired"))
            .then_some(())
    };
    eventually("it has expired", over).await;
    mock.set_ttl(None);
    mock.ca().always(vec![]);
    agent.wait_ready().await;
    agent.stop().await;
}
