//! What it costs to keep the last good configuration (`XDS_REPLAY`), and what it brings: the same pushes through two
//! agents of one binary, in turns, one that keeps it and one that does not; then an Envoy that dies, with istiod there and
//! with istiod away.

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as Wrapped,
};
use envoy_types::pb::google::protobuf::Any;
use mock_istiod::MockIstiod;
use mock_istiod::ads::AdsStream;
use mock_istiod::bulk::Kind;
use mock_istiod::grpc::frame;
use prost::Message;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::agent::{Agent, DELTA, LIMIT, Setup, header};
use crate::heal::{Mesh, said};
use crate::relay::{Pair, limit, pair};
use crate::table::{Row, Value};

/// Services of a mesh of some size: about 10 MB of clusters.
const SERVICES: u32 = 5000;
/// Changes of one cluster each.
const CHANGES: u32 = 500;
/// The store is filled beside the stream; after that it has been.
const SETTLED: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);
const MODES: [&str; 2] = ["off", "memory"];

// Numbers that do not repeat themselves.
fn drawn(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

// A cluster as istiod writes it, as far as its size goes and what of it is the same in all: about 2 KB.
fn cluster(number: u32, version: u32) -> Wrapped {
    let random = |k: u64| drawn(u64::from(number) * 1000 + u64::from(version) * 7 + k);
    let name = format!(
        "outbound|{}||service-{:x}.team-{}.svc.cluster.local",
        8000 + number % 90,
        random(0),
        number % 97
    );
    let mut text = name.clone();
    for part in [
        "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "envoy.transport_sockets.tls",
        "istio-peer-exchange",
        "istio",
        "h2",
        "tlsMode-istio",
        "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer",
        "type.googleapis.com/envoy.extensions.filters.network.upstream.v3.ProtocolOptions",
        "istio.workload_locality",
        "default_original_port",
        "envoy.filters.network.upstream.metadata_exchange",
        "type.googleapis.com/udpa.type.v1.TypedStruct",
        "sds-grpc",
        "ROOTCA",
        "file-root:system",
    ] {
        text.push_str(part);
        text.push('\u{a}');
    }
    for k in 0..8 {
        let (a, b) = (random(2 * k + 1), random(2 * k + 2));
        text.push_str(&format!(
            "spiffe://cluster.local/ns/team-{}/sa/account-{:x}10.{}.{}.{}:{}uid-{a:016x}{b:016x}region-{}/zone-{}\u{12}",
            number % 97, a % 4096, a % 250, (a >> 8) % 250, (a >> 16) % 250, 8000 + b % 2000, b % 3, b % 9
        ));
    }
    let type_url = Kind::Clusters.type_url().to_owned();
    Wrapped {
        name,
        version: version.to_string(),
        resource: Some(Any { type_url, value: text.into_bytes() }),
        ..Wrapped::default()
    }
}

fn response(resources: Vec<Wrapped>, nonce: &str) -> Bytes {
    let type_url = Kind::Clusters.type_url().to_owned();
    let nonce = nonce.to_owned();
    frame(
        &DeltaDiscoveryResponse { type_url, nonce, resources, ..DeltaDiscoveryResponse::default() }
            .encode_to_vec(),
    )
}

fn ack(nonce: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: Kind::Clusters.type_url().to_owned(),
        response_nonce: nonce.to_owned(),
        ..DeltaDiscoveryRequest::default()
    }
}

// One push and its answer; gives what the push took.
async fn push(pair: &mut Pair, message: &Bytes, nonce: &str) -> Result<f64, String> {
    let begin = Instant::now();
    pair.server.responses.raw(message.clone()).await.map_err(|_| "istiod's stream ended")?;
    limit("push", pair.client.message()).await?.map_err(said)?;
    let took = begin.elapsed();
    pair.client.send(&ack(nonce)).map_err(said)?;
    limit("answer at istiod", pair.server.requests.recv()).await?.ok_or("istiod is gone")?;
    Ok(took.as_secs_f64() * 1e3)
}

#[derive(Default)]
struct Measured {
    large: Vec<f64>,
    cpu: Vec<f64>,
    small: Vec<f64>,
    small_cpu: Vec<f64>,
    held: Vec<f64>,
}

async fn started(binary: &Path, mode: &str, istiod: &MockIstiod) -> Result<Agent, String> {
    let env = vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()), ("XDS_REPLAY", mode.to_owned())];
    let agent = Agent::start(&Setup { binary, envoy: None, env }, istiod).map_err(said)?;
    agent.certificate().await.map_err(said)?;
    Ok(agent)
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
async fn run(
    agent: &Agent,
    streams: &mut UnboundedReceiver<AdsStream>,
    of: &mut Measured,
    all: &Bytes,
) -> Result<(), String> {
    let proc = agent.proc();
    let client = agent.stream(DELTA).await.map_err(said)?;
    let mut pair = pair(client, streams, true).await?;
    let before = proc.cpu();
    of.large.push(push(&mut pair, all, "all").await?);
    tokio::time::sleep(SETTLED).await;
    of.cpu.push((proc.cpu() - before).as_secs_f64() * 1e3 / (all.len() as f64 / 1e6));
    of.held.push(proc.memory().anon as f64);
    let before = proc.cpu();
    let mut times = Vec::new();
    for n in 0..CHANGES {
        let nonce = format!("change {n}");
        let change = response(vec![cluster(n % SERVICES, 1)], &nonce);
        times.push(push(&mut pair, &change, &nonce).await? * 1e3);
        // What is kept is kept after the push: the next one is not to meet it.
        tokio::time::sleep(PAUSE).await;
    }
    tokio::time::sleep(SETTLED).await;
    of.small_cpu.push((proc.cpu() - before).as_secs_f64() * 1e6 / f64::from(CHANGES));
    times.sort_by(f64::total_cmp);
    of.small.push(times[times.len() / 2]);
    Ok(())
}

fn row(what: String, runs: Vec<f64>, target: &'static str) -> Row {
    Row { what, ours: Value::of(runs), peer: None, wire: None, direct: None, target }
}

/// Of the agent alone: what is compared is one binary with itself.
#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
pub(crate) async fn cost(binary: &Path, runs: usize) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let all = response((0..SERVICES).map(|n| cluster(n, 0)).collect(), "all");
    let size = all.len() as f64;
    let mut measured: [Measured; MODES.len()] = Default::default();
    for _ in 0..runs {
        for (mode, of) in MODES.into_iter().zip(&mut measured) {
            // A fresh one each time, as what it has kept would be there already.
            let agent = started(binary, mode, &istiod).await?;
            run(&agent, &mut streams, of, &all).await?;
        }
    }
    let [off, memory] = measured;
    let added = |on: &[f64], off: &[f64]| on.iter().zip(off).map(|(on, off)| on - off).collect::<Vec<f64>>();
    let held = added(&memory.held, &off.held).into_iter().map(|bytes| bytes / size).collect();
    let of = format!("{:.1} MB of clusters", size / 1e6);
    Ok(vec![
        row(format!("{of}: anonymous memory over XDS_REPLAY=off, times their size"), held, "≤ 0.35"),
        row(format!("{of}: agent CPU ms/MB, off"), off.cpu.clone(), "–"),
        row(format!("{of}: agent CPU ms/MB, memory adds"), added(&memory.cpu, &off.cpu), "≤ 1.5"),
        row(format!("{of}: push to last byte, ms, off"), off.large.clone(), "–"),
        row(format!("{of}: push to last byte, ms, memory adds"), added(&memory.large, &off.large), "0"),
        row("one changed cluster, p50 µs, off".to_owned(), off.small.clone(), "–"),
        row("one changed cluster, p50 µs, memory adds".to_owned(), added(&memory.small, &off.small), "0"),
        row("one changed cluster, agent CPU µs, off".to_owned(), off.small_cpu.clone(), "–"),
        row(
            "one changed cluster, agent CPU µs, memory adds".to_owned(),
            added(&memory.small_cpu, &off.small_cpu),
            "–",
        ),
    ])
}

// The agent's Envoy: the child that is no pilot-agent.
fn envoy_of(agent: &Agent) -> Option<u32> {
    let parent = agent.proc().id;
    let text = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("envoy")
    })
}

/// From Envoy's end by SIGKILL to the first request that its successor answers.
pub(crate) async fn crashes(binary: &Path, envoy: &Path, runs: usize) -> Result<Vec<Row>, String> {
    let (mut there, mut away) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        there.push(crash(binary, envoy, false).await?);
        away.push(crash(binary, envoy, true).await?);
    }
    let more = away.iter().zip(&there).map(|(away, there)| away - there).collect();
    Ok(vec![
        row("Envoy killed, istiod there: first request answered, ms".to_owned(), there, "–"),
        row("Envoy killed, istiod away: first request answered, ms".to_owned(), away, "–"),
        row("what istiod's absence adds, ms".to_owned(), more, "≤ 300"),
    ])
}

// A SIGKILL looks like a lack of memory, which is answered once: each has an agent of its own.
async fn crash(binary: &Path, envoy: &Path, down: bool) -> Result<f64, String> {
    let istiod = MockIstiod::start().await;
    let mesh = Mesh::new();
    mesh.push(&istiod, "one")?;
    let env = vec![
        ("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()),
        ("XDS_REPLAY", "memory".to_owned()),
        ("ENVOY_RECOVERY", "true".to_owned()),
    ];
    let agent = Agent::start(&Setup { binary, envoy: Some(envoy), env }, &istiod).map_err(said)?;
    agent.ready().await.map_err(said)?;
    mesh.shows("one", LIMIT).await?;
    if down {
        istiod.down().await;
    }
    let pid = envoy_of(&agent).ok_or("no Envoy runs")?;
    std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status().map_err(said)?;
    let since = Instant::now();
    while header(mesh.outbound, "/", "x-config").await.is_some() && since.elapsed() < LIMIT {}
    mesh.shows("one", LIMIT).await.map_err(|e| format!("{e}\n{}", agent.log()))?;
    Ok(since.elapsed().as_secs_f64() * 1e3)
}
