//! Floods of the status port: whatever they are made of, who asks and takes the answer is answered, and the agent's
//! memory is bounded. The attackers come back as soon as they are thrown out.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::{App, ok, serving};
use crate::support::{MockIstiod, TestAgent, eventually, http};

/// More than there are places, four times over.
const HOSTILE: usize = 2000;
const PROBES: usize = 100;
/// What the agent may grow by.
const GROWTH: usize = 32 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Silent,
    OneByte,
    Trickle,
    LargeHead,
    WholeHead,
    SlowBody,
    SlowReader,
}

/// One hostile client; it ends when it is thrown out.
async fn attack(kind: Kind, port: u16, from: [u8; 4]) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    if kind == Kind::SlowReader {
        socket.set_recv_buffer_size(4096)?;
    }
    socket.bind((from, 0).into())?;
    let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await?;
    match kind {
        Kind::Silent => {}
        Kind::OneByte => stream.write_all(b"G").await?,
        Kind::Trickle => {
            stream.write_all(b"GET /healthz/ready HTTP/1.1\r\nX-Slow: ").await?;
            loop {
                stream.write_all(b"a").await?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        Kind::LargeHead => {
            stream.write_all(b"GET / HTTP/1.1\r\nX-Large: ").await?;
            for _ in 0..15 {
                stream.write_all(&[b'a'; 64 * 1024]).await?;
            }
        }
        Kind::WholeHead => {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nX-Large: ").await?;
            for _ in 0..15 {
                stream.write_all(&[b'a'; 64 * 1024]).await?;
            }
            stream.write_all(b"\r\n\r\n").await?;
        }
        Kind::SlowBody => {
            stream.write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nx").await?;
        }
        Kind::SlowReader => stream.write_all(b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n").await?,
    }
    if kind == Kind::SlowReader {
        return std::future::pending().await;
    }
    while stream.read(&mut [0; 64]).await? > 0 {}
    Ok(())
}

async fn withstands(kind: Kind, many_addresses: bool) {
    let app =
        App::start("127.0.0.1", ok(&"a_metric_of_the_application{with=\"labels\"} 1\n".repeat(80_000))).await;
    let scraped = format!(r#"{{"scrape":"true","path":"/metrics","port":"{}"}}"#, app.port);
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().env("ISTIO_PROMETHEUS_ANNOTATIONS", scraped);
    let mut agent = serving(&mock, builder).await;
    agent.wait_ready().await;
    agent.get("/stats/prometheus").await.unwrap();
    let before = agent.memory("VmRSS");
    let port = agent.ports().status;
    let mut hostile = JoinSet::new();
    // These need the network's whole width for each.
    let hostile_clients =
        if matches!(kind, Kind::LargeHead | Kind::WholeHead) { HOSTILE / 10 } else { HOSTILE };
    for n in 0..hostile_clients {
        let from = [127, 0, u8::try_from(n / 250).unwrap(), u8::try_from(n % 250 + 1).unwrap()];
        let from = if many_addresses { from } else { [127, 0, 0, 1] };
        hostile.spawn(async move {
            loop {
                let _ = attack(kind, port, from).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }
    let mut answered = 0;
    let mut most = before;
    for n in 0..PROBES {
        let path = if n % 2 == 0 { "/healthz/ready" } else { "/nothing" };
        match http::get(port, path).await {
            Ok(_) => answered += 1,
            Err(error) => println!("{kind:?}: probe {n}: {error}"),
        }
        most = most.max(agent.memory("VmRSS"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    hostile.shutdown().await;
    println!(
        "{kind:?} from many addresses {many_addresses}: {answered} of {PROBES}, {before} kB, then {most} kB"
    );
    assert!(answered * 100 >= PROBES * 99, "{kind:?}: {answered} of {PROBES} probes were answered");
    assert!(most < before + GROWTH, "{kind:?}: grew from {before} kB to {most} kB");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_heads() {
    withstands(Kind::OneByte, false).await;
    withstands(Kind::Trickle, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_and_large_heads() {
    withstands(Kind::Silent, false).await;
    withstands(Kind::LargeHead, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_heads_that_were_answered() {
    withstands(Kind::WholeHead, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_bodies() {
    withstands(Kind::SlowBody, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_readers_of_scrapes() {
    withstands(Kind::SlowReader, false).await;
}

#[tokio::test]
async fn without_descriptors_clients_are_refused_and_the_log_stays_short() {
    let mock = MockIstiod::start().await;
    let words: Vec<String> = ["prlimit", "--nofile=64"].map(str::to_owned).into();
    let agent = serving(&mock, TestAgent::with().before(&words).env("DISABLE_ENVOY", "true")).await;
    let port = agent.ports().status;
    let mut open = Vec::new();
    // Of both sockets and the port: more than there are descriptors.
    for _ in 0..100 {
        for socket in ["var/run/secrets/workload-spiffe-uds/socket", "etc/istio/proxy/XDS"] {
            open.extend(std::os::unix::net::UnixStream::connect(agent.path(socket)).ok());
        }
    }
    let silent: Vec<_> =
        futures_util::future::join_all((0..100).map(|_| TcpStream::connect(("127.0.0.1", port)))).await;
    for _ in 0..20 {
        eventually("an answer", async || agent.get("/nothing").await.ok()).await;
    }
    drop((open, silent));
    let lines = agent.log().text().lines().filter(|l| l.contains("accept")).count();
    assert!(lines < 20, "{lines} lines about accepting");
    agent.stop().await;
}

#[tokio::test]
async fn bodies_are_read_off_so_that_the_connection_can_be_used_again() {
    let mock = MockIstiod::start().await;
    let agent = serving(&mock, TestAgent::with()).await;
    let mut stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
    let head = "POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n";
    for round in 0..4 {
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&[b'x'; 60_000]).await.unwrap();
        let answer = answer(&mut stream).await;
        assert!(
            answer.starts_with("HTTP/1.1 404 ") && !answer.contains("onnection: close"),
            "{round}: {answer}"
        );
    }
    // What is too long for that is answered, and the connection ends in order.
    for length in [300_000, 5_000_000] {
        let mut stream = TcpStream::connect(("127.0.0.1", agent.ports().status)).await.unwrap();
        let head = format!("POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let _ = stream.write_all(&vec![b'x'; 300_000]).await;
        let answer = answer(&mut stream).await.to_lowercase();
        assert!(answer.starts_with("http/1.1 404 ") && answer.contains("connection: close"), "{answer}");
    }
    agent.stop().await;
}

async fn answer(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"404 page not found\n") {
        let n = stream.read_buf(&mut bytes).await.unwrap();
        assert!(n > 0, "closed after {:?}", String::from_utf8_lossy(&bytes));
    }
    String::from_utf8(bytes).unwrap()
}
