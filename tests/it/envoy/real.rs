//! A real Envoy under load: requests in flight at the stop, hot restarts under traffic, a stale one.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pilot_agent::testing::base::tasks::{Group, Stop};
use pilot_agent::testing::envoy::{ConfigFile, Reason, RunState, admin};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{envoy_bin, eventually_within};

use super::fake::{LONG, Scene, eventually};

async fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

/// An HTTP server that answers after `delay`.
async fn app(group: &Group, delay: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let connections = group.clone();
    group.run("app", async move {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            connections.run("app connection", async move {
                let mut request = vec![0; 8192];
                while let Ok(n) = stream.read(&mut request).await
                    && n > 0
                {
                    tokio::time::sleep(delay).await;
                    if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

fn bootstrap(admin: u16, listener: u16, app: u16, version: u32) -> Vec<u8> {
    let address =
        |port: u16| serde_json::json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
    let manager = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let endpoints = serde_json::json!([{"lb_endpoints": [{"endpoint": {"address": address(app)}}]}]);
    serde_json::json!({
        "node": {"id": format!("test-{version}"), "cluster": "test"},
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [{
                "name": "inbound", "traffic_direction": "INBOUND", "address": address(listener),
                "filter_chains": [{"filters": [{
                    "name": "http",
                    "typed_config": {
                        "@type": manager, "stat_prefix": "in",
                        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"],
                            "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "app"}}]}]},
                        "http_filters": [{"name": "router", "typed_config": {"@type": router}}]
                    }
                }]}]
            }],
            "clusters": [{
                "name": "app", "connect_timeout": "5s",
                "load_assignment": {"cluster_name": "app", "endpoints": endpoints}
            }]
        }
    })
    .to_string()
    .into_bytes()
}

/// One request on a connection; whether it may be used again.
async fn request(stream: &mut TcpStream) -> std::io::Result<bool> {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n").await?;
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    while !answer.ends_with(b"ok") {
        let n = stream.read(&mut part).await?;
        if n == 0 {
            return Err(std::io::Error::other(format!("cut: {}", String::from_utf8_lossy(&answer))));
        }
        answer.extend_from_slice(&part[..n]);
    }
    let head = String::from_utf8_lossy(&answer).to_lowercase();
    if !head.starts_with("http/1.1 200") {
        return Err(std::io::Error::other(head));
    }
    Ok(!head.contains("connection: close"))
}

#[derive(Default)]
struct Counts {
    good: AtomicU64,
    failed: AtomicU64,
    began: AtomicU64,
}

/// `clients` that ask again and again over connections kept as long as Envoy keeps them.
fn load(group: &Group, port: u16, clients: usize, halt: &Stop) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    for _ in 0..clients {
        let (counts, halt) = (counts.clone(), halt.clone());
        group.run("client", async move {
            let mut kept: Option<TcpStream> = None;
            while !halt.is_cancelled() {
                let connected = match kept.take() {
                    Some(stream) => Ok(stream),
                    None => TcpStream::connect(("127.0.0.1", port)).await,
                };
                counts.began.fetch_add(1, Ordering::SeqCst);
                let done = match connected {
                    Ok(mut stream) => request(&mut stream).await.map(|again| again.then_some(stream)),
                    Err(error) => Err(error),
                };
                match done {
                    Ok(stream) => {
                        kept = stream;
                        counts.good.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) => {
                        eprintln!("a request failed: {error}");
                        counts.failed.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        });
    }
    counts
}

async fn live(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)).await else { return false };
    request(&mut stream).await.is_ok()
}

async fn until_live(port: u16) {
    eventually_within(LONG, "Envoy serves", async || live(port).await.then_some(())).await;
}

async fn until_epoch(client: &admin::Client, wanted: u64) {
    eventually_within(LONG, &format!("epoch {wanted} is live"), async || {
        (client.live().await.ok() == Some((true, wanted))).then_some(())
    })
    .await;
}

struct Real {
    scene: Scene,
    group: Group,
    admin: u16,
    listener: u16,
    app: u16,
}

async fn real(delay: Duration) -> Real {
    let mut scene = Scene::new("");
    scene.config.binary = envoy_bin().to_str().unwrap().to_owned();
    scene.config.arguments.concurrency = 1;
    let group = Group::new();
    let app = app(&group, delay).await;
    let (admin, listener) = (free_port().await, free_port().await);
    scene.config.admin.port = admin;
    Real { scene, group, admin, listener, app }
}

#[tokio::test]
async fn requests_in_flight_at_the_stop_are_answered() {
    let mut real = real(Duration::from_millis(200)).await;
    real.scene.config.drain.termination_drain = Duration::from_secs(3);
    let (admin, listener, app) = (real.admin, real.listener, real.app);
    let (supervisor, handle) = real.scene.with_text(move || bootstrap(admin, listener, app, 0));
    let halt = Stop::new();
    let group = real.group.clone();
    let act = async {
        until_live(listener).await;
        let counts = load(&group, listener, 20, &halt);
        eventually("traffic", || (counts.good.load(Ordering::SeqCst) > 100).then_some(())).await;
        handle.stop(Reason::Signal("terminated"));
        // New requests go on until Envoy has been asked to drain; those under way then are what counts.
        halt.cancel();
        counts
    };
    let both = async { tokio::join!(supervisor.run(), act) };
    let (outcome, counts) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
    let (began, good) = (counts.began.load(Ordering::SeqCst), counts.good.load(Ordering::SeqCst));
    assert_eq!(counts.failed.load(Ordering::SeqCst), 0);
    assert_eq!(began, good, "every request that began was answered before Envoy was killed");
    real.scene.assert_clean();
}

#[tokio::test]
async fn five_hot_restarts_fail_no_request() {
    let mut real = real(Duration::from_millis(5)).await;
    real.scene.config.restart.hot_restart = true;
    real.scene.config.restart.parent_shutdown = Duration::from_secs(2);
    real.scene.config.arguments.drain_seconds = 1;
    let (admin, listener, app) = (real.admin, real.listener, real.app);
    let version = Arc::new(AtomicU64::new(0));
    let shown = version.clone();
    let text = move || bootstrap(admin, listener, app, u32::try_from(shown.load(Ordering::SeqCst)).unwrap());
    let (supervisor, handle) = real.scene.with_text(text);
    let halt = Stop::new();
    let group = real.group.clone();
    let client = admin::Client::new(real.scene.config.admin.clone());
    let act = async {
        until_live(listener).await;
        let counts = load(&group, listener, 10, &halt);
        for epoch in 1..=5u64 {
            version.store(epoch, Ordering::SeqCst);
            handle.reload(false);
            until_epoch(&client, epoch).await;
        }
        halt.cancel();
        eventually("the clients end", || (!group.running().contains(&"client".to_owned())).then_some(()))
            .await;
        handle.quit();
        counts
    };
    let both = async { tokio::join!(supervisor.run(), act) };
    let (outcome, counts) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
    assert_eq!(counts.failed.load(Ordering::SeqCst), 0, "of {}", counts.good.load(Ordering::SeqCst));
    assert!(counts.good.load(Ordering::SeqCst) > 100);
    eprintln!("{} requests over 5 hot restarts, none failed", counts.good.load(Ordering::SeqCst));
    real.scene.assert_clean();
}

#[tokio::test]
async fn a_crash_after_a_hot_restart_recovers() {
    let mut real = real(Duration::ZERO).await;
    real.scene.config.restart.hot_restart = true;
    real.scene.config.restart.recovery = true;
    let (admin, listener, app) = (real.admin, real.listener, real.app);
    let (supervisor, handle) = real.scene.with_text(move || bootstrap(admin, listener, app, 0));
    let mut states = handle.watch();
    let client = admin::Client::new(real.scene.config.admin.clone());
    let act = async {
        until_epoch(&client, 0).await;
        handle.reload(true);
        until_epoch(&client, 1).await;
        let pid = eventually("the new epoch's pid", || pid_with(&real.scene, "envoy-rev1.json")).await;
        let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::SEGV).unwrap();
        states.wait_for(|s| *s == RunState::Recovering).await.unwrap();
        until_epoch(&client, 0).await;
        until_live(listener).await;
        handle.quit();
    };
    let both = async { tokio::join!(supervisor.run(), act) };
    let (outcome, ()) = tokio::time::timeout(LONG, both).await.unwrap();
    assert_eq!(outcome.exit_code, 0);
    real.scene.assert_clean();
}

fn pid_with(scene: &Scene, file: &str) -> Option<String> {
    let wanted = scene.path("conf").join(file);
    std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        let mut args = line.split(|b| *b == 0);
        args.any(|a| a == wanted.as_os_str().as_encoded_bytes())
            .then(|| entry.file_name().into_string().unwrap())
    })
}

#[tokio::test]
async fn an_envoy_left_over_on_the_admin_port_is_named() {
    let mut real = real(Duration::ZERO).await;
    let config: PathBuf = real.scene.path("stale.json");
    let other = free_port().await;
    let mut file = std::fs::File::create(&config).unwrap();
    file.write_all(&bootstrap(real.admin, other, real.app, 0)).unwrap();
    let mut stale = std::process::Command::new(&real.scene.config.binary)
        .args(["--disable-hot-restart", "-l", "error", "--concurrency", "1", "-c"])
        .arg(&config)
        .spawn()
        .unwrap();
    until_live(other).await;
    let text = bootstrap(real.admin, real.listener, real.app, 0);
    let custom = real.scene.path("custom.json");
    std::fs::write(&custom, text).unwrap();
    real.scene.config.file = ConfigFile::Custom(custom.clone());
    let (supervisor, _handle) = real.scene.supervisor();
    let outcome = tokio::time::timeout(LONG, supervisor.run()).await.unwrap();
    stale.kill().unwrap();
    stale.wait().unwrap();
    assert_eq!(outcome.exit_code, 1);
    let named = format!("admin port {} is held by pid {} (envoy", real.admin, stale.id());
    assert!(outcome.reason.contains(&named), "{outcome:?}");
    assert!(custom.exists(), "the user's own file stays");
}
