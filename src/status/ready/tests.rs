use std::sync::atomic::Ordering::Relaxed;

use crate::status::fake::{envoy, start, with_envoy};

#[tokio::test]
async fn ready_once_envoy_says_so_and_it_is_asked_only_once() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    for _ in 0..3 {
        let got = served.get("/healthz/ready").await;
        assert_eq!((got.status, got.text().as_str(), got.header("vary")), (200, "", Some("Accept-Encoding")));
        assert_eq!(got.header("content-type"), None);
    }
    let heads = web.heads();
    assert_eq!(heads.len(), 2, "{heads:?}");
    assert!(heads[0].starts_with(r"GET /stats?usedonly&filter=^(cluster_manager\.cds|listener_manager\.lds)\.(update_success|update_rejected)$ HTTP/1.1"));
    assert!(heads[1].starts_with(
        r"GET /stats?usedonly&filter=^(server\.state|listener_manager\.workers_started) HTTP/1.1"
    ));
    let scrape = served.get("/stats/prometheus").await.text();
    assert!(scrape.contains("istio_agent_startup_duration_seconds "), "{scrape}");
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    *served.agent.not_ready.lock().unwrap() = vec!["no name table".into(), "no sds".into()];
    let got = served.get("/healthz/ready").await;
    assert_eq!(
        (got.status, got.text().as_str(), got.header("x-not-ready")),
        (503, "", Some("no name table; no sds"))
    );
    assert_eq!(served.get("/healthz/ready?verbose").await.text(), "no name table; no sds\n");
    served.agent.not_ready.lock().unwrap().clear();
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    *served.agent.terminating.lock().unwrap() = Some("received signal: terminated".into());
    let got = served.get("/healthz/ready").await;
    assert_eq!(
        (got.status, got.header("x-not-ready")),
        (503, Some("server is terminated: received signal: terminated"))
    );
}

#[tokio::test]
async fn an_envoy_that_is_gone_must_prove_itself_again() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    served.agent.gone.store(true, Relaxed);
    assert_eq!(served.get("/healthz/ready").await.header("x-not-ready"), Some("Envoy is not running"));
    served.agent.gone.store(false, Relaxed);
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    assert_eq!(web.heads().len(), 4);
}

#[tokio::test]
async fn strict_mode_takes_readiness_away() {
    let web = envoy().await;
    let mut config = with_envoy(&web);
    let loose = start(config.clone());
    config.ready.strict = true;
    let strict = start(config);
    for (served, status) in [(loose, 200), (strict, 503)] {
        *served.agent.degraded.lock().unwrap() = vec!["the identity has expired".into()];
        assert_eq!(served.get("/healthz/ready").await.status, status);
    }
}
