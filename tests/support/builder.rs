//! What to start an agent with.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use mock_istiod::MockIstiod;
use serde_json::{Value, json};
use tokio::process::Command;

use super::agent::{ROOT, TOKEN, TestAgent};
use super::commands::Scene;
use super::{agent_bin, envoy_bin, free_port};

/// Which Envoy the agent starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Envoy {
    /// A script that has Envoy's admin port and notes what it is asked; ready at once.
    Fake,
    /// The real one.
    Real,
    /// This binary.
    Binary(PathBuf),
}

/// What to start an agent with.
#[derive(Clone)]
pub struct Builder {
    args: Vec<String>,
    env: BTreeMap<String, String>,
    proxy_config: Value,
    files: Vec<(PathBuf, Vec<u8>, u32)>,
    envoy: Envoy,
    fake: Value,
    ports: Ports,
    before: Vec<String>,
    owner: Option<u32>,
}

/// The ports of one agent and its Envoy.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    /// The agent's status server.
    pub status: u16,
    /// Envoy's admin.
    pub admin: u16,
    /// Envoy's readiness listener.
    pub envoy_status: u16,
    /// Envoy's stats listener.
    pub prometheus: u16,
}

impl Default for Builder {
    fn default() -> Self {
        let ports = Ports {
            status: free_port(),
            admin: free_port(),
            envoy_status: free_port(),
            prometheus: free_port(),
        };
        let env = [
            ("POD_NAME", "pod"),
            ("POD_NAMESPACE", "ns"),
            ("SERVICE_ACCOUNT", "sa"),
            ("INSTANCE_IP", "127.0.0.1"),
            ("TRUST_DOMAIN", "cluster.local"),
            ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ];
        let mut env: BTreeMap<String, String> =
            env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        env.insert("ENVOY_STATUS_PORT".into(), ports.envoy_status.to_string());
        env.insert("ENVOY_PROMETHEUS_PORT".into(), ports.prometheus.to_string());
        Self {
            args: vec!["proxy".into(), "sidecar".into()],
            env,
            proxy_config: json!({
                "statusPort": ports.status,
                "proxyAdminPort": ports.admin,
                "terminationDrainDuration": "1s",
                "concurrency": 1,
            }),
            files: Vec::new(),
            envoy: Envoy::Fake,
            fake: json!({}),
            ports,
            before: Vec::new(),
            owner: None,
        }
    }
}

impl Builder {
    /// The istiod to use: its address, its root, and a token for `ns`/`sa`.
    pub fn istiod(self, mock: &MockIstiod) -> Self {
        self.proxy_config("discoveryAddress", mock.discovery_address()).file(ROOT, mock.root_pem()).file_mode(
            TOKEN,
            mock.mint("ns", "sa"),
            0o600,
        )
    }

    /// The settings of a file in `examples/identity`: variables, and the flags that a comment names.
    pub fn example(mut self, name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/identity").join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for line in text.lines() {
            if let Some(flags) = line.strip_prefix("# flags:") {
                self.args.extend(flags.split_whitespace().map(ToOwned::to_owned));
            } else if let Some((name, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
                self.env.insert(name.to_owned(), value.to_owned());
            }
        }
        self
    }

    /// The value of a variable that it has so far.
    pub fn variable(&self, name: &str) -> String {
        self.env.get(name).cloned().unwrap_or_default()
    }

    /// The command line after the program's name, in place of `proxy sidecar`.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(ToString::to_string).collect();
        self
    }

    /// One more argument.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.insert(name.to_owned(), value.into());
        self
    }

    /// With hot restart of Envoy; one that is replaced drains for 2 s and is gone after 3.
    pub fn hot_restarts(self) -> Self {
        self.env("ENVOY_HOT_RESTART", "true")
            .env("ENVOY_PARENT_SHUTDOWN_DURATION", "3s")
            .proxy_config("drainDuration", "2s")
    }

    pub fn without_env(mut self, name: &str) -> Self {
        self.env.remove(name);
        self
    }

    /// A field of `PROXY_CONFIG`.
    pub fn proxy_config(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.proxy_config[field] = value.into();
        self
    }

    /// A file below the working directory, mode 0644.
    pub fn file(self, path: &str, content: impl Into<Vec<u8>>) -> Self {
        self.file_mode(path, content, 0o644)
    }

    pub fn file_mode(mut self, path: &str, content: impl Into<Vec<u8>>, mode: u32) -> Self {
        self.files.retain(|(other, ..)| other != Path::new(path));
        self.files.push((path.into(), content.into(), mode));
        self
    }

    pub fn without_file(mut self, path: &str) -> Self {
        self.files.retain(|(other, ..)| other != Path::new(path));
        self
    }

    pub fn envoy(mut self, envoy: Envoy) -> Self {
        self.envoy = envoy;
        self
    }

    /// How the fake Envoy behaves; the fields stand in `fake_envoy.py`.
    pub fn fake(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.fake[field] = value.into();
        self
    }

    /// Words before the agent's own command line: a program that prepares something and executes the rest.
    pub fn before(mut self, words: &[String]) -> Self {
        self.before = words.to_vec();
        self
    }

    /// Words before all others that there are before the agent's.
    pub fn within(mut self, words: &[&str]) -> Self {
        self.before.splice(..0, words.iter().map(ToString::to_string));
        self
    }

    /// The user to whom the working directory and its files belong.
    pub fn owner(mut self, uid: u32) -> Self {
        self.owner = Some(uid);
        self
    }

    pub fn ports(&self) -> Ports {
        self.ports
    }

    /// Starts it; the working directory is there with all its files.
    pub fn start(self) -> TestAgent {
        self.start_in(tempfile::Builder::new().prefix("agent-").tempdir().expect("a scratch directory"))
    }

    /// Starts it in a directory that is there already (what an earlier agent left).
    pub fn start_in(mut self, dir: tempfile::TempDir) -> TestAgent {
        self.prepare(&dir);
        let started = Instant::now();
        let agent = agent_bin().to_string_lossy().into_owned();
        let mut words = self.before.iter().chain([&agent]).chain(&self.args);
        let child = Command::new(words.next().expect("the agent at least"))
            .args(words)
            .env_clear()
            .envs(&self.env)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("{} cannot be started: {e}", agent_bin().display()));
        TestAgent::watch(child, dir, self.ports, started, self.env)
    }

    /// Prepares all of it and starts nothing.
    pub fn scene(mut self) -> Scene {
        let dir = tempfile::Builder::new().prefix("scene-").tempdir().expect("a scratch directory");
        self.prepare(&dir);
        Scene { dir, env: self.env }
    }

    // The directory's files, and the whole environment.
    fn prepare(&mut self, dir: &tempfile::TempDir) {
        // Envoy under another user must reach its sockets.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("our directory");
        for (path, content, mode) in &self.files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("below the directory")).expect("our directory");
            // A file of an earlier start that nobody may write to: root writes to it all the same, a plain user may not.
            let written = std::fs::write(&path, content)
                .or_else(|_| std::fs::remove_file(&path).and_then(|()| std::fs::write(&path, content)));
            written.expect("our directory");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(*mode)).expect("our file");
        }
        if let Some(uid) = self.owner {
            own(dir.path(), uid);
        }
        let binary = match &self.envoy {
            // Where another user can reach it: the checkout may lie in a home that is its owner's alone.
            Envoy::Fake if self.owner.is_some() => installed(FAKE, &dir.path().join("fake-envoy")),
            Envoy::Fake => PathBuf::from(FAKE),
            Envoy::Real => envoy_bin(),
            Envoy::Binary(path) => path.clone(),
        };
        self.env.insert("FAKE_ENVOY".into(), self.fake.to_string());
        if self.proxy_config.get("binaryPath").is_none() {
            self.proxy_config["binaryPath"] = binary.to_string_lossy().into();
        }
        self.env.entry("PROXY_CONFIG".into()).or_insert_with(|| self.proxy_config.to_string());
    }
}

const FAKE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_envoy.py");

/// A program's copy, written by another process: what this one starts meanwhile does not hold it open for writing.
fn installed(program: &str, to: &Path) -> PathBuf {
    let done = std::process::Command::new("install").args(["-m", "755", program]).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "{program} cannot be copied to {}", to.display());
    to.to_owned()
}

fn own(path: &Path, uid: u32) {
    std::os::unix::fs::lchown(path, Some(uid), Some(uid)).expect("we are root");
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        own(&entry.path(), uid);
    }
}
