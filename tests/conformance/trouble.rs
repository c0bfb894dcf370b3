//! Why something is broken: log, readiness, `/debug/agentz`, `/debug/` and `wait` all name the same cause. The wide
//! table of faults is `why.rs`; here is what the model itself promises.

use std::process::Command;

use rustix::process::{Resource, Rlimit, prlimit};
use serde_json::Value;

use super::ads::{CDS, ask};
use crate::support::agent::{Builder, ROOT, TOKEN};
use crate::support::client::secret_request;
use crate::support::{Code, Fault, MockIstiod, TestAgent, Token, agent_bin, eventually, promtool_bin};

async fn agentz(agent: &TestAgent) -> Value {
    let reply = agent.get("/debug/agentz").await.map(|reply| reply.text()).unwrap_or_default();
    serde_json::from_str(&reply).unwrap_or_default()
}

/// Waits until the verdict is `kind`, then looks at every witness that needs no other process.
async fn told(agent: &TestAgent, kind: &str) -> Value {
    let document = eventually(kind, || async {
        let document = agentz(agent).await;
        (document["verdict"]["kind"] == kind).then_some(document)
    })
    .await;
    let verdict = &document["verdict"];
    for field in ["severity", "summary", "detail", "hint", "part", "since"] {
        assert!(verdict[field].as_str().is_some_and(|text| !text.is_empty()), "{field} in {verdict}");
    }
    let detail = verdict["detail"].as_str().unwrap();
    let reply = agent.get("/healthz/ready").await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (503, ""), "{kind}");
    let header = reply.headers["x-not-ready"].to_str().unwrap().to_owned();
    assert!(header.starts_with(&format!("{kind}: ")), "{header}");
    let body = agent.get("/healthz/ready?verbose").await.unwrap().text();
    assert!(body.contains(&format!("verdict: {kind}: ")), "{body}");
    let page = agent.get("/debug/").await.unwrap().text();
    assert!(page.contains(&format!("<h1>{kind}</h1>")), "{page}");
    let log = agent.log().text();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    let begin: String = detail.chars().take(40).collect();
    assert!(last.iter().any(|line| line.contains(&begin) || line.contains(kind)), "{kind} in\n{log}");
    document
}

fn broken(builder: Builder) -> TestAgent {
    builder.fake("ready", false).start()
}

#[tokio::test]
async fn an_expired_token_is_the_verdict_everywhere_until_it_is_replaced() {
    let mock = MockIstiod::start().await;
    let expires = mock_istiod::jwt::Expiry::Ago(std::time::Duration::from_secs(3600));
    let old = Token { expires, ..Token::of("ns", "sa") }.sign();
    let mut agent = broken(TestAgent::with().istiod(&mock).file(TOKEN, old.clone()));
    let client = agent.sds().await;
    let stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    let document = told(&agent, "TokenExpired").await;
    let kinds: Vec<&str> =
        document["troubles"].as_array().unwrap().iter().filter_map(|t| t["kind"].as_str()).collect();
    assert!(kinds.len() > 1 && kinds[0] == "TokenExpired", "what follows stands below: {kinds:?}");
    assert!(!document.to_string().contains(&old), "a token is never shown");

    let url = format!("http://localhost:{}/healthz/ready", agent.ports().status);
    let wait = Command::new(agent_bin())
        .args(["wait", "--timeoutSeconds=1", "--periodMillis=100", "--url", &url])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&wait.stdout).into_owned();
    assert_eq!(wait.status.code(), Some(255), "{said}");
    assert!(said.contains("Last error: HTTP status code 503: TokenExpired: "), "{said}");
    assert_eq!(said.matches("Not ready yet: ").count(), 1, "only a change is told: {said}");

    agent.put(TOKEN, mock.mint("ns", "sa"));
    agent.wait_log("over: TokenExpired").await;
    agent.wait_log("generated new workload certificate\tresourceName=default latency=").await;
    told(&agent, "NoConfig").await;
    agent.stop().await;
}

#[tokio::test]
async fn each_cause_has_its_kind() {
    let mock = MockIstiod::start().await;
    let other = MockIstiod::start().await;
    let down = MockIstiod::start().await;
    down.down().await;
    let refusing = MockIstiod::start().await;
    refusing.ca().always(vec![Fault::refuse(Code::PermissionDenied)]);
    for (kind, builder) in [
        ("TokenMissing", TestAgent::with().istiod(&mock).without_file(TOKEN)),
        ("TokenMalformed", TestAgent::with().istiod(&mock).file(TOKEN, " \n")),
        ("RootDoesNotSign", TestAgent::with().istiod(&mock).file(ROOT, other.root_pem())),
        ("ConnectionRefused", TestAgent::with().istiod(&down)),
        ("CertificateRefused", TestAgent::with().istiod(&refusing)),
        (
            "NameNotResolved",
            TestAgent::with().istiod(&mock).proxy_config("discoveryAddress", "istiod.invalid:15012"),
        ),
        ("EnvoyNotInitialised", {
            let live = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n\
                        server.state: 2\nlistener_manager.workers_started: 0\n";
            TestAgent::with().istiod(&mock).fake("stats", live)
        }),
    ] {
        let agent = broken(builder);
        told(&agent, kind).await;
        agent.stop().await;
    }
}

#[tokio::test]
async fn a_healthy_start_warns_of_nothing() {
    let mock = MockIstiod::start().await;
    // As in a pod without a limit.
    let pod = TestAgent::with().istiod(&mock).proxy_config("concurrency", 0);
    // As on a machine that has no certificate yet.
    let machine =
        TestAgent::with().istiod(&mock).env("PROV_CERT", "etc/certs").env("OUTPUT_CERTS", "./etc/certs/");
    for builder in [pod, machine.file("etc/certs/root-cert.pem", mock.root_pem())] {
        warns_of_nothing(builder).await;
    }
}

async fn warns_of_nothing(builder: Builder) {
    let mut agent = builder.arg("--log_as_json").start();
    agent.wait_ready().await;
    agent.wait_log("generated new workload certificate").await;
    let document = agentz(&agent).await;
    assert_eq!((&document["verdict"], &document["troubles"]), (&Value::Null, &serde_json::json!([])));
    assert!(agent.get("/debug/").await.unwrap().text().contains("<h1>Healthy</h1>"));
    let log = agent.stop().await;
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line:?} is no JSON: {e}"));
        assert_eq!(line["level"], "info", "{line}");
        match line["msg"].as_str().unwrap_or_default() {
            "Proxy role" => assert!(line["ips"].is_array(), "{line}"),
            "generated new workload certificate" => {
                assert!(
                    line["latency"].is_i64() && line["ttl"].is_i64() && line["resourceName"] == "default",
                    "{line}"
                );
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn an_envoy_that_ends_by_itself_is_the_last_line() {
    let mock = MockIstiod::start().await;
    let exit = serde_json::json!({"after": 0.2, "status": 3});
    let mut agent = TestAgent::with().istiod(&mock).fake("exit", exit).start();
    assert_eq!(agent.wait_exit().await.code(), Some(3));
    agent.wait_log("Envoy ended by itself").await;
    let log = agent.log().text();
    let last = log.lines().rev().find(|line| line.contains("\terror\t")).unwrap();
    assert!(last.contains("exit status 3"), "{last}");
}

#[tokio::test]
async fn levels_change_while_it_runs_and_pages_answer_no_foreign_name() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    agent.wait_ready().await;
    assert!(agent.get("/logging").await.unwrap().text().contains("  xdsproxy: info\n"));
    assert_eq!(agent.get("/logging?xdsproxy=debug").await.unwrap().status.as_u16(), 405);
    assert_eq!(agent.post("/logging?nonsense=debug").await.unwrap().status.as_u16(), 400);
    let reply = agent.post("/logging?xdsproxy=debug").await.unwrap();
    assert!(reply.text().contains("  xdsproxy: debug\n"), "{}", reply.text());
    let client = agent.xds().await;
    let stream = client.ads();
    stream.send(&secret_request("x"));
    agent.wait_log("\tdebug\txdsproxy\t").await;
    for path in ["/debug/", "/debug/agentz", "/logging"] {
        for (host, refused) in
            [("localhost", false), ("127.0.0.1:1", false), ("[::1]", false), ("evil.example", true)]
        {
            let mut io = tokio::net::TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            io.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            io.read_to_string(&mut answer).await.unwrap();
            assert_eq!(answer.starts_with("HTTP/1.1 421 "), refused, "{path} {host}: {answer}");
        }
    }
    drop(stream);
    agent.stop().await;
}

#[test]
fn prometheus_accepts_the_rules_and_their_tests() {
    let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    for (command, file) in [("check", "prometheus-rules.yaml"), ("test", "prometheus-rules.test.yaml")] {
        let output =
            Command::new(promtool_bin()).args([command, "rules"]).arg(deploy.join(file)).output().unwrap();
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command} {file}: {said}");
    }
}

/// Without a descriptor the C library's resolver calls every name unknown.
#[tokio::test]
async fn a_resolver_that_can_open_nothing_is_not_taken_for_an_unknown_name() {
    let mock = MockIstiod::start().await;
    // No name is looked up before Envoy's stream of configuration.
    let mut agent = TestAgent::with().istiod(&mock).env("CA_ADDR", "127.0.0.1:1").start();
    agent.wait_ready().await;
    let client = agent.xds().await;
    // An answer, so that nothing is left to be opened for this connection.
    client.fetch_secrets(&secret_request("default")).await.unwrap_err();
    let pid = agent.pid();
    let limit = |most| {
        prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(most), maximum: Some(1024) }).unwrap()
    };
    limit(3);
    let mut first = client.ads();
    first.send(&ask(CDS));
    first.end().await;
    agent.wait_log("localhost: Too many open files (os error 24)").await;
    limit(1024);
    let client = agent.xds().await;
    let stream = client.ads();
    stream.send(&ask(CDS));
    let over = async || (agentz(&agent).await["verdict"]["kind"] != "OpenFiles").then_some(());
    eventually("it is over", over).await;
    agent.stop().await;
}
