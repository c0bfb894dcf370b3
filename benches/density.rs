//! Many agents on one node, each with a certificate and a configuration of 1 MB: what each holds and does when
//! nothing happens, and what it takes to start them all at once.
//!
//! The stand-in for Envoy sleeps; a stream for each agent is kept open by this process, as Envoy's is. What the kernel
//! holds for sockets is counted for the whole machine, so it is a bound.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mock_istiod::MockIstiod;
use mock_istiod::ads::AdsStream;
use mock_istiod::bulk::{self, Kind};
use tokio::task::JoinSet;

use crate::ads::Stream;
use crate::agent::{ADS, Agent, LIMIT, Setup};
use crate::proc::{Proc, socket_memory};
use crate::relay::{limit, pair};
use crate::status;
use crate::table::{Row, Value};
use crate::web::Web;

const NODES: [usize; 2] = [50, 200];
const CONFIG: usize = 1_000_000;
/// After the last message: what a start leaves to do is over.
const SETTLE: Duration = Duration::from_secs(15);

/// What one run gives; memory in bytes, for each agent.
#[derive(Default)]
struct Node {
    last: f64,
    ready: f64,
    start_cpu: Vec<f64>,
    ready_cpu: Vec<f64>,
    pss: Vec<f64>,
    rss: Vec<f64>,
    anon: Vec<f64>,
    tables: Vec<f64>,
    sockets: f64,
    kernel: Vec<f64>,
    threads: Vec<f64>,
    wakes: Vec<f64>,
    idle_cpu: Vec<f64>,
}

/// All rows: `seconds` of idling for each number of agents.
pub(crate) async fn nodes(binaries: &[PathBuf], seconds: u64) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for count in NODES {
        let mut all = Vec::new();
        for (place, binary) in binaries.iter().enumerate() {
            match node(binary, count, Duration::from_secs(seconds)).await {
                Ok(node) => all.push(Some(node)),
                // Each of its agents may take one of the 128 watchers that a user has, and end without.
                Err(why) if place > 0 => {
                    eprintln!("bench: {count} agents of the peer did not get there: {why}");
                    all.push(None);
                }
                Err(why) => return Err(why),
            }
        }
        let mut add = |what: &str, target: &'static str, of: &dyn Fn(&Node) -> Vec<f64>| {
            let mut values = all.iter().map(|node| Value::of(of(node.as_ref()?)));
            let ours = values.next().flatten();
            let (what, peer) = (format!("{count} agents: {what}"), values.next().flatten());
            rows.push(Row { what, ours, peer, wire: None, direct: None, target });
        };
        add("started at once, to the last certificate (ms)", "–", &|n| vec![n.last]);
        add("started at once, to the last that is ready (ms)", "–", &|n| vec![n.ready]);
        add("CPU from exec to a served certificate, P-256 (ms)", "≤ 20", &|n| n.start_cpu.clone());
        add("CPU from exec to ready (ms)", "–", &|n| n.ready_cpu.clone());
        add("proportional memory each (MB)", "≤ 1.36", &|n| n.pss.clone());
        add("resident each (MB)", "–", &|n| n.rss.clone());
        add("anonymous each (MB)", "–", &|n| n.anon.clone());
        add("page tables each (MB)", "–", &|n| n.tables.clone());
        add("kernel memory of TCP sockets, both ends, each (MB)", "–", &|n| vec![n.sockets]);
        add("kernel memory charged to its control group, each (MB)", "–", &|n| n.kernel.clone());
        add("threads each", "–", &|n| n.threads.clone());
        add("wake-ups a second each, idle", "≤ 0.2", &|n| n.wakes.clone());
        add("CPU a second each, idle (µs)", "–", &|n| n.idle_cpu.clone());
    }
    Ok(rows)
}

/// An agent, its configuration's stream, istiod's end of it, and what readiness asks.
struct Running {
    agent: Agent,
    _stream: Stream,
    _istiod: AdsStream,
    _envoy: Web,
}

#[expect(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^53")]
async fn node(binary: &Path, count: usize, idle: Duration) -> Result<Node, String> {
    let text = |e: std::io::Error| e.to_string();
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let mut out = Node { sockets: -(socket_memory() as f64), ..Node::default() };
    let all = started(binary, count, &istiod, &[]).await?;
    let config = bulk::sotw(Kind::Clusters, CONFIG, "all");
    let mut running = Vec::new();
    for one in all {
        out.last = out.last.max(one.certified);
        out.ready = out.ready.max(one.ready);
        out.start_cpu.push(one.certified_cpu);
        out.ready_cpu.push(one.ready_cpu);
        let mut both = pair(one.agent.stream(ADS).await.map_err(text)?, &mut streams, false).await?;
        both.server.responses.raw(config.clone()).await.map_err(|_| "istiod's stream ended")?;
        limit("configuration", both.client.count(1)).await?.map_err(text)?;
        running.push(Running {
            agent: one.agent,
            _stream: both.client,
            _istiod: both.server,
            _envoy: one.envoy,
        });
    }
    tokio::time::sleep(SETTLE).await;
    let procs: Vec<Proc> = running.iter().map(|one| one.agent.proc()).collect();
    let before: Vec<_> = procs.iter().map(|p| (p.wakes(), p.cpu())).collect();
    tokio::time::sleep(idle).await;
    for (proc, (wakes, cpu)) in procs.iter().zip(before) {
        out.wakes.push(proc.wakes().saturating_sub(wakes) as f64 / idle.as_secs_f64());
        out.idle_cpu.push((proc.cpu() - cpu).as_secs_f64() * 1e6 / idle.as_secs_f64());
    }
    for one in &running {
        let proc = one.agent.proc();
        let (memory, shared) = (proc.memory(), proc.shared());
        out.pss.push(shared.pss as f64 / 1e6);
        out.rss.push(memory.rss as f64 / 1e6);
        out.anon.push(memory.anon as f64 / 1e6);
        out.tables.push(shared.tables as f64 / 1e6);
        out.threads.push(proc.threads() as f64);
        out.kernel.extend(one.agent.group.as_ref().map(|group| group.usage().kernel as f64 / 1e6));
    }
    out.sockets = (out.sockets + socket_memory() as f64) / 1e6 / count as f64;
    end(running).await;
    Ok(out)
}

/// An agent that is ready, beside an Envoy that says it is; times since the first of all began, and CPU, in ms.
pub(crate) struct Started {
    /// The agent.
    pub agent: Agent,
    envoy: Web,
    certified: f64,
    certified_cpu: f64,
    ready: f64,
    ready_cpu: f64,
}

/// Agents that were started at once, each with its certificate and ready.
pub(crate) async fn started(
    binary: &Path,
    count: usize,
    istiod: &MockIstiod,
    more: &[(&'static str, String)],
) -> Result<Vec<Started>, String> {
    let text = |e: std::io::Error| e.to_string();
    let mut env = vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())];
    env.extend_from_slice(more);
    let mut waiting = Vec::new();
    for _ in 0..count {
        let setup = Setup { binary, envoy: None, env: env.clone() };
        let agent = Agent::prepare(&setup, "sidecar", istiod).map_err(text)?;
        let envoy = status::admin(agent.admin_port).await.map_err(text)?;
        waiting.push((agent, envoy));
    }
    let begin = Instant::now();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let mut starting = JoinSet::new();
    for (mut agent, envoy) in waiting {
        agent.go().map_err(text)?;
        starting.spawn(async move {
            agent.certificate().await?;
            let (certified, certified_cpu) = (ms(begin.elapsed()), ms(agent.proc().cpu()));
            agent.ready().await?;
            let (ready, ready_cpu) = (ms(begin.elapsed()), ms(agent.proc().cpu()));
            Ok::<_, std::io::Error>(Started { agent, envoy, certified, certified_cpu, ready, ready_cpu })
        });
    }
    let mut agents = Vec::new();
    while let Some(started) = starting.join_next().await {
        agents.push(started.map_err(|e| e.to_string())?.map_err(text)?);
    }
    Ok(agents)
}

/// Ends them all at once: each takes a moment to end its Envoy.
pub(crate) async fn end<T: Send + 'static>(running: Vec<T>) {
    let mut ending = JoinSet::new();
    for one in running {
        ending.spawn_blocking(move || drop(one));
    }
    let _ = tokio::time::timeout(LIMIT, ending.join_all()).await;
}
