//! What a row of the table is, and how its witnesses are judged.

use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use serde_json::Value;

use crate::support::agent::Builder;
use crate::support::client::{node, secret_request};
use crate::support::{MockIstiod, TestAgent};

/// A dial to a silent server takes 20 s; the rest is a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
pub(super) const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// What is done to the builder, or to istiod, before the agent starts.
pub(super) type Break = fn(Builder, &MockIstiod) -> Builder;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The agent runs on and is not ready.
    Waits,
    /// The agent is ready all the same.
    Ready,
    /// The agent refuses to start, or ends.
    Ends,
}

pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) life: Life,
    /// The verdict is one of these.
    pub(super) kinds: &'static [&'static str],
    /// One of these stands in every witness for people.
    pub(super) words: &'static [&'static str],
    pub(super) make: Break,
    /// Only a running agent knows: `doctor` without one sees nothing.
    pub(super) unseen: bool,
}

pub(super) const fn row(
    name: &'static str,
    kinds: &'static [&'static str],
    words: &'static [&'static str],
    make: Break,
) -> Row {
    Row { name, life: Life::Waits, kinds, words, make, unseen: false }
}

pub(super) const fn ends(
    name: &'static str,
    kinds: &'static [&'static str],
    words: &'static [&'static str],
    make: Break,
) -> Row {
    Row { name, life: Life::Ends, kinds, words, make, unseen: false }
}

pub(super) const fn unseen(mut row: Row) -> Row {
    row.unseen = true;
    row
}

/// What is wrong with the witnesses of one row.
struct Judge<'a> {
    row: &'a Row,
    wrong: Vec<String>,
}

impl Judge<'_> {
    fn check(&mut self, witness: &str, good: bool, saw: &str) {
        if !good {
            let saw: String = saw.chars().take(1500).collect();
            self.wrong.push(format!("{} / {witness}: {saw}", self.row.name));
        }
    }

    fn has_words(&self, text: &str) -> bool {
        self.row.words.iter().any(|word| text.contains(word))
    }

    fn is_kind(&self, verdict: &Value) -> bool {
        verdict["kind"].as_str().is_some_and(|kind| self.row.kinds.contains(&kind))
    }

    async fn commands(&mut self, agent: &TestAgent, runs: bool) {
        let status = agent.run(&["status"]).await;
        let shown = format!("{}{}", status.stdout, status.stderr);
        if runs {
            self.check("status exit", status.code == Some(1), &shown);
            self.check("status words", self.has_words(&shown) && shown.contains("verdict: "), &shown);
            let json = agent.run(&["status", "--json"]).await.json();
            self.check(
                "status --json",
                self.is_kind(&json["verdict"]) && json["healthy"] == false,
                &json["verdict"].to_string(),
            );
        } else {
            self.check("status exit", status.code == Some(2) && shown.contains("not reachable"), &shown);
        }
        let doctor = agent.run(&["doctor", self.row.node_type()]).await;
        // Without a running agent nothing tells how its Envoy ended.
        let visible = runs || !self.row.unseen;
        let code = Some(i32::from(visible));
        self.check("doctor exit", doctor.code == code, &format!("{}{}", doctor.stdout, doctor.stderr));
        let last = doctor.stdout.lines().last().unwrap_or_default().to_owned();
        self.check(
            "doctor words",
            last.starts_with("verdict: ") && self.has_words(&doctor.stdout),
            &doctor.stdout,
        );
        let json = agent.run(&["doctor", self.row.node_type(), "--json"]).await.json();
        self.check("doctor --json", !visible || self.is_kind(&json["verdict"]), &json.to_string());
    }
}

impl Row {
    fn node_type(&self) -> &'static str {
        if self.name == "unknown node type" { "gateway" } else { "sidecar" }
    }
}

pub(super) async fn look(row: &Row) -> Vec<String> {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with()
        .istiod(&mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("CLOUD_PLATFORM", "none")
        .fake("ready", false);
    let mut agent = (row.make)(builder, &mock).start();
    let mut judge = Judge { row, wrong: Vec::new() };
    if row.life == Life::Ends {
        judge.ended(&mut agent).await;
        return judge.wrong;
    }
    // As Envoy does at its start.
    let (sds, xds) = (agent.sds().await, agent.xds().await);
    let secrets = sds.stream_secrets();
    secrets.send(&secret_request("default"));
    let request = DiscoveryRequest {
        node: Some(node("sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local")),
        type_url: CLUSTER.to_owned(),
        ..DiscoveryRequest::default()
    };
    let stream = xds.ads();
    stream.send(&request);
    if !judge.reported(&agent).await {
        return judge.wrong;
    }
    if row.life == Life::Waits {
        judge.not_ready(&agent).await;
    }
    let log = agent.log().text();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    judge.check("log", judge.has_words(&last.join("\n")), &last.join("\n"));
    judge.commands(&agent, true).await;
    agent.assert_running();
    judge.wrong
}

async fn document(agent: &TestAgent) -> Value {
    let text = agent.get("/debug/agentz").await.map(|r| r.text()).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

impl Judge<'_> {
    // Exit status, log and commands of an agent that ends.
    async fn ended(&mut self, agent: &mut TestAgent) {
        let status = agent.wait_exit().await;
        // The last lines may still be on their way.
        let said = async {
            while !agent.log().contains("verdict: ") {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(10), said).await;
        let log = agent.log().text();
        self.check("exit status", !status.success(), &status.to_string());
        let last: Vec<&str> = log.lines().rev().take(20).collect();
        self.check("log", self.has_words(&last.join("\n")), &log);
        // Envoy's own output may come behind it.
        let verdict = last.iter().find_map(|line| line.split("verdict: ").nth(1)).unwrap_or_default();
        let kind = verdict.split([':', ';']).next().unwrap_or_default();
        self.check("last line", self.row.kinds.contains(&kind), &log);
        self.commands(agent, false).await;
    }

    // The verdict is there, sooner or later.
    async fn reported(&mut self, agent: &TestAgent) -> bool {
        let found = tokio::time::timeout(LIMIT, async {
            while !self.is_kind(&document(agent).await["verdict"]) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        if found.await.is_ok() {
            return true;
        }
        let document = document(agent).await;
        self.check("agentz", false, &format!("{} {}", document["verdict"], document["troubles"]));
        false
    }

    // Readiness and `wait` say why.
    async fn not_ready(&mut self, agent: &TestAgent) {
        let reply = agent.get("/healthz/ready?verbose").await.expect("the status port answers");
        let header = reply.headers.get("x-not-ready").map(|h| h.to_str().unwrap_or_default().to_owned());
        let header = header.unwrap_or_default();
        self.check("readiness", reply.status == 503 && self.has_words(&header), &header);
        self.check("readiness body", self.has_words(&reply.text()), &reply.text());
        let url = format!("http://localhost:{}/healthz/ready", agent.ports().status);
        let words = [
            "wait",
            "--timeoutSeconds=1",
            "--periodMillis=100",
            "--requestTimeoutMillis=3000",
            "--url",
            &url,
        ];
        let wait = agent.run(&words).await;
        let said = format!("{}{}", wait.stdout, wait.stderr);
        self.check("wait", wait.code == Some(255) && self.has_words(&said), &wait.stderr);
    }
}

pub(super) async fn without_an_agent(row: &Row) -> Vec<String> {
    let mock = MockIstiod::start().await;
    let builder =
        TestAgent::with().istiod(&mock).env("ECC_SIGNATURE_ALGORITHM", "ECDSA").env("CLOUD_PLATFORM", "none");
    let scene = (row.make)(builder, &mock).scene();
    let mut judge = Judge { row, wrong: Vec::new() };
    let words = ["doctor", row.node_type(), "--sign"];
    let said = scene.run(&words).await;
    let degraded = row.life == Life::Ready;
    judge.check("doctor exit", said.code == Some(i32::from(!degraded)), &said.stdout);
    judge.check("doctor words", judge.has_words(&said.stdout), &said.stdout);
    let json = scene.run(&[&words[..], &["--json"]].concat()).await.json();
    let kinds: Vec<&str> = match degraded {
        true => json["checks"].as_array().into_iter().flatten().filter_map(|c| c["kind"].as_str()).collect(),
        false => json["verdict"]["kind"].as_str().into_iter().collect(),
    };
    judge.check("doctor --json", kinds.iter().any(|k| row.kinds.contains(k)), &json.to_string());
    judge.wrong
}
