//! A defect anywhere, seen from outside: a debug build panics where `AGENT_TEST_PANIC` says. In a loop that lasts, the
//! agent ends and names it; in the work for one connection, stream or request, that one ends with a status, it is
//! counted, and the next one is served.

use serde_json::json;
use tonic::Code;

use crate::support::agent::Builder;
use crate::support::client::{node, secret_request};
use crate::support::{MockIstiod, Resource, TestAgent, eventually, free_port};

const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

fn builder(mock: &MockIstiod, panics: &str) -> Builder {
    TestAgent::with()
        .istiod(mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("METRICS_DETAILS", "true")
        .env("AGENT_TEST_PANIC", panics)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_any_loop_ends_the_agent_with_its_name() {
    const LOOPS: &[&str] = &[
        "application health",
        "dns",
        "log",
        "sds",
        "secrets",
        "gateway secrets",
        "status",
        "systemd watchdog",
        "token and root files",
        "token service",
        "troubles",
        "trust bundle",
        "upgrade door",
        "wasm modules",
        "xds",
    ];
    let mock = MockIstiod::start().await;
    let scratch = tempfile::tempdir().unwrap();
    let manager = scratch.path().join("notify");
    let _manager = std::os::unix::net::UnixDatagram::bind(&manager).unwrap();
    for name in LOOPS {
        let mut agent = builder(&mock, name)
            .args(&["proxy", "sidecar", "--stsPort", &free_port().to_string()])
            .arg(format!("--gateway-secrets-dir={}", scratch.path().display()))
            .env("NOTIFY_SOCKET", manager.to_string_lossy())
            .env("WATCHDOG_USEC", "60000000")
            .env("AGENT_UPGRADE", "true")
            .env("TOKEN_PLUGIN", "GoogleTokenExchange")
            .env("GCP_METADATA", "project|1|cluster|zone")
            .env("ISTIO_META_DNS_CAPTURE", "true")
            .env("DNS_PROXY_ADDR", format!("127.0.0.1:{}", free_port()))
            .env("PROXY_CONFIG_XDS_AGENT", "true")
            .proxy_config("readinessProbe", json!({"tcpSocket": {"port": free_port()}}))
            .start();
        let status = agent.wait_exit().await;
        agent.wait_log(&format!("task {name} failed: it panicked")).await;
        assert!(!status.success(), "{name}: {status}");
        agent.assert_clean().await;
    }
}

async fn panics(agent: &TestAgent, task: &str) {
    let counted = format!("istio_agent_task_panics_total{{task=\"{task}\"}}");
    eventually("the panic is counted", || async { agent.metric(&counted).await.filter(|n| *n == 1.0) }).await;
    assert!(
        agent.log().contains(&format!("a defect in the agent ended one {task}: panic at src/")),
        "{task}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_stream_of_configuration_ends_that_one() {
    let mock = MockIstiod::start().await;
    mock.resources().update(|set| set.put(None, Resource::new(LISTENER, "here", &b"1"[..])));
    for at in ["xds stream", "xds stream@300"] {
        let mut agent = builder(&mock, at).start();
        agent.wait_ready().await;
        let client = agent.xds().await;
        let ask = |client: &crate::support::EnvoyClient| {
            let stream = client.ads();
            stream.send(&envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest {
                node: Some(node("sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local")),
                type_url: LISTENER.to_owned(),
                ..Default::default()
            });
            stream
        };
        let status = ask(&client).end().await;
        assert_eq!(
            (status.code(), status.message()),
            (Code::Internal, "a defect in the agent ended this stream")
        );
        let answer = ask(&client).next().await.unwrap();
        assert_eq!(answer.type_url, LISTENER);
        panics(&agent, "xds stream").await;
        agent.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_stream_of_secrets_ends_that_one() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock, "sds stream").start();
    agent.wait_ready().await;
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    let status = stream.end().await;
    assert_eq!(
        (status.code(), status.message()),
        (Code::Internal, "a defect in the agent ended this stream")
    );
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    panics(&agent, "sds stream").await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_secrets_of_a_caller_ends_that_one() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock, "caller")
        .example("callers.env")
        .env("WORKLOAD_SDS", "./node.sock")
        .env("AGENT_TEST_PANIC", "caller")
        .start();
    agent.wait_ready().await;
    let client = agent.client("node.sock").await;
    let token = mock.mint("team", "account");
    let client = client.with_headers(&[("authorization", &token)]);
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    assert!(stream.next().await.is_err(), "nobody answers it");
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    panics(&agent, "caller").await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_connection_ends_that_one() {
    let mock = MockIstiod::start().await;
    for task in ["sds connection", "xds connection", "status connection"] {
        let mut agent = builder(&mock, &format!("{task} task")).start();
        // The first connection of each kind is gone at once; whoever comes again is served.
        agent.wait_ready().await;
        eventually("secrets are served", || async {
            let mut stream = agent_client(&agent, crate::support::agent::SDS).await?.stream_secrets();
            stream.send(&secret_request("default"));
            stream.next().await.ok()
        })
        .await;
        eventually("the relay answers", || async {
            let stream = agent_client(&agent, crate::support::agent::XDS).await?.ads();
            drop(stream);
            Some(())
        })
        .await;
        panics(&agent, task).await;
        agent.stop().await;
    }
}

async fn agent_client(agent: &TestAgent, socket: &str) -> Option<crate::support::EnvoyClient> {
    crate::support::EnvoyClient::connect(&agent.path(socket)).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_request_is_an_answer_of_500() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock, "status request").start();
    let first =
        eventually("the status port answers", || async { agent.get("/healthz/ready").await.ok() }).await;
    assert_eq!(first.status.as_u16(), 500);
    agent.wait_ready().await;
    panics(&agent, "status request").await;
    agent.stop().await;
}
