//! The table of faults: whatever is looked at first names the cause. Each row is a real fault; its witnesses are the
//! log, the readiness answer, `/debug/agentz`, `wait`, `status` and `doctor`, all judged by the kind of trouble and by
//! words that a person would look for.

mod alone;
pub mod beside;
mod judge;
mod restarts;
mod rows;
mod servers;
mod surroundings;
mod views;
mod wider;

use futures_util::StreamExt;
use serde_json::Value;

use crate::support::agent::TOKEN;
use crate::support::client::{ack, node};
use crate::support::{Code, Fault, LIMIT, MockIstiod, TestAgent};
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::google::rpc::Status as Refusal;
use judge::{CLUSTER, Row, look, without_an_agent};

/// Every row, a few at a time: each has an agent and an istiod of its own.
async fn all<F: Future<Output = Vec<String>>>(
    rows: impl Iterator<Item = &'static Row>,
    judge: impl Fn(&'static Row) -> F,
) {
    let looks = futures_util::stream::iter(rows.map(judge)).buffer_unordered(6);
    let wrong: Vec<String> = looks.collect::<Vec<_>>().await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{} witnesses are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_witness_names_the_cause_of_every_fault() {
    assert!(rows::ROWS.len() >= 35, "{}", rows::ROWS.len());
    all(rows::ROWS.iter(), look).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_witness_names_the_cause_of_rarer_faults() {
    all(wider::ROWS.iter(), look).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_the_cause_of_every_fault_without_an_agent() {
    all(rows::ROWS.iter().chain(wider::ROWS).filter(|row| !row.unseen), without_an_agent).await;
}

#[tokio::test]
async fn a_rejection_of_envoys_is_named() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    let xds = agent.xds().await;
    let mut stream = xds.ads();
    let first = DiscoveryRequest {
        node: Some(node("sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local")),
        type_url: CLUSTER.to_owned(),
        ..DiscoveryRequest::default()
    };
    stream.send(&first);
    let response = stream.next().await.unwrap();
    let refusal = Refusal { code: 13, message: "no such cluster type".to_owned(), ..Refusal::default() };
    stream.send(&DiscoveryRequest { error_detail: Some(refusal), ..ack(&response, &[]) });
    let json = crate::support::eventually("the rejection is shown", || async {
        let json = agent.run(&["status", "--json"]).await.json();
        (json["verdict"]["kind"] == "ConfigRejected").then_some(json)
    })
    .await;
    assert_eq!(json["istiod"]["rejections"][0]["message"], "no such cluster type", "{json}");
    let doctor = agent.run(&["doctor"]).await;
    assert_eq!(doctor.code, Some(1));
    assert!(doctor.stdout.contains("no such cluster type"), "{}", doctor.stdout);
}

#[tokio::test]
async fn a_healthy_proxy_is_healthy_for_every_witness_and_doctor_leaves_no_trace() {
    let mock = MockIstiod::start().await;
    let agent = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").start();
    let mut agent = agent;
    agent.wait_ready().await;
    agent.wait_log("generated new workload certificate").await;
    let before = tree(&agent.path(""));
    for words in [&["doctor"][..], &["doctor", "--sign"], &["status"]] {
        let said = agent.run(words).await;
        assert_eq!(said.code, Some(0), "{words:?}: {}{}", said.stdout, said.stderr);
        assert!(said.stdout.lines().last().unwrap().starts_with("verdict: healthy"), "{}", said.stdout);
        assert!(!said.stdout.contains("FAIL") && !said.stdout.contains("warn "), "{}", said.stdout);
    }
    let json = agent.run(&["status", "--json"]).await.json();
    assert_eq!((json["healthy"].clone(), json["ready"].clone()), (true.into(), true.into()), "{json}");
    let date = json["identity"]["certificate"]["notAfter"].as_str().unwrap().to_owned();
    assert!(date.len() == 20 && date.ends_with('Z'), "RFC 3339: {date}");
    assert_eq!(json["verdict"], Value::Null);
    let operations =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/OPERATIONS.md")).unwrap();
    for document in [&json, &agent.run(&["doctor", "--json"]).await.json()] {
        for field in fields(document) {
            assert!(operations.contains(&format!("`{field}`")), "{field} is not documented");
        }
    }
    assert_eq!(tree(&agent.path("")), before, "nothing is written");
    // What nobody could read is no good news.
    for words in ["doctor", "doctor --json", "status"] {
        let lost = format!("exec \"$0\" {words} >/dev/full");
        let mut child = agent.spawn_by(&["sh", "-c", &lost]);
        let ended = tokio::time::timeout(LIMIT, child.wait()).await.expect("it ends").unwrap();
        assert_eq!(ended.code(), Some(1), "{words}");
    }
    agent.stop().await;
}

/// The names of all fields, but those below names that the mesh gives.
fn fields(value: &Value) -> std::collections::BTreeSet<String> {
    let mut all = std::collections::BTreeSet::new();
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                all.insert(name.clone());
                all.extend(fields(value));
            }
        }
        Value::Array(list) => list.iter().for_each(|value| all.extend(fields(value))),
        _ => {}
    }
    all
}

#[tokio::test]
async fn a_watch_shows_what_changes_until_nobody_reads() {
    use tokio::io::{AsyncBufReadExt, BufReader};
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).fake("unready_by", "unready").file("unready", "").start();
    agent.wait_log("generated new workload certificate").await;
    let mut watch = agent.spawn(&["status", "--watch", "--json"]);
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut next = async || {
        let line = tokio::time::timeout(crate::support::LIMIT, lines.next_line()).await.expect("in time");
        serde_json::from_str::<Value>(&line.unwrap().expect("it goes on")).expect("one document a line")
    };
    assert_eq!(next().await["ready"], false);
    std::fs::remove_file(agent.path("unready")).unwrap();
    while next().await["ready"] != true {}
    agent.signal(rustix::process::Signal::TERM);
    agent.wait_exit().await;
    while next().await["reachable"] != false {}
    drop(lines);
    let ended = tokio::time::timeout(crate::support::LIMIT, watch.wait()).await.expect("nobody reads");
    assert!(ended.unwrap().code().is_some());
}

#[tokio::test]
async fn a_watch_looks_at_the_rules_again() {
    use tokio::io::{AsyncBufReadExt, BufReader};
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .env("PATH", "bin:/usr/bin:/bin")
        .file_mode("bin/iptables-nft-save", "#!/bin/sh\ncat rules 2>/dev/null\ntrue\n", 0o755)
        .env("DISABLE_ENVOY", "true")
        .start();
    agent.wait_log("generated new workload certificate").await;
    let mut watch = agent.spawn(&["status", "--watch", "--json"]);
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut rules = async || {
        let line = tokio::time::timeout(crate::support::LIMIT, lines.next_line()).await.expect("in time");
        let line = line.unwrap().expect("it goes on");
        serde_json::from_str::<Value>(&line).unwrap()["capture"].to_string().contains("iptables-nft-save")
    };
    assert!(!rules().await);
    let made = "*nat\n:OUTPUT ACCEPT [0:0]\n:ISTIO_OUTPUT - [0:0]\n[1:60] -A OUTPUT -j ISTIO_OUTPUT\n\
                [0:0] -A ISTIO_OUTPUT -j RETURN\nCOMMIT\n";
    std::fs::write(agent.path("rules"), made).unwrap();
    let mut seen = false;
    for _ in 0..12 {
        seen = seen || rules().await;
    }
    assert!(seen, "twelve looks, and none at the rules");
    agent.assert_running();
}

fn tree(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.extend(tree(&path));
        }
        // What the fake Envoy notes of each request is its own.
        if path.file_name().is_none_or(|n| n != "fake-envoy.jsonl") {
            all.push(path);
        }
    }
    all.sort();
    all
}

/// Parts of every secret that the agent is given: the token's three parts, headers, passwords, keys.
#[tokio::test]
async fn no_secret_is_in_any_output() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .arg("--log_output_level=all:debug")
        .env("XDS_HEADER_AUTHORIZATION", "hunter2-header")
        .env("CA_HEADER_X_API_KEY", "hunter2-ca-header")
        .env("ISTIO_META_DNS_CAPTRUE", "hunter2-misspelt")
        .env("HTTPS_PROXY", "http://user:hunter2-proxy@127.0.0.1:1")
        .env("NO_PROXY", "localhost,127.0.0.1")
        .env("OUTPUT_CERTS", "out")
        .proxy_config("proxyMetadata", serde_json::json!({"MY_PASSWORD": "hunter2-meta"}))
        .proxy_config(
            "tracing",
            serde_json::json!({"lightstep": {"address": "a:1", "accessToken": "hunter2-token"}}),
        )
        .start();
    std::fs::create_dir(agent.path("out")).unwrap();
    agent.wait_log("generated new workload certificate").await;
    let mut secrets = vec!["hunter2".to_owned()];
    let token = std::fs::read_to_string(agent.path(TOKEN)).unwrap();
    secrets.extend(token.trim().split('.').skip(1).map(ToOwned::to_owned));
    let mut outputs = Vec::new();
    for (breaks, words) in [
        (false, &["doctor", "--sign"][..]),
        (false, &["doctor", "--json", "--log_output_level=all:debug"]),
        (false, &["status"]),
        (false, &["status", "--json"]),
        (true, &["doctor", "--json", "--sign"]),
        (true, &["doctor", "--log_output_level=all:debug"]),
        (true, &["status", "--json"]),
    ] {
        if breaks {
            mock.ca().always(vec![Fault::refuse(Code::Unauthenticated)]);
            mock.ads().always(vec![Fault::refuse(Code::Unauthenticated)]);
        }
        let said = agent.run(words).await;
        outputs.push((format!("{words:?}"), format!("{}{}", said.stdout, said.stderr)));
    }
    outputs.push(("the log".to_owned(), agent.log().text()));
    let header = agent.get("/healthz/ready").await.unwrap().headers.get("x-not-ready").cloned();
    outputs.push(("x-not-ready".to_owned(), format!("{header:?}")));
    let url = format!("http://localhost:{}/healthz/ready", agent.ports().status);
    for words in [
        &["wait", "--timeoutSeconds=1", "--periodMillis=100", "--url", &url][..],
        &["run", "--wait-timeout=1s", "--", "true"],
        &["doctor"],
        &["request", "GET", "/debug/agentz", "--debug-port=15020"],
    ] {
        let said = agent.run(words).await;
        outputs.push((format!("{words:?}"), format!("{}{}", said.stdout, said.stderr)));
    }
    for page in ["/debug/", "/debug/agentz", "/healthz/ready?verbose", "/stats/prometheus", "/logging"] {
        outputs.push((page.to_owned(), agent.get(page).await.map(|r| r.text()).unwrap_or_default()));
    }
    for (place, text) in outputs {
        assert!(!text.is_empty() || place.starts_with("[\"run\""), "{place} says nothing");
        for secret in &secrets {
            assert!(!text.contains(secret.as_str()), "{place} shows a secret:\n{text}");
        }
        assert!(!text.contains("PRIVATE KEY"), "{place} shows a key");
    }
}
