//! What keeps a proxy from getting stuck: a certificate that is asked for early or is about to expire, users that may
//! not connect, streams that have become too old.

use std::time::Duration;

use envoy_types::pb::google::rpc;
use mock_istiod::AdsStream;

use super::ads::{CDS, Sotw, World, answer, ask, request};
use crate::support::agent::{Builder, SDS, TOKEN};
use crate::support::client::{ack, secret_request};
use crate::support::mesh::Loop;
use crate::support::{Envoy, MockIstiod, TestAgent, Token, eventually, root_for};

const READY: &str = "/healthz/ready";

fn builder(mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).env("ECC_SIGNATURE_ALGORITHM", "ECDSA").env("METRICS_DETAILS", "true")
}

fn expired() -> String {
    Token { expires: mock_istiod::jwt::Expiry::Ago(Duration::from_secs(60)), ..Token::of("ns", "sa") }.sign()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_early_after_trouble() {
    let mock = MockIstiod::start().await;
    // Due after 54 s.
    mock.set_ttl(Some(Duration::from_secs(60)));
    let _mesh = Loop::serve(&mock);
    let mut agent = builder(&mock)
        .env("SECRET_GRACE_PERIOD_RATIO", "0.1")
        .env("RENEWAL_EARLY", "true")
        .envoy(Envoy::Real)
        .start();
    agent.wait_ready().await;
    assert_eq!(mock.record().signed().len(), 1);
    mock.down().await;
    let early = |result: &str| format!("istio_agent_cert_early_renewals_total{{result=\"{result}\"}}");
    eventually("it is asked for before it is due", || async { agent.metric(&early("failed")).await }).await;
    assert_eq!(agent.metric("istio_agent_cert_renewal_failures_total").await, None, "nothing was due");
    mock.up().await.unwrap();
    eventually("it is renewed before it is due", || async { agent.metric(&early("issued")).await }).await;
    agent.stop().await;
}

/// An agent whose certificate is due at once and whose token is no good any more.
async fn near_the_end(mock: &MockIstiod, action: &str) -> TestAgent {
    mock.set_ttl(Some(Duration::from_secs(60)));
    let mut agent = builder(mock)
        .env("SECRET_GRACE_PERIOD_RATIO", "0.95")
        .env("IDENTITY_NEAR_EXPIRY", action)
        .env("IDENTITY_NEAR_EXPIRY_BEFORE", "1h")
        .start();
    agent.wait_ready().await;
    let client = agent.client(SDS).await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    agent
}

#[tokio::test(flavor = "multi_thread")]
async fn near_the_end_of_its_certificate_a_proxy_with_a_fault_of_its_own_is_not_ready() {
    let mock = MockIstiod::start().await;
    let agent = near_the_end(&mock, "unready").await;
    agent.put(TOKEN, expired());
    let reply = eventually("the proxy is not ready", || async {
        agent.get(READY).await.ok().filter(|reply| !reply.status.is_success())
    })
    .await;
    let why = reply.headers["x-not-ready"].to_str().unwrap().to_owned();
    assert!(why.starts_with("TokenExpired") && why.contains("IdentityNearExpiry"), "{why}");
    agent.put(TOKEN, mock.mint("ns", "sa"));
    eventually("it is ready again", || async {
        agent.get(READY).await.ok().filter(|reply| reply.status.is_success())
    })
    .await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn near_the_end_of_its_certificate_a_proxy_with_a_fault_of_its_own_ends_if_told_to() {
    let mock = MockIstiod::start().await;
    let mut agent = near_the_end(&mock, "exit").await;
    agent.put(TOKEN, expired());
    let status = agent.wait_exit().await;
    assert_eq!(status.code(), Some(1));
    assert!(agent.log().contains("IDENTITY_NEAR_EXPIRY=exit"), "{}", agent.log().text());
}

#[tokio::test(flavor = "multi_thread")]
async fn while_istiod_is_away_for_everybody_the_end_of_a_certificate_moves_nobody() {
    let mock = MockIstiod::start().await;
    let mut agent = near_the_end(&mock, "exit").await;
    mock.down().await;
    eventually("a renewal has failed more than once", || async {
        let failed = agent.metric("istio_agent_num_failed_outgoing_requests{request_type=\"csr\"}").await;
        failed.filter(|n| *n >= 2.0)
    })
    .await;
    agent.assert_running();
    assert!(agent.get(READY).await.unwrap().status.is_success());
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn values_that_mean_nothing_end_the_start() {
    let mut agent =
        TestAgent::with().env("IDENTITY_NEAR_EXPIRY", "die").env("SDS_ALLOWED_UIDS", "1337,root").start();
    assert_ne!(agent.wait_exit().await.code(), Some(0));
    let log = agent.log().text();
    assert!(log.contains("it is ignore, unready or exit") && log.contains("\"root\" is no user ID"), "{log}");
}

/// Bytes that a server sends a client of this user first; none when it closes.
async fn greeted(agent: &TestAgent, uid: u32) -> usize {
    let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.settimeout(60)\ns.connect(sys.argv[1])\n\
                  try:\n s.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n\\0\\0\\0\\4\\0\\0\\0\\0\\0')\n \
                  print(len(s.recv(9)))\nexcept OSError: print(0)";
    // Other users may not go through the test's folder: the socket is opened by its number.
    let folder = std::fs::File::open(agent.path(SDS).parent().unwrap()).unwrap();
    let path = format!("/proc/{}/fd/{}/socket", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&folder));
    let output = tokio::process::Command::new("setpriv")
        .args([&format!("--reuid={uid}"), "--clear-groups", "--inh-caps=+dac_override,+sys_ptrace"])
        .args(["--ambient-caps=+dac_override,+sys_ptrace", "python3", "-c", script, &path])
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    text.parse().unwrap_or_else(|_| panic!("{output:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn users_that_are_not_named_get_no_word_on_the_sds_sockets() {
    if !root_for("clients of other users") {
        return;
    }
    let mock = MockIstiod::start().await;
    for (allowed, expected) in [(None, [9, 9, 9]), (Some("4242, 77"), [9, 9, 0])] {
        let mut builder = builder(&mock);
        if let Some(allowed) = allowed {
            builder = builder.env("SDS_ALLOWED_UIDS", allowed);
        }
        let mut agent = builder.start();
        agent.wait_ready().await;
        let seen = [greeted(&agent, 0).await, greeted(&agent, 4242).await, greeted(&agent, 4243).await];
        assert_eq!(seen, expected, "{allowed:?}: the agent's own user, one that is named, one that is not");
        let refused = agent.metric("istio_agent_sds_refused_peers_total").await;
        assert_eq!(refused, allowed.map(|_| 1.0));
        agent.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_too_old_is_opened_anew_and_nothing_is_lost() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let mut agent = builder(&mock).env("XDS_STREAM_MAX_AGE", "1s").envoy(Envoy::Real).start();
    agent.wait_ready().await;
    eventually("streams end because of their age", || async {
        agent.metric("istio_agent_xds_aged_streams").await.filter(|n| *n >= 2.0)
    })
    .await;
    mesh.push(&mock, "two");
    eventually("a push arrives all the same", || async {
        let reply = mesh.ask(&mock).await.ok()?;
        (reply.headers.get("x-config")? == "two").then_some(())
    })
    .await;
    assert_eq!(agent.metric("istio_agent_xds_holds").await, None, "no stream had to be held");
    agent.stop().await;
}

#[tokio::test]
async fn how_fresh_each_type_is_stands_in_the_metrics_without_a_switch() {
    let mut world = World::with(|b| b.without_env("METRICS_DETAILS")).await;
    let (mut envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    request(&mut istiod).await;
    let push = async |envoy: &mut Sotw, istiod: &mut AdsStream, nonce: &str| {
        istiod.responses.sotw(&answer(CDS, nonce, 10)).await.unwrap();
        envoy.next().await.unwrap()
    };
    let shows = async |state: &str| {
        let name = format!("istio_agent_xds_config_state{{state=\"{state}\",type=\"CDS\"}}");
        eventually(state, || async { world.agent.metric(&name).await.filter(|n| *n == 1.0) }).await;
        let all = world.agent.get("/stats/prometheus").await.unwrap().text();
        let lines = all.lines().filter(|line| line.contains("xds_config_state{") && line.contains("\"CDS\""));
        assert_eq!(lines.count(), 1, "one state at a time");
    };
    shows("never").await;
    let first = push(&mut envoy, &mut istiod, "1").await;
    shows("sent").await;
    envoy.send(&ack(&first, &[]));
    shows("synced").await;
    let mut rejects = ack(&push(&mut envoy, &mut istiod, "2").await, &[]);
    rejects.error_detail = Some(rpc::Status { code: 13, message: "no".to_owned(), ..Default::default() });
    envoy.send(&rejects);
    shows("rejected").await;
    let third = push(&mut envoy, &mut istiod, "3").await;
    envoy.send(&ack(&third, &[]));
    shows("synced").await;
    drop(istiod);
    world.mock.down().await;
    shows("stale").await;
    world.agent.stop().await;
}
