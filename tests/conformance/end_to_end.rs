//! The whole: an agent, a real Envoy, an istiod that comes and goes, and traffic that must not notice.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;

use crate::support::agent::{Builder, TOKEN};
use crate::support::mesh::{Loop, serials};
use crate::support::{Code, Envoy, LIMIT, MockIstiod, TestAgent, eventually, http};

fn real(mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).envoy(Envoy::Real)
}

/// Asks without a pause until dropped, and counts.
pub struct Traffic {
    answered: Arc<AtomicU64>,
    failed: Arc<Mutex<Vec<String>>>,
    _asking: JoinSet<()>,
}

impl Traffic {
    pub fn start(mock: &Arc<MockIstiod>, mesh: Loop) -> Self {
        let (answered, failed) = (Arc::<AtomicU64>::default(), Arc::<Mutex<Vec<String>>>::default());
        let mut asking = JoinSet::new();
        let (mock, count, failures) = (mock.clone(), answered.clone(), failed.clone());
        asking.spawn(async move {
            loop {
                match mesh.ask(&mock).await {
                    Ok(_) => drop(count.fetch_add(1, Ordering::Relaxed)),
                    Err(reason) => failures.lock().expect("no panic holds this lock").push(reason),
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        Self { answered, failed, _asking: asking }
    }

    /// Waits for `more` answers, all of them good.
    pub async fn goes_on(&self, more: u64) {
        let until = self.answered.load(Ordering::Relaxed) + more;
        eventually("traffic goes on", || async {
            self.assert_unharmed();
            (self.answered.load(Ordering::Relaxed) >= until).then_some(())
        })
        .await;
    }

    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    pub fn assert_unharmed(&self) {
        let failed = self.failed.lock().expect("no panic holds this lock");
        assert!(failed.is_empty(), "{} requests failed: {:?}", failed.len(), &failed[..failed.len().min(3)]);
    }
}

/// Of what it counts Envoy keeps what it was told to.
#[tokio::test]
async fn envoy_counts_requests_where_a_drain_asks_for_them() {
    let mock = MockIstiod::start().await;
    for (name, counts) in [("DRAIN_COUNT_REQUESTS", true), ("OTHER", false)] {
        let builder = real(&mock).env("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true").env(name, "true");
        let agent = builder.env("MINIMUM_DRAIN_DURATION", "0s").start();
        let stats = async |filter: &str| {
            let path = format!("/stats?filter={filter}");
            http::get(agent.ports().admin, &path).await.ok().map(|reply| reply.text())
        };
        let seen = eventually("it counts", async || stats("downstream_cx_active$").await).await;
        assert!(seen.contains("listener."), "{seen}");
        let seen = stats("downstream_rq_active$").await.unwrap();
        // Those of its admin port, at least.
        assert_eq!(seen.contains("http.admin.downstream_rq_active: 1"), counts, "{seen}");
    }
}

#[tokio::test]
async fn identity_and_config_arrive_and_traffic_flows() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = real(&mock).start();
    agent.wait_ready().await;
    Traffic::start(&mock, mesh).goes_on(20).await;
    assert_eq!(serials(agent.ports().admin).await.len(), 1);

    let record = mock.record();
    let accepted: BTreeSet<String> = record
        .ads_requests()
        .into_iter()
        .filter(|request| request.is_ack())
        .map(|request| request.type_url)
        .collect();
    for kind in ["cluster.v3.Cluster", "listener.v3.Listener", "route.v3.RouteConfiguration"] {
        assert!(accepted.iter().any(|url| url.ends_with(kind)), "{kind} was not accepted: {accepted:?}");
    }
    assert!(record.ads_requests().iter().all(|request| request.nack.is_none()));
    assert_eq!(record.signed().len(), 1, "one key, one request");

    mesh.push(&mock, "two");
    eventually("the pushed route is in effect", || async {
        let reply = mesh.ask(&mock).await.ok()?;
        (reply.headers.get("x-config")? == "two").then_some(())
    })
    .await;
    agent.stop().await;
}

/// Renews its certificate every two seconds, when it has most of its minute left: no load of the machine makes it expire.
fn renewing(mock: &MockIstiod) -> Builder {
    real(mock)
        .env("SECRET_TTL", "60s")
        .env("SECRET_GRACE_PERIOD_RATIO", "0.967")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0")
}

#[tokio::test]
async fn certificates_rotate_under_traffic_without_a_failed_request() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = renewing(&mock).start();
    agent.wait_ready().await;
    let traffic = Traffic::start(&mock, mesh);
    let seen = Mutex::new(BTreeSet::new());
    eventually("four certificates were in use", || async {
        traffic.assert_unharmed();
        let now = serials(agent.ports().admin).await;
        let mut seen = seen.lock().expect("no panic holds this lock");
        seen.extend(now);
        (seen.len() >= 4).then_some(())
    })
    .await;
    traffic.goes_on(20).await;
    drop(traffic);
    agent.stop().await;
}

#[tokio::test]
async fn istiod_gone_and_back() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = real(&mock).start();
    agent.wait_ready().await;
    let traffic = Traffic::start(&mock, mesh);
    traffic.goes_on(20).await;
    mock.down().await;
    traffic.goes_on(50).await;
    assert!(agent.get("/healthz/ready").await.unwrap().status.is_success(), "still ready without istiod");
    mesh.push(&mock, "two");
    mock.up().await.unwrap();
    eventually("what changed meanwhile is in effect", || async {
        let reply = mesh.ask(&mock).await.ok()?;
        (reply.headers.get("x-config")? == "two").then_some(())
    })
    .await;
    traffic.goes_on(20).await;
    drop(traffic);
    agent.stop().await;
}

#[tokio::test]
async fn a_rotation_that_falls_into_an_outage_is_made_up_for() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = renewing(&mock).start();
    agent.wait_ready().await;
    let traffic = Traffic::start(&mock, mesh);
    let first = serials(agent.ports().admin).await;
    mock.ca().always(vec![mock_istiod::Fault::refuse(Code::Unavailable)]);
    mock.record()
        .wait("a renewal was refused", LIMIT, |record| {
            record.ca_calls().iter().any(|call| call.status.code == Code::Unavailable).then_some(())
        })
        .await
        .unwrap();
    mock.ca().clear();
    eventually("the next certificate is in use", || async {
        traffic.assert_unharmed();
        let now = serials(agent.ports().admin).await;
        (!now.is_empty() && now != first).then_some(())
    })
    .await;
    traffic.goes_on(10).await;
    drop(traffic);
    agent.stop().await;
}

#[tokio::test]
async fn an_istiod_that_comes_later_is_waited_for() {
    let mock = Arc::new(MockIstiod::builder().down().start().await.unwrap());
    let mesh = Loop::serve(&mock);
    let mut agent = real(&mock).start();
    drop(agent.sds().await);
    agent.envoy_pid().await;
    let reply =
        eventually("the status server answers", || async { agent.get("/healthz/ready").await.ok() }).await;
    assert_eq!(reply.status, 503);
    mock.up().await.unwrap();
    agent.wait_ready().await;
    Traffic::start(&mock, mesh).goes_on(5).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_token_that_comes_later_is_read() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = real(&mock).without_file(TOKEN).start();
    let refused = |record: &mock_istiod::Record| {
        record.ca_calls().into_iter().find(|call| call.status.code == Code::Unauthenticated)
    };
    let call = mock.record().wait("a call without a token", LIMIT, refused).await.unwrap();
    assert!(call.headers.iter().all(|(name, _)| name != "authorization"), "{:?}", call.headers);
    // The missing file.
    agent.wait_log("istio-token").await;
    agent.put(TOKEN, mock.mint("ns", "sa"));
    agent.wait_ready().await;
    Traffic::start(&mock, mesh).goes_on(5).await;
    agent.stop().await;
}

#[tokio::test]
async fn a_killed_envoy_ends_the_agent() {
    let mock = MockIstiod::start().await;
    Loop::serve(&mock);
    let mut agent = real(&mock).start();
    agent.wait_ready().await;
    kill_process(agent.envoy_pid().await, Signal::KILL).unwrap();
    agent.wait_exit().await;
    agent.wait_log("signal: killed").await;
    agent.assert_clean().await;
}

#[tokio::test]
async fn requests_in_flight_are_finished_before_the_end() {
    let mock = Arc::new(MockIstiod::start().await);
    let mesh = Loop::serve(&mock);
    let mut agent = real(&mock).proxy_config("terminationDrainDuration", "3s").start();
    agent.wait_ready().await;
    Traffic::start(&mock, mesh).goes_on(1).await;

    let app = tokio::net::TcpListener::bind(("127.0.0.1", mesh.app)).await.unwrap();
    let mut asking = JoinSet::new();
    asking.spawn(async move { http::get(mesh.outbound, "/app").await });
    let (mut request, _) =
        tokio::time::timeout(LIMIT, app.accept()).await.expect("the request arrives").unwrap();
    agent.signal(Signal::TERM);
    // The drain has begun when the status server no longer answers.
    eventually("the end has begun", || async { agent.get("/healthz/ready").await.is_err().then_some(()) })
        .await;
    request.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone").await.unwrap();
    let answer = asking.join_next().await.expect("one request").expect("no panic");
    assert_eq!(answer.expect("answered during the drain").text(), "done");
    let status = agent.wait_exit().await;
    assert!(status.success(), "{status}");
    agent.assert_clean().await;
}
