//! Configuration through the agent, and past it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use mock_istiod::MockIstiod;
use mock_istiod::ads::{AdsStream, Responses};
use mock_istiod::bulk::{self, Kind};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::ads::Stream;
use crate::agent::{ADS, Agent, DELTA, LIMIT, Setup, node};
use crate::table::{Row, Value};

const MB: usize = 1_000_000;

struct Pair {
    client: Stream,
    server: AdsStream,
}

async fn limit<T>(what: &str, task: impl Future<Output = T>) -> Result<T, String> {
    tokio::time::timeout(LIMIT, task).await.map_err(|_| format!("{what}: nothing within {LIMIT:?}"))
}

// A stream whose far end is in our hands.
async fn pair(
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

/// Throughput, CPU and memory by shape.
pub async fn bulk(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let mut rows = Vec::new();
    for shape in SHAPES {
        let payload = bulk::many(Kind::Clusters, shape.total, shape.each);
        let count = (shape.total / shape.each).max(1);
        let mut plain = Vec::new();
        for _ in 0..runs {
            let mut pair = pair(direct(&istiod, ADS).await?, &mut streams, false).await?;
            plain.push(transfer(&mut pair, &payload, count).await?);
        }
        let mut measured: [Vec<Option<Value>>; 4] = Default::default();
        for binary in binaries {
            let of = through(binary, &istiod, &mut streams, &payload, count, runs).await?;
            let pick = |f: fn(&Run) -> f64| Value::of(of.iter().map(f).collect());
            measured[0].push(pick(|r| r.throughput));
            measured[1].push(pick(|r| r.cpu));
            measured[2].push(pick(|r| r.peak));
            measured[3].push(pick(|r| r.after));
        }
        let [throughput, cpu, peak, after] = measured;
        let row = |what: &str, values: Vec<Option<Value>>, direct, target| {
            let mut values = values.into_iter();
            let what = format!("{}: {what}", shape.name);
            Row { what, ours: values.next().flatten(), peer: values.next().flatten(), direct, target }
        };
        rows.push(row("MB/s", throughput, Value::of(plain), "≥ peer"));
        rows.push(row("agent CPU ms/MB", cpu, None, shape.cpu_target));
        rows.push(row("peak over idle MB", peak, None, shape.peak_target));
        rows.push(row("left over idle MB", after, None, "≤ 1"));
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

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
async fn through(
    binary: &Path,
    istiod: &MockIstiod,
    streams: &mut UnboundedReceiver<AdsStream>,
    payload: &Bytes,
    count: usize,
    runs: usize,
) -> Result<Vec<Run>, String> {
    let setup = Setup { binary, envoy: None, env: vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())] };
    let agent = Agent::start(&setup, istiod).map_err(|e| e.to_string())?;
    agent.certificate().await.map_err(|e| e.to_string())?;
    // An agent at rest has an Envoy that was served before: the relay's code is in memory. Without this its
    // first megabyte of pages would count as growth.
    let small = bulk::sotw(Kind::Clusters, 1000, "warm");
    let mut warm = pair(agent.stream(ADS).await.map_err(|e| e.to_string())?, streams, false).await?;
    transfer(&mut warm, &small, 1).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let proc = agent.proc();
    let idle = proc.memory().rss;
    drop(warm);
    let mut out = Vec::new();
    for _ in 0..runs {
        let client = agent.stream(ADS).await.map_err(|e| e.to_string())?;
        let mut pair = pair(client, streams, false).await?;
        proc.reset_peak();
        let before = proc.cpu();
        let throughput = transfer(&mut pair, payload, count).await?;
        let cpu = (proc.cpu() - before).as_secs_f64() * 1e3 / (payload.len() as f64 / 1e6);
        let peak = proc.memory().peak.saturating_sub(idle) as f64 / 1e6;
        drop(pair);
        tokio::time::sleep(Duration::from_millis(300)).await;
        let after = (proc.memory().rss as f64 - idle as f64) / 1e6;
        out.push(Run { throughput, cpu, peak, after });
    }
    Ok(out)
}

/// One small resource at a time, as most changes of a mesh are.
pub async fn pushes(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    const PUSHES: usize = 1000;
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let payload = bulk::delta(Kind::Clusters, 1000, "n");
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let mut pair = pair(direct(&istiod, DELTA).await?, &mut streams, true).await?;
        let (a, b) = latencies(&mut pair.client, &pair.server.responses, &payload, PUSHES).await?;
        p50.push(a);
        p99.push(b);
    }
    let base = (Value::of(p50.clone()), Value::of(p99.clone()));
    let floor = |mut v: Vec<f64>| {
        v.sort_by(f64::total_cmp);
        v[v.len() / 2]
    };
    let (floor50, floor99) = (floor(p50), floor(p99));
    let mut measured: [Vec<Option<Value>>; 3] = Default::default();
    for binary in binaries {
        let setup = Setup { binary, envoy: None, env: vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())] };
        let agent = Agent::start(&setup, &istiod).map_err(|e| e.to_string())?;
        agent.certificate().await.map_err(|e| e.to_string())?;
        let (mut p50, mut p99, mut cpu) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..runs {
            let client = agent.stream(DELTA).await.map_err(|e| e.to_string())?;
            let mut pair = pair(client, &mut streams, true).await?;
            let before = agent.proc().cpu();
            let (a, b) = latencies(&mut pair.client, &pair.server.responses, &payload, PUSHES).await?;
            let spent = agent.proc().cpu() - before;
            p50.push(a - floor50);
            p99.push(b - floor99);
            cpu.push(spent.as_secs_f64() * 1e6 / f64::from(u32::try_from(PUSHES).unwrap_or(1)));
        }
        measured[0].push(Value::of(p50));
        measured[1].push(Value::of(p99));
        measured[2].push(Value::of(cpu));
    }
    let [p50, p99, cpu] = measured;
    let row = |what: &str, values: Vec<Option<Value>>, direct, target| {
        let mut values = values.into_iter();
        Row {
            what: what.to_owned(),
            ours: values.next().flatten(),
            peer: values.next().flatten(),
            direct,
            target,
        }
    };
    Ok(vec![
        row("added p50 (direct: the whole)", p50, base.0, "≤ 50"),
        row("added p99 (direct: the whole)", p99, base.1, "≤ 150"),
        row("agent CPU per push", cpu, None, "≤ 55"),
    ])
}

async fn latencies(
    client: &mut Stream,
    responses: &Responses,
    payload: &Bytes,
    count: usize,
) -> Result<(f64, f64), String> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        responses.raw(payload.clone()).await.map_err(|_| "istiod's stream ended")?;
        limit("push", client.message()).await?.map_err(|e| e.to_string())?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[count / 2], times[count * 99 / 100]))
}
