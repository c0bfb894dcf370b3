//! How soon a configuration pushed after an outage is in a real Envoy. Takes minutes, so it runs on request:
//! `cargo test --test conformance heal -- --ignored --nocapture --test-threads=1`.
//!
//! The bounds are the product's: two seconds in the median, six at worst. Envoy alone, behind an agent that fails
//! each of its tries, needs 5 to 24 s.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::support::agent::TOKEN;
use crate::support::mesh::Loop;
use crate::support::{Envoy, MockIstiod, TestAgent, Token, eventually};

/// Agents at a time: more of them measure the machine.
const AT_ONCE: usize = 5;
const RUNS: usize = 10;

#[derive(Debug, Clone, Copy)]
enum Outage {
    Istiod(u64),
    Token(u64),
}

fn expired() -> String {
    Token { expires: mock_istiod::jwt::Expiry::Ago(Duration::from_secs(60)), ..Token::of("ns", "sa") }.sign()
}

async fn has(mesh: Loop, mock: &MockIstiod, value: &str) {
    eventually("the pushed route is in effect", || async {
        let reply = mesh.ask(mock).await.ok()?;
        (reply.headers.get("x-config")? == value).then_some(())
    })
    .await;
}

async fn run(outage: Outage) -> Duration {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = TestAgent::with().env("METRICS_DETAILS", "true").istiod(&mock).envoy(Envoy::Real).start();
    agent.wait_ready().await;
    has(mesh, &mock, "one").await;
    let since = match outage {
        Outage::Istiod(seconds) => {
            mock.down().await;
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            mesh.push(&mock, "two");
            mock.up().await.unwrap();
            Instant::now()
        }
        Outage::Token(seconds) => {
            agent.put(TOKEN, expired());
            mock.down().await;
            mock.up().await.unwrap();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            mesh.push(&mock, "two");
            agent.put(TOKEN, mock.mint("ns", "sa"));
            Instant::now()
        }
    };
    has(mesh, &mock, "two").await;
    let took = since.elapsed();
    agent.stop().await;
    took
}

async fn measure(outage: Outage) {
    let mut took = Vec::new();
    for _ in 0..RUNS / AT_ONCE {
        let mut runs = JoinSet::new();
        (0..AT_ONCE).for_each(|_| drop(runs.spawn(run(outage))));
        took.extend(runs.join_all().await);
    }
    took.sort();
    println!("{outage:?}: median {:?}, worst {:?}, all {took:?}", took[RUNS / 2], took[RUNS - 1]);
    assert!(took[RUNS / 2] <= Duration::from_secs(2), "the median of {took:?}");
    assert!(took[RUNS - 1] <= Duration::from_secs(6), "the worst of {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute"]
async fn heal_after_5_seconds_without_istiod() {
    measure(Outage::Istiod(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes"]
async fn heal_after_25_seconds_without_istiod() {
    measure(Outage::Istiod(25)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes three minutes"]
async fn heal_after_60_seconds_without_istiod() {
    measure(Outage::Istiod(60)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes"]
async fn heal_after_25_seconds_with_an_expired_token() {
    measure(Outage::Token(25)).await;
}
