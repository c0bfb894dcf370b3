//! Pages, readiness, quit, and what floods and oddities do.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::serving;
use crate::support::{MockIstiod, TestAgent, eventually, free_port, http};

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
async fn a_body_whose_coding_nobody_undoes_is_refused() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, TestAgent::with()).await;
    let body = "3\r\nabc\r\n0\r\n\r\n";
    for (fields, status) in [
        ("Transfer-Encoding: chunked", "404 Not Found"),
        ("Transfer-Encoding: gzip, chunked", "501 Not Implemented"),
        ("Transfer-Encoding: chunked, chunked", "501 Not Implemented"),
        ("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", "501 Not Implemented"),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "501 Not Implemented"),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
        let follows = "GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let ask = format!("POST /x HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n{body}{follows}");
        stream.write_all(ask.as_bytes()).await.unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        assert!(said.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{fields}: {said}");
        let refused = status.starts_with("501");
        assert_eq!(said.matches("HTTP/1.1 ").count(), if refused { 1 } else { 2 }, "{fields}: {said}");
        assert_eq!(said.ends_with("\r\n\r\nUnsupported transfer encoding"), refused, "{fields}: {said}");
    }
    agent.stop().await;
}

#[tokio::test]
async fn quit_gives_its_answer_and_then_ends() {
    let mock = MockIstiod::start().await;
    // Several, for the end of the process races with the answer on its way.
    for _ in 0..8 {
        let mut agent = serving(&mock, TestAgent::with()).await;
        let reply = agent.post("/quitquitquit").await.unwrap();
        assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
        assert!(agent.wait_exit().await.success());
        agent.assert_clean().await;
    }
}

#[tokio::test]
async fn quit_works_without_envoy_too() {
    let mock = MockIstiod::start().await;
    let mut agent = serving(&mock, TestAgent::with().env("DISABLE_ENVOY", "true")).await;
    let reply = agent.post("/drain").await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
    let reply = agent.post("/quitquitquit").await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "OK"));
    assert!(agent.wait_exit().await.success());
    agent.assert_clean().await;
}

#[tokio::test]
async fn without_envoy_the_first_answer_says_ready() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().env("DISABLE_ENVOY", "true").istiod(&mock).start();
    let first = eventually("an answer", async || agent.get("/healthz/ready").await.ok()).await;
    assert_eq!(first.status, 200);
    agent.assert_running();
    agent.stop().await;
}

#[tokio::test]
async fn readiness_follows_envoys_own_word() {
    let mock = MockIstiod::start().await;
    let mut agent = serving(&mock, TestAgent::with()).await;
    agent.wait_ready().await;
    agent.stop().await;
}

#[tokio::test]
async fn what_is_missing_is_told_to_those_who_ask() {
    let mock = MockIstiod::start().await;
    let agent = serving(
        &mock,
        TestAgent::with()
            .env("ISTIO_META_DNS_CAPTURE", "true")
            .env("DNS_PROXY_ADDR", format!("127.0.0.1:{}", free_port()))
            .env("DISABLE_ENVOY", "true"),
    )
    .await;
    let reply = agent.get("/healthz/ready").await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (503, ""));
    let missing = "istio DNS capture is turned ON and DNS lookup table is not ready yet";
    let why = reply.headers["x-not-ready"].to_str().unwrap();
    assert!(why.starts_with(&format!("NameTableMissing: {missing}; ")), "{why}");
    let reply = agent.get("/healthz/ready?verbose").await.unwrap();
    let wanted = format!("not ready\nverdict: NameTableMissing: {missing}\nwhat to do: ");
    assert_eq!(reply.status.as_u16(), 503);
    assert!(reply.text().starts_with(&wanted), "{}", reply.text());
    agent.stop().await;
}

#[tokio::test]
async fn profiles_name_the_tasks_that_run() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, TestAgent::with()).await;
    let text = agent.get("/debug/pprof/goroutine?debug=1").await.unwrap().text();
    for task in ["secrets", "sds", "status", "xds"] {
        assert!(text.lines().any(|l| l.split_whitespace().last() == Some(task)), "{task}: {text}");
    }
    agent.stop().await;
}

#[tokio::test]
async fn silent_connections_and_endless_heads_do_not_lock_the_kubelet_out() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, TestAgent::with()).await;
    let mut open = Vec::new();
    for n in 0..700 {
        let mut stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
        if n % 2 == 0 {
            // May meet a connection that had to make room already.
            let _ = stream.write_all(b"GET /healthz/ready HTTP/1.1\r\nX-Slow: ").await;
        }
        open.push(stream);
    }
    assert_eq!(agent.get("/nothing").await.unwrap().status, 404);
    agent.stop().await;
}

#[tokio::test]
async fn a_head_without_end_is_refused_and_nobody_else_is_harmed() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, TestAgent::with()).await;
    let stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    // It may be refused, and the connection closed, before all of it is sent.
    let sending = async {
        let _ = write.write_all(b"GET /nothing HTTP/1.1\r\nHost: a\r\nX-Long: ").await;
        for _ in 0..40 {
            let _ = write.write_all(&[b'z'; 64 * 1024]).await;
        }
    };
    let mut answer = Vec::new();
    let reading =
        async { while !answer.contains(&b'\n') && read.read_buf(&mut answer).await.unwrap_or(0) > 0 {} };
    tokio::join!(sending, reading);
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert_eq!(agent.get("/nothing").await.unwrap().status, 404);
    agent.stop().await;
}

#[tokio::test]
async fn a_log_that_nobody_reads_holds_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with()
        .arg(format!("--log_target={}", path.display()))
        .env("ISTIO_META_DNS_CAPTURE", "true")
        .env("DNS_PROXY_ADDR", format!("127.0.0.1:{}", free_port()))
        .env("DISABLE_ENVOY", "true");
    let agent = serving(&mock, builder).await;
    // Each answer is a line of about 130 bytes; a pipe holds 64 kB.
    for _ in 0..1000 {
        assert_eq!(agent.get("/healthz/ready").await.unwrap().status, 503);
    }
    // Whoever comes late finds what there was room for, from the start on.
    let reader = tokio::net::unix::pipe::OpenOptions::new().open_receiver(&path).unwrap();
    reader.readable().await.unwrap();
    let mut first = [0; 4096];
    let length = reader.try_read(&mut first).unwrap();
    let first = String::from_utf8_lossy(&first[..length]);
    assert!(first.contains("FLAG: --concurrency"), "{first}");
    agent.stop().await;
}
