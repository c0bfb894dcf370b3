//! Packets to istiod that vanish, all or the large ones, or that no route takes: every witness says so. Everything, the
//! test included, runs in a network namespace of its own.

use std::fs::File;
use std::os::fd::AsFd;

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;

use crate::support::{MockIstiod, TestAgent, eventually_within};
use crate::world::{Backend, World};

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
/// A dial to a silent address takes 20 s; the rest is a busy machine.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(90);

#[test]
fn every_witness_names_packets_that_do_not_arrive() {
    within("10.77.10.2/24", async |world| {
        world.inside("ip route add unreachable 10.88.0.0/16");
        look("10.88.0.1:15012", "ConnectionFailed", "No route to host").await;
        world.inside("iptables -A OUTPUT -p tcp -d 10.89.0.1 -j DROP");
        look("10.89.0.1:15012", "ConnectionTimedOut", "TCP connect").await;
    });
}

/// Whether our clock gives the handshake up or the kernel's, which finds that nothing of it was acknowledged: one fault has
/// one name.
#[test]
fn packets_that_are_too_large_are_one_trouble_throughout() {
    within("10.77.11.2/24", async |world| {
        let mock = MockIstiod::start().await;
        let port = mock.address().port();
        world.inside(&format!("iptables -A OUTPUT -p tcp --dport {port} -m length --length 200: -j DROP"));
        let mut agent = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").start();
        let envoy = agent.xds().await.ads();
        envoy.send(&DiscoveryRequest { type_url: CDS.to_owned(), ..Default::default() });
        until(&agent, "the kernel's word", |document| text(document).contains("os error 110")).await;
        let log = agent.log();
        assert!(log.contains("a smaller MTU") && !log.contains("(before: "), "{}", log.text());
    });
}

/// Runs it in a namespace with this address.
fn within(address: &str, test: impl AsyncFn(&World) + Sync) {
    let Some(world) = World::new(Backend::Nft, &[address]) else { return };
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            let namespace = File::open(format!("/var/run/netns/{}", world.name())).expect("just made");
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("root may");
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(test(&world));
        });
        if let Err(panic) = inside.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// What the agent says of troubles at present.
fn text(document: &Value) -> String {
    document["troubles"].to_string()
}

async fn until(agent: &TestAgent, what: &str, good: impl Fn(&Value) -> bool) {
    eventually_within(LIMIT, what, async || {
        let text = agent.get("/debug/agentz").await.ok()?.text();
        serde_json::from_str(&text).is_ok_and(|document| good(&document)).then_some(())
    })
    .await;
}

async fn look(address: &str, kind: &str, word: &str) {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .proxy_config("discoveryAddress", address)
        .env("CLOUD_PLATFORM", "none")
        .fake("ready", false)
        .start();
    let envoy = agent.xds().await.ads();
    envoy.send(&DiscoveryRequest { type_url: CDS.to_owned(), ..Default::default() });
    until(&agent, kind, |document| document["verdict"]["kind"] == kind).await;
    let reply = agent.get("/healthz/ready?verbose").await.expect("the status port answers");
    let url = format!("http://localhost:{}/healthz/ready", agent.ports().status);
    let wait = agent.run(&["wait", "--timeoutSeconds=1", "--periodMillis=100", "--url", &url]).await;
    let (status, doctor) = tokio::join!(agent.run(&["status"]), agent.run(&["doctor"]));
    let log = agent.log().text();
    let last: Vec<&str> = log.lines().rev().take(20).collect();
    for (witness, text) in [
        ("log", last.join("\n")),
        ("readiness", reply.text()),
        ("header", reply.headers["x-not-ready"].to_str().unwrap().to_owned()),
        ("wait", wait.stdout + &wait.stderr),
        ("status", status.stdout),
        ("doctor", doctor.stdout),
    ] {
        assert!(text.contains(word) && text.contains(address), "{witness}: {text}");
    }
    let json = agent.run(&["doctor", "--json"]).await.json();
    assert_eq!(json["verdict"]["kind"], kind, "{json}");
}
