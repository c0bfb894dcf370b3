//! One agent under measurement: a scratch working directory, a mock istiod to talk to, a stand-in or a
//! real Envoy.

use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use mock_istiod::MockIstiod;
use mock_istiod::net::free_port;
use tokio::net::UnixStream;

use crate::ads::Stream;
use crate::cgroup::Group;
use crate::proc::Proc;

/// SotW ADS.
pub(crate) const ADS: &str =
    "envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
/// Delta ADS.
pub(crate) const DELTA: &str =
    "envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// SDS.
pub(crate) const SDS: &str = "envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";
/// The type of secrets.
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// Nothing here takes longer, unless something is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// What is started.
#[derive(Debug, Clone)]
pub(crate) struct Setup<'a> {
    /// The agent's binary.
    pub binary: &'a Path,
    /// Envoy's binary; `None` for a stand-in that sleeps.
    pub envoy: Option<&'a Path>,
    /// Additional variables.
    pub env: Vec<(&'static str, String)>,
}

/// Whether a binary is this one, which plays the bare proxy (`wire`) and has no certificates.
pub(crate) fn is_wire(binary: &Path) -> bool {
    std::env::current_exe().is_ok_and(|me| me == binary)
}

/// The shell that becomes the agent: in its control group first, and once it is told to, so that neither counts as start.
const WAITS: &str = r#"[ -z "$1" ] || echo $$ >"$1" || exit 1
echo joined; read -r go || exit 1
shift; exec "$@" </dev/null >agent.log 2>&1"#;

/// A started agent; ended in order, then by force, when dropped.
pub(crate) struct Agent {
    child: Child,
    dir: tempfile::TempDir,
    /// Of the shell, until it is told to go on.
    go: Option<ChildStdin>,
    /// CPU of the shell.
    before: Duration,
    /// When it was executed.
    pub started: Instant,
    /// What holds its memory, where it is limited; outlives it.
    pub group: Option<Group>,
    /// Its status port.
    pub status_port: u16,
    /// Where it looks for Envoy's admin interface.
    pub admin_port: u16,
    /// Where it looks for Envoy's metrics.
    pub prometheus_port: u16,
}

impl Agent {
    /// Writes what it needs and executes it.
    pub(crate) fn start(setup: &Setup<'_>, istiod: &MockIstiod) -> io::Result<Self> {
        let mut agent = Self::prepare(setup, "sidecar", istiod)?;
        agent.go()?;
        Ok(agent)
    }

    /// All but executing it: for many that are to begin at once.
    pub(crate) fn prepare(setup: &Setup<'_>, role: &str, istiod: &MockIstiod) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        let at = |path: &str| dir.path().join(path);
        for folder in
            ["var/run/secrets/istio", "var/run/secrets/tokens", "etc/istio/proxy", "var/lib/istio/envoy"]
        {
            std::fs::create_dir_all(at(folder))?;
        }
        std::fs::write(at("var/run/secrets/istio/root-cert.pem"), istiod.root_pem())?;
        std::fs::write(at("var/run/secrets/tokens/istio-token"), istiod.mint("default", "bench"))?;
        // The Go agent reads its bootstrap template from the working directory.
        #[expect(clippy::disallowed_methods, reason = "a measuring tool reads its own settings")]
        if let Some(template) = std::env::var_os("GO_TEMPLATE") {
            std::fs::copy(template, at("var/lib/istio/envoy/envoy_bootstrap_tmpl.json"))?;
        }
        let group = Group::around(setup.binary)?;
        let envoy = match (setup.envoy, &group) {
            (Some(path), None) => path.to_owned(),
            (Some(path), Some(_)) => outside(dir.path(), path)?,
            (None, _) => stand_in(dir.path())?,
        };
        let [status_port, admin_port, envoy_status, prometheus_port] = [(); 4].map(|()| free_port());
        let config = serde_json::json!({
            "discoveryAddress": istiod.discovery_address(),
            "binaryPath": envoy,
            "statusPort": status_port,
            "proxyAdminPort": admin_port,
            "concurrency": 1,
            "terminationDrainDuration": "0.1s",
        });
        let mut child = Command::new("/bin/sh")
            .args(["-c", WAITS, "sh"])
            .arg(group.as_ref().map(Group::door).unwrap_or_default())
            .arg(setup.binary)
            .args(["proxy", role])
            .current_dir(dir.path())
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("PROXY_CONFIG", config.to_string())
            .env("POD_NAME", "bench-1")
            .env("POD_NAMESPACE", "default")
            .env("SERVICE_ACCOUNT", "bench")
            .env("INSTANCE_IP", "127.0.0.1")
            .env("ENVOY_STATUS_PORT", envoy_status.to_string())
            .env("ENVOY_PROMETHEUS_PORT", prometheus_port.to_string())
            .env("CLOUD_PLATFORM", "none")
            .envs(setup.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (go, mut joined) = (child.stdin.take(), child.stdout.take());
        let (before, started) = (Duration::ZERO, Instant::now());
        let agent = Self { child, dir, go, before, started, group, status_port, admin_port, prometheus_port };
        match joined.as_mut().map(|pipe| pipe.read(&mut [0; 8])).transpose()? {
            Some(1..) => Ok(agent),
            _ => Err(io::Error::other("the agent's process cannot join its control group")),
        }
    }

    /// Executes it.
    pub(crate) fn go(&mut self) -> io::Result<()> {
        self.before = self.proc().cpu();
        self.started = Instant::now();
        self.go.take().map_or(Ok(()), |mut pipe| pipe.write_all(b"go\n"))
    }

    /// The process.
    pub(crate) fn proc(&self) -> Proc {
        Proc { id: self.child.id(), before: self.before }
    }

    /// Something in its working directory.
    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    /// Where the configuration socket is.
    pub(crate) fn xds(&self) -> PathBuf {
        self.dir.path().join("etc/istio/proxy/XDS")
    }

    /// Where the identity socket is.
    pub(crate) fn sds(&self) -> PathBuf {
        self.dir.path().join("var/run/secrets/workload-spiffe-uds/socket")
    }

    /// Replaces the token, as a mounted volume does.
    pub(crate) fn put_token(&self, token: &str) -> io::Result<()> {
        let path = self.dir.path().join("var/run/secrets/tokens/istio-token");
        std::fs::write(path.with_extension("fresh"), token)?;
        std::fs::rename(path.with_extension("fresh"), path)
    }

    /// The log so far, for an error message.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("agent.log")).unwrap_or_default()
    }

    /// Waits until both sockets accept; gives the time since the start.
    pub(crate) async fn sockets(&self) -> io::Result<Duration> {
        for path in [self.sds(), self.xds()] {
            connect(&path, self).await?;
        }
        Ok(self.started.elapsed())
    }

    /// Asks for the workload certificate; gives the time since the start.
    pub(crate) async fn certificate(&self) -> io::Result<Duration> {
        let mut stream = self.secrets().await?;
        stream.send(&secret_request("default"))?;
        stream.message().await?;
        Ok(self.started.elapsed())
    }

    /// Opens a stream for secrets, on a connection of its own.
    pub(crate) async fn secrets(&self) -> io::Result<Stream> {
        Stream::open(connect(&self.sds(), self).await?, "sds-grpc", SDS, &[]).await
    }

    /// Opens a stream for secrets of a gateway, on a connection of its own.
    pub(crate) async fn gateway_secrets(&self) -> io::Result<Stream> {
        let socket = self.path("var/run/ingress_gateway/sds");
        Stream::open(connect(&socket, self).await?, "gateway-sds", SDS, &[]).await
    }

    /// Opens a stream to istiod through the agent.
    pub(crate) async fn stream(&self, path: &str) -> io::Result<Stream> {
        Stream::open(connect(&self.xds(), self).await?, "xds-grpc", path, &[]).await
    }

    /// As [`Agent::stream`], with at most `window` bytes under way to us.
    pub(crate) async fn stream_with(&self, path: &str, window: u32) -> io::Result<Stream> {
        Stream::open_with(connect(&self.xds(), self).await?, window, "xds-grpc", path, &[]).await
    }

    /// Waits for `/healthz/ready`; gives the time since the start.
    pub(crate) async fn ready(&self) -> io::Result<Duration> {
        let until = Instant::now() + LIMIT;
        loop {
            if status(self.status_port, "/healthz/ready").await == Some(200) {
                return Ok(self.started.elapsed());
            }
            if Instant::now() > until {
                return Err(io::Error::other(format!("not ready in {LIMIT:?}\n{}", self.log())));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(group) = &self.group {
            group.note();
        }
        let pid = self.child.id().to_string();
        let _ = Command::new("kill").args(["-TERM", &pid]).status();
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A request for a secret, as Envoy's first.
pub(crate) fn secret_request(name: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(node()),
        type_url: SECRET.to_owned(),
        resource_names: vec![name.to_owned()],
        ..DiscoveryRequest::default()
    }
}

/// A node as Envoy sends it.
pub(crate) fn node() -> Node {
    let id = "sidecar~127.0.0.1~bench-1.default~default.svc.cluster.local".to_owned();
    Node { id, cluster: "bench".to_owned(), ..Node::default() }
}

// Tries again until somebody listens.
async fn connect(path: &Path, agent: &Agent) -> io::Result<UnixStream> {
    let until = Instant::now() + LIMIT;
    loop {
        match UnixStream::connect(path).await {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() > until => {
                return Err(io::Error::other(format!("{}: {e}\n{}", path.display(), agent.log())));
            }
            // The runtime's timer counts whole milliseconds, a third of what is measured here.
            Err(_) => {
                std::thread::sleep(Duration::from_micros(50));
                tokio::task::yield_now().await;
            }
        }
    }
}

fn stand_in(dir: &Path) -> io::Result<PathBuf> {
    script(dir, "exec sleep 600")
}

// The limit is the agent's, not its Envoy's.
fn outside(dir: &Path, envoy: &Path) -> io::Result<PathBuf> {
    let door = Group::way_out().unwrap_or_default();
    script(dir, &format!("echo $$ >'{}'\nexec '{}' \"$@\"", door.display(), envoy.display()))
}

fn script(dir: &Path, body: &str) -> io::Result<PathBuf> {
    let path = dir.join("stand-in");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n"))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// One HTTP GET; the status code.
pub(crate) async fn status(port: u16, path: &str) -> Option<u16> {
    head(port, path).await?.split_whitespace().nth(1)?.parse().ok()
}

/// One HTTP GET; a header of the answer.
pub(crate) async fn header(port: u16, path: &str, name: &str) -> Option<String> {
    let head = head(port, path).await?;
    let (_, value) = head.lines().filter_map(|l| l.split_once(": ")).find(|(n, _)| *n == name)?;
    Some(value.to_owned())
}

async fn head(port: u16, path: &str) -> Option<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let exchange = async {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        while !answer.windows(4).any(|w| w == b"\r\n\r\n") {
            if stream.read_buf(&mut answer).await.ok()? == 0 {
                break;
            }
        }
        String::from_utf8(answer).ok()
    };
    tokio::time::timeout(Duration::from_secs(2), exchange).await.ok().flatten()
}
