//! Merged metrics.

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{App, ok, serving};
use crate::support::agent::Builder;
use crate::support::{Envoy, LIMIT, MockIstiod, TestAgent, eventually, promtool_bin};

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
        assert!(!text.contains("go_"), "{text}");
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
async fn what_hangs_is_given_up_before_the_scraper_gives_up() {
    let envoy = App::start("127.0.0.1", "").await;
    let app = App::start("127.0.0.1", ok("app_x 3\n")).await;
    let mock = MockIstiod::start().await;
    let mut agent = serving(&mock, scraping(&envoy, app.port)).await;
    let mut stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
    let text = asked(&mut stream, "X-Prometheus-Scrape-Timeout-Seconds: 1\r\n").await;
    assert!(text.contains("\napp_x 3\n"), "{text}");
    agent.wait_log("no envoy metrics in this scrape").await;
    let log = agent.stop().await;
    let told = log.lines().find(|line| line.contains("no envoy metrics in this scrape")).unwrap();
    assert!(told.contains("no answer within 900ms"), "{told}");
}

async fn asked(stream: &mut TcpStream, more: &str) -> String {
    let ask = format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{more}Connection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn of_several_one_that_hangs_takes_nothing_of_another_scrapers_other_metrics() {
    let envoy = App::start("127.0.0.1", ok("envoy_x 1\n")).await;
    let (app, hanging) = (App::start("127.0.0.1", ok("app_x 3\n")).await, App::start("127.0.0.1", "").await);
    let annotations = json!({"scrape": "true", "targets": [
        {"port": app.port.to_string()}, {"port": hanging.port.to_string()},
    ]});
    let mock = MockIstiod::start().await;
    let builder = scraping(&envoy, app.port).env("ISTIO_PROMETHEUS_ANNOTATIONS", annotations.to_string());
    let agent = serving(&mock, builder).await;
    let connect = || TcpStream::connect(("127.0.0.1", agent.ports().status));
    // One without a limit, which waits for the application as long as the test takes.
    let mut first = connect().await.unwrap();
    first.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    eventually("the application is asked", async || (!hanging.seen().is_empty()).then_some(())).await;
    let text = asked(&mut connect().await.unwrap(), "X-Prometheus-Scrape-Timeout-Seconds: 1\r\n").await;
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("\nenvoy_x 1\n"), "{text}");
    assert!(text.contains("\nistio_agent_scrape_failures_total{type=\"application\"} 2\n"), "{text}");
    assert_eq!(hanging.seen().len(), 1, "the second was not asked");
    let waits = first.try_read(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
    assert!(waits, "the first still waits");
    agent.stop().await;
}

#[tokio::test]
async fn a_scraper_that_has_gone_keeps_nothing_of_the_application() {
    let envoy = App::start("127.0.0.1", ok("envoy_x 1\n")).await;
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, scraping(&envoy, app.local_addr().unwrap().port())).await;
    let mut scraper = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
    scraper.write_all(b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let (mut asked, _) = timeout(LIMIT, app.accept()).await.expect("the application is asked").unwrap();
    drop(scraper);
    // The application is silent, and its connection is ended none the less.
    let mut seen = Vec::new();
    let ended = timeout(LIMIT, asked.read_to_end(&mut seen)).await;
    assert!(ended.is_ok(), "the application is still waited for");
    assert!(seen.starts_with(b"GET /m "), "{}", String::from_utf8_lossy(&seen));
    agent.stop().await;
}

/// The scrape's text.
async fn scraped(agent: &TestAgent) -> String {
    agent.get("/stats/prometheus").await.unwrap().text()
}

fn failures(text: &str) -> Vec<&str> {
    text.lines().filter_map(|l| l.strip_prefix("istio_agent_scrape_failures_total")).collect()
}

#[tokio::test]
async fn a_body_that_breaks_off_is_marked_and_counted_and_spoils_nothing_after_it() {
    let cut = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n# TYPE envoy_x counter\nenvoy_x 1\nenvoy_y 12";
    let envoy = App::start("127.0.0.1", cut).await;
    let app = App::start("127.0.0.1", ok("# TYPE app_x gauge\napp_x 3\n")).await;
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, scraping(&envoy, app.port)).await;
    let text = scraped(&agent).await;
    assert!(!text.contains("envoy_y"), "half a number is no number: {text}");
    let mark = text.lines().find(|l| l.starts_with("# istio_agent: envoy metrics are cut here"));
    assert!(mark.is_some(), "{text}");
    assert!(text.ends_with("\n# TYPE app_x gauge\napp_x 3\n"), "{text}");
    assert_eq!(failures(&scraped(&agent).await), ["{type=\"envoy\"} 1"]);
    agent.stop().await;
}

#[tokio::test]
async fn several_ports_of_an_application_each_up_to_a_limit() {
    let long = "app_a 1\n".repeat(40);
    let (one, two) =
        (App::start("127.0.0.1", ok(&long)).await, App::start("127.0.0.1", ok("app_b 2\n")).await);
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with();
    let nobody = crate::support::free_port().to_string();
    let annotations = json!({"scrape": "true", "targets": [
        {"port": one.port.to_string(), "path": "/one"},
        {"port": nobody, "path": "/stats/prometheus"},
        {"port": two.port.to_string()},
    ]});
    let builder = builder
        .env("PILOT_AGENT_MERGE_ENVOY_STATS", "false")
        .env("METRICS_PART_LIMIT_BYTES", "100")
        .env("ISTIO_PROMETHEUS_ANNOTATIONS", annotations.to_string());
    let agent = serving(&mock, builder).await;
    let text = scraped(&agent).await;
    assert_eq!(text.matches("app_a 1\n").count(), 12, "whole lines within 100 bytes: {text}");
    assert!(
        text.contains("\n# istio_agent: application metrics are cut here after 100 bytes (limit)\n"),
        "{text}"
    );
    assert!(text.ends_with("app_b 2\n"), "{text}");
    assert_eq!(failures(&text), ["{type=\"application\"} 1"], "the one that nobody serves");
    assert!(one.seen()[0].1.starts_with("GET /one ") && two.seen()[0].1.starts_with("GET /metrics "));
    agent.stop().await;
}

#[tokio::test]
async fn families_of_our_own_are_shown_where_they_are_asked_for() {
    let mock = MockIstiod::start().await;
    for (details, shown) in [("false", false), ("true", true)] {
        let agent = serving(&mock, TestAgent::with().env("METRICS_DETAILS", details)).await;
        scraped(&agent).await;
        // Nobody serves Envoy's metrics here: a failure with a reason.
        let text = scraped(&agent).await;
        assert!(text.contains("istio_agent_scrape_failures_total{type=\"envoy\"}"), "{text}");
        assert_eq!(text.contains("istio_agent_scrape_failure_reasons_total{"), shown, "{details}: {text}");
        agent.stop().await;
    }
}

/// Prometheus' own opinion of a merged scrape; `scripts/get-promtool` gets it.
#[tokio::test]
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
    let mut promtool = tokio::process::Command::new(promtool_bin())
        .args(["check", "metrics"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("promtool can be started");
    let mut input = promtool.stdin.take().unwrap();
    input.write_all(text.as_bytes()).await.unwrap();
    drop(input);
    let output = promtool.wait_with_output().await.unwrap();
    // 3: it can be read, but names or help are not to its taste; Envoy's never have help.
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{said}");
    agent.stop().await;
}
