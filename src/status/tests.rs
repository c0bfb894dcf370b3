//! The server through its socket, with a fake Envoy and a fake agent.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::*;

/// An agent that remembers what it was told.
#[derive(Default)]
pub(super) struct Fake {
    pub(super) quits: AtomicUsize,
    pub(super) drains: AtomicUsize,
    pub(super) terminating: Mutex<Option<String>>,
    pub(super) not_ready: Mutex<Vec<String>>,
    pub(super) degraded: Mutex<Vec<String>>,
    pub(super) table: Mutex<Option<String>>,
    pub(super) gone: std::sync::atomic::AtomicBool,
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

    fn not_ready(&self) -> Vec<String> {
        self.not_ready.lock().unwrap().clone()
    }

    fn degraded(&self) -> Vec<String> {
        self.degraded.lock().unwrap().clone()
    }

    fn name_table(&self) -> Option<Result<String, String>> {
        self.table.lock().unwrap().clone().map(Ok)
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

#[expect(clippy::disallowed_methods, reason = "a test joins or aborts what it starts")]
pub(super) fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task)
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
        let raw = format!("{method} {path} HTTP/1.1\r\nHost: a:{}\r\n{headers}\r\n", self.addr.port());
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

/// A server that gives each path a raw answer and remembers the request heads.
pub(super) struct Web {
    pub(super) addr: SocketAddr,
    pub(super) heads: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Drop for Web {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Web {
    /// `answer` gives the raw bytes for a request head; an empty answer hangs.
    pub(super) async fn start(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (answer, seen) = (Arc::new(answer), heads.clone());
        let task = spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            loop {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let (answer, seen) = (answer.clone(), seen.clone());
                open.spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        match stream.read_u8().await {
                            Ok(byte) => head.push(byte),
                            Err(_) => return,
                        }
                    }
                    let head = String::from_utf8_lossy(&head).into_owned();
                    let out = answer(&head);
                    seen.lock().unwrap().push(head);
                    if out.is_empty() {
                        std::future::pending::<()>().await;
                    }
                    let _ = stream.write_all(&out).await;
                });
            }
        });
        Self { addr, heads, task }
    }

    pub(super) fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

pub(super) fn http(status: u16, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len()).into_bytes()
}

const CONFIGURED: &str = "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n";
const LIVE: &str = "server.state: 0\nlistener_manager.workers_started: 1\n";

pub(super) async fn envoy() -> Web {
    Web::start(|head| http(200, "", if head.contains("cluster_manager") { CONFIGURED } else { LIVE })).await
}

pub(super) fn with_envoy(web: &Web) -> Config {
    let mut config = Config::new(0);
    config.ready.envoy_admin = Some(web.addr);
    config.stats.envoy_port = None;
    config
}

#[tokio::test]
async fn ready_once_envoy_says_so_and_it_is_asked_only_once() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    for _ in 0..3 {
        let got = served.get("/healthz/ready").await;
        assert_eq!((got.status, got.text().as_str(), got.header("vary")), (200, "", Some("Accept-Encoding")));
        assert_eq!(got.header("content-type"), None);
    }
    let heads = web.heads();
    assert_eq!(heads.len(), 2, "{heads:?}");
    assert!(heads[0].starts_with(r"GET /stats?usedonly&filter=^(cluster_manager\.cds|listener_manager\.lds)\.(update_success|update_rejected)$ HTTP/1.1"));
    assert!(heads[1].starts_with(
        r"GET /stats?usedonly&filter=^(server\.state|listener_manager\.workers_started) HTTP/1.1"
    ));
    let scrape = served.get("/stats/prometheus").await.text();
    assert!(scrape.contains("istio_agent_startup_duration_seconds "), "{scrape}");
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    *served.agent.not_ready.lock().unwrap() = vec!["no name table".into(), "no sds".into()];
    let got = served.get("/healthz/ready").await;
    assert_eq!(
        (got.status, got.text().as_str(), got.header("x-not-ready")),
        (503, "", Some("no name table; no sds"))
    );
    assert_eq!(served.get("/healthz/ready?verbose").await.text(), "no name table; no sds\n");
    served.agent.not_ready.lock().unwrap().clear();
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    *served.agent.terminating.lock().unwrap() = Some("received signal: terminated".into());
    let got = served.get("/healthz/ready").await;
    assert_eq!(
        (got.status, got.header("x-not-ready")),
        (503, Some("server is terminated: received signal: terminated"))
    );
}

#[tokio::test]
async fn an_envoy_that_is_gone_must_prove_itself_again() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    served.agent.gone.store(true, Relaxed);
    assert_eq!(served.get("/healthz/ready").await.header("x-not-ready"), Some("Envoy is not running"));
    served.agent.gone.store(false, Relaxed);
    assert_eq!(served.get("/healthz/ready").await.status, 200);
    assert_eq!(web.heads().len(), 4);
}

#[tokio::test]
async fn strict_mode_takes_readiness_away() {
    let web = envoy().await;
    let mut config = with_envoy(&web);
    let loose = start(config.clone());
    config.ready.strict = true;
    let strict = start(config);
    for (served, status) in [(loose, 200), (strict, 503)] {
        *served.agent.degraded.lock().unwrap() = vec!["the identity has expired".into()];
        assert_eq!(served.get("/healthz/ready").await.status, status);
    }
}

#[tokio::test]
async fn quit_answers_before_the_agent_is_told() {
    let served = start(Config::new(0));
    for _ in 0..20 {
        let before = served.agent.quits.load(Relaxed);
        let got = served.ask("POST", "/quitquitquit", "Content-Length: 0\r\n").await;
        assert_eq!((got.status, got.text().as_str()), (200, "OK"));
        // The answer was read to its end, so it was written; the word to the agent follows at once.
        while served.agent.quits.load(Relaxed) == before {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(served.agent.quits.load(Relaxed), 20);
}

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
async fn closing_refuses_new_connections_and_keeps_the_kept() {
    let web = envoy().await;
    let served = start(with_envoy(&web));
    let mut kept = served.connect().await;
    let ask = "GET /healthz/ready HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(exchange(&mut kept, ask, false).await.status, 200);
    served.closing.cancel();
    while TcpStream::connect(served.addr).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(exchange(&mut kept, ask, false).await.status, 200);
    served.stop.cancel();
    assert_eq!(kept.read(&mut [0; 1]).await.unwrap(), 0, "an idle connection ends with the server");
}

#[tokio::test]
async fn a_busy_port_is_named_and_taken_later() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = Config::new(holder.local_addr().unwrap().port());
    config.address = Some(loopback(false));
    let error = bind(&config).unwrap_err();
    assert!(error.to_string().contains(&config.port.to_string()), "{error}");
    let handles = Handles {
        agent: Arc::new(Fake::default()),
        metrics: Metrics::new(),
        crypto: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
        started: tokio::time::Instant::now(),
    };
    drop(holder);
    let (port, stop) = (config.port, Stop::new());
    let task = spawn(Bound::later(&config).serve(handles, Stop::new(), stop.clone()));
    while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.cancel();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn paths_hosts_and_heads() {
    let served = start(Config::new(0));
    for (path, status) in [
        ("/", 404),
        ("/healthz/ready/", 404),
        ("/healthz%2Fready", 404),
        ("/debug", 404),
        ("/debug/", 404),
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
        ("/app-lifecycle", "/app-lifecycle/"),
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
    assert_eq!(raw("GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n").await.status, 400);
    assert_eq!(raw("nonsense\r\n\r\n").await.status, 400);
    let long = format!("X-Long: {}\r\n", "z".repeat(100_000));
    assert_eq!(served.ask("GET", "/x", &long).await.status, 404);
    let many: String = (0..500).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(served.ask("GET", "/x", &many).await.status, 404);
}

#[test]
fn the_family_follows_the_addresses() {
    assert!(!ipv6_mode(false, ""));
    assert!(!ipv6_mode(false, "10.0.0.1"));
    assert!(!ipv6_mode(false, "fe80::1"));
    assert!(!ipv6_mode(false, "nonsense"));
    assert!(ipv6_mode(false, "fd00::2"));
    assert!(ipv6_mode(true, "10.0.0.1"));
    assert_eq!(probe_source(true).to_string(), "::6");
    assert_eq!(probe_source(false).to_string(), "127.0.0.6");
}

#[tokio::test]
async fn pages_for_people() {
    let served = start(Config::new(0));
    let got = served.get("/debug/ndsz").await;
    assert_eq!((got.status, got.text().as_str()), (404, "{}"));
    *served.agent.table.lock().unwrap() = Some(r#"{"table":{}}"#.into());
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
        ("/debug/pprof/profile?seconds=1", "application/octet-stream"),
    ] {
        let got = served.get(path).await;
        assert_eq!(
            (got.status, got.header("content-type"), got.header("x-content-type-options")),
            (200, Some(kind), Some("nosniff")),
            "{path}"
        );
    }
    assert_eq!(served.get("/debug/pprof/trace").await.text(), "Unknown profile\n");
    let mut config = Config::new(0);
    config.profiling = false;
    let served = start(config);
    for path in ["/debug/pprof/", "/debug/pprof/heap", "/debug/pprof"] {
        assert_eq!(served.get(path).await.text(), "404 page not found\n", "{path}");
    }
}
