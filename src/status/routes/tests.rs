use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::status::Config;
use crate::status::fake::{exchange, start};

#[tokio::test]
async fn control_is_by_post() {
    let served = start(Config::new(0));
    for path in ["/quitquitquit", "/drain"] {
        for method in ["GET", "PUT", "HEAD", "DELETE", "FOO"] {
            let got = served.ask(method, path, "").await;
            assert_eq!(got.status, 405, "{method} {path}");
            assert_eq!(got.header("allow"), None);
            assert_eq!(got.header("x-content-type-options"), Some("nosniff"));
        }
    }
    assert_eq!(served.agent.quits.load(Relaxed), 0);
    let got = served.ask("POST", "/drain", "Content-Length: 0\r\n").await;
    assert_eq!((got.status, got.text().as_str(), served.agent.drains.load(Relaxed)), (200, "OK", 1));
}

#[tokio::test]
async fn paths_hosts_and_heads() {
    let served = start(Config::new(0));
    for (path, status) in [
        ("/", 404),
        ("/healthz/ready/", 404),
        ("/healthz%2Fready", 404),
        ("/debug", 404),
        ("/debug/", 200),
        ("/debug/ndsz", 404),
        ("/app-health/x/livez", 400),
        ("/%zz", 400),
    ] {
        assert_eq!(served.get(path).await.status, status, "{path}");
    }
    for (from, to) in [
        ("/app-health", "/app-health/"),
        ("/debug/pprof?a=b", "/debug/pprof/?a=b"),
        ("//x/../y", "/y"),
        ("//x?", "/x"),
        ("//app-health?a", "/app-health/?a"),
        ("/x/../app-lifecycle", "/app-lifecycle/"),
        ("/%61pp-health", "/app-health/"),
        ("/app-lifecycle", "/app-lifecycle/"),
        ("//a%ffb|c", "/a%ffb|c"),
    ] {
        let got = served.ask("POST", from, "Content-Length: 0\r\n").await;
        assert_eq!((got.status, got.header("location")), (307, Some(to)), "{from}");
    }
    let raw = |raw: &'static str| async { exchange(&mut served.connect().await, raw, false).await };
    let got = raw("GET /x HTTP/1.1\r\n\r\n").await;
    assert_eq!(
        (got.status, got.text().as_str(), got.header("connection")),
        (400, "400 Bad Request: missing required Host header", Some("close"))
    );
    assert_eq!(raw("GET /x HTTP/1.0\r\n\r\n").await.status, 404);
    for (head, text) in [
        ("GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400 Bad Request"),
        ("GET /x HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", "400 Bad Request"),
        ("GET /%zz HTTP/1.1\r\n\r\n", "400 Bad Request"),
        ("GET /x HTTP/1.1\r\nHost: me@a\r\n\r\n", "400 Bad Request: malformed Host header"),
    ] {
        let got = raw(head).await;
        assert_eq!((got.status, got.text().as_str(), got.header("vary")), (400, text, None), "{head}");
    }
    let got = raw("GET * HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!((got.status, got.text().as_str(), got.header("connection")), (400, "", Some("close")));
    assert_eq!(got.header("vary"), Some("Accept-Encoding"), "a handler's, as in the Go agent");
    let got = raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    assert_eq!((got.status, got.text().as_str(), got.header("connection")), (400, "", Some("close")));
    let got = raw("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!((got.status, got.header("vary")), (200, None), "no handler has seen it");
    assert_eq!(raw("GET x HTTP/1.1\r\nHost: a\r\n\r\n").await.status, 400);
    assert_eq!(raw("GET http://a/x HTTP/1.1\r\n\r\n").await.status, 400);
    assert_eq!(raw("GET http://a/x HTTP/1.1\r\nHost: b\r\n\r\n").await.status, 404);
    assert_eq!(raw("GET /x HTTP/1.1\r\nHost: a\r\nExpect: more\r\n\r\n").await.status, 417);
    for nonsense in ["nonsense\r\n\r\n", "GET /x HTTP/1.1\r\nHost: a\r\nX Y: z\r\n\r\n"] {
        let mut stream = served.connect().await;
        stream.write_all(nonsense.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 400 ") && answer.ends_with("\r\n\r\n400 Bad Request"),
            "{answer}"
        );
    }
    let long = format!("X-Long: {}\r\n", "z".repeat(100_000));
    assert_eq!(served.ask("GET", "/x", &long).await.status, 404);
    let many: String = (0..500).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(served.ask("GET", "/x", &many).await.status, 404);
}

#[tokio::test]
async fn heads_that_go_takes_and_nobody_sends() {
    let served = start(Config::new(0));
    let status = |text: String| {
        let served = &served;
        async move {
            let mut stream = served.connect().await;
            stream.write_all(text.as_bytes()).await.unwrap();
            let mut line = [0; 12];
            stream.read_exact(&mut line).await.unwrap();
            String::from_utf8_lossy(&line[9..]).into_owned()
        }
    };
    let path = "p".repeat(70_000);
    assert_eq!(status(format!("GET /{path} HTTP/1.1\r\nHost: a\r\n\r\n")).await, "414");
    let many: String = (0..1001).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(status(format!("GET /x HTTP/1.1\r\nHost: a\r\n{many}\r\n")).await, "431");
    for odd in [
        "HTTP/1.1\r\nHost: a\r\nX: b\r\n folded",
        "HTTP/1.2\r\nHost: a",
        "HTTP/1.9\r\nHost: a",
        "HTTP/2.0\r\nHost: a",
        "HTTP/1.0\r\nTransfer-Encoding: chunked",
        "HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip",
    ] {
        assert_eq!(status(format!("GET /x {odd}\r\n\r\n")).await, "400", "{odd}");
    }
    for odd in ["/<", "/>", "/`", "/x?<", "/x?>", "/x?\""] {
        assert_eq!(status(format!("GET {odd} HTTP/1.1\r\nHost: a\r\n\r\n")).await, "400", "{odd}");
    }
    assert_eq!(status("GET http:///debug/ HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()).await, "400");
    let connect =
        exchange(&mut served.connect().await, "CONNECT /metrics HTTP/1.1\r\nHost: a\r\n\r\n", false).await;
    assert_eq!((connect.status, connect.text().as_str()), (200, ""));
    let plain = status("GET /debug/ HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()).await;
    for odd in ["GET /debug/#x", "\r\nGET /debug/"] {
        assert_eq!(status(format!("{odd} HTTP/1.1\r\nHost: a\r\n\r\n")).await, plain, "{odd}");
    }
}

#[tokio::test]
async fn pages_for_people() {
    let served = start(Config::new(0));
    let got = served.get("/debug/ndsz").await;
    assert_eq!((got.status, got.text().as_str()), (404, "{}"));
    let pieces = || [r#"{"table":{}}"#].into_iter().map(Bytes::from);
    *served.agent.table.lock().unwrap() = Some(Box::new(move || Ok(Box::new(pieces()))));
    let got = served.get("/debug/ndsz").await;
    assert_eq!(
        (got.status, got.header("content-type"), got.text().as_str()),
        (200, Some("application/json"), r#"{"table":{}}"#)
    );
    let agentz: serde_json::Value = serde_json::from_slice(&served.get("/debug/agentz").await.body).unwrap();
    assert_eq!(agentz["status"]["notReady"], serde_json::json!([]));
    for (path, kind) in [
        ("/debug/pprof/", "text/html; charset=utf-8"),
        ("/debug/pprof/cmdline", "text/plain; charset=utf-8"),
        ("/debug/pprof/symbol", "text/plain; charset=utf-8"),
        ("/debug/pprof/heap", "application/octet-stream"),
        ("/debug/pprof/goroutine?debug=2", "text/plain; charset=utf-8"),
        ("/debug/pprof/allocs?debug=1", "text/plain; charset=utf-8"),
        ("/debug/pprof/block", "application/octet-stream"),
        ("/debug/pprof/mutex", "application/octet-stream"),
        ("/debug/pprof/profile?seconds=1", "application/octet-stream"),
    ] {
        let got = served.get(path).await;
        assert_eq!(
            (got.status, got.header("content-type"), got.header("x-content-type-options")),
            (200, Some(kind), Some("nosniff")),
            "{path}"
        );
    }
    let profile = || served.get("/debug/pprof/profile?seconds=1");
    let (one, other) = tokio::join!(profile(), profile());
    let refused = if one.status == 200 { &other } else { &one };
    assert_eq!(one.status + other.status, 700, "one at a time");
    assert!(refused.text().contains("profiling already in use"), "{}", refused.text());
    assert_eq!(served.get("/debug/pprof/trace").await.text(), "Unknown profile\n");
    let mut config = Config::new(0);
    config.profiling = false;
    let served = start(config);
    for path in ["/debug/pprof/", "/debug/pprof/heap", "/debug/pprof"] {
        assert_eq!(served.get(path).await.text(), "404 page not found\n", "{path}");
    }
}

#[tokio::test]
async fn a_long_page_is_made_on_a_thread_and_sent_in_pieces() {
    let served = start(Config::new(0));
    let (say, said) = std::sync::mpsc::channel();
    let pieces = |of: usize| (0..of).map(|n| Bytes::from(vec![u8::try_from(n % 10).unwrap() + b'0'; 50_000]));
    *served.agent.table.lock().unwrap() = Some(Box::new(move || {
        // Only when somebody else was answered meanwhile.
        said.recv()?;
        Ok(Box::new(pieces(100)))
    }));
    let other = async {
        let answered = served.get("/nothing").await;
        say.send(()).unwrap();
        answered
    };
    let (long, other) = tokio::join!(served.get("/debug/ndsz"), other);
    assert_eq!(
        (long.status, long.header("content-type"), other.status),
        (200, Some("application/json"), 404)
    );
    assert_eq!(long.body, pieces(100).collect::<Vec<_>>().concat());
    *served.agent.table.lock().unwrap() = Some(Box::new(|| Err("no table".into())));
    assert_eq!(served.get("/debug/ndsz").await.status, 500);
}

#[test]
fn who_is_local() {
    for (addr, local) in [
        ("127.0.0.1:1", true),
        ("127.9.8.7:1", true),
        ("10.0.0.1:1", false),
        ("0.0.0.0:1", false),
        ("[::1]:1", true),
        ("[::2]:1", false),
        ("[::ffff:127.0.0.1]:1", true),
        ("[::ffff:10.0.0.1]:1", false),
        ("[::1%3]:1", false),
        ("[fe80::1%3]:1", false),
    ] {
        assert_eq!(Peer::new(addr.parse().unwrap()).local, local, "{addr}");
    }
}

#[test]
fn others_are_kept_out_before_anything_else_is_looked_at() {
    let refused = control(Peer { local: false }, &Method::GET).unwrap();
    assert_eq!(refused.status(), 403);
    assert_eq!(control(Peer { local: true }, &Method::GET).unwrap().status(), 405);
    assert!(control(Peer { local: true }, &Method::POST).is_none());
}

#[test]
fn an_address_in_the_first_line_names_the_host_before_the_header_does() {
    let host = |target: &str| {
        let request = Request::builder().uri(target).header(header::HOST, "a:1").body(()).unwrap();
        addressed(&request)[header::HOST].to_str().unwrap().to_owned()
    };
    assert_eq!(host("/app-health/a/livez"), "a:1");
    assert_eq!(host("http://b:2/app-health/a/livez"), "b:2");
    assert_eq!(host("http://user@b/app-health/a/livez"), "b");
}
