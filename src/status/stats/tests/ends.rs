//! Parts that hang, break off, are cut, or that nobody waits for any more.

use super::*;

#[tokio::test]
async fn an_application_that_hangs_takes_nothing_of_envoys_part() {
    let envoy = envoy().await;
    let hanging = Web::start(|_| Vec::new()).await;
    let served = merging(Some(&envoy), vec![target(&hanging, "/")], |_| {});
    let got = served.ask("GET", "/metrics", "X-Prometheus-Scrape-Timeout-Seconds: 0.5\r\n").await;
    assert_eq!(rest(&got.text()), ENVOY);
    assert_eq!(failures(&got.text()), ["{type=\"application\"} 1"]);
    // Its head comes, its body does not.
    let (addr, task) =
        dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\napp_x 1\napp_y 12".to_vec()).await;
    let served =
        merging(Some(&envoy), vec![Target { port: addr.port().to_string(), path: "/".into() }], |_| {});
    let got = served.ask("GET", "/metrics", "X-Prometheus-Scrape-Timeout-Seconds: 0.5\r\n").await;
    assert_eq!(
        rest(&got.text()),
        format!("{ENVOY}app_x 1\n# istio_agent: application metrics are cut here after 16 bytes (timeout)\n"),
        "half a number is no number"
    );
    let got = served.ask("GET", "/metrics", "X-Prometheus-Scrape-Timeout-Seconds: 0.5\r\n").await;
    assert_eq!(failures(&got.text()), ["{type=\"application\"} 1"]);
    task.abort();
}

/// Sends the bytes and then nothing more, without closing.
async fn dripping(bytes: Vec<u8>) -> (std::net::SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(&bytes).await;
            open.push(stream);
        }
    });
    (addr, task)
}

#[test]
fn who_names_no_limit_waits_five_minutes_for_each_piece() {
    assert_eq!(part::NO_LIMIT, Duration::from_secs(300));
}

#[tokio::test]
async fn a_redirect_to_https_is_not_followed() {
    let app = Web::start(|_| {
        b"HTTP/1.1 302 X\r\nLocation: https://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n".to_vec()
    })
    .await;
    let served = merging(None, vec![target(&app, "/")], |_| {});
    let got = served.get("/metrics").await.text();
    assert_eq!((rest(&got).as_str(), failures(&got)), ("", vec!["{type=\"application\"} 1"]));
    assert_eq!(app.heads().len(), 1);
}

#[tokio::test]
async fn limits_that_are_no_time_at_all() {
    let (envoy, app) = (envoy().await, Web::start(|_| http(200, "", APP)).await);
    let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
    for zero in ["0", "-1", "-0.5"] {
        let got =
            served.ask("GET", "/metrics", &format!("X-Prometheus-Scrape-Timeout-Seconds: {zero}\r\n")).await;
        assert_eq!(rest(&got.text()), "", "{zero}");
    }
    assert!(envoy.heads().is_empty() && app.heads().is_empty());
    for none in ["x", "", "inf", "NaN", "1e300", "9223372037", "0x1p3", "1_0"] {
        let got =
            served.ask("GET", "/metrics", &format!("X-Prometheus-Scrape-Timeout-Seconds: {none}\r\n")).await;
        assert_eq!(rest(&got.text()), format!("{ENVOY}{APP}"), "{none}");
    }
}

#[tokio::test]
async fn a_body_that_is_cut_is_counted_and_what_follows_stays_readable() {
    let cut = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{body}").into_bytes();
    let (whole, half) = (cut(ENVOY), cut("envoy_a 1\nenvoy_b 12"));
    let app = Web::start(|_| http(200, "", APP)).await;
    let envoy = Web::start(move |_| whole.clone()).await;
    let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
    let got = served.get("/metrics").await.text();
    assert_eq!(rest(&got), format!("{ENVOY}{APP}"), "at the end of a line nothing is added");
    assert!(failures(&got).is_empty());
    assert_eq!(failures(&served.get("/metrics").await.text()), ["{type=\"envoy\"} 1"]);
    let served = merging(Some(&envoy), vec![target(&app, "/")], |c| c.details = true);
    let mark =
        |bytes: usize| format!("# istio_agent: envoy metrics are cut here after {bytes} bytes (cut)\n");
    assert_eq!(rest(&served.get("/metrics").await.text()), format!("{ENVOY}{}{APP}", mark(ENVOY.len())));
    let envoy = Web::start(move |_| half.clone()).await;
    let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
    assert_eq!(rest(&served.get("/metrics").await.text()), format!("envoy_a 1\n{}{APP}", mark(20)));
    // OpenMetrics has no comments, and must come to its end.
    let envoy = Web::start(|_| http(200, "", ENVOY)).await;
    let open = cut(OPEN.split_once("# EOF").unwrap().0);
    let open = String::from_utf8(open)
        .unwrap()
        .replace("\r\n\r\n", "\r\nContent-Type: application/openmetrics-text\r\n\r\n");
    let app = Web::start(move |_| open.clone().into_bytes()).await;
    let served = merging(Some(&envoy), vec![target(&app, "/")], |c| c.details = true);
    assert_eq!(
        rest(&served.get("/metrics").await.text()),
        format!(
            "{ENVOY}# TYPE app_y counter\napp_y_total 3\nistio_agent_scrape_part_cut{{type=\"application\",reason=\"cut\"}} 1\n# EOF\n"
        )
    );
}

#[tokio::test]
async fn nothing_follows_the_end_of_an_exposition_whose_body_breaks_off() {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text\r\n";
    for answer in [
        format!("{head}Content-Length: 1000\r\n\r\n{OPEN}"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{OPEN}\r\n", OPEN.len()),
    ] {
        let envoy = envoy().await;
        let app = Web::start(move |_| answer.clone().into_bytes()).await;
        for details in [false, true] {
            let served = merging(Some(&envoy), vec![target(&app, "/")], |c| c.details = details);
            assert_eq!(rest(&served.get("/metrics").await.text()), format!("{ENVOY}{OPEN}"));
            assert_eq!(failures(&served.get("/metrics").await.text()), ["{type=\"application\"} 1"]);
        }
    }
}

#[tokio::test]
async fn of_several_the_end_is_ours_wherever_the_last_one_is_cut() {
    let open = |text| Web::start(move |_| http(200, "Content-Type: application/openmetrics-text\r\n", text));
    let (first, last) = (open("b 1\n# EOF\n").await, open("a 1\n# EOF\n\n").await);
    let served = merging(None, vec![target(&first, "/"), target(&last, "/")], |c| c.limit = Some(10));
    let got = rest(&served.get("/metrics").await.text());
    assert!(got.ends_with("# EOF\n") && got.matches("# EOF").count() == 1, "{got}");
}

#[tokio::test]
async fn a_limit_of_bytes_ends_a_part_at_a_line() {
    let app = Web::start(|_| http(200, "", &"app_x 1\n".repeat(100))).await;
    let served = merging(None, vec![target(&app, "/")], |c| c.limit = Some(20));
    let text = served.get("/metrics").await.text();
    assert_eq!(
        rest(&text),
        "app_x 1\napp_x 1\n# istio_agent: application metrics are cut here after 20 bytes (limit)\n"
    );
}

#[tokio::test]
async fn a_line_that_is_passed_on_unfinished_is_ended_before_what_follows() {
    let long = "x".repeat(100_000);
    let broken = format!("HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n{long}").into_bytes();
    let (envoy, app) = (Web::start(move |_| broken.clone()).await, Web::start(|_| http(200, "", APP)).await);
    let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
    let got = rest(&served.get("/metrics").await.text());
    let (line, after) = got.split_once('\n').unwrap();
    assert!(line.len() <= long.len() && line.bytes().all(|b| b == b'x'), "{}", &line[line.len() - 90..]);
    assert!(
        after.starts_with("# istio_agent: envoy metrics are cut here") && after.ends_with(APP),
        "{after}"
    );
    // And where it ends as it should, OpenMetrics' end is a line of its own.
    let whole = http(200, "", &"x".repeat(65 * 1024 + 7));
    let envoy = Web::start(|_| http(200, "Content-Type: application/openmetrics-text\r\n", OPEN)).await;
    let app = Web::start(move |_| whole.clone()).await;
    let served = merging(None, vec![target(&envoy, "/"), target(&app, "/")], |_| {});
    let got = served.get("/metrics").await.text();
    assert!(got.ends_with("x\n"), "each of several has its end");
}

#[tokio::test]
async fn a_scraper_that_goes_away_ends_the_scrape() {
    let (addr, task) = dripping(b"HTTP/1.1 200 OK\r\n\r\napp_x 1\n".to_vec()).await;
    let served = merging(None, vec![Target { port: addr.port().to_string(), path: "/".into() }], |_| {});
    let mut stream = TcpStream::connect(served.addr).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"app_x 1\n\r\n") {
        assert!(stream.read_buf(&mut seen).await.unwrap() > 0);
    }
    drop(stream);
    served.stop.cancel();
    // The server ends though the application never does.
    let mut server = served;
    (&mut server.task).await.unwrap().unwrap();
    task.abort();
}
