//! The status server: readiness, probes of the application, merged metrics, pages, quit and drain.

use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::support::agent::Builder;
use crate::support::{Envoy, MockIstiod, TestAgent, free_port, http};

/// An application: gives the same answer to every request and remembers the heads and where they came from.
struct App {
    port: u16,
    seen: Arc<Mutex<Vec<(String, String)>>>,
    _serving: JoinSet<()>,
}

impl App {
    async fn start(host: &str, answer: impl Into<String>) -> Self {
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (seen, answer) = (Arc::new(Mutex::new(Vec::new())), answer.into());
        let mut serving = JoinSet::new();
        let notes = seen.clone();
        serving.spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let Ok((mut stream, peer)) = listener.accept().await else { return };
                let (notes, answer) = (notes.clone(), answer.clone());
                open.spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        let Ok(byte) = stream.read_u8().await else { return };
                        head.push(byte);
                    }
                    let head = String::from_utf8_lossy(&head).into_owned();
                    notes.lock().unwrap().push((peer.ip().to_string(), head));
                    if answer.is_empty() {
                        std::future::pending::<()>().await;
                    }
                    let _ = stream.write_all(answer.as_bytes()).await;
                });
            }
        });
        Self { port, seen, _serving: serving }
    }

    fn seen(&self) -> Vec<(String, String)> {
        self.seen.lock().unwrap().clone()
    }
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// An agent whose status server answers.
async fn serving(mock: &MockIstiod, builder: Builder) -> TestAgent {
    let mut agent = builder.istiod(mock).start();
    while agent.get("/nothing").await.is_err() {
        agent.assert_running();
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    agent
}

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
        "{\"/app-health/a/livez\":{\"httpGet\":{\"port\":\"http\"}}}",
    ] {
        let mut agent = TestAgent::with().env("ISTIO_KUBE_APP_PROBERS", bad).start();
        let status = agent.wait_exit().await;
        assert!(!status.success(), "{bad}");
    }
    for bad in ["yes", "[]", "{\"port\":9090}"] {
        let mut agent = TestAgent::with().env("ISTIO_PROMETHEUS_ANNOTATIONS", bad).start();
        assert!(!agent.wait_exit().await.success(), "{bad}");
    }
    let builder = TestAgent::with();
    let own = json!({"port": builder.ports().status.to_string()}).to_string();
    assert!(!builder.env("ISTIO_PROMETHEUS_ANNOTATIONS", own).start().wait_exit().await.success());
}

fn scraping(envoy: &App, app: u16) -> Builder {
    TestAgent::with().env("ENVOY_PROMETHEUS_PORT", envoy.port.to_string()).env(
        "ISTIO_PROMETHEUS_ANNOTATIONS",
        json!({"scrape": "true", "path": "/m", "port": app.to_string()}).to_string(),
    )
}

#[tokio::test]
async fn metrics_are_the_agents_envoys_and_the_applications() {
    let envoy = App::start("127.0.0.1", ok("# TYPE envoy_x counter\nenvoy_x 1\n")).await;
    let app = App::start("127.0.0.1", ok("# TYPE app_x gauge\napp_x 3\n")).await;
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, scraping(&envoy, app.port)).await;
    for path in ["/stats/prometheus", "/metrics"] {
        let reply = agent.get(path).await.unwrap();
        assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
        let text = reply.text();
        assert!(text.contains("\nistio_agent_scrapes_total "), "{text}");
        assert!(text.ends_with("# TYPE envoy_x counter\nenvoy_x 1\n# TYPE app_x gauge\napp_x 3\n"), "{text}");
    }
    assert!(app.seen()[0].1.starts_with("GET /m HTTP/1.1\r\n"));
    agent.stop().await;
}

#[tokio::test]
async fn an_application_that_hangs_takes_nothing_of_envoys_metrics() {
    let envoy = App::start("127.0.0.1", ok("envoy_x 1\n")).await;
    let app = App::start("127.0.0.1", "").await;
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, scraping(&envoy, app.port)).await;
    let mut stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
    let ask = "GET /metrics HTTP/1.1\r\nHost: a\r\nX-Prometheus-Scrape-Timeout-Seconds: 1\r\nConnection: close\r\n\r\n";
    stream.write_all(ask.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.contains("\nenvoy_x 1\n"), "{text}");
    assert!(text.contains("istio_agent_scrape_failures_total{type=\"application\"} 1\n"), "{text}");
    agent.stop().await;
}

#[tokio::test]
async fn pages_that_are_there_and_those_that_are_not() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, TestAgent::with()).await;
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/debug/ndsz", 404),
        ("GET", "/config_dump", 404),
        ("GET", "/quitquitquit", 405),
        ("GET", "/drain", 405),
        ("GET", "/app-health", 307),
        ("GET", "//healthz/ready", 307),
        ("GET", "/healthz/ready/", 404),
    ] {
        let reply = http::call(method, agent.ports().status, path, "").await.unwrap();
        assert_eq!(reply.status.as_u16(), status, "{method} {path}");
        assert_eq!(reply.headers["vary"], "Accept-Encoding", "{path}");
    }
    agent.stop().await;
}

#[tokio::test]
async fn quit_gives_its_answer_and_then_ends() {
    let mock = MockIstiod::start().await;
    let mut agent = serving(&mock, TestAgent::with()).await;
    let reply = agent.post("/quitquitquit").await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
    assert!(agent.wait_exit().await.success());
    agent.assert_clean().await;
}

#[tokio::test]
async fn readiness_follows_envoys_own_word() {
    let mock = MockIstiod::start().await;
    let mut agent = serving(&mock, TestAgent::with()).await;
    agent.wait_ready().await;
    agent.stop().await;
}

/// Prometheus' own opinion of a merged scrape. Not among the ordinary tests, because a bare machine has no
/// promtool; what they check with a reader of their own (src/status/stats/tests.rs) is the same format.
#[tokio::test]
#[ignore = "needs promtool, from Debian's package prometheus: cargo test --test conformance promtool -- --ignored"]
async fn promtool_reads_what_a_real_envoy_and_an_application_are_merged_to() {
    let app =
        App::start("127.0.0.1", ok("# HELP app_x Something.\n# TYPE app_x gauge\napp_x{a=\"b\"} 3\n")).await;
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().istiod(&mock).envoy(Envoy::Real);
    let annotations = json!({"scrape": "true", "path": "/m", "port": app.port.to_string()});
    let mut agent = builder.env("ISTIO_PROMETHEUS_ANNOTATIONS", annotations.to_string()).start();
    agent.wait_ready().await;
    let text = agent.get("/stats/prometheus").await.unwrap().text();
    for part in ["\nistio_agent_scrapes_total 1\n", "\nenvoy_server_live", "\napp_x{a=\"b\"} 3\n"] {
        assert!(text.contains(part), "{part} is not in the scrape");
    }
    let mut promtool = tokio::process::Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("promtool cannot be started ({e}): install the package prometheus"));
    let mut input = promtool.stdin.take().unwrap();
    input.write_all(text.as_bytes()).await.unwrap();
    drop(input);
    let output = promtool.wait_with_output().await.unwrap();
    // 3: it can be read, but names or help are not to its taste; Envoy's never have help.
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{said}");
    agent.stop().await;
}
