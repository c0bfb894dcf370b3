//! Mounted certificates and settings of secrets, with a real Envoy as the judge.

use std::collections::BTreeSet;
use std::time::Duration;

use mock_istiod::Pair;
use serde_json::json;

use crate::support::agent::Builder;
use crate::support::mesh::{Loop, serials};
use crate::support::{Envoy, MockIstiod, TestAgent, eventually, http, root_for};

const CERT: &str = "etc/certs/cert-chain.pem";
const KEY: &str = "etc/certs/key.pem";

/// With this pair as its identity.
fn mounted(agent: Builder, pair: Pair, mock: &MockIstiod) -> Builder {
    agent
        .env("FILE_MOUNTED_CERTS", "true")
        .file(CERT, pair.chain)
        .file_mode(KEY, pair.key, 0o600)
        .file("etc/certs/root-cert.pem", mock.root_pem())
}

/// Secrets that Envoy has refused so far.
async fn refused(admin: u16) -> u64 {
    let reply = http::get(admin, "/stats?filter=sds.*update_rejected").await.expect("Envoy's admin port");
    reply.text().lines().filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn half_of_a_pair_never_reaches_envoy() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let fresh = || mock.issue(&mock.identity("ns", "sa"), Duration::from_secs(3600));
    let first = fresh();
    let agent = TestAgent::with().istiod(&mock).envoy(Envoy::Real);
    let mut agent = mounted(agent, first, &mock).start();
    agent.wait_ready().await;
    eventually("traffic", || async { mesh.ask(&mock).await.ok() }).await;
    let mut seen: BTreeSet<String> = serials(agent.ports().admin).await;
    for certificate_first in [true, false] {
        let next = fresh();
        let halves = [(CERT, &next.chain), (KEY, &next.key)];
        let [one, two] = if certificate_first { halves } else { [halves[1], halves[0]] };
        agent.put(one.0, one.1);
        for _ in 0..50 {
            mesh.ask(&mock).await.expect("the pair from before is in use");
        }
        assert_eq!(serials(agent.ports().admin).await, seen);
        agent.put(two.0, two.1);
        seen = eventually("the new pair is in use", || async {
            let now = serials(agent.ports().admin).await;
            (!now.is_empty() && now != seen).then_some(now)
        })
        .await;
        mesh.ask(&mock).await.expect("the new pair works");
    }
    assert_eq!(refused(agent.ports().admin).await, 0);
    assert!(mock.record().signed().is_empty(), "nobody asked a CA");
    agent.stop().await;
}

/// The start line of a VM or gateway of 0.8 to 1.5, whose agent replaced Envoy when its mounted certificates changed.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_start_line_replaces_envoy_when_its_certificates_change() {
    let mock = MockIstiod::start().await;
    let mesh = Loop::serve(&mock);
    let fresh = || mock.issue(&mock.identity("ns", "sa"), Duration::from_secs(3600));
    let first = fresh();
    let agent = TestAgent::with()
        .istiod(&mock)
        .arg("--parentShutdownDuration=3s")
        .arg("--drainDuration=2s")
        .envoy(Envoy::Real);
    let mut agent = mounted(agent, first, &mock).start();
    agent.wait_ready().await;
    agent.wait_log("a start line of Istio 0.8 to 1.5").await;
    eventually("traffic", || async { mesh.ask(&mock).await.ok() }).await;
    let next = fresh();
    agent.put(CERT, &next.chain);
    agent.put(KEY, &next.key);
    eventually("the next epoch is live", || async {
        let reply = http::get(agent.ports().admin, "/server_info").await.ok()?;
        let info: serde_json::Value = serde_json::from_slice(&reply.body).ok()?;
        let epoch = info["command_line_options"]["restart_epoch"].as_u64()?;
        (info["state"] == "LIVE" && epoch >= 1).then_some(())
    })
    .await;
    eventually("traffic with the new pair", || async { mesh.ask(&mock).await.ok() }).await;
    agent.stop().await;
}

/// The builds of Envoy that we test with have neither provider; what can be judged is that Envoy reads the message
/// and that the agent says what Envoy has against it.
#[tokio::test(flavor = "multi_thread")]
async fn a_private_key_provider_that_envoy_lacks_is_told() {
    for provider in ["cryptomb", "qat"] {
        let mock = MockIstiod::start().await;
        Loop::serve(&mock);
        let mut agent = TestAgent::with()
            .istiod(&mock)
            .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
            .proxy_config(
                "privateKeyProvider",
                json!({ provider: { "pollDelay": "0.01s", "fallback": true } }),
            )
            .envoy(Envoy::Real)
            .start();
        agent.wait_log(&format!("private key provider: {provider}")).await;
        let rejects = "istio_agent_pilot_total_xds_rejects{type=\"sds\"}";
        eventually("the refusal is counted", || async { agent.metric(rejects).await.filter(|n| *n >= 1.0) })
            .await;
        agent.assert_running();
    }
}

/// The list lies at a path from the root of the file system, so the agent runs in a mount namespace of its own.
const WITH_LIST: &str = "mount -t tmpfs tmpfs /run && mkdir -p /run/secrets/istio && \
    ln -s \"$PWD/lists\" /run/secrets/istio/crl && exec \"$@\"";

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_certificate_is_refused_by_envoy() {
    if !root_for("a mount namespace") {
        return;
    }
    for revoke in [false, true] {
        let mock = MockIstiod::start().await;
        let mesh = Loop::serve(&mock);
        let pair = mock.issue(&mock.identity("ns", "sa"), Duration::from_secs(3600));
        let revoked = if revoke { vec![pair.chain.as_str()] } else { Vec::new() };
        let lists = mock.authority().revocation_lists(&revoked);
        let mut agent = TestAgent::with()
            .istiod(&mock)
            .before(&["unshare", "--mount", "sh", "-c", WITH_LIST, "sh"].map(ToOwned::to_owned))
            .env("FILE_MOUNTED_CERTS", "true")
            .file("lists/ca-crl.pem", lists)
            .file(CERT, pair.chain)
            .file_mode(KEY, pair.key, 0o600)
            .file("etc/certs/root-cert.pem", mock.root_pem())
            .envoy(Envoy::Real)
            .start();
        agent.wait_ready().await;
        // The list is all that differs. What Envoy tells its client is only that the connection failed.
        let wanted = |asked: &Result<_, String>| match asked {
            Ok(_) => !revoke,
            Err(reason) => revoke && reason.contains("remote connection failure"),
        };
        eventually(&format!("Envoy goes by the list (revoked: {revoke})"), || async {
            wanted(&mesh.ask(&mock).await).then_some(())
        })
        .await;
        for _ in 0..20 {
            let asked = mesh.ask(&mock).await;
            assert!(wanted(&asked), "revoked: {revoke}, {asked:?}");
        }
        agent.stop().await;
    }
}

/// The CA takes over, as with the Go agent, which says nothing of it.
#[tokio::test]
async fn a_mounted_pair_that_cannot_be_used_is_named() {
    let mock = MockIstiod::start().await;
    let pair = || mock.issue(&mock.identity("ns", "sa"), Duration::from_secs(3600));
    let builder = || TestAgent::with().istiod(&mock).env("OUTPUT_CERTS", "out").file("out/.keep", "");
    for (other, why) in
        [("etc/certs/key.pem/in", "key.pem: a folder is in its place"), (KEY, "key.pem: it is empty")]
    {
        let mut agent = builder().file(CERT, pair().chain).file(other, "").start();
        agent
            .wait_log(&format!("the mounted certificate is not used, and the CA is asked: ./etc/certs/{why}"))
            .await;
        eventually("the CA's", || async { std::fs::read(agent.path("out/cert-chain.pem")).ok() }).await;
        agent.stop().await;
    }
    let agent = builder().start();
    eventually("the CA's", || async { std::fs::read(agent.path("out/cert-chain.pem")).ok() }).await;
    assert!(!agent.log().contains("the mounted certificate"));
    agent.stop().await;
}
