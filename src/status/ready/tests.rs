use std::sync::atomic::Ordering::Relaxed;

use crate::status::fake::{CONFIGURED, LIVE, Web, envoy, http, start, with_envoy};
use crate::trouble::{Kind, Report};

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
    *served.agent.not_ready.lock().unwrap() =
        ["no name table", "no sds"].map(|text| Report::new(Kind::NameTableMissing, text)).into();
    let got = served.get("/healthz/ready").await;
    assert_eq!((got.status, got.text().as_str()), (503, ""));
    let why = got.header("x-not-ready").unwrap().to_owned();
    assert!(why.starts_with("NameTableMissing: no name table; ") && why.contains(": no sds"), "{why}");
    let body = served.get("/healthz/ready?verbose").await.text();
    assert!(body.starts_with("not ready\nverdict: NameTableMissing: no name table\nwhat to do: "), "{body}");
    let agentz: serde_json::Value = serde_json::from_str(&served.get("/debug/agentz").await.text()).unwrap();
    assert_eq!(agentz["verdict"]["kind"], "NameTableMissing", "{agentz}");
    served.agent.not_ready.lock().unwrap().clear();
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    *served.agent.terminating.lock().unwrap() = Some("received signal: terminated".into());
    let got = served.get("/healthz/ready").await;
    let why = got.header("x-not-ready").unwrap();
    assert_eq!(got.status, 503);
    assert!(why.starts_with("Terminating: server is terminated: received signal: terminated; "), "{why}");
}

#[tokio::test]
async fn an_envoy_that_is_gone_must_prove_itself_again() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    served.agent.gone.store(true, Relaxed);
    let got = served.get("/healthz/ready").await;
    assert!(got.header("x-not-ready").unwrap().starts_with("EnvoyNotStarted: Envoy is not running; "));
    served.agent.gone.store(false, Relaxed);
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    assert_eq!(web.heads().len(), 4);
    // Another process, though no probe has fallen into the gap.
    served.agent.generation.store(7, Relaxed);
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    assert_eq!(web.heads().len(), 6);
}

#[tokio::test]
async fn strict_mode_takes_readiness_away() {
    let web = envoy().await;
    let mut config = with_envoy(&web);
    let loose = start(config.clone());
    config.ready.strict = true;
    let strict = start(config);
    for (served, status) in [(loose, 200), (strict, 503)] {
        *served.agent.degraded.lock().unwrap() =
            vec![Report::new(Kind::CertificateExpired, "the identity has expired")];
        assert_eq!(served.get("/healthz/ready").await.status, status);
    }
}

#[tokio::test]
async fn a_question_that_is_closed_without_an_answer_is_asked_with_the_next_probe() {
    let asked = std::sync::atomic::AtomicUsize::new(0);
    // An empty line is no head of an answer.
    let web = Web::start(move |head| match asked.fetch_add(1, Relaxed) {
        1 => b"\r\n".to_vec(),
        _ => http(200, "", if head.contains("cluster_manager") { CONFIGURED } else { LIVE }),
    })
    .await;
    let served = start(with_envoy(&web));
    let got = served.get("/healthz/ready").await;
    assert!(
        got.status == 503 && got.header("x-not-ready").is_some_and(|why| why.contains("EnvoyAdminSilent"))
    );
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    assert_eq!(web.heads().len(), 3);
}
