//! Probes against real HTTP, HTTPS, gRPC and TCP applications on loopback.

mod grpc;
mod tls;

use std::time::Instant;

use bytes::Bytes;
use tokio::net::TcpListener;

use super::*;
use crate::net::progress::Heads;
use crate::status::Config as StatusConfig;
use crate::status::fake::{Got, Served, Web, http, spawn, start};
use crate::trouble::Troubles;

const KEY: &str = "/app-health/app/livez";

fn probing(probe: &str, change: impl FnOnce(&mut Config)) -> Served {
    let mut config = StatusConfig::new(0);
    config.ready.envoy_admin = None;
    config.stats.envoy_port = None;
    config.probes.table = parse(&format!("{{\"{KEY}\": {probe}}}")).unwrap();
    change(&mut config.probes);
    start(config)
}

fn http_get(port: u16, more: &str) -> String {
    format!("{{\"httpGet\": {{\"path\": \"/hello\", \"port\": {port}{more}}}, \"timeoutSeconds\": 5}}")
}

async fn ask(served: &Served, headers: &str) -> Got {
    served.ask("GET", KEY, headers).await
}

const KUBELET: &str = "User-Agent: kube-probe/1.30\r\nAccept: */*\r\nConnection: close\r\n";

#[tokio::test]
async fn what_the_application_sees() {
    let app = Web::start(|_| http(200, "X-App: 1\r\n", "fine")).await;
    let port = app.addr.port();
    let served = probing(&http_get(port, ""), |_| {});
    let got = served.ask("POST", KEY, &format!("{KUBELET}X-A: 1\r\nX-A: 2\r\nContent-Length: 0\r\n")).await;
    assert_eq!((got.status, got.text().as_str()), (200, "fine"));
    assert_eq!(got.header("content-type"), Some("text/plain; charset=utf-8"));
    assert_eq!(got.header("x-app"), None);
    let head = app.heads().remove(0);
    assert!(got.head.contains("\r\nContent-Type: ") && head.contains("\r\nX-A: 1\r\n"), "as Go spells them");
    let head = head.to_lowercase();
    assert!(head.starts_with("get /hello http/1.1\r\n"), "{head}");
    assert_eq!(head.matches("connection: close").count(), 1);
    for line in [
        &format!("host: localhost:{port}"),
        "user-agent: kube-probe/1.30",
        "x-a: 1",
        "x-a: 2",
        "accept: */*",
        "accept-encoding: gzip",
    ] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line}: {head}");
    }
    assert!(!head.contains("content-length"));
    let _ = ask(&served, "Connection: keep-alive\r\n").await;
    let head = app.heads().remove(1).to_lowercase();
    assert!(head.contains("connection: keep-alive\r\n") && head.contains("connection: close\r\n"), "{head}");
}

#[tokio::test]
async fn statuses_and_bodies() {
    for (status, body, shown, back) in [
        (200, "fine", 200, "fine"),
        (204, "", 204, ""),
        (302, "moved", 200, ""),
        (304, "", 200, ""),
        (399, "x", 200, ""),
        (418, "tea", 418, "tea"),
        (500, "", 500, ""),
        (599, "odd", 599, "odd"),
    ] {
        let app = Web::start(move |_| {
            if status == 204 { b"HTTP/1.1 204 X\r\n\r\n".to_vec() } else { http(status, "", body) }
        })
        .await;
        let served = probing(&http_get(app.addr.port(), ""), |_| {});
        let got = ask(&served, KUBELET).await;
        assert_eq!((got.status, got.text().as_str()), (shown, back), "{status}");
        assert_eq!(got.header("content-type").is_some(), !back.is_empty());
    }
    let app = Web::start(|_| http(200, "", &"x".repeat(10_241))).await;
    let served = probing(&http_get(app.addr.port(), ""), |_| {});
    assert_eq!(ask(&served, KUBELET).await.body.len(), 10_240);
    let app = Web::start(|_| b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc".to_vec()).await;
    let served = probing(&http_get(app.addr.port(), ""), |_| {});
    let got = ask(&served, KUBELET).await;
    assert_eq!((got.status, got.text().as_str()), (200, "abc"), "a cut body keeps its status");
    let app = Web::start(|_| b"HTTP/1.1 204 X\r\nContent-Length: 0x1\r\n\r\n".to_vec()).await;
    assert_eq!(ask(&probing(&http_get(app.addr.port(), ""), |_| {}), KUBELET).await.status, 204);
    let app = Web::start(|_| http(200, "", "fine")).await;
    let odd = format!("{{\"httpGet\":{{\"path\":\"/a\\u0001\",\"port\":{}}}}}", app.addr.port());
    assert_eq!(ask(&probing(&odd, |_| {}), KUBELET).await.status, 500, "no address has control characters");
    assert!(app.heads().is_empty());
    let many: String = (0..1001).map(|n| format!("X-{n}: y\r\n")).collect();
    for odd in [
        "SSH-2.0".to_owned(),
        "HTTP/1.2 200 OK".to_owned(),
        "HTTP/1.1 101 X".to_owned(),
        "HTTP/1.1 099 X".to_owned(),
        format!("HTTP/1.1 200 OK\r\n{many}"),
    ] {
        let app = Web::start(move |_| format!("{odd}\r\n\r\n").into_bytes()).await;
        let served = probing(&http_get(app.addr.port(), ""), |_| {});
        assert_eq!(ask(&served, KUBELET).await.status, 500);
    }
}

#[test]
fn a_timeout_of_zero_is_ten_minutes() {
    for (seconds, limited) in [(0, 600), (-1, 600), (1, 1), (3600, 3600)] {
        assert_eq!(limit(seconds), Duration::from_secs(limited), "{seconds}");
    }
}

#[tokio::test]
async fn redirects_stay_with_the_host() {
    let asks = |head: &str| if head.contains("Authorization: Basic bWU6c2VjcmV0\r\n") { "me" } else { "who" };
    let named = Web::start(move |head| http(200, "", asks(head))).await;
    let named = named.addr;
    let app = Web::start(move |head| match head.split(' ').nth(1).unwrap() {
        "/hello" => http(302, "Location: /there\r\n", ""),
        "/there" => http(200, "", "there"),
        "/loop" => http(307, "Location: /loop\r\n", ""),
        "/away" => http(302, "Location: http://other.example/\r\n", "x"),
        "/mail" => http(302, "Location: mailto:somebody\r\n", "x"),
        "/named" => http(302, &format!("Location: http://me:secret@{named}/\r\n"), ""),
        "/long" => http(200, &format!("X-Long: {}\r\n", "x".repeat(300_000)), "long"),
        _ => http(302, "Location: http://[\r\n", ""),
    })
    .await;
    let port = app.addr.port();
    let at =
        |path: &str| probing(&format!("{{\"httpGet\":{{\"path\":\"{path}\",\"port\":{port}}}}}"), |_| {});
    let got = ask(&at("/hello"), KUBELET).await;
    assert_eq!((got.status, got.text().as_str()), (200, "there"));
    assert_eq!(ask(&at("loop"), KUBELET).await.status, 500);
    assert_eq!(app.heads().len(), 12);
    let got = ask(&at("/away"), KUBELET).await;
    assert_eq!((got.status, got.text().as_str()), (200, ""));
    assert_eq!(ask(&at("/mail"), KUBELET).await.status, 200);
    assert_eq!(ask(&at("/named"), KUBELET).await.text(), "me");
    assert_eq!(ask(&at("/long"), KUBELET).await.text(), "long");
    assert_eq!(ask(&at("/bad"), KUBELET).await.status, 500);
}

#[tokio::test]
async fn limits_of_time() {
    let hanging = Web::start(|_| Vec::new()).await;
    let port = hanging.addr.port();
    for probe in [
        format!("{{\"httpGet\":{{\"port\":{port}}},\"timeoutSeconds\":1}}"),
        format!("{{\"grpc\":{{\"port\":{port}}},\"timeoutSeconds\":1}}"),
        "{\"grpc\":{\"port\":1},\"timeoutSeconds\":1}".to_owned(),
    ] {
        let served = probing(&probe, |_| {});
        let begun = Instant::now();
        assert_eq!(ask(&served, KUBELET).await.status, 500, "{probe}");
        assert!(begun.elapsed() >= Duration::from_secs(1), "{probe}: it must have waited");
    }
    for probe in [
        format!("{{\"tcpSocket\":{{\"port\":{port}}},\"timeoutSeconds\":-1}}"),
        format!("{{\"grpc\":{{\"port\":{port}}}}}"),
        format!("{{\"grpc\":{{\"port\":{port}}},\"timeoutSeconds\":-1}}"),
        "{\"tcpSocket\":{\"port\":70000}}".to_owned(),
        "{\"tcpSocket\":{\"port\":1}}".to_owned(),
        "{\"httpGet\":{\"port\":0}}".to_owned(),
        "{\"httpGet\":{\"port\":-1}}".to_owned(),
    ] {
        assert_eq!(ask(&probing(&probe, |_| {}), KUBELET).await.status, 500, "{probe}");
    }
    let served = probing(&format!("{{\"tcpSocket\":{{\"port\":{port}}}}}"), |_| {});
    assert_eq!(ask(&served, KUBELET).await.status, 200);
}

#[tokio::test]
async fn probes_leave_from_their_own_address() {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    for (destination, legacy) in [("127.0.0.1", false), ("", false), ("localhost", true)] {
        let served = probing(&format!("{{\"tcpSocket\":{{\"port\":{port}}}}}"), |c| {
            c.destination = destination.into()
        });
        let (got, accepted) = tokio::join!(ask(&served, KUBELET), listener.accept());
        assert_eq!(got.status, 200, "{destination} {legacy}");
        assert_eq!(accepted.unwrap().1.ip().to_string(), "127.0.0.6");
    }
    // The other family cannot be reached from here.
    for destination in ["::1", "[::1]"] {
        let served = probing(&format!("{{\"tcpSocket\":{{\"port\":{port}}}}}"), |c| {
            c.destination = destination.into()
        });
        assert_eq!(ask(&served, KUBELET).await.status, 500);
    }
}

#[tokio::test]
async fn kept_connections_are_used_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = spawn(async move {
        let mut count = 0;
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count += 1;
            let service =
                hyper::service::service_fn(move |request: ::http::Request<hyper::body::Incoming>| {
                    let kept = !request.headers().contains_key("connection");
                    let body = format!("{count} {kept}{}", " ".repeat(20_000));
                    async move {
                        Ok::<_, std::convert::Infallible>(::http::Response::new(http_body_util::Full::new(
                            Bytes::from(body),
                        )))
                    }
                });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(hyper_util::rt::TokioIo::new(stream), service)
                .await;
        }
    });
    let served = probing(&http_get(addr.port(), ""), |c| c.keepalive = true);
    for _ in 0..3 {
        let got = ask(&served, "").await;
        assert_eq!(got.text().trim_end(), "1 true");
        assert_eq!(got.body.len(), 10_240);
    }
    let got = ask(&served, "Connection: close\r\n").await;
    assert_eq!(got.text().trim_end(), "1 false");
    assert_eq!(ask(&served, "").await.text().trim_end(), "2 true");
    task.abort();
}

#[tokio::test]
async fn a_probe_that_is_led_back_here_ends_after_as_many_turns_as_redirects() {
    let back = Arc::new(std::sync::OnceLock::<std::net::SocketAddr>::new());
    let known = back.clone();
    let app =
        Web::start(move |_| http(302, &format!("Location: http://{}{KEY}\r\n", known.get().unwrap()), ""))
            .await;
    let served = probing(&http_get(app.addr.port(), ""), |_| {});
    back.set(served.addr).unwrap();
    assert_eq!(ask(&served, KUBELET).await.status, 500);
    assert_eq!(app.heads().len(), crate::fetch::REQUESTS);
    // And nothing is remembered against it.
    assert_eq!(ask(&served, KUBELET).await.status, 500);
    assert_eq!(app.heads().len(), 2 * crate::fetch::REQUESTS);
}

#[tokio::test(start_paused = true)]
async fn of_one_path_so_many_are_under_way_and_the_others_wait() {
    let probe = http_get(1, "");
    let table = parse(&format!("{{\"{KEY}\": {probe}, \"/app-health/other/livez\": {probe}}}")).unwrap();
    let config = Config { table, ..Config::default() };
    let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let prober = Prober::new(config, 40, 1, crypto, Troubles::default().reporter("probes"));
    let of = Progress::new(Arc::new(Heads::new(0)));
    let mut held = Vec::new();
    let from = |last| Caller { here: false, origin: [10, 0, 0, last].into() };
    for last in 0..5 {
        held.push(prober.slot(KEY, 3, from(last), &of).await.unwrap());
    }
    let begun = tokio::time::Instant::now();
    assert!(prober.slot(KEY, 3, from(7), &of).await.is_none(), "an eighth of the connections are taken");
    assert_eq!(begun.elapsed(), Duration::from_secs(3), "as long as the probe may take");
    let other = prober.slot("/app-health/other/livez", 3, from(0), &of).await;
    assert!(other.is_some(), "another path has slots of its own");
    let mut waiting = Box::pin(prober.slot(KEY, 3, from(7), &of));
    assert!(futures_util::poll!(&mut waiting).is_pending());
    assert_eq!(of.phase(), Phase::Waiting);
    held.pop();
    assert!(waiting.await.is_some());
    assert_eq!(of.phase(), Phase::Busy);
}
