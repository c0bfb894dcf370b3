//! One agent with its Envoy, watched from outside through what both offer.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

use mock_istiod::MockIstiod;
use mock_istiod::net::free_port;
use mock_istiod::record::{Event, Record};
use mock_istiod::resources::LISTENER;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::http;

/// How long anything may take; a healthy agent needs a fraction.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
const SOCKETS: [&str; 2] = ["etc/istio/proxy/XDS", "var/run/secrets/workload-spiffe-uds/socket"];

/// Moments of a start, counted from exec.
#[derive(Debug, Default, Clone)]
pub(crate) struct Timeline {
    pub(crate) sockets: Duration,
    pub(crate) csr_sent: Duration,
    pub(crate) csr_signed: Duration,
    pub(crate) envoy: Duration,
    pub(crate) config: Duration,
    pub(crate) ready: Duration,
}

/// What Envoy holds, by its own word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Certificate {
    pub(crate) identity: String,
    pub(crate) serial: String,
    pub(crate) from: String,
    pub(crate) to: String,
}

/// A running agent; dropping it kills it and its Envoy.
pub(crate) struct Agent {
    pub(crate) name: &'static str,
    pub(crate) identity: String,
    dir: PathBuf,
    child: Child,
    pid: Pid,
    envoy: Option<Pid>,
    started: Instant,
    started_at: SystemTime,
    status_port: u16,
    admin_port: u16,
}

impl Agent {
    /// Starts `name` as service account of the same name in namespace `demo`.
    pub(crate) fn start(
        name: &'static str,
        binary: &Path,
        envoy: &Path,
        scratch: &Path,
        mock: &MockIstiod,
        ttl: Duration,
    ) -> Result<Self, String> {
        let dir = scratch.join(name);
        let put = |path: &str, text: &str| {
            let path = dir.join(path);
            let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
            made.and_then(|()| std::fs::write(&path, text)).map_err(|e| format!("{}: {e}", path.display()))
        };
        put("var/run/secrets/istio/root-cert.pem", &mock.root_pem())?;
        put("var/run/secrets/tokens/istio-token", &mock.mint("demo", name))?;
        let log = std::fs::File::create(dir.join("agent.log")).map_err(|e| format!("agent.log: {e}"))?;
        let errors = log.try_clone().map_err(|e| format!("agent.log: {e}"))?;
        let (status_port, admin_port) = (free_port(), free_port());
        let config = json!({
            "discoveryAddress": mock.discovery_address(),
            "statusPort": status_port,
            "proxyAdminPort": admin_port,
            "binaryPath": envoy,
            "concurrency": 1,
            "terminationDrainDuration": "1s",
        });
        let (started, started_at) = (Instant::now(), SystemTime::now());
        let child = Command::new(binary)
            .args(["proxy", "sidecar"])
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("POD_NAME", format!("{name}-0"))
            .env("POD_NAMESPACE", "demo")
            .env("SERVICE_ACCOUNT", name)
            .env("INSTANCE_IP", "127.0.0.1")
            .env("ISTIO_META_CLUSTER_ID", "Kubernetes")
            .env("PROXY_CONFIG", config.to_string())
            .env("SECRET_TTL", format!("{}s", ttl.as_secs()))
            .env("SECRET_GRACE_PERIOD_RATIO", "0.916")
            .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0.005")
            .env("ENVOY_STATUS_PORT", free_port().to_string())
            .env("ENVOY_PROMETHEUS_PORT", free_port().to_string())
            .current_dir(&dir)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("{} cannot be started: {e}", binary.display()))?;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)).ok_or("no process ID")?;
        let identity = mock.identity("demo", name);
        Ok(Self {
            name,
            identity,
            dir,
            child,
            pid,
            envoy: None,
            started,
            started_at,
            status_port,
            admin_port,
        })
    }

    fn check(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("the {}'s agent has ended with {status}", self.name)),
            Err(e) => Err(format!("the {}'s agent: {e}", self.name)),
        }
    }

    /// Follows the start to its end.
    pub(crate) async fn watch_start(&mut self, record: &Record) -> Result<Timeline, String> {
        let mut line = Timeline::default();
        loop {
            let now = self.started.elapsed();
            if line.sockets.is_zero() && self.sockets_accept().await {
                line.sockets = now;
            }
            if line.envoy.is_zero() {
                self.envoy = self.envoy_process();
                if self.envoy.is_some() {
                    line.envoy = now;
                }
            }
            if !line.sockets.is_zero() && !line.envoy.is_zero() && self.is_ready().await {
                line.ready = self.started.elapsed();
                break;
            }
            if now > LIMIT {
                let state = format!("sockets {:?}, Envoy {:?}", line.sockets, self.envoy.is_some());
                return Err(format!("the {}'s agent is not ready after {LIMIT:?} ({state})", self.name));
            }
            self.check()?;
            // Finely at first, where moments lie close together; then gently.
            let pause = if line.envoy.is_zero() { 200 } else { 5000 };
            tokio::time::sleep(Duration::from_micros(pause)).await;
        }
        let since = |at: SystemTime| at.duration_since(self.started_at).unwrap_or_default();
        let node = format!("{}-0.demo", self.name);
        let mut stream = None;
        for entry in record.entries() {
            match &entry.event {
                Event::CaCall(call)
                    if call.identity.as_ref() == Some(&self.identity) && line.csr_sent.is_zero() =>
                {
                    line.csr_sent = since(call.received);
                    line.csr_signed = since(entry.at);
                }
                Event::AdsRequest(request) => {
                    if request.node.as_ref().is_some_and(|id| id.contains(&node)) {
                        stream = Some(request.stream);
                    }
                    let ours = stream == Some(request.stream) && request.type_url == LISTENER;
                    if ours && request.is_ack() && line.config.is_zero() {
                        line.config = since(entry.at);
                    }
                }
                _ => {}
            }
        }
        match line.config.is_zero() || line.csr_signed.is_zero() {
            true => Err(format!(
                "the {} is ready, yet istiod has not seen a CSR and an accepted listener",
                self.name
            )),
            false => Ok(line),
        }
    }

    async fn sockets_accept(&self) -> bool {
        for socket in SOCKETS {
            if UnixStream::connect(self.dir.join(socket)).await.is_err() {
                return false;
            }
        }
        true
    }

    fn envoy_process(&self) -> Option<Pid> {
        let pid = self.pid.as_raw_nonzero();
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let children = tasks.flatten().find_map(|task| {
            let text = std::fs::read_to_string(task.path().join("children")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        });
        let child = Pid::from_raw(children?)?;
        // Between fork and exec the child is still the agent.
        let name = std::fs::read_to_string(format!("/proc/{}/comm", child.as_raw_nonzero())).ok()?;
        name.starts_with("envoy").then_some(child)
    }

    async fn is_ready(&self) -> bool {
        http::get(self.status_port, "/healthz/ready").await.is_ok_and(|reply| reply.status.is_success())
    }

    /// The workload certificate that Envoy uses now.
    pub(crate) async fn certificate(&self) -> Result<Certificate, String> {
        let reply = http::get(self.admin_port, "/certs").await?;
        let certs: Value = serde_json::from_str(&reply.body).map_err(|e| format!("/certs: {e}"))?;
        let chains = certs["certificates"].as_array().into_iter().flatten();
        let leaf = chains
            .flat_map(|certificate| certificate["cert_chain"].as_array().into_iter().flatten())
            .find(|leaf| leaf["subject_alt_names"][0]["uri"].is_string())
            .ok_or_else(|| format!("the {}'s Envoy shows no workload certificate", self.name))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(Certificate {
            identity: text(&leaf["subject_alt_names"][0]["uri"]),
            serial: text(&leaf["serial_number"]),
            from: text(&leaf["valid_from"]),
            to: text(&leaf["expiration_time"]),
        })
    }

    /// Anonymous and whole resident memory of the agent (without Envoy), in KiB.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid.as_raw_nonzero())).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some((field("RssAnon:")?, field("VmRSS:")?))
    }

    /// SIGTERM; then everything must be gone: agent, Envoy, sockets.
    pub(crate) async fn stop(&mut self) -> Result<Duration, String> {
        self.check()?;
        let started = Instant::now();
        kill_process(self.pid, Signal::TERM).map_err(|e| format!("SIGTERM: {e}"))?;
        let waited = tokio::time::timeout(LIMIT, self.child.wait()).await;
        let status = waited
            .map_err(|_| format!("the {}'s agent has not ended {LIMIT:?} after SIGTERM", self.name))?
            .map_err(|e| e.to_string())?;
        if !status.success() {
            return Err(format!("the {}'s agent has ended with {status}", self.name));
        }
        let took = started.elapsed();
        if let Some(envoy) = self.envoy.take()
            && Path::new(&format!("/proc/{}", envoy.as_raw_nonzero())).exists()
        {
            return Err(format!("the {}'s Envoy has outlived its agent", self.name));
        }
        for socket in SOCKETS {
            if self.dir.join(socket).exists() {
                return Err(format!("the {}'s agent has left {socket} behind", self.name));
            }
        }
        Ok(took)
    }

    /// The end of its log, for a failure's report.
    pub(crate) fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(self.dir.join("agent.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(envoy) = self.envoy {
            let _ = kill_process(envoy, Signal::KILL);
        }
    }
}
