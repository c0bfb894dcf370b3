//! The table of faults: whatever is looked at first names the cause. Each row is a real fault; its witnesses are the
//! log, the readiness answer, `/debug/agentz`, `wait`, `status` and `doctor`, all judged by the kind of trouble and by
//! words that a person would look for.

use std::time::Duration;

use futures_util::StreamExt;
use mock_istiod::jwt::Expiry;
use serde_json::Value;

use crate::support::agent::{Builder, ROOT, TOKEN};
use crate::support::client::{ack, node, secret_request};
use crate::support::{Code, Fault, MockIstiod, TestAgent, Token, free_port};
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::google::rpc::Status as Refusal;

/// A dial to a silent server takes 20 s; the rest is a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// What is done to the builder, or to istiod, before the agent starts.
type Break = fn(Builder, &MockIstiod) -> Builder;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    /// The agent runs on and is not ready.
    Waits,
    /// The agent is ready all the same.
    Ready,
    /// The agent refuses to start, or ends.
    Ends,
}

struct Row {
    name: &'static str,
    life: Life,
    /// The verdict is one of these.
    kinds: &'static [&'static str],
    /// One of these stands in every witness for people.
    words: &'static [&'static str],
    make: Break,
}

const fn row(
    name: &'static str,
    kinds: &'static [&'static str],
    words: &'static [&'static str],
    make: Break,
) -> Row {
    Row { name, life: Life::Waits, kinds, words, make }
}

const fn ends(
    name: &'static str,
    kinds: &'static [&'static str],
    words: &'static [&'static str],
    make: Break,
) -> Row {
    Row { name, life: Life::Ends, kinds, words, make }
}

fn token(builder: Builder, change: impl FnOnce(Token) -> Token) -> Builder {
    builder.file_mode(TOKEN, change(Token::of("ns", "sa")).sign(), 0o600)
}

fn ca(builder: Builder, mock: &MockIstiod, fault: Fault) -> Builder {
    mock.ca().always(vec![fault]);
    builder.env("CA_ATTEMPT_TIMEOUT", "2s").env("CA_TIMEOUT", "4s")
}

fn ads(builder: Builder, mock: &MockIstiod, fault: Fault) -> Builder {
    mock.ads().always(vec![fault]);
    builder
}

const ROWS: &[Row] = &[
    row("token missing", &["TokenMissing"], &["token"], |b, _| b.without_file(TOKEN)),
    row("token empty", &["TokenMalformed"], &["token"], |b, _| b.file(TOKEN, " \n")),
    row(
        "token is junk",
        &["TokenMalformed", "CertificateRefused", "AdsRefused"],
        &["token", "UNAUTHENTICATED"],
        |b, _| b.file(TOKEN, "junk"),
    ),
    row("token expired", &["TokenExpired"], &["expired"], |b, _| {
        token(b, |t| Token { expires: Expiry::Ago(Duration::from_secs(60)), ..t })
    }),
    row("token for another audience", &["TokenWrongAudience"], &["audience"], |b, _| {
        token(b, |t| Token { audience: "elsewhere".into(), ..t })
    }),
    row("token of another issuer", &["CertificateRefused", "AdsRefused"], &["UNAUTHENTICATED"], |b, _| {
        token(b, |t| Token { issuer: "https://elsewhere".into(), ..t })
    }),
    row("name not resolved", &["NameNotResolved"], &["name"], |b, _| {
        b.proxy_config("discoveryAddress", "istiod.invalid:15012")
    }),
    row("port closed", &["ConnectionRefused"], &["refused"], |b, _| {
        b.proxy_config("discoveryAddress", format!("localhost:{}", free_port()))
    }),
    row(
        "silent server",
        &["IstiodSilent", "CertificateNotAnswered"],
        &["no answer", "says nothing"],
        |b, mock| {
            mock.connections().always(vec![Fault::HalfOpen]);
            b.env("CA_ATTEMPT_TIMEOUT", "2s").env("CA_TIMEOUT", "4s")
        },
    ),
    row("another root", &["RootDoesNotSign"], &["root"], |b, _| {
        b.file(ROOT, mock_istiod::Authority::new("cluster.local", 0).root_pem())
    }),
    row(
        "clock behind",
        &["ClockWrong", "ServerCertificateNotYetValid"],
        &["clock", "not valid yet"],
        |b, _| b.clock_off_by(-10 * 86_400),
    ),
    row(
        "clock ahead",
        &["ClockWrong", "TokenExpired", "ServerCertificateExpired"],
        &["expired", "clock"],
        |b, _| b.clock_off_by(20 * 86_400),
    ),
    row("another name", &["ServerNameMismatch"], &["name"], |b, _| {
        b.env("ISTIOD_SAN", "istiod.elsewhere.svc")
    }),
    row("no HTTP proxy", &["ProxyRefused", "ConnectionRefused"], &["proxy"], |b, _| {
        b.proxy_config("discoveryAddress", "istiod.example.com:15012")
            .env("HTTPS_PROXY", format!("http://127.0.0.1:{}", free_port()))
    }),
    row("CA: not authenticated", &["CertificateRefused"], &["UNAUTHENTICATED"], |b, m| {
        ca(b, m, Fault::refuse(Code::Unauthenticated))
    }),
    row("CA: not allowed", &["CertificateRefused"], &["PERMISSION_DENIED"], |b, m| {
        ca(b, m, Fault::refuse(Code::PermissionDenied))
    }),
    row("CA: bad request", &["CertificateRefused"], &["INVALID_ARGUMENT"], |b, m| {
        ca(b, m, Fault::refuse(Code::InvalidArgument))
    }),
    row("CA: not there", &["CertificateRefused"], &["UNIMPLEMENTED"], |b, m| {
        ca(b, m, Fault::refuse(Code::Unimplemented))
    }),
    row("CA: unavailable", &["CertificateRefused", "CertificateNotAnswered"], &["UNAVAILABLE"], |b, m| {
        ca(b, m, Fault::refuse(Code::Unavailable))
    }),
    row(
        "CA: too busy",
        &["CertificateRefused", "CertificateNotAnswered"],
        &["RESOURCE_EXHAUSTED"],
        |b, m| ca(b, m, Fault::exhausted()),
    ),
    row("CA: silent", &["CertificateNotAnswered"], &["no answer", "not answer"], |b, m| {
        ca(b, m, Fault::HalfOpen)
    }),
    row("CA: garbage", &["CertificateUnusable"], &["certificate"], |b, m| {
        ca(b, m, Fault::Chain(vec!["junk".to_owned(), "more junk".to_owned()]))
    }),
    row("CA: no root", &["CertificateUnusable"], &["certificate", "CertChain"], |b, m| {
        ca(b, m, Fault::OneCertificate)
    }),
    row("CA: empty chain", &["CertificateUnusable"], &["certificate", "CertChain"], |b, m| {
        ca(b, m, Fault::EmptyChain)
    }),
    row("CA: for another key", &["CertificateUnusable"], &["key"], |b, m| ca(b, m, Fault::WrongKey)),
    row("CA: in the wrong order", &["CertificateUnusable"], &["order"], |b, m| ca(b, m, Fault::WrongOrder)),
    row("CA: expired already", &["CertificateUnusable", "ClockWrong"], &["expired"], |b, m| {
        ca(b, m, Fault::Expired(Duration::from_secs(60)))
    }),
    row("ADS: not authenticated", &["AdsRefused"], &["UNAUTHENTICATED"], |b, m| {
        ads(b, m, Fault::refuse(Code::Unauthenticated))
    }),
    row("ADS: not allowed", &["AdsRefused"], &["PERMISSION_DENIED"], |b, m| {
        ads(b, m, Fault::refuse(Code::PermissionDenied))
    }),
    row("ADS: unavailable", &["AdsRefused", "IstiodCloses"], &["UNAVAILABLE", "unavailable"], |b, m| {
        ads(b, m, Fault::refuse(Code::Unavailable))
    }),
    row("ADS: internal error", &["AdsRefused", "IstiodCloses"], &["INTERNAL"], |b, m| {
        ads(b, m, Fault::refuse(Code::Internal))
    }),
    row("no configuration", &["NoConfig", "NoListeners"], &["config"], |b, _| b),
    row(
        "name table missing",
        &["NoConfig", "NameTableMissing", "NoListeners"],
        &["config", "DNS"],
        |b, _| {
            b.env("ISTIO_META_DNS_CAPTURE", "true")
                .env("DNS_PROXY_ADDR", format!("localhost:{}", free_port()))
        },
    ),
    Row {
        name: "OUTPUT_CERTS is no folder",
        life: Life::Ready,
        kinds: &["OutputCertsFailed"],
        words: &["OUTPUT_CERTS", "nowhere"],
        make: |b, _| b.env("OUTPUT_CERTS", "nowhere").fake("ready", true),
    },
    ends("root missing", &["RootMissing"], &["root"], |b, _| b.without_file(ROOT)),
    ends("root broken", &["RootBroken"], &["root"], |b, _| b.file(ROOT, "no certificate")),
    ends("Envoy is not there", &["EnvoyNotStarted"], &["/no/envoy"], |b, _| {
        b.proxy_config("binaryPath", "/no/envoy")
    }),
    ends("Envoy ends by itself", &["EnvoyCrashed"], &["nvoy"], |b, _| {
        b.fake("exit", serde_json::json!({"after": 0.2, "status": 3}))
    }),
    ends("configuration refused", &["ConfigInvalid"], &["drainDuration"], |b, _| {
        b.proxy_config("drainDuration", "45")
    }),
    ends("unknown node type", &["ConfigInvalid"], &["gateway"], |b, _| b.args(&["proxy", "gateway"])),
    ends("address without a port", &["ConfigInvalid", "AddressInvalid"], &["discovery address"], |b, _| {
        b.proxy_config("discoveryAddress", "istiod")
    }),
];

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
        let visible = runs || self.row.kinds != ["EnvoyCrashed"];
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

async fn look(row: &Row) -> Vec<String> {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with()
        .istiod(&mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("CLOUD_PLATFORM", "none")
        .fake("ready", false);
    let mut agent = (row.make)(builder, &mock).start();
    let mut judge = Judge { row, wrong: Vec::new() };
    if row.life == Life::Ends {
        let status = agent.wait_exit().await;
        let log = agent.log().text();
        judge.check("exit status", !status.success(), &status.to_string());
        let last: Vec<&str> = log.lines().rev().take(20).collect();
        judge.check("log", judge.has_words(&last.join("\n")), &log);
        judge.commands(&agent, false).await;
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
    let found = tokio::time::timeout(LIMIT, async {
        loop {
            let text = agent.get("/debug/agentz").await.map(|r| r.text()).unwrap_or_default();
            let document: Value = serde_json::from_str(&text).unwrap_or_default();
            if judge.is_kind(&document["verdict"]) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    if found.await.is_err() {
        let text = agent.get("/debug/agentz").await.map(|r| r.text()).unwrap_or_default();
        let document: Value = serde_json::from_str(&text).unwrap_or_default();
        judge.check("agentz", false, &format!("{} {}", document["verdict"], document["troubles"]));
        return judge.wrong;
    }
    if row.life == Life::Waits {
        let reply = agent.get("/healthz/ready?verbose").await.expect("the status port answers");
        let header = reply.headers.get("x-not-ready").map(|h| h.to_str().unwrap_or_default().to_owned());
        let header = header.unwrap_or_default();
        judge.check("readiness", reply.status == 503 && judge.has_words(&header), &header);
        judge.check("readiness body", judge.has_words(&reply.text()), &reply.text());
        let url = format!("http://localhost:{}/healthz/ready", agent.ports().status);
        let wait = agent.run(&["wait", "--timeoutSeconds=1", "--periodMillis=100", "--url", &url]).await;
        judge.check(
            "wait",
            wait.code == Some(255) && judge.has_words(&format!("{}{}", wait.stdout, wait.stderr)),
            &wait.stderr,
        );
    }
    let log = agent.log().text();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    judge.check("log", judge.has_words(&last.join("\n")), &last.join("\n"));
    judge.commands(&agent, true).await;
    agent.assert_running();
    judge.wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn every_witness_names_the_cause_of_every_fault() {
    assert!(ROWS.len() >= 35, "{}", ROWS.len());
    // A few at a time: each row has an agent and an istiod of its own.
    let looks = futures_util::stream::iter(ROWS).map(look).buffer_unordered(6);
    let wrong: Vec<String> = looks.collect::<Vec<_>>().await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{} witnesses are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// What only a running agent knows.
const UNSEEN: [&str; 3] = ["no configuration", "name table missing", "Envoy ends by itself"];

async fn without_an_agent(row: &Row) -> Vec<String> {
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

#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_the_cause_of_every_fault_without_an_agent() {
    let rows = ROWS.iter().filter(|row| !UNSEEN.contains(&row.name));
    assert!(rows.clone().count() >= 35);
    let looks = futures_util::stream::iter(rows).map(without_an_agent).buffer_unordered(6);
    let wrong: Vec<String> = looks.collect::<Vec<_>>().await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{} witnesses are wrong:\n{}", wrong.len(), wrong.join("\n"));
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
    assert_eq!(tree(&agent.path("")), before, "nothing is written");
    agent.stop().await;
}

#[tokio::test]
async fn doctor_without_an_agent_judges_as_another_user() {
    if !crate::support::root_for("another user") {
        return;
    }
    let mock = MockIstiod::start().await;
    // Nothing is started: the builder's environment and directory are what matters.
    let scene = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").owner(1337).scene();
    let doctor = scene.run_as(1337, &["doctor", "--sign"]).await;
    assert_eq!(doctor.code, Some(0), "{}{}", doctor.stdout, doctor.stderr);
    assert!(doctor.stdout.contains("spiffe://cluster.local/ns/ns/sa/sa"), "{}", doctor.stdout);
    // Somebody else's token.
    let scene = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").owner(0).scene();
    let json = scene.run_as(1337, &["doctor", "--json"]).await.json();
    let token = json["checks"].as_array().unwrap().iter().find(|c| c["check"] == "token").unwrap();
    assert_eq!(token["kind"], "TokenUnreadable", "{json}");
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
    for page in ["/debug/agentz", "/healthz/ready?verbose"] {
        outputs.push((page.to_owned(), agent.get(page).await.map(|r| r.text()).unwrap_or_default()));
    }
    for (place, text) in outputs {
        assert!(!text.is_empty(), "{place} says nothing");
        for secret in &secrets {
            assert!(!text.contains(secret.as_str()), "{place} shows a secret:\n{text}");
        }
        assert!(!text.contains("PRIVATE KEY"), "{place} shows a key");
    }
}
