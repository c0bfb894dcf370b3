use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::base::clock::System;
use crate::fetch::fake::{Web, grpc_app, http, spawn};

const LOCAL: &str = "127.0.0.1";

fn config(method: Method) -> Config {
    Config {
        initial_delay: Duration::ZERO,
        timeout: Duration::from_secs(20),
        period: Duration::from_millis(10),
        success_threshold: 1,
        failure_threshold: 1,
        method,
        source: [127, 0, 0, 6].into(),
    }
}

fn get(port: u16, path: &str) -> Method {
    let headers = vec![("X-One".to_owned(), "1".to_owned()), ("Host".to_owned(), "app.example".to_owned())];
    Method::Http {
        scheme: "http".to_owned(),
        host: LOCAL.to_owned(),
        port: port.into(),
        path: path.to_owned(),
        headers,
    }
}

fn crypto() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

struct Running {
    changes: mpsc::UnboundedReceiver<Option<String>>,
    handle: Handle,
    metrics: Metrics,
    stop: Stop,
    task: tokio::task::JoinHandle<()>,
}

fn start(config: Config, envoy: Option<EnvoyReady>) -> Running {
    let (sender, changes) = mpsc::unbounded_channel();
    let metrics = Metrics::new();
    let parts = Parts {
        envoy,
        report: Box::new(move |change| drop(sender.send(change))),
        trouble: Reporter::default(),
        crypto: crypto(),
        metrics: metrics.clone(),
        clock: Arc::new(System),
    };
    let (checker, handle) = Checker::new(config, parts);
    let stop = Stop::new();
    let task = spawn(checker.run(stop.clone()));
    Running { changes, handle, metrics, stop, task }
}

impl Running {
    async fn next(&mut self) -> Option<String> {
        self.changes.recv().await.expect("the checks run")
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

async fn once(method: Method, limit: Duration) -> Outcome {
    Prober::new(&config(method), crypto()).probe(limit).await
}

fn port_of(listener: &TcpListener) -> u32 {
    listener.local_addr().unwrap().port().into()
}

async fn closed_port() -> u32 {
    port_of(&TcpListener::bind("127.0.0.1:0").await.unwrap())
}

#[tokio::test]
async fn only_changes_are_told_with_the_reason() {
    let code = Arc::new(AtomicU16::new(200));
    let shown = code.clone();
    let web = Web::start(move |_| http(shown.load(Relaxed), "", "")).await;
    let mut running = start(config(get(web.addr.port(), "/h?a=b")), None);
    assert_eq!(running.next().await, None);
    assert_eq!(running.handle.status().state, AppHealth::Healthy);
    code.store(503, Relaxed);
    let why = running.next().await.unwrap();
    assert_eq!(why, "status code was not from [200,400), bad code 503");
    let status = running.handle.status();
    assert_eq!((status.state, status.last_error), (AppHealth::Unhealthy, Some(why)));
    let asked = web.heads().len();
    while web.heads().len() < asked + 5 {
        tokio::task::yield_now().await;
    }
    assert!(running.changes.try_recv().is_err(), "five more failures are no news");
    code.store(399, Relaxed);
    assert_eq!(running.next().await, None);
    let text = prometheus::TextEncoder::new().encode_to_string(&running.metrics.registry().gather()).unwrap();
    assert!(text.contains("app_health_probes_total{result=\"unhealthy\"}"), "{text}");
    assert!(text.contains("app_healthy 1"), "{text}");
    let head = web.heads()[0].to_lowercase();
    for part in [
        "get /h?a=b http/1.1\r\n",
        "host: app.example\r\n",
        "x-one: 1\r\n",
        "user-agent: istio-probe/1.0\r\n",
        "connection: close\r\n",
    ] {
        assert!(head.contains(part), "{part} in {head}");
    }
    running.end().await;
}

#[tokio::test]
async fn without_a_ready_envoy_the_application_is_not_asked() {
    let web = Web::start(|_| http(200, "", "")).await;
    let ready = Arc::new(AtomicBool::new(false));
    let shown = ready.clone();
    let envoy: EnvoyReady = Box::new(move || {
        let word = if shown.load(Relaxed) { Ok(()) } else { Err("config not received".into()) };
        Box::pin(std::future::ready(word))
    });
    let mut running = start(config(get(web.addr.port(), "/")), Some(envoy));
    assert_eq!(running.next().await.as_deref(), Some("config not received"));
    assert!(web.heads().is_empty());
    ready.store(true, Relaxed);
    assert_eq!(running.next().await, None);
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn ticks_missed_by_a_slow_probe_are_dropped() {
    let begun = Arc::new(AtomicUsize::new(0));
    let count = begun.clone();
    let envoy: EnvoyReady = Box::new(move || {
        count.fetch_add(1, Relaxed);
        Box::pin(async {
            tokio::time::sleep(Duration::from_secs(25)).await;
            Err("slow".into())
        })
    });
    let method = Method::Exec { command: vec!["true".to_owned()] };
    let config = Config { period: Duration::from_secs(10), ..config(method) };
    let running = start(config, Some(envoy));
    tokio::time::sleep(Duration::from_secs(99)).await;
    assert_eq!(begun.load(Relaxed), 4, "at 0, 25, 50 and 75 s");
    running.end().await;
}

#[tokio::test]
async fn the_initial_delay_can_be_cancelled() {
    let method = Method::Exec { command: vec!["true".to_owned()] };
    let running = start(Config { initial_delay: Duration::from_secs(3600), ..config(method) }, None);
    assert_eq!(running.handle.status().probes, 0);
    running.end().await;
}

#[tokio::test]
async fn http_says_why() {
    let limit = Duration::from_secs(20);
    let hung = Web::start(|_| Vec::new()).await;
    let out = once(get(hung.addr.port(), "/"), Duration::from_millis(50)).await;
    assert!(matches!(&out, Outcome::Unhealthy(why) if why.contains("no answer within 50ms")), "{out:?}");
    let out = once(get(1, "/%zz"), limit).await;
    assert!(matches!(&out, Outcome::Unknown(why) if why.contains("escape")), "{out:?}");
    let Method::Http { host, path, headers, .. } = get(1, "/") else { unreachable!() };
    for (scheme, port) in [("ftp", 80), ("http", 70_000)] {
        let method = Method::Http {
            scheme: scheme.to_owned(),
            host: host.clone(),
            port,
            path: path.clone(),
            headers: headers.clone(),
        };
        assert!(matches!(once(method, limit).await, Outcome::Unhealthy(_)));
    }
    let there = Web::start(|_| http(204, "", "")).await;
    let to = format!("Location: http://127.0.0.1:{}/\r\n", there.addr.port());
    let moved = Web::start(move |_| http(302, &to, "")).await;
    assert_eq!(once(get(moved.addr.port(), "/"), limit).await, Outcome::Healthy);
    assert_eq!(there.heads().len(), 1);
}

#[tokio::test]
async fn tcp_and_its_ports() {
    let limit = Duration::from_secs(20);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tcp = |port| Method::Tcp { host: LOCAL.to_owned(), port };
    assert_eq!(once(tcp(port_of(&listener)), limit).await, Outcome::Healthy);
    let port = closed_port().await;
    let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
    assert_eq!(once(tcp(port), limit).await, Outcome::Unhealthy(refused));
    assert!(matches!(once(tcp(65_536), limit).await, Outcome::Unhealthy(_)));
}

#[tokio::test]
async fn commands_are_judged_by_their_status() {
    let exec = |words: &[&str]| Method::Exec { command: words.iter().map(|w| (*w).to_owned()).collect() };
    let limit = Duration::from_secs(20);
    let unhealthy = |why: &str| Outcome::Unhealthy(why.to_owned());
    assert_eq!(once(exec(&["true"]), limit).await, Outcome::Healthy);
    assert_eq!(once(exec(&["sh", "-c", "exit 3"]), limit).await, unhealthy("exit status 3"));
    assert_eq!(once(exec(&["sh", "-c", "kill -9 $$"]), limit).await, unhealthy("signal: killed"));
    assert_eq!(
        once(exec(&["sleep", "60"]), Duration::from_secs(2)).await,
        unhealthy("command timeout exceeded: signal: killed")
    );
    let missing = "exec: \"/no/such/program\": no such file or directory";
    assert_eq!(once(exec(&["/no/such/program"]), limit).await, unhealthy(missing));
}

#[tokio::test]
async fn grpc_states_and_codes_have_texts() {
    let limit = Duration::from_secs(20);
    let grpc = |port| Method::Grpc { host: LOCAL.to_owned(), port, service: "shop".to_owned() };
    for (state, code, said) in [
        (&b"\0\0\0\0\x02\x08\x01"[..], "0", None),
        (b"\0\0\0\0\x02\x08\x02", "0", Some("health rpc status NOT_SERVING")),
        (b"", "12", Some("doesn't implement the grpc health protocol grpc.health.v1.Health")),
        (b"", "5", Some("health rpc probe failed with status NotFound: rpc error: code = NotFound desc =")),
        (b"", "4", Some("health rpc probe timed out after 20s")),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = port_of(&listener);
        let app = grpc_app(listener, state.to_vec(), code).await;
        match (once(grpc(port), limit).await, said) {
            (Outcome::Healthy, None) => {}
            (Outcome::Unhealthy(why), Some(said)) => assert!(why.contains(said), "{why}"),
            other => panic!("{other:?}"),
        }
        let seen = app.await.unwrap();
        assert!(seen[0].1.starts_with("istio-probe/1.0 "), "{}", seen[0].1);
    }
    let port = closed_port().await;
    let out = once(grpc(port), Duration::from_millis(50)).await;
    let said =
        format!("failed to connect health check grpc service on port {port}: context deadline exceeded");
    assert!(matches!(&out, Outcome::Unhealthy(why) if why.starts_with(&said)), "{out:?}");
}
