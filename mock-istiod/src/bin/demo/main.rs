//! The main job, end to end: two agents give two real Envoys an identity and a config, and traffic flows between them
//! over mutual TLS; then certificates rotate and config changes under that traffic.
//!
//! Everything is seen from outside: mock-istiod's record, the agents' sockets and status port, Envoy's admin. Any
//! promise that does not hold ends the demo with a non-zero status and the end of both logs.

mod agent;
mod app;
mod http;
mod progress;
mod traffic;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use mock_istiod::MockIstiod;
use mock_istiod::net::free_port;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::agent::{Agent, Certificate, LIMIT, Timeline};
use crate::progress::wait;
use crate::traffic::{Ends, Tally, Traffic};

/// Two sidecars from an empty machine.
#[derive(Debug, Parser)]
struct Flags {
    /// The agent.
    #[arg(long)]
    agent: PathBuf,
    /// The Envoy that it starts.
    #[arg(long)]
    envoy: PathBuf,
    /// How many times each certificate must have been replaced under traffic.
    #[arg(long, default_value_t = 3)]
    rotations: usize,
    /// Keep the scratch directory.
    #[arg(long)]
    keep: bool,
}

/// A workload certificate's life in the demo. It is replaced when a twelfth of it is over: rotations follow each other, and
/// a slow machine has time enough for each.
const TTL: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    let started = Instant::now();
    let scratch = match tempfile::Builder::new().prefix("pilot-agent-demo-").tempdir() {
        Ok(scratch) => scratch,
        Err(error) => {
            eprintln!("demo: no scratch directory: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut agents = Vec::new();
    let outcome = run(&flags, scratch.path(), &mut agents).await;
    let code = match &outcome {
        Ok(()) => {
            println!("\n  all of it held; {:.1} s\n", started.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(reason) => {
            println!("\n  FAILED: {reason}\n");
            for agent in &agents {
                println!("--- end of the {}'s log ---\n{}\n", agent.name, agent.log_tail());
            }
            ExitCode::FAILURE
        }
    };
    drop(agents);
    if flags.keep || outcome.is_err() {
        println!("  scratch directory kept: {}", scratch.keep().display());
    }
    code
}

async fn run(flags: &Flags, scratch: &Path, agents: &mut Vec<Agent>) -> Result<(), String> {
    let absolute = |path: &Path| path.canonicalize().map_err(|e| format!("{}: {e}", path.display()));
    let (binary, envoy) = (absolute(&flags.agent)?, absolute(&flags.envoy)?);
    let mock = MockIstiod::builder().start().await.map_err(|e| format!("mock-istiod cannot listen: {e}"))?;
    let listener =
        TcpListener::bind("127.0.0.1:0").await.map_err(|e| format!("the app cannot listen: {e}"))?;
    let app_port = listener.local_addr().map_err(|e| e.to_string())?.port();
    let mut app = JoinSet::new();
    app.spawn(app::serve(listener));
    let mesh = Mesh::write(&scratch.join("istiod"), &mock, app_port)?;
    mock.serve_folder(&mesh.folder).map_err(|e| e.to_string())?;

    println!("\n  Two sidecars, mutual TLS between them\n");
    println!("  agent    {}", binary.display());
    println!("  envoy    {}", envoy.display());
    println!("  istiod   mock-istiod on {}, serving {}\n", mock.address(), mesh.folder.display());

    for name in ["client", "server"] {
        agents.push(Agent::start(name, &binary, &envoy, scratch, &mock, TTL)?);
    }
    let [client, server] = &mut agents[..] else { return Err("two agents were started".to_owned()) };
    start(client, server, &mock).await?;
    let traffic = traffic_flows(&mesh, client, server).await?;
    rotate(flags.rotations, [&*client, &*server], &traffic, &mock).await?;
    push(&mesh, &traffic).await?;
    settle(traffic, [&*client, &*server]).await?;

    let stopping = async { tokio::join!(client.stop(), server.stop()) };
    let (client_took, server_took) = wait("orderly stop", String::new, stopping).await;
    println!(
        "\n  stop     client {}, server {}: Envoy drained and gone, sockets removed, status 0",
        ms(client_took?),
        ms(server_took?)
    );
    mock.stop().await;
    Ok(())
}

/// Both are ready, and each Envoy is who it should be.
async fn start(client: &mut Agent, server: &mut Agent, mock: &MockIstiod) -> Result<(), String> {
    let starting = async {
        let (client, server) =
            tokio::join!(client.watch_start(mock.record()), server.watch_start(mock.record()));
        Ok::<_, String>((client?, server?))
    };
    let lines = wait("both agents start", String::new, starting).await?;
    print_timeline(&lines.0, &lines.1);

    let first = [client.certificate().await?, server.certificate().await?];
    print_identities(&first);
    for (agent, certificate) in [(&*client, &first[0]), (&*server, &first[1])] {
        if certificate.identity != agent.identity {
            return Err(format!(
                "the {}'s Envoy is {} and not {}",
                agent.name, certificate.identity, agent.identity
            ));
        }
    }
    Ok(())
}

/// Requests arrive, over mutual TLS only.
async fn traffic_flows(mesh: &Mesh, client: &Agent, server: &Agent) -> Result<Traffic, String> {
    let ends = Ends { client: client.identity.clone(), server: server.identity.clone() };
    let traffic = Traffic::start(mesh.outbound, ends);
    let flowing = until(|| traffic.look(|tally| tally.answered >= 100 || tally.failed > 0).then_some(()));
    wait("first requests", || asked(&traffic), flowing).await.ok_or("no hundred requests were answered")?;
    none_failed(&traffic)?;
    println!("  request  app was asked by  {}", client.identity);
    println!("           through           {}", server.identity);
    refuses_plaintext(mesh.inbound).await?;
    println!("           without a certificate: refused\n");
    Ok(traffic)
}

/// Certificates are replaced under traffic, and no request fails.
async fn rotate(
    wanted: usize,
    agents: [&Agent; 2],
    traffic: &Traffic,
    mock: &MockIstiod,
) -> Result<(), String> {
    let (rotated, took) = rotations(wanted, agents, traffic).await?;
    println!("  rotate   {TTL:?} certificates, replaced after a twelfth of that, traffic never pausing");
    for (name, serials) in ["client", "server"].iter().zip(&rotated) {
        println!("           {name}  {} certificates in use one after the other", serials.len());
    }
    println!("           {} signed by istiod in {:.1} s\n", mock.record().signed().len(), took.as_secs_f64());
    none_failed(traffic)
}

/// A changed route has its effect.
async fn push(mesh: &Mesh, traffic: &Traffic) -> Result<(), String> {
    let pushed = Instant::now();
    mesh.push_config("two")?;
    let arrived = until(|| {
        traffic.look(|tally| tally.config.clone()).filter(|(value, _)| value == "two").map(|(_, at)| at)
    });
    let at =
        wait("pushed change", || asked(traffic), arrived).await.ok_or("the pushed change had no effect")?;
    println!("  push     a changed route is in effect {} after its file was written\n", ms(at - pushed));
    Ok(())
}

/// The end of the traffic: how it went, and what it took.
async fn settle(traffic: Traffic, agents: [&Agent; 2]) -> Result<(), String> {
    let tally = traffic.stop().await;
    print_traffic(&tally);
    if tally.failed > 0 {
        return Err(format!("{} requests failed: {}", tally.failed, tally.reasons.join("; ")));
    }
    for agent in agents {
        if let Some((anonymous, whole)) = agent.memory() {
            let mib = |kib: u64| kib as f64 / 1024.0;
            println!(
                "  memory   {}'s agent: {:.1} MiB resident, {:.1} MiB anonymous",
                agent.name,
                mib(whole),
                mib(anonymous)
            );
        }
    }
    Ok(())
}

/// The mesh's resources as files.
struct Mesh {
    folder: PathBuf,
    outbound: u16,
    inbound: u16,
}

impl Mesh {
    fn write(folder: &Path, mock: &MockIstiod, app: u16) -> Result<Self, String> {
        let mesh = Self { folder: folder.to_owned(), outbound: free_port(), inbound: free_port() };
        let fill = |text: &str| {
            text.replace("\"{{outbound}}\"", &mesh.outbound.to_string())
                .replace("\"{{inbound}}\"", &mesh.inbound.to_string())
                .replace("\"{{app}}\"", &app.to_string())
                .replace("{{client-id}}", &mock.identity("demo", "client"))
                .replace("{{server-id}}", &mock.identity("demo", "server"))
        };
        mesh.put("server-0.demo/mesh.yaml", &fill(include_str!("server.yaml")))?;
        mesh.put("client-0.demo/mesh.yaml", &fill(include_str!("client.yaml")))?;
        mesh.push_config("one")?;
        Ok(mesh)
    }

    fn push_config(&self, value: &str) -> Result<(), String> {
        self.put("client-0.demo/route.yaml", &include_str!("route.yaml").replace("{{config}}", value))
    }

    // Beside its place and renamed, so that no half-written file is ever served.
    fn put(&self, path: &str, text: &str) -> Result<(), String> {
        let path = self.folder.join(path);
        let fresh = path.with_extension("fresh");
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(&fresh, text))
            .and_then(|()| std::fs::rename(&fresh, &path))
            .map_err(|e| format!("{}: {e}", path.display()))
    }
}

/// Watches both Envoys until each has used `wanted` new certificates.
async fn rotations(
    wanted: usize,
    agents: [&Agent; 2],
    traffic: &Traffic,
) -> Result<([BTreeSet<String>; 2], Duration), String> {
    let started = Instant::now();
    let seen = std::cell::RefCell::new([BTreeSet::new(), BTreeSet::new()]);
    let watching = async {
        loop {
            for (n, agent) in agents.iter().enumerate() {
                let certificate = agent.certificate().await?;
                if certificate.identity != agent.identity {
                    return Err(format!("after a rotation the {} is {}", agent.name, certificate.identity));
                }
                seen.borrow_mut()[n].insert(certificate.serial);
            }
            if seen.borrow().iter().all(|serials| serials.len() > wanted) {
                return Ok(());
            }
            if started.elapsed() > LIMIT {
                let counts: Vec<_> = seen.borrow().iter().map(|serials| serials.len() - 1).collect();
                return Err(format!("{counts:?} rotations in {LIMIT:?}, {wanted} were expected of each"));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let detail = || {
        let counts: Vec<_> = seen.borrow().iter().map(|serials| serials.len().saturating_sub(1)).collect();
        format!(": client {}, server {} of {wanted}{}", counts[0], counts[1], asked(traffic))
    };
    wait("certificates rotate", detail, watching).await?;
    Ok((seen.into_inner(), started.elapsed()))
}

async fn until<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let looking = async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, looking).await.ok()
}

/// The server's port must give nothing to somebody without a certificate.
async fn refuses_plaintext(port: u16) -> Result<(), String> {
    let mut socket =
        TcpStream::connect(("127.0.0.1", port)).await.map_err(|e| format!("server's port: {e}"))?;
    let mut answer = Vec::new();
    let asking = async {
        socket.write_all(b"GET / HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n").await?;
        socket.read_to_end(&mut answer).await
    };
    // Whether the connection is closed or reset, nothing may come back.
    let ended = tokio::time::timeout(LIMIT, asking).await;
    match answer.starts_with(b"HTTP/") || ended.is_err() {
        true => Err("the server answers a client without a certificate".to_owned()),
        false => Ok(()),
    }
}

/// A failed request is known at once and ends the demo.
fn none_failed(traffic: &Traffic) -> Result<(), String> {
    traffic.look(|tally| match tally.failed {
        0 => Ok(()),
        failed => Err(format!("{failed} requests failed: {}", tally.reasons.join("; "))),
    })
}

fn asked(traffic: &Traffic) -> String {
    traffic.look(|tally| format!(", {} requests, {} failed", tally.answered + tally.failed, tally.failed))
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

fn print_timeline(client: &Timeline, server: &Timeline) {
    println!("  from exec to           client       server");
    let row = |what: &str, at: fn(&Timeline) -> Duration| {
        println!("    {what:<18}{:>11}  {:>11}", ms(at(client)), ms(at(server)));
    };
    row("sockets bound", |line| line.sockets);
    row("key made, CSR sent", |line| line.csr_sent);
    row("CSR signed", |line| line.csr_signed);
    row("Envoy started", |line| line.envoy);
    row("config accepted", |line| line.config);
    row("ready", |line| line.ready);
    println!();
}

fn print_identities(certificates: &[Certificate; 2]) {
    for (name, certificate) in ["client", "server"].iter().zip(certificates) {
        println!("  {name}   {}", certificate.identity);
        println!("           certificate {} to {}", certificate.from, certificate.to);
    }
    println!();
}

fn print_traffic(tally: &Tally) {
    let mut sorted = tally.latencies.clone();
    sorted.sort_unstable();
    let at = |share: f64| sorted.get((sorted.len() as f64 * share) as usize).copied().unwrap_or_default();
    println!("  traffic  {} requests answered, {} failed", tally.answered, tally.failed);
    println!("           latency p50 {}, p99 {}\n", ms(at(0.5)), ms(at(0.99)));
}
