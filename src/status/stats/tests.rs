use std::io::Write as _;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::net::fair::Caller;
use crate::net::progress::Heads;
use crate::status::Config as StatusConfig;
use crate::status::fake::{Served, Web, http, spawn, start};

mod ends;
mod readable;

const ENVOY: &str = "# TYPE envoy_x counter\nenvoy_x{a=\"b\"} 1\n";
const APP: &str = "# HELP app_x Something.\n# TYPE app_x gauge\napp_x 3\n";
const OPEN: &str = "# TYPE app_y counter\napp_y_total 3\n# EOF\n";

fn target(web: &Web, path: &str) -> Target {
    Target { port: web.addr.port().to_string(), path: path.to_owned() }
}

fn merging(envoy: Option<&Web>, targets: Vec<Target>, change: impl FnOnce(&mut Config)) -> Served {
    let mut config = StatusConfig::new(0);
    config.ready.envoy_admin = None;
    config.stats = Config { envoy_port: envoy.map(|w| w.addr.port()), targets, ..Config::default() };
    change(&mut config.stats);
    start(config)
}

async fn envoy() -> Web {
    Web::start(|_| http(200, "Content-Type: text/plain\r\n", ENVOY)).await
}

/// The part after the agent's own metrics.
fn rest(text: &str) -> String {
    let own = |l: &&str| {
        l.starts_with("istio_agent_")
            || l.starts_with("# HELP istio_agent_")
            || l.starts_with("# TYPE istio_agent_")
    };
    text.split_inclusive('\n').skip_while(own).collect()
}

fn failures(text: &str) -> Vec<&str> {
    text.lines().filter_map(|l| l.strip_prefix("istio_agent_scrape_failures_total")).collect()
}

#[tokio::test]
async fn three_parts_in_order_and_what_each_is_asked() {
    let (envoy, app) = (envoy().await, Web::start(|_| http(200, "", APP)).await);
    let served = merging(Some(&envoy), vec![target(&app, "/m")], |_| {});
    let headers = "User-Agent: Prometheus/3\r\nX-Prometheus-Scrape-Timeout-Seconds: 9.5\r\nAccept: application/openmetrics-text;version=1.0.0,*/*\r\nAuthorization: x\r\n";
    let got = served.ask("POST", "/stats/prometheus?usedonly&filter=^x.*%24", headers).await;
    assert_eq!(
        (got.status, got.header("content-type")),
        (200, Some("text/plain; version=0.0.4; charset=utf-8"))
    );
    let text = got.text();
    assert!(text.starts_with("# HELP istio_agent_process_"), "{text}");
    assert_eq!(rest(&text), format!("{ENVOY}{APP}"));
    assert!(text.contains("\nistio_agent_scrapes_total 1\n") && failures(&text).is_empty());
    let head = envoy.heads().remove(0).to_lowercase();
    assert!(head.starts_with("get /stats/prometheus?usedonly&filter=^x.*%24 http/1.1\r\n"), "{head}");
    for line in [
        "user-agent: prometheus/3",
        "x-prometheus-scrape-timeout-seconds: 9.5",
        "accept-encoding: gzip",
        "accept: text/plain; q=0.1; version=0.0.4",
    ] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line}: {head}");
    }
    assert!(
        head.contains(&format!("host: localhost:{}", envoy.addr.port())) && !head.contains("authorization")
    );
    let head = app.heads().remove(0);
    assert!(head.starts_with("GET /m HTTP/1.1\r\n"), "{head}");
    assert!(
        head.contains(
            "Accept: application/openmetrics-text; q=0.2; version=1.0.0,text/plain; q=0.1; version=0.0.4\r\n"
        ),
        "{head}"
    );
}

#[tokio::test]
async fn a_part_that_fails_is_left_out_and_counted_at_once() {
    let refused = "1";
    let envoy = envoy().await;
    let not_found = Web::start(|_| http(404, "", "no")).await;
    let empty = Web::start(|_| b"SSH-2.0-x\r\n".to_vec()).await;
    for (port, path, reason) in [
        (refused.to_owned(), "/m", "connect"),
        ("http".to_owned(), "/m", "address"),
        (not_found.addr.port().to_string(), "/m", "status"),
        (not_found.addr.port().to_string(), "m", "address"),
        (empty.addr.port().to_string(), "/m", "http"),
    ] {
        let served = merging(Some(&envoy), vec![Target { port, path: path.into() }], |c| c.details = true);
        let text = served.get("/metrics").await.text();
        assert_eq!(failures(&text), ["{type=\"application\"} 1"], "{reason}");
        let line = format!(
            "istio_agent_scrape_failure_reasons_total{{reason=\"{reason}\",type=\"application\"}} 1\n"
        );
        assert!(text.contains(&line), "{reason}: {text}");
        assert!(text.ends_with(ENVOY));
    }
    let served = merging(None, vec![], |c| c.envoy_port = Some(1));
    assert_eq!(failures(&served.get("/metrics").await.text()), ["{type=\"envoy\"} 1"]);
    assert!(!served.get("/metrics").await.text().contains("reasons"), "only with details");
    let page = served.get("/debug/agentz").await.text();
    assert!(page.contains("cannot connect to localhost:1"), "{page}");
}

#[tokio::test]
async fn of_what_envoy_is_asked_nothing_is_kept() {
    let served = merging(None, vec![], |c| c.envoy_port = Some(1));
    for n in 0..20 {
        served.get(&format!("/metrics?filter={n}{}", "x".repeat(1000))).await;
    }
    let page: serde_json::Value = serde_json::from_slice(&served.get("/debug/agentz").await.body).unwrap();
    let failures: Vec<_> = page["status"]["scrapeFailures"].as_object().unwrap().keys().collect();
    assert_eq!(failures, ["envoy http://localhost:1/stats/prometheus"]);
}

#[tokio::test]
async fn open_metrics_ends_once_and_at_the_end() {
    let om =
        |version: &str| format!("Content-Type: application/openmetrics-text{version}; charset=utf-8\r\n");
    let envoy = Web::start(|_| http(200, "", &format!("{ENVOY}# EOF\n"))).await;
    for (given, kind) in [
        ("; version=1.0.0", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("; version=0.0.1", "application/openmetrics-text; version=0.0.1; charset=utf-8"),
        ("", "application/openmetrics-text; version=0.0.1; charset=utf-8"),
        ("; version=2.0.0", "text/plain; version=0.0.4; charset=utf-8"),
    ] {
        let head = om(given);
        let app = Web::start(move |_| http(200, &head, OPEN)).await;
        let text_app = Web::start(|_| http(200, "", APP)).await;
        let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
        let got = served.get("/metrics").await;
        assert_eq!(got.header("content-type"), Some(kind), "{given}");
        let open = kind.starts_with("application");
        assert_eq!(
            rest(&got.text()),
            if open { format!("{ENVOY}{OPEN}") } else { format!("{ENVOY}# EOF\n{OPEN}") }
        );
        // Several: plain text where they do not agree, and one end where they agree on OpenMetrics.
        let served = merging(None, vec![target(&app, "/"), target(&text_app, "/")], |_| {});
        let got = served.get("/metrics").await;
        let without = OPEN.replace("# EOF\n", "");
        assert_eq!(got.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        assert_eq!(rest(&got.text()), format!("{without}{APP}"));
        let served = merging(None, vec![target(&app, "/"), target(&app, "/")], |_| {});
        assert_eq!(
            rest(&served.get("/metrics").await.text()),
            if open { format!("{without}{OPEN}") } else { without.repeat(2) }
        );
    }
}

#[tokio::test]
async fn of_several_only_those_that_answer_decide() {
    let app =
        Web::start(|_| http(200, "Content-Type: application/openmetrics-text; version=1.0.0\r\n", OPEN))
            .await;
    let served =
        merging(None, vec![Target { port: "1".into(), path: "/".into() }, target(&app, "/")], |_| {});
    let got = served.get("/metrics").await;
    assert_eq!(
        got.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert_eq!(failures(&got.text()), ["{type=\"application\"} 1"]);
    assert!(got.text().ends_with(OPEN));
}

#[tokio::test]
async fn of_several_no_more_is_held_than_there_is_room_for() {
    let lines = usize::try_from(LONGEST_OF_SEVERAL).unwrap() / 4;
    let app = Web::start(move |_| http(200, "", &"a 1\n".repeat(lines))).await;
    let targets = (0..3).map(|_| target(&app, "/")).collect();
    let got = merging(None, targets, |_| {}).get("/metrics").await.text();
    assert_eq!(got.matches("a 1\n").count() / lines, 2, "two have all the room");
    assert_eq!(failures(&got), ["{type=\"application\"} 1"]);
}

#[tokio::test]
async fn what_is_left_out_leaves_its_room_to_the_others() {
    let broken = b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\nhalf of it".to_vec();
    let long = http(200, "", &"a".repeat(60));
    for (reply, left) in [(http(200, "", &"a".repeat(40)), 60), (broken, 100), (long, 100)] {
        let app = Web::start(move |_| reply.clone()).await;
        let room = AtomicU64::new(100);
        let url = format!("http://{}/", app.addr);
        let Ok(part) = Part::ask("application", &url, HeaderMap::new(), None, 0).await else {
            panic!("no answer")
        };
        assert_eq!(part.whole(50, &room).await.is_ok(), left == 60);
        assert_eq!(room.into_inner(), left);
    }
}

#[tokio::test]
async fn of_several_one_that_fails_at_any_point_is_left_out_whole() {
    let long = "a 1\n".repeat(usize::try_from(LONGEST_OF_SEVERAL).unwrap() / 4);
    let over = format!("{long}a");
    let broken = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\na 1\na 2\n".to_vec();
    // Not longer than allowed, and its last line has no end.
    let good = Web::start(|_| http(200, "", "x 1\n# EOF \r\ny 2")).await;
    for bad in [http(200, "", &over), broken] {
        let bad = Web::start(move |_| bad.clone()).await;
        let served = merging(None, vec![target(&bad, "/"), target(&good, "/")], |_| {});
        let got = served.get("/metrics").await.text();
        assert_eq!(rest(&got), "x 1\ny 2\n");
        assert_eq!(failures(&served.get("/metrics").await.text()), ["{type=\"application\"} 2"]);
    }
    let full = Web::start(move |_| http(200, "", &long)).await;
    let served = merging(None, vec![target(&good, "/"), target(&full, "/")], |_| {});
    assert_eq!(rest(&served.get("/metrics").await.text()).len() as u64, 8 + LONGEST_OF_SEVERAL);
}

#[tokio::test]
async fn the_agent_does_not_ask_itself() {
    let served = merging(None, vec![], |_| {});
    let port = served.addr.port();
    drop(served);
    let away =
        Web::start(move |_| http(302, &format!("Location: http://localhost:{port}/metrics\r\n"), "")).await;
    let mut config = StatusConfig::new(port);
    config.stats = Config {
        envoy_port: None,
        targets: vec![Target { port: format!("0{port}"), path: "/".into() }, target(&away, "/")],
        ..Config::default()
    };
    let merger = {
        let metrics = Metrics::new();
        let own = Own::new(&metrics).unwrap();
        Merger::new(config.stats, port, own, metrics)
    };
    let caller = Caller { here: true, origin: std::net::Ipv4Addr::LOCALHOST.into() };
    let of = ConnState::new(Arc::new(Heads::new(0)), caller);
    let (_, apps, _) = merger.ask(&HeaderMap::new(), None, None, &of).await;
    assert!(apps.is_empty());
    let shown = merger.failures().to_string();
    assert!(shown.contains("without end") && shown.contains("302"), "{shown}");
}

#[tokio::test]
async fn gzip_bodies_are_unpacked_and_redirects_followed() {
    let zipped = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        let body = encoder.finish().unwrap();
        let mut out =
            format!("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n\r\n", body.len())
                .into_bytes();
        out.extend(body);
        out
    };
    let long = APP.repeat(20_000);
    let (answer, moved) = (zipped(&long), http(307, "Location: /there\r\n", ""));
    let app =
        Web::start(move |head| if head.starts_with("GET /there") { answer.clone() } else { moved.clone() })
            .await;
    let served = merging(None, vec![target(&app, "/here")], |_| {});
    assert!(rest(&served.get("/metrics").await.text()) == long);
    let mut broken = zipped(&long);
    broken.truncate(broken.len() / 2);
    let app = Web::start(move |_| broken.clone()).await;
    let served = merging(None, vec![target(&app, "/")], |_| {});
    let _ = served.get("/metrics").await;
    assert_eq!(failures(&served.get("/metrics").await.text()), ["{type=\"application\"} 1"]);
}

#[tokio::test]
async fn only_this_pod_where_that_is_asked_for() {
    // Peers are loopback here; who counts as one is a table in routes/tests.rs.
    let served = merging(None, vec![], |c| c.local_only = true);
    assert_eq!(served.get("/metrics").await.status, 200);
}

#[test]
fn formats() {
    assert_eq!(format(None), ("text/plain; version=0.0.4; charset=utf-8", false));
    assert_eq!(limit(&HeaderMap::new()), None);
}
