//! Configuration through the agent, and past it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use mock_istiod::MockIstiod;
use mock_istiod::ads::AdsStream;
use mock_istiod::bulk::{self, Kind};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::ads::Stream;
use crate::affinity::OneCore;
use crate::agent::{ADS, Agent, DELTA, LIMIT, Setup, is_wire, node};
use crate::table::{Row, Value};

const MB: usize = 1_000_000;

/// A stream and its far end.
pub(crate) struct Pair {
    /// Ours.
    pub client: Stream,
    /// Istiod's.
    pub server: AdsStream,
}

/// Waits for it, but not for ever.
pub(crate) async fn limit<T>(what: &str, task: impl Future<Output = T>) -> Result<T, String> {
    tokio::time::timeout(LIMIT, task).await.map_err(|_| format!("{what}: nothing within {LIMIT:?}"))
}

/// A stream whose far end is in our hands.
pub(crate) async fn pair(
    mut client: Stream,
    streams: &mut UnboundedReceiver<AdsStream>,
    delta: bool,
) -> Result<Pair, String> {
    let type_url = Kind::Clusters.type_url().to_owned();
    if delta {
        client.send(&DeltaDiscoveryRequest { node: Some(node()), type_url, ..Default::default() })
    } else {
        client.send(&DiscoveryRequest { node: Some(node()), type_url, ..Default::default() })
    }
    .map_err(|e| e.to_string())?;
    let mut server = limit("stream at istiod", streams.recv()).await?.ok_or("istiod is gone")?;
    limit("request at istiod", server.requests.recv()).await?;
    Ok(Pair { client, server })
}

async fn direct(istiod: &MockIstiod, path: &str) -> Result<Stream, String> {
    let tcp = tokio::net::TcpStream::connect(istiod.address()).await.map_err(|e| e.to_string())?;
    tcp.set_nodelay(true).map_err(|e| e.to_string())?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(istiod.authority().root_der()).map_err(|e| e.to_string())?;
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = "istiod.istio-system.svc".try_into().map_err(|_| "server name")?;
    let tls = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config))
        .connect(name, tcp)
        .await
        .map_err(|e| e.to_string())?;
    let token = format!("Bearer {}", istiod.mint("default", "bench"));
    let headers = [("authorization", token), ("clusterid", String::new())];
    Stream::open(tls, "istiod.istio-system.svc", path, &headers).await.map_err(|e| e.to_string())
}

struct Shape {
    name: &'static str,
    total: usize,
    each: usize,
    cpu_target: &'static str,
    peak_target: &'static str,
}

const SHAPES: [Shape; 5] = [
    Shape { name: "1 MB as one message", total: MB, each: MB, cpu_target: "–", peak_target: "–" },
    Shape {
        name: "10 MB as one message", total: 10 * MB, each: 10 * MB, cpu_target: "–", peak_target: "–"
    },
    Shape {
        name: "50 MB as one message",
        total: 50 * MB,
        each: 50 * MB,
        cpu_target: "≤ 1.2",
        peak_target: "≤ 4",
    },
    Shape {
        name: "50 MB as 64 KB messages",
        total: 50 * MB,
        each: 64_000,
        cpu_target: "≤ 1.9",
        peak_target: "≤ 4",
    },
    Shape {
        name: "10 MB as 4 KB messages",
        total: 10 * MB,
        each: 4_000,
        cpu_target: "≤ 8",
        peak_target: "–",
    },
];

struct Run {
    throughput: f64,
    cpu: f64,
    peak: f64,
    after: f64,
}

// The agents, and the bare proxy after them.
fn with_wire(binaries: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    let me = std::env::current_exe().map_err(|e| e.to_string())?;
    Ok(binaries.iter().cloned().chain([me]).collect())
}

// One figure by agent as a line of the table.
fn row(what: String, values: Vec<Option<Value>>, direct: Option<Value>, target: &'static str) -> Row {
    let mut values = values.into_iter();
    let wire = values.next_back().flatten();
    Row { what, ours: values.next().flatten(), peer: values.next().flatten(), wire, direct, target }
}

async fn started(binary: &Path, istiod: &MockIstiod) -> Result<Agent, String> {
    let setup = Setup { binary, envoy: None, env: vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())] };
    let agent = Agent::start(&setup, istiod).map_err(|e| e.to_string())?;
    if !is_wire(binary) {
        agent.certificate().await.map_err(|e| e.to_string())?;
    }
    Ok(agent)
}

/// Throughput, CPU and memory by shape.
pub(crate) async fn bulk(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let mut rows = Vec::new();
    for shape in SHAPES {
        let payload = bulk::many(Kind::Clusters, shape.total, shape.each);
        let count = (shape.total / shape.each).max(1);
        let mut under = Vec::new();
        for binary in with_wire(binaries)? {
            under.push(Under::start(&binary, &istiod, &mut streams).await?);
        }
        let mut plain = Vec::new();
        // In turns, so that what else the machine does meets all of them.
        for _ in 0..runs {
            let mut pair = pair(direct(&istiod, ADS).await?, &mut streams, false).await?;
            plain.push(transfer(&mut pair, &payload, count).await?);
            drop(pair);
            for under in &mut under {
                under.run(&mut streams, &payload, count).await?;
            }
        }
        let of =
            |f: fn(&Run) -> f64| under.iter().map(|u| Value::of(u.runs.iter().map(f).collect())).collect();
        let mut add = |what, f, direct, target| {
            rows.push(row(format!("{}: {what}", shape.name), of(f), direct, target));
        };
        add("MB/s", |r| r.throughput, Value::of(plain), "≥ peer");
        add("agent CPU ms/MB", |r| r.cpu, None, shape.cpu_target);
        add("peak over idle MB", |r| r.peak, None, shape.peak_target);
        add("left over idle MB", |r| r.after, None, "≤ 1");
    }
    Ok(rows)
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
async fn transfer(pair: &mut Pair, payload: &Bytes, count: usize) -> Result<f64, String> {
    let begin = Instant::now();
    pair.server.responses.raw(payload.clone()).await.map_err(|_| "istiod's stream ended")?;
    limit("messages", pair.client.count(count)).await?.map_err(|e| e.to_string())?;
    Ok(payload.len() as f64 / 1e6 / begin.elapsed().as_secs_f64())
}

// An agent and what it was measured at.
struct Under {
    agent: Agent,
    idle: u64,
    runs: Vec<Run>,
}

impl Under {
    async fn start(
        binary: &Path,
        istiod: &MockIstiod,
        streams: &mut UnboundedReceiver<AdsStream>,
    ) -> Result<Self, String> {
        let agent = started(binary, istiod).await?;
        // An agent at rest has an Envoy that was served before: the relay's code is in memory. Without this
        // its first megabyte of pages would count as growth.
        let small = bulk::sotw(Kind::Clusters, 1000, "warm");
        let mut warm = pair(agent.stream(ADS).await.map_err(|e| e.to_string())?, streams, false).await?;
        transfer(&mut warm, &small, 1).await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        let idle = agent.proc().memory().rss;
        Ok(Self { agent, idle, runs: Vec::new() })
    }

    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    async fn run(
        &mut self,
        streams: &mut UnboundedReceiver<AdsStream>,
        payload: &Bytes,
        count: usize,
    ) -> Result<(), String> {
        let proc = self.agent.proc();
        let client = self.agent.stream(ADS).await.map_err(|e| e.to_string())?;
        let mut pair = pair(client, streams, false).await?;
        proc.reset_peak();
        let before = proc.cpu();
        let throughput = transfer(&mut pair, payload, count).await?;
        let cpu = (proc.cpu() - before).as_secs_f64() * 1e3 / (payload.len() as f64 / 1e6);
        let peak = proc.memory().peak.saturating_sub(self.idle) as f64 / 1e6;
        drop(pair);
        tokio::time::sleep(Duration::from_millis(300)).await;
        let after = (proc.memory().rss as f64 - self.idle as f64) / 1e6;
        self.runs.push(Run { throughput, cpu, peak, after });
        Ok(())
    }
}

/// One small resource at a time, as most changes of a mesh are.
pub(crate) async fn pushes(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    const PUSHES: u32 = 1000;
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let payload = bulk::delta(Kind::Clusters, 1000, "n");
    let mut agents = Vec::new();
    for binary in with_wire(binaries)? {
        agents.push(started(&binary, &istiod).await?);
    }
    let mut rows = Vec::new();
    for (place, targets) in [("", ["≤ 50", "≤ 150", "≤ 55"]), (", all on one core", ["≤ 40", "–", "≤ 45"])]
    {
        let (mut plain50, mut plain99) = (Vec::new(), Vec::new());
        // What each adds to the direct way, in the same round.
        let mut added = vec![[const { Vec::new() }; 3]; agents.len()];
        let hold = |agent: &Agent| (!place.is_empty()).then(|| OneCore::with(agent.proc().id)).transpose();
        for _ in 0..runs {
            let mut pair_direct = pair(direct(&istiod, DELTA).await?, &mut streams, true).await?;
            let held = hold(&agents[0]).map_err(|e| e.to_string())?;
            let (p50, p99) = latencies(&mut pair_direct, &payload, PUSHES).await?;
            drop((pair_direct, held));
            plain50.push(p50);
            plain99.push(p99);
            for (agent, added) in agents.iter().zip(&mut added) {
                let client = agent.stream(DELTA).await.map_err(|e| e.to_string())?;
                let mut pair = pair(client, &mut streams, true).await?;
                let _held = hold(agent).map_err(|e| e.to_string())?;
                let before = agent.proc().cpu();
                let (a, b) = latencies(&mut pair, &payload, PUSHES).await?;
                let spent = agent.proc().cpu() - before;
                added[0].push(a - p50);
                added[1].push(b - p99);
                added[2].push(spent.as_secs_f64() * 1e6 / f64::from(PUSHES));
            }
        }
        let of = |n: usize| added.iter().map(|a| Value::of(a[n].clone())).collect();
        let [p50, p99, cpu] = targets;
        rows.extend([
            row(format!("added p50{place} (direct: the whole)"), of(0), Value::of(plain50), p50),
            row(format!("added p99{place} (direct: the whole)"), of(1), Value::of(plain99), p99),
            row(format!("agent CPU per push{place}"), of(2), None, cpu),
        ]);
    }
    Ok(rows)
}

async fn latencies(pair: &mut Pair, payload: &Bytes, count: u32) -> Result<(f64, f64), String> {
    let mut times = Vec::new();
    for _ in 0..count {
        let begin = Instant::now();
        pair.server.responses.raw(payload.clone()).await.map_err(|_| "istiod's stream ended")?;
        limit("push", pair.client.message()).await?.map_err(|e| e.to_string())?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}
