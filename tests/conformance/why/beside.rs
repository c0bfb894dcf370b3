//! Troubles of parts beside the proxy: it stays ready, and the other witnesses name them.

use serde_json::{Value, json};

use super::servers;
use crate::support::{MockIstiod, SmallDisk, TestAgent, eventually, free_port, root_for};

/// Waits until the kind is on the list, and has every witness but readiness name it with this word.
pub async fn told(agent: &TestAgent, kind: &str, word: &str) {
    let has = |troubles: &Value| {
        let all = troubles.as_array().map(Vec::as_slice).unwrap_or_default();
        all.iter().any(|t| t["kind"] == kind && t["detail"].as_str().is_some_and(|d| d.contains(word)))
    };
    eventually(kind, || async {
        let text = agent.get("/debug/agentz").await.ok()?.text();
        let document: Value = serde_json::from_str(&text).ok()?;
        has(&document["troubles"]).then_some(())
    })
    .await;
    let json = agent.run(&["status", "--json"]).await.json();
    assert!(has(&json["troubles"]) && json["healthy"] == false, "{json}");
    let json = agent.run(&["doctor", "--json"]).await.json();
    assert!(has(&json["troubles"]), "{json}");
    let doctor = agent.run(&["doctor"]).await.stdout;
    let status = agent.run(&["status"]).await;
    assert_eq!(status.code, Some(1), "{}", status.stdout);
    let page = agent.get("/debug/").await.unwrap().text();
    for (witness, text) in [("doctor", &doctor), ("status", &status.stdout), ("page", &page)] {
        assert!(text.contains(kind) && text.contains(word), "{witness}: {text}");
    }
}

/// The same, and the log.
async fn told_aloud(agent: &TestAgent, kind: &str, word: &str) {
    told(agent, kind, word).await;
    let log = agent.log().text();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    assert!(last.iter().any(|line| line.contains(word)), "{word} in {log}");
}

#[tokio::test]
async fn an_application_that_fails_the_kubelets_probes() {
    let mock = MockIstiod::start().await;
    let app = free_port();
    let probe = json!({"/app-health/app/livez": {"httpGet": {"path": "/", "port": app, "scheme": "HTTP"}}});
    let mut agent = TestAgent::with().istiod(&mock).env("ISTIO_KUBE_APP_PROBERS", probe.to_string()).start();
    agent.wait_ready().await;
    for _ in 0..3 {
        assert_eq!(agent.get("/app-health/app/livez").await.unwrap().status.as_u16(), 500);
    }
    told_aloud(&agent, "ApplicationUnhealthy", "/app-health/app/livez").await;
    let status = agent.run(&["status"]).await.stdout;
    assert!(status.contains("FAILED 3 times in a row"), "{status}");
    agent.stop().await;
}

#[tokio::test]
async fn an_application_on_a_machine_that_fails_its_health_check() {
    let mock = MockIstiod::start().await;
    let probe = json!({"periodSeconds": 1, "exec": {"command": ["test", "-e", "well"]}});
    let mut agent = TestAgent::with().istiod(&mock).proxy_config("readinessProbe", probe).start();
    agent.wait_ready().await;
    told_aloud(&agent, "ApplicationUnhealthy", "exit status 1").await;
    agent.put("well", "");
    agent.wait_log("over: ApplicationUnhealthy").await;
    let status = agent.run(&["status"]).await;
    assert_eq!(status.code, Some(0), "{}", status.stdout);
    agent.stop().await;
}

#[tokio::test]
async fn a_status_port_that_somebody_else_holds() {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().istiod(&mock);
    servers::hold(builder.ports().status);
    let mut agent = builder.start();
    agent.wait_log("Error listening on status port").await;
    assert!(agent.log().contains("held by pid"), "{}", agent.log().text());
    let status = agent.run(&["status"]).await;
    assert!(status.code == Some(2) && status.stdout.contains("held by"), "{}", status.stdout);
    // The agent goes on, but probes come to a stranger.
    let doctor = agent.run(&["doctor", "--json"]).await;
    let json = doctor.json();
    assert_eq!((doctor.code, &json["verdict"]["kind"]), (Some(1), &"StatusPortTaken".into()), "{json}");
    agent.assert_running();
}

#[tokio::test]
async fn output_certs_on_a_full_disk() {
    if !root_for("a disk of a few kilobytes") {
        return;
    }
    let mock = MockIstiod::start().await;
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let disk = SmallDisk::mount(&dir.path().join("out"));
    disk.fill();
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .env("OUTPUT_CERTS", "out")
        .env("GRPC_XDS_BOOTSTRAP", "")
        .start_in(dir);
    agent.wait_ready().await;
    told_aloud(&agent, "DiskFull", "out").await;
    disk.empty();
    agent.wait_log("over: DiskFull").await;
    agent.stop().await;
}

#[tokio::test]
async fn a_root_that_was_rotated_away() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.wait_ready().await;
    agent.wait_log("generated new workload certificate").await;
    mock.down().await;
    mock.rotate_root(false);
    mock.up().await.unwrap();
    let client = agent.xds().await;
    let stream = client.ads();
    stream.send(&crate::support::client::secret_request("x"));
    told_aloud(&agent, "RootDoesNotSign", "invalid peer certificate").await;
    agent.put(crate::support::agent::ROOT, mock.root_pem());
    let stream = client.ads();
    stream.send(&crate::support::client::secret_request("x"));
    // The mock has nothing to say to this request; that it is asked is enough.
    agent.wait_log("(before: RootDoesNotSign)").await;
    agent.stop().await;
}
