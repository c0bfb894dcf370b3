//! An agent in a scratch working directory.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Child;
use tokio::task::JoinSet;

pub use super::builder::{Builder, Envoy, Ports};
use super::http::{self, Reply};
use super::{EnvoyClient, LIMIT, eventually};

/// Where Envoy's ADS socket is, below the working directory.
pub const XDS: &str = "etc/istio/proxy/XDS";
/// Where the workload's SDS socket is.
pub const SDS: &str = "var/run/secrets/workload-spiffe-uds/socket";
/// The token that istiod checks.
pub const TOKEN: &str = "var/run/secrets/tokens/istio-token";
/// What istiod's certificate is verified with.
pub const ROOT: &str = "var/run/secrets/istio/root-cert.pem";

/// What the agent and its Envoy have printed. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    async fn read(self, from: impl AsyncRead + Unpin) {
        let mut lines = BufReader::new(from).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            self.0.lock().expect("no panic holds this lock").push(line);
        }
    }

    pub fn text(&self) -> String {
        self.0.lock().expect("no panic holds this lock").join("\n")
    }

    pub fn contains(&self, part: &str) -> bool {
        self.0.lock().expect("no panic holds this lock").iter().any(|line| line.contains(part))
    }
}

/// A running agent. Dropping it kills it and everything it started.
pub struct TestAgent {
    child: Child,
    pid: Pid,
    dir: Option<tempfile::TempDir>,
    log: Log,
    readers: JoinSet<()>,
    ports: Ports,
    started: Instant,
    status: Option<ExitStatus>,
    env: BTreeMap<String, String>,
}

impl TestAgent {
    pub(super) fn watch(
        mut child: Child,
        dir: tempfile::TempDir,
        ports: Ports,
        started: Instant,
        env: BTreeMap<String, String>,
    ) -> Self {
        let log = Log::default();
        let mut readers = JoinSet::new();
        readers.spawn(log.clone().read(child.stdout.take().expect("piped")));
        readers.spawn(log.clone().read(child.stderr.take().expect("piped")));
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)).expect("just started");
        Self { child, pid, dir: Some(dir), log, readers, ports, started, status: None, env }
    }

    /// What to start one with. Named so that a test reads `TestAgent::with().istiod(&mock).start()`.
    #[allow(clippy::new_ret_no_self)]
    pub fn with() -> Builder {
        Builder::default()
    }

    /// What it was started with.
    pub fn environment(&self) -> &BTreeMap<String, String> {
        &self.env
    }

    pub fn ports(&self) -> Ports {
        self.ports
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What the kernel says it has of `VmRSS`, `RssAnon` and their like, in kB.
    pub fn memory(&self, of: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid.as_raw_pid()));
        let status = status.expect("it runs");
        let line = status.lines().find(|line| line.starts_with(of)).expect("the kernel tells it");
        line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
    }

    pub fn started(&self) -> Instant {
        self.started
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The working directory, or something in it.
    pub fn path(&self, below: &str) -> PathBuf {
        self.dir.as_ref().expect("there until taken").path().join(below)
    }

    /// Writes a file beside its place and renames it there, as a mounted volume changes.
    pub fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        let fresh = path.with_extension("fresh");
        std::fs::create_dir_all(path.parent().expect("below the directory")).expect("our directory");
        std::fs::write(&fresh, content).expect("our directory");
        std::fs::rename(fresh, path).expect("our directory");
    }

    /// Fails with the log when the agent has ended.
    pub fn assert_running(&mut self) {
        if let Some(status) = self.child.try_wait().expect("our child") {
            panic!("the agent has ended with {status}; its log:\n{}", self.log.text());
        }
    }

    /// A client on the workload's SDS socket.
    pub async fn sds(&mut self) -> EnvoyClient {
        self.client(SDS).await
    }

    /// A client on the ADS socket.
    pub async fn xds(&mut self) -> EnvoyClient {
        self.client(XDS).await
    }

    pub async fn client(&mut self, socket: &str) -> EnvoyClient {
        let path = self.path(socket);
        let deadline = Instant::now() + LIMIT;
        loop {
            self.assert_running();
            match EnvoyClient::connect(&path).await {
                Ok(client) => return client,
                Err(e) if Instant::now() > deadline => {
                    panic!("{socket} never accepted: {e:?}; the agent's log:\n{}", self.log.text())
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// A GET on the status server.
    pub async fn get(&self, path: &str) -> Result<Reply, String> {
        http::get(self.ports.status, path).await
    }

    /// A POST on the status server.
    pub async fn post(&self, path: &str) -> Result<Reply, String> {
        http::post(self.ports.status, path).await
    }

    /// The value of a metric of the agent, with its labels as they are written.
    pub async fn metric(&self, name: &str) -> Option<f64> {
        let text = self.get("/stats/prometheus").await.ok()?.text();
        let line =
            text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Waits until `/healthz/ready` is 200.
    pub async fn wait_ready(&mut self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            self.assert_running();
            let reply = self.get("/healthz/ready").await;
            if reply.as_ref().is_ok_and(|reply| reply.status.is_success()) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "never ready ({reply:?}); the agent's log:\n{}",
                self.log.text()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for a line of the log, or fails with the whole of it.
    pub async fn wait_log(&mut self, part: &str) {
        let deadline = Instant::now() + LIMIT;
        while !self.log.contains(part) {
            assert!(Instant::now() < deadline, "{part:?} never logged; the log:\n{}", self.log.text());
            if self.child.try_wait().expect("our child").is_some() {
                while self.readers.join_next().await.is_some() {}
                assert!(self.log.contains(part), "{part:?} never logged; the log:\n{}", self.log.text());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid, signal).expect("the agent is our child and was not waited for");
    }

    /// Waits for the agent's end by itself.
    pub async fn wait_exit(&mut self) -> ExitStatus {
        if let Some(status) = self.status {
            return status;
        }
        let waited = tokio::time::timeout(LIMIT, self.child.wait()).await;
        let status =
            waited.unwrap_or_else(|_| panic!("the agent does not end; its log:\n{}", self.log.text()));
        let status = status.expect("our child");
        self.status = Some(status);
        // Its last lines; an Envoy that has outlived it may hold the other end of the pipes.
        let read = async { while self.readers.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(2), read).await;
        status
    }

    /// The processes that have the working directory as theirs: the agent, its Envoy, and whatever else came of them.
    pub fn processes(&self) -> Vec<(Pid, String)> {
        processes_in(self.dir.as_ref().expect("there until taken").path())
    }

    /// Envoy's process ID.
    pub async fn envoy_pid(&self) -> Pid {
        eventually("Envoy runs", || async { self.envoy() }).await
    }

    /// Envoy's process ID, if it runs now: not the agent's own processes, and not what becomes Envoy in a moment (its
    /// name is `exe` until then, and signals that it gets are lost).
    pub fn envoy(&self) -> Option<Pid> {
        let ours = |name: &str| name == "exe" || name.starts_with("pilot-agent");
        self.processes().into_iter().find(|(pid, name)| *pid != self.pid && !ours(name)).map(|(pid, _)| pid)
    }

    /// What the fake Envoy noted: its arguments, what it was asked, its end.
    pub fn fake_notes(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("fake-envoy.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// SIGTERM, then checks that nothing is left over: no process, no socket, no listening port.
    pub async fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let status = self.wait_exit().await;
        assert!(status.success(), "ended with {status}; the log:\n{}", self.log.text());
        self.assert_clean().await;
        self.log.text()
    }

    /// Nothing is left of an agent that has ended.
    pub async fn assert_clean(&mut self) {
        assert!(self.status.is_some(), "asked of an agent that still runs");
        // Envoy was told to die before the agent ended; the kernel may need a moment to take it away.
        eventually("no process is left", || async { self.processes().is_empty().then_some(()) }).await;
        for socket in [XDS, SDS] {
            let path = self.path(socket);
            assert!(!path.exists(), "{socket} is left over; the log:\n{}", self.log.text());
        }
        for port in [self.ports.status, self.ports.admin, self.ports.envoy_status, self.ports.prometheus] {
            let connected = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
            assert!(
                connected.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused),
                "port {port} still answers"
            );
        }
    }

    /// The working directory of an agent that has ended, for the next one.
    pub fn take_dir(mut self) -> tempfile::TempDir {
        assert!(self.status.is_some(), "asked of an agent that still runs");
        self.dir.take().expect("there until taken")
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        if let Some(dir) = &self.dir {
            for (pid, _) in processes_in(dir.path()) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if std::thread::panicking() {
            eprintln!("--- log of the agent ---\n{}\n---", self.log.text());
        }
    }
}

/// Processes whose working directory is `dir` (zombies have none). Not by its name: in a chroot the kernel tells another
/// one of processes that have mounts of their own.
fn processes_in(dir: &Path) -> Vec<(Pid, String)> {
    let place = |path: &Path| std::fs::metadata(path).ok().map(|about| (about.dev(), about.ino()));
    let Some(dir) = place(dir) else { return Vec::new() };
    let entries = std::fs::read_dir("/proc").expect("/proc is mounted");
    let found = entries.flatten().filter_map(|entry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let cwd = place(&entry.path().join("cwd"))?;
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        (cwd == dir).then(|| (pid, name.trim().to_owned()))
    });
    found.collect()
}
