//! Probes of the application on the kubelet's behalf.

use std::io::ErrorKind;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{App, ok, serving};
use crate::support::agent::Builder;
use crate::support::{MockIstiod, TestAgent, free_port, http};

fn probing(port: u16, action: &str) -> Builder {
    let probe = match action {
        "http" => json!({"httpGet": {"path": "/hello?x", "port": port}, "timeoutSeconds": 5}),
        "https" => json!({"httpGet": {"port": port, "scheme": "HTTPS"}, "timeoutSeconds": 20}),
        "grpc" => json!({"grpc": {"port": port}, "timeoutSeconds": 20}),
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

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, stream][..], payload].concat()
}

/// A field of a header block, as it stands.
fn field(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()][..], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// What a health service that is well says, with one more field in its head and in its end.
fn serving_with(name: &str, value: &str) -> Vec<u8> {
    let more = field(name, value);
    let head = [vec![0x88], field("content-type", "application/grpc"), more.clone()].concat();
    let end = [field("grpc-status", "0"), more].concat();
    [frame(1, 4, 1, &head), frame(0, 0, 1, b"\0\0\0\0\x02\x08\x01"), frame(1, 5, 1, &end)].concat()
}

/// Answers the calls of a health service that come next, each on a connection of its own, with these frames.
async fn answers(listener: &TcpListener, with: &[Vec<u8>]) {
    for frames in with {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&frame(4, 0, 0, &[])).await.unwrap();
        let mut read = Vec::new();
        // The end of the stream: of the frame of data that holds an empty request.
        while !read.windows(9).any(|head| head == [0, 0, 5, 0, 1, 0, 0, 0, 1]) {
            assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0, "it has left");
        }
        stream.write_all(frames).await.unwrap();
        // Until it leaves.
        while stream.read_buf(&mut read).await.is_ok_and(|n| n > 0) {}
    }
}

async fn asked(agent: &TestAgent, listener: &TcpListener, with: &[Vec<u8>]) -> u16 {
    let answering = async {
        answers(listener, with).await;
        std::future::pending().await
    };
    let reply = tokio::select! {
        reply = agent.get("/app-health/app/livez") => reply,
        () = answering => unreachable!(),
    };
    reply.unwrap().status.as_u16()
}

#[tokio::test]
async fn an_application_that_sends_fields_of_a_connection_over_http2_is_well() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, probing(listener.local_addr().unwrap().port(), "grpc")).await;
    for (name, value) in [
        ("x-connection", "close"),
        ("connection", "close"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
        ("transfer-encoding", "chunked"),
        // Of a web server behind another one.
        ("upgrade", "h2,h2c"),
    ] {
        assert_eq!(asked(&agent, &listener, &[serving_with(name, value)]).await, 200, "{name}");
    }
    agent.stop().await;
}

#[tokio::test]
async fn a_probe_that_a_server_did_not_take_is_made_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, probing(listener.local_addr().unwrap().port(), "grpc")).await;
    let (refused, ended) = (frame(3, 0, 1, &[0, 0, 0, 7]), frame(3, 0, 1, &[0, 0, 0, 2]));
    let well = serving_with("x", "y");
    assert_eq!(asked(&agent, &listener, &[refused, well]).await, 200);
    assert_eq!(asked(&agent, &listener, &[ended]).await, 500, "one that it took and gave up is not");
    agent.stop().await;
}

#[tokio::test]
async fn an_application_that_has_only_suites_of_cbc_is_not_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, probing(listener.local_addr().unwrap().port(), "https")).await;
    let offered = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut record = [0; 5];
        stream.read_exact(&mut record).await.unwrap();
        let mut hello = vec![0; usize::from(u16::from_be_bytes([record[3], record[4]]))];
        stream.read_exact(&mut hello).await.unwrap();
        // Nothing in common: the alert handshake_failure.
        stream.write_all(&[21, 3, 3, 0, 2, 2, 40]).await.unwrap();
        // Behind the message's head, version and random: the session, then the suites.
        let session = &hello[4 + 2 + 32..];
        let suites = &session[1 + usize::from(session[0])..];
        let length = usize::from(u16::from_be_bytes([suites[0], suites[1]]));
        suites[2..2 + length].chunks(2).map(|s| u16::from_be_bytes([s[0], s[1]])).collect::<Vec<_>>()
    };
    let (reply, offered) = tokio::join!(agent.get("/app-health/app/livez"), offered);
    assert_eq!(reply.unwrap().status, 500);
    // ECDHE with AES-GCM is there, with AES-CBC and SHA-1 it is not.
    assert!(offered.contains(&0xc02f), "{offered:x?}");
    assert!([0xc009, 0xc00a, 0xc013, 0xc014].iter().all(|cbc| !offered.contains(cbc)), "{offered:x?}");
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

/// An application that answers nobody by itself: each connection with the head that came.
async fn holding() -> (u16, mpsc::UnboundedReceiver<(TcpStream, String)>, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (asked, seen) = mpsc::unbounded_channel();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            if let Some(head) = http::head(&mut stream).await {
                let _ = asked.send((stream, head));
            }
        }
    });
    (port, seen, serving)
}

async fn from(source: [u8; 4], port: u16, more: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((source, 0).into()).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
    let ask = format!("GET /app-health/app/livez HTTP/1.1\r\nHost: a\r\n{more}\r\n");
    stream.write_all(ask.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn one_address_does_not_have_all_probes_of_a_path() {
    let (port, mut seen, _serving) = holding().await;
    let probe = json!({"httpGet": {"path": "/", "port": port}, "timeoutSeconds": 20});
    let probers = json!({"/app-health/app/livez": probe}).to_string();
    let mock = MockIstiod::start().await;
    // 32 of a path at a time.
    let words: Vec<String> = ["prlimit", "--nofile=1024"].map(str::to_owned).into();
    let builder = TestAgent::with().before(&words).env("ISTIO_KUBE_APP_PROBERS", probers);
    let agent = serving(&mock, builder).await;
    let status = agent.ports().status;
    let (mut flood, mut held) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        flood.push(from([127, 0, 0, 2], status, "X-Flood: 1\r\n").await);
    }
    for _ in 0..16 {
        held.push(seen.recv().await.expect("the flood's are made"));
    }
    // None of these is answered before the kubelet's.
    let mut kubelet = from([127, 0, 0, 3], status, "X-Kubelet: 1\r\nConnection: close\r\n").await;
    let answering = async {
        while let Some((mut stream, head)) = seen.recv().await {
            if head.to_lowercase().contains("x-kubelet") {
                stream.write_all(ok("fine").as_bytes()).await.unwrap();
                return;
            }
            held.push((stream, head));
        }
    };
    let mut said = String::new();
    let (answer, ()) = tokio::join!(kubelet.read_to_string(&mut said), answering);
    assert!(answer.is_ok() && said.starts_with("HTTP/1.1 200 "), "{answer:?} {said}");
    let waits = |one: &TcpStream| one.try_read(&mut [0]).is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
    assert!(flood.iter().all(waits), "the flood's were answered first");
    drop((flood, held));
    agent.stop().await;
}
