//! A scripted Envoy (a shell script) and a scripted admin port.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pilot_agent::testing::base::metrics::Metrics;
use pilot_agent::testing::base::tasks::Group;
use pilot_agent::testing::envoy::{self, ConfigFile, Handle, Supervisor, admin, command, drain, restart};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::eventually_within;

/// The agent's binary, which turns into Envoy in the child.
pub const LAUNCHER: &str = env!("CARGO_BIN_EXE_pilot-agent");

/// No test may hang; far beyond what any of them needs.
pub const LONG: Duration = Duration::from_secs(60);

/// A folder with an Envoy that does what its script says.
pub struct Scene {
    pub dir: tempfile::TempDir,
    pub config: envoy::Config,
}

impl Scene {
    /// `script` follows a shell's first line; `$D` is the scene's folder.
    pub fn new(script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("envoy");
        write_executable(&binary, &format!("#!/bin/sh\nD={}\n{script}\n", dir.path().display()));
        let config = envoy::Config {
            binary: binary.to_str().unwrap().to_owned(),
            launcher: PathBuf::from(LAUNCHER),
            arguments: command::Options::default(),
            extra_env: Vec::new(),
            user: None,
            own_group: false,
            file: ConfigFile::Generated(dir.path().join("conf/envoy-rev.json")),
            admin: admin::Config { port: 1, ..admin::Config::default() },
            drain: drain::Config {
                termination_drain: Duration::from_millis(300),
                ..drain::Config::default()
            },
            restart: restart::Config::default(),
            always_zero: false,
        };
        Self { dir, config }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn supervisor(&self) -> (Supervisor, Handle) {
        self.with_text(|| b"{}".to_vec())
    }

    pub fn with_text(&self, mut text: impl FnMut() -> Vec<u8> + Send + 'static) -> (Supervisor, Handle) {
        let bootstrap = move || -> Result<_, Box<dyn std::error::Error + Send + Sync>> { Ok(text()) };
        Supervisor::new(self.config.clone(), Box::new(bootstrap), &Metrics::new()).unwrap()
    }

    /// Runs to the end without being told anything.
    pub async fn run(&self) -> envoy::Outcome {
        let (supervisor, _handle) = self.supervisor();
        tokio::time::timeout(LONG, supervisor.run()).await.expect("it ends")
    }

    /// Nothing generated is left.
    pub fn assert_clean(&self) {
        let left: Vec<_> = std::fs::read_dir(self.path("conf")).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

pub fn write_executable(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Waits until `check` gives something.
pub async fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    eventually_within(LONG, what, || std::future::ready(check())).await
}

/// Waits for a file that a script wrote whole (it ends with a newline).
pub async fn file(path: PathBuf) -> String {
    eventually(&path.display().to_string(), || {
        std::fs::read_to_string(&path).ok().filter(|t| t.ends_with('\n'))
    })
    .await
}

/// Whether a process runs (a zombie does not).
pub fn runs(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()))
        .is_ok_and(|s| !matches!(s.rsplit(") ").next().and_then(|r| r.chars().next()), Some('Z' | 'X')))
}

/// An admin port that answers each request path with what `answer` gives; `None`: never.
pub struct Admin {
    pub port: u16,
    seen: Arc<Mutex<Vec<String>>>,
    _group: Group,
}

impl Admin {
    pub async fn start(answer: impl Fn(&str, usize) -> Option<String> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (group, noted) = (Group::new(), seen.clone());
        let connections = group.clone();
        let answer = Arc::new(answer);
        group.run("admin", async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                connections.run("admin connection", serve(stream, answer.clone(), noted.clone()));
            }
        });
        Self { port, seen, _group: group }
    }

    /// Request lines so far: method and path.
    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

async fn serve(
    mut stream: tokio::net::TcpStream,
    answer: Arc<impl Fn(&str, usize) -> Option<String>>,
    seen: Arc<Mutex<Vec<String>>>,
) {
    let mut head = vec![0; 8192];
    let Ok(n) = stream.read(&mut head).await else { return };
    let text = String::from_utf8_lossy(&head[..n]).into_owned();
    let line = text.lines().next().unwrap_or_default().trim_end_matches(" HTTP/1.1").to_owned();
    let nth = {
        let mut seen = seen.lock().unwrap();
        seen.push(line.clone());
        seen.iter().filter(|l| **l == line).count() - 1
    };
    match answer(&line, nth) {
        Some(body) => {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
        }
        None => std::future::pending().await,
    }
}

pub const DRAIN: &str = "POST /drain_listeners?inboundonly&graceful";
pub const DRAIN_NOW: &str = "POST /drain_listeners?inboundonly&graceful&skip_exit";
