//! Doubles for the tests of this part: an agent that remembers what it was told, a server under test with a
//! client that shows what came over the wire, and a web server that plays Envoy or an application.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::*;
pub(super) use crate::fetch::fake::{Web, http, spawn};

/// An agent that remembers what it was told.
#[derive(Default)]
pub(super) struct Fake {
    pub(super) quits: AtomicUsize,
    pub(super) drains: AtomicUsize,
    pub(super) terminating: Mutex<Option<String>>,
    pub(super) not_ready: Mutex<Vec<Report>>,
    pub(super) degraded: Mutex<Vec<Report>>,
    pub(super) table: Mutex<Option<Making>>,
    pub(super) gone: std::sync::atomic::AtomicBool,
    pub(super) generation: std::sync::atomic::AtomicU64,
}

impl Agent for Fake {
    fn quit(&self) {
        self.quits.fetch_add(1, Relaxed);
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.drains.fetch_add(1, Relaxed);
        Box::pin(async {})
    }

    fn terminating(&self) -> Option<String> {
        self.terminating.lock().unwrap().clone()
    }

    fn envoy_running(&self) -> bool {
        !self.gone.load(Relaxed)
    }

    fn envoy_generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    fn agentz(&self) -> serde_json::Value {
        serde_json::json!({})
    }

    fn not_ready(&self) -> Vec<Report> {
        self.not_ready.lock().unwrap().clone()
    }

    fn degraded(&self) -> Vec<Report> {
        self.degraded.lock().unwrap().clone()
    }

    fn name_table(&self) -> Option<Making> {
        self.table.lock().unwrap().take()
    }
}

/// A server under test.
pub(super) struct Served {
    pub(super) addr: SocketAddr,
    pub(super) agent: Arc<Fake>,
    pub(super) closing: Stop,
    pub(super) stop: Stop,
    pub(super) task: JoinHandle<TaskResult>,
}

pub(super) fn start(mut config: Config) -> Served {
    config.port = 0;
    config.address = Some(loopback(false));
    let bound = bind(&config).unwrap();
    let addr = bound.addr().unwrap();
    let agent = Arc::new(Fake::default());
    let (closing, stop) = (Stop::new(), Stop::new());
    let handles = Handles {
        agent: agent.clone(),
        metrics: Metrics::new(),
        crypto: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
        started: tokio::time::Instant::now(),
    };
    let task = spawn(bound.serve(handles, closing.clone(), stop.clone()));
    Served { addr, agent, closing, stop, task }
}

/// What came over the wire: head and decoded body.
#[derive(Debug)]
pub(super) struct Got {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: Vec<u8>,
}

impl Got {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let found = self.head.lines().find(|l| l.to_lowercase().starts_with(&format!("{name}:")));
        found.and_then(|l| l.split_once(':')).map(|(_, v)| v.trim())
    }
}

/// Sends raw bytes and reads one answer.
pub(super) async fn exchange(stream: &mut TcpStream, raw: &str, head_only: bool) -> Got {
    stream.write_all(raw.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        let n = stream.read_buf(&mut bytes_limited(&mut bytes)).await.unwrap();
        assert!(n > 0, "closed after {:?}", String::from_utf8_lossy(&bytes));
    }
    let head = String::from_utf8(bytes).unwrap();
    let mut got = Got { status: head[9..12].parse().unwrap(), head, body: Vec::new() };
    if head_only {
        return got;
    }
    if got.header("transfer-encoding") == Some("chunked") {
        loop {
            let size = usize::from_str_radix(line(stream).await.trim(), 16).unwrap();
            let mut piece = vec![0; size + 2];
            stream.read_exact(&mut piece).await.unwrap();
            if size == 0 {
                break;
            }
            got.body.extend_from_slice(&piece[..size]);
        }
    } else if let Some(length) = got.header("content-length") {
        got.body = vec![0; length.parse().unwrap()];
        stream.read_exact(&mut got.body).await.unwrap();
    }
    got
}

// One byte at a time, so that nothing of the body is taken with the head.
fn bytes_limited(bytes: &mut Vec<u8>) -> bytes::buf::Limit<&mut Vec<u8>> {
    use bytes::BufMut;
    bytes.limit(1)
}

async fn line(stream: &mut TcpStream) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        line.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(line).unwrap()
}

impl Served {
    pub(super) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    pub(super) async fn ask(&self, method: &str, path: &str, headers: &str) -> Got {
        let raw =
            format!("{method} {path} HTTP/1.1\r\nHost: localhost:{}\r\n{headers}\r\n", self.addr.port());
        exchange(&mut self.connect().await, &raw, method == "HEAD").await
    }

    pub(super) async fn get(&self, path: &str) -> Got {
        self.ask("GET", path, "").await
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
        self.task.abort();
    }
}

pub(super) const CONFIGURED: &str =
    "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n";
pub(super) const LIVE: &str = "server.state: 0\nlistener_manager.workers_started: 1\n";

pub(super) async fn envoy() -> Web {
    Web::start(|head| http(200, "", if head.contains("cluster_manager") { CONFIGURED } else { LIVE })).await
}

pub(super) fn with_envoy(web: &Web) -> Config {
    let mut config = Config::new(0);
    config.ready.envoy_admin = Some(web.addr);
    config.stats.envoy_port = None;
    config
}
