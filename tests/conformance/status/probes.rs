//! Probes of the application on the kubelet's behalf.

use serde_json::json;

use super::{App, ok, serving};
use crate::support::agent::Builder;
use crate::support::{MockIstiod, TestAgent, free_port};

fn probing(port: u16, action: &str) -> Builder {
    let probe = match action {
        "http" => json!({"httpGet": {"path": "/hello?x", "port": port}, "timeoutSeconds": 5}),
        _ => json!({"tcpSocket": {"port": port}, "timeoutSeconds": 5}),
    };
    TestAgent::with().env("ISTIO_KUBE_APP_PROBERS", json!({"/app-health/app/livez": probe}).to_string())
}

#[tokio::test]
async fn a_probe_is_made_from_its_own_address_with_the_callers_headers() {
    let app = App::start("127.0.0.1", ok("fine")).await;
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, probing(app.port, "http")).await;
    let reply = agent.get("/app-health/app/livez").await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "fine"));
    let (peer, head) = app.seen().remove(0);
    assert_eq!(peer, "127.0.0.6");
    let head = head.to_lowercase();
    assert!(
        head.starts_with("get /hello?x http/1.1\r\n") && head.contains("connection: close\r\n"),
        "{head}"
    );
    assert!(
        head.contains(&format!("host: localhost:{}\r\n", app.port)),
        "our port is exchanged for its own: {head}"
    );
    let missing = agent.get("/app-health/app/readyz").await.unwrap();
    assert_eq!(missing.status, 400);
    assert_eq!(missing.text(), "app prober config does not exists for /app-health/app/readyz");
    agent.stop().await;
}

#[tokio::test]
async fn a_port_that_nobody_listens_on_fails_its_probe() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, probing(free_port(), "tcp")).await;
    assert_eq!(agent.get("/app-health/app/livez").await.unwrap().status, 500);
    agent.stop().await;
}

#[tokio::test]
async fn probers_that_cannot_be_meant_end_the_agent_before_it_serves() {
    for bad in [
        "[]",
        "{\"/x\":{\"tcpSocket\":{\"port\":1}}}",
        "{\"/app-health/a/livez\":{}}",
        // Crashes the Go agent.
        "{\"/app-health/a/livez\":null}",
        "{\"/app-health/a/livez\":{\"httpGet\":{\"port\":\"http\"}}}",
    ] {
        let mut agent = TestAgent::with().env("ISTIO_KUBE_APP_PROBERS", bad).start();
        // 255 is an error that was told; a crash ends otherwise.
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{bad}");
    }
    for bad in ["yes", "[]", "{\"port\":9090}"] {
        let mut agent = TestAgent::with().env("ISTIO_PROMETHEUS_ANNOTATIONS", bad).start();
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{bad}");
    }
    let builder = TestAgent::with();
    let own = json!({"port": builder.ports().status.to_string()}).to_string();
    let mut agent = builder.env("ISTIO_PROMETHEUS_ANNOTATIONS", own).start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
}
