//! Where the last good configuration ends: its age, its key, and whoever wants no such readiness.

use std::time::{Duration, Instant};

use super::{
    CDS, LDS, SERVING, answer_delta, ask_delta, delta, ended, filled, killed, killed_with, request, resource,
    told,
};
use crate::ads::World;
use crate::support::{TestAgent, eventually, variable};

#[tokio::test]
async fn what_is_too_old_ends_as_a_whole_while_it_is_served() {
    let mut world = World::with(|b| {
        b.env("XDS_REPLAY", "disk").env("XDS_REPLAY_AFTER", "200ms").env("XDS_REPLAY_MAX_AGE", "12s")
    })
    .await;
    filled(&mut world).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    assert_eq!(envoy.next().await.unwrap().resources[0].name, "a");
    assert_eq!(envoy.end().await.code(), tonic::Code::Unavailable);
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    eventually("the stream is held", || async {
        world.agent.metric("istio_agent_xds_held_streams").await.filter(|n| *n == 1.0)
    })
    .await;
    assert!(envoy.is_silent(), "no part of it is served any more");
    assert_eq!(world.agent.metric(SERVING).await, Some(0.0));
    world.agent.stop().await;
}

// An Envoy that is busy answers late.
#[tokio::test]
async fn what_envoy_accepts_long_after_it_came_is_kept_as_a_whole() {
    let mut world = super::world().await;
    let (mut envoy, mut istiod) = world.delta().await;
    envoy.send(&ask_delta(LDS));
    request(&mut istiod).await;
    told(&mut envoy, &mut istiod, &delta(LDS, "l1", &[resource(LDS, "l", "1")], &[]), true).await;
    envoy.send(&ask_delta(CDS));
    request(&mut istiod).await;
    let names: Vec<_> = (100..200).map(|n| n.to_string()).collect();
    for name in &names {
        istiod.responses.delta(&delta(CDS, name, &[resource(CDS, name, "1")], &[])).await.unwrap();
    }
    for _ in &names {
        envoy.next().await.unwrap();
    }
    for name in &names {
        envoy.send(&answer_delta(CDS, name));
        assert_eq!(request(&mut istiod).await.nonce, *name);
    }
    drop(envoy);
    ended(istiod).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&ask_delta(CDS));
    let mut kept: Vec<_> = envoy.next().await.unwrap().resources.into_iter().map(|r| r.name).collect();
    kept.sort();
    assert_eq!(kept, names);
    world.agent.stop().await;
}

#[tokio::test]
async fn readiness_that_is_strict_refuses_what_comes_from_memory() {
    for strict in [false, true] {
        let mut world = World::with(|b| {
            let b = b.env("XDS_REPLAY", "memory").env("XDS_REPLAY_AFTER", "200ms");
            b.env("READINESS_STRICT", strict.to_string())
        })
        .await;
        filled(&mut world).await;
        world.mock.down().await;
        let mut envoy = world.envoy().await.delta_ads();
        envoy.send(&ask_delta(CDS));
        envoy.next().await.unwrap();
        let told = eventually("it is told, and judged", || async {
            let reply = world.agent.get("/healthz/ready?verbose").await.ok()?;
            (reply.status.is_success() != strict).then_some(reply)
        })
        .await;
        assert!(told.text().contains("ServingFromMemory"), "{}", told.text());
        world.agent.stop().await;
    }
}

async fn dead(agent: &mut TestAgent) {
    agent.signal(rustix::process::Signal::KILL);
    agent.wait_exit().await;
    eventually("Envoy is gone, too", || async { agent.processes().is_empty().then_some(()) }).await;
}

// `KILLS=20` makes a long run of it, with what it took.
#[tokio::test(flavor = "multi_thread")]
async fn it_is_killed_again_and_again_and_serves_each_time_without_istiod() {
    let kills = variable("KILLS").and_then(|n| n.to_str()?.parse().ok()).unwrap_or(2);
    let (mock, mesh, mut agent, start) = killed_with(|builder| builder, |builder| builder).await;
    let mut took: Vec<Duration> = Vec::new();
    loop {
        let began: Instant = agent.started();
        eventually("traffic flows again", || async { mesh.ask(&mock).await.ok() }).await;
        took.push(began.elapsed());
        if took.len() == kills {
            break;
        }
        dead(&mut agent).await;
        agent = start().start_in(agent.take_dir());
    }
    took.sort();
    eprintln!(
        "killed {kills} times without istiod: mutual TLS again after {:.2?} (p50), {:.2?} at most",
        took[took.len() / 2],
        took[took.len() - 1]
    );
    agent.stop().await;
}

const IDENTITY: &str = "etc/istio/proxy/last-good/identity";

#[tokio::test(flavor = "multi_thread")]
async fn a_sealed_key_is_of_use_with_its_file_only() {
    let sealed = |builder: crate::support::builder::Builder, secret: u8| {
        builder.file_mode("sealing", vec![secret; 32], 0o400).env("IDENTITY_PERSIST_KEY", "./sealing")
    };
    let (mock, mesh, mut agent, _) = killed_with(|b| sealed(b, 7), |b| sealed(b, 7)).await;
    eventually("traffic flows again", || async { mesh.ask(&mock).await.ok() }).await;
    assert!(!agent.path(IDENTITY).join("key.pem").exists(), "no open key is there");
    let file = std::fs::read(agent.path(IDENTITY).join("key.sealed")).unwrap();
    assert!(!String::from_utf8_lossy(&file).contains("PRIVATE"));
    dead(&mut agent).await;
    drop(agent);
    // With another file it is as if there were none.
    let (_mock, _mesh, mut agent, _) = killed_with(|b| sealed(b, 7), |b| sealed(b, 8)).await;
    agent.wait_log("was not sealed by this file for this workload").await;
    assert!(!agent.log().contains("PRIVATE"));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_node_starts_empty() {
    let (_mock, _mesh, mut agent) = killed(|builder| builder.env("POD_NAME", "other")).await;
    agent.wait_log("it belongs to another proxy").await;
    assert_eq!(agent.metric(SERVING).await, None);
}
