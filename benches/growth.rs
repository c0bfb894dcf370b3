//! How cost grows with what an agent is asked to carry: for each quantity a curve, and the exponent that fits it.
//!
//! An exponent of 1 is "twice as much costs twice as much"; anything clearly above it is a defect, and so is a memory
//! that stays when nothing is under way. What is below its floor everywhere is called flat: the noise of pages and
//! clocks would decide its exponent. Everybody is held to one core ([`crate::affinity`]): where the kernel has moved the
//! agent to another one before the last point, that point costs three times as much, and the curve tells of the kernel.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use mock_istiod::MockIstiod;
use mock_istiod::bulk::{self, Kind};
use mock_istiod::names::{self, NameInfo};
use prost::Message;
use serde_json::json;
use tokio::net::UdpSocket;

use crate::ads::Stream;
use crate::affinity::OneCore;
use crate::agent::{ADS, Agent, DELTA, LIMIT, SDS, Setup, node, secret_request};
use crate::cgroup;
use crate::relay::{limit, pair};
use crate::status;

/// Time for what a transfer leaves to do: trimming the heap, closing connections.
const SETTLE: Duration = Duration::from_millis(1500);

/// One measured quantity at each point of a curve.
#[derive(Debug)]
pub(crate) struct Measure {
    what: &'static str,
    /// Below this nothing is said of its growth.
    floor: f64,
    ours: Vec<f64>,
    peer: Vec<f64>,
}

/// What was asked for, how much of it, and what that cost.
#[derive(Debug)]
pub(crate) struct Curve {
    what: &'static str,
    /// The unit of `points`.
    by: &'static str,
    points: Vec<f64>,
    measures: Vec<Measure>,
}

impl Curve {
    fn new(what: &'static str, by: &'static str, points: &[usize], measures: &[(&'static str, f64)]) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^53")]
        let points = points.iter().map(|n| *n as f64).collect();
        let measure = |&(what, floor)| Measure { what, floor, ours: Vec::new(), peer: Vec::new() };
        Self { what, by, points, measures: measures.iter().map(measure).collect() }
    }

    // One point of the first binary, or of the second.
    fn add(&mut self, binary: usize, values: &[f64]) {
        for (measure, value) in self.measures.iter_mut().zip(values) {
            if binary == 0 { &mut measure.ours } else { &mut measure.peer }.push(*value);
        }
    }

    /// A table: a line a point, the exponents at the end.
    pub(crate) fn print(&self) {
        println!("\nGrowth: {}", self.what);
        for measure in &self.measures {
            for (who, values) in [("this agent", &measure.ours), ("peer", &measure.peer)] {
                if values.is_empty() {
                    continue;
                }
                let points: Vec<String> =
                    self.points.iter().zip(values).map(|(x, y)| format!("{x}: {y:.2}")).collect();
                let grows = exponent(&self.points, values, measure.floor)
                    .map_or_else(|| "flat".to_owned(), |e| format!("exponent {e:.2}"));
                println!("  {}, {who}, by {}: {}; {grows}", measure.what, self.by, points.join(", "));
            }
        }
    }

    /// For `--json`.
    pub(crate) fn json(&self) -> serde_json::Value {
        let measure = |m: &Measure| {
            json!({
                "what": m.what, "ours": m.ours, "peer": m.peer,
                "exponent": exponent(&self.points, &m.ours, m.floor),
                "peer_exponent": exponent(&self.points, &m.peer, m.floor),
            })
        };
        json!({
            "what": self.what, "by": self.by, "points": self.points,
            "measures": self.measures.iter().map(measure).collect::<Vec<_>>(),
        })
    }
}

/// The slope of the line through the logarithms of what is above the floor, and of the point before that (least
/// squares); nothing where all is below it.
#[expect(clippy::cast_precision_loss, reason = "a handful of points")]
fn exponent(points: &[f64], values: &[f64], floor: f64) -> Option<f64> {
    let first = values.iter().position(|y| *y > floor)?.saturating_sub(1);
    let logs: Vec<(f64, f64)> = points
        .iter()
        .zip(values)
        .skip(first)
        .filter(|(_, y)| **y > 0.0)
        .map(|(x, y)| (x.ln(), y.ln()))
        .collect();
    let count = logs.len() as f64;
    let (sx, sy) = logs.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let (mx, my) = (sx / count, sy / count);
    let (over, under) = logs
        .iter()
        .fold((0.0, 0.0), |sum, one| (sum.0 + (one.0 - mx) * (one.1 - my), sum.1 + (one.0 - mx).powi(2)));
    (logs.len() > 1 && under > 0.0).then(|| over / under)
}

/// All curves.
pub(crate) async fn curves(binaries: &[PathBuf]) -> Result<Vec<Curve>, String> {
    let mut all = Vec::new();
    let [mut config, mut resources, mut pushes, mut names, mut hosts, mut series, mut streams] = empty();
    for (n, binary) in binaries.iter().enumerate() {
        eprintln!("  {}", binary.display());
        let done = configuration(binary, n, &mut config).await;
        ended(done, &config)?;
        let done = many_resources(binary, n, &mut resources).await;
        ended(done, &resources)?;
        let done = push_sizes(binary, n, &mut pushes).await;
        ended(done, &pushes)?;
        let done = secret_names(binary, n, &mut names).await;
        ended(done, &names)?;
        let done = dns_hosts(binary, n, &mut hosts).await;
        ended(done, &hosts)?;
        let done = scrapes(binary, n, &mut series).await;
        ended(done, &series)?;
        let done = open_streams(binary, n, &mut streams).await;
        ended(done, &streams)?;
    }
    all.extend([config, resources, pushes, names, hosts, series, streams]);
    Ok(all)
}

// Says which curve it was, and ends with it where an agent was killed at its memory limit.
fn ended(done: Result<(), String>, curve: &Curve) -> Result<(), String> {
    done.map_err(|e| format!("{}: {e}", curve.what))?;
    cgroup::held(curve.what)
}

fn empty() -> [Curve; 7] {
    const CPU: (&str, f64) = ("agent CPU (ms)", 1.0);
    const PEAK: (&str, f64) = ("peak over idle (MB)", 1.0);
    const LEFT: (&str, f64) = ("left over idle (MB)", 1.0);
    [
        Curve::new("configuration in one message", "MB", &[1, 10, 50, 200], &[CPU, PEAK, LEFT]),
        Curve::new(
            "small resources in one delta message",
            "resources",
            &[1_000, 10_000, 100_000],
            &[CPU, PEAK, LEFT],
        ),
        Curve::new(
            "a delta push",
            "KB",
            &[1, 10, 100, 1_000],
            &[("p50 through the agent (µs)", 1.0), ("agent CPU (µs)", 1.0)],
        ),
        Curve::new(
            "SDS names, a stream each (roots in files)",
            "names",
            &[1, 10, 100, 300, 1_000],
            &[("agent CPU (ms)", 1.0), ("anonymous over idle (MB)", 0.5)],
        ),
        Curve::new(
            "hosts in the DNS table",
            "hosts",
            &[1_000, 10_000, 50_000],
            &[("anonymous over idle (MB)", 0.5), PEAK, ("look-up p50 (µs)", 1.0)],
        ),
        Curve::new(
            "series of the application in a scrape",
            "series",
            &[1_000, 10_000, 100_000, 500_000],
            &[("scrape (ms)", 1.0), CPU, PEAK],
        ),
        Curve::new(
            "SDS streams for the workload's certificate",
            "streams",
            &[10, 100, 1_000, 2_500, 5_000],
            &[("agent CPU (ms)", 1.0), ("anonymous over idle (MB)", 0.5)],
        ),
    ]
}

fn text(error: std::io::Error) -> String {
    error.to_string()
}

fn counts(curve: &Curve) -> Vec<usize> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "made of usize")]
    curve.points.iter().map(|n| *n as usize).collect()
}

// An agent with a certificate, and everybody on its core.
async fn started(
    binary: &Path,
    istiod: &MockIstiod,
    more: &[(&'static str, String)],
) -> Result<(Agent, OneCore), String> {
    let mut env = vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())];
    env.extend_from_slice(more);
    let agent = Agent::start(&Setup { binary, envoy: None, env }, istiod).map_err(text)?;
    agent.certificate().await.map_err(text)?;
    let held = OneCore::with(agent.proc().id).map_err(text)?;
    Ok((agent, held))
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn mb(now: u64, before: u64) -> f64 {
    (now as f64 - before as f64) / 1e6
}

/// Messages through the agent: its CPU, its peak and what is left, from one agent for all sizes.
async fn relayed(
    binary: &Path,
    path: &str,
    delta: bool,
    messages: Vec<bytes::Bytes>,
) -> Result<Vec<[f64; 3]>, String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let (agent, _held) = started(binary, &istiod, &[]).await?;
    let proc = agent.proc();
    let mut out = Vec::new();
    // The first message loads code and fills buffers, which is no growth: once unmeasured.
    let warm = messages.first().cloned();
    let mut idle = 0;
    for (n, message) in warm.into_iter().chain(messages).enumerate() {
        proc.reset_peak();
        let cpu = proc.cpu();
        let mut both = pair(agent.stream(path).await.map_err(text)?, &mut streams, delta).await?;
        both.server.responses.raw(message).await.map_err(|_| "istiod's stream ended")?;
        limit("message", both.client.count(1)).await?.map_err(text)?;
        let cpu = (proc.cpu() - cpu).as_secs_f64() * 1e3;
        let peak = proc.memory().peak;
        drop(both);
        tokio::time::sleep(SETTLE).await;
        let left = proc.memory().rss;
        if n == 0 {
            idle = left;
        } else {
            out.push([cpu, mb(peak, idle), mb(left, idle)]);
        }
    }
    Ok(out)
}

async fn configuration(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    let message = |megabytes: usize| bulk::sotw(Kind::Clusters, megabytes * 1_000_000, "all");
    let messages = counts(curve).into_iter().map(message).collect();
    relayed(binary, ADS, false, messages).await?.iter().for_each(|values| curve.add(n, values));
    Ok(())
}

async fn many_resources(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    let type_url = Kind::Clusters.type_url();
    let one = |number: usize| Resource {
        name: format!("outbound|80||service-{number}"),
        version: "1".to_owned(),
        resource: Some(Any { type_url: type_url.to_owned(), value: Vec::new() }),
        ..Resource::default()
    };
    let message = |count: usize| {
        let response = DeltaDiscoveryResponse {
            type_url: type_url.to_owned(),
            nonce: "n".to_owned(),
            resources: (0..count).map(one).collect(),
            ..DeltaDiscoveryResponse::default()
        };
        framed(&response)
    };
    let messages = counts(curve).into_iter().map(message).collect();
    relayed(binary, DELTA, true, messages).await?.iter().for_each(|values| curve.add(n, values));
    Ok(())
}

fn framed(message: &impl Message) -> bytes::Bytes {
    let body = message.encode_to_vec();
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    [&[0][..], &length.to_be_bytes(), &body].concat().into()
}

async fn push_sizes(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    const PUSHES: usize = 200;
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let (agent, _held) = started(binary, &istiod, &[]).await?;
    for size in counts(curve) {
        let payload = bulk::delta(Kind::Clusters, size * 1000, "n");
        let mut both = pair(agent.stream(DELTA).await.map_err(text)?, &mut streams, true).await?;
        let mut times = Vec::new();
        let cpu = agent.proc().cpu();
        for _ in 0..PUSHES {
            let begin = Instant::now();
            both.server.responses.raw(payload.clone()).await.map_err(|_| "istiod's stream ended")?;
            limit("push", both.client.count(1)).await?.map_err(text)?;
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        #[expect(clippy::cast_precision_loss, reason = "200")]
        let cpu = (agent.proc().cpu() - cpu).as_secs_f64() * 1e6 / PUSHES as f64;
        curve.add(n, &[times[PUSHES / 2], cpu]);
    }
    Ok(())
}

/// Opens `count` more streams, a hundred on a connection, and takes the first answer of each.
async fn secrets(agent: &Agent, names: impl Iterator<Item = String>) -> Result<Vec<Stream>, String> {
    let mut open: Vec<Stream> = Vec::new();
    let mut lead = 0;
    for (n, name) in names.enumerate() {
        let mut stream = if n % 100 == 0 {
            lead = n;
            agent.secrets().await.map_err(text)?
        } else {
            open[lead].another("sds-grpc", SDS).await.map_err(text)?
        };
        let request = secret_request(&name);
        stream.send(&request).map_err(text)?;
        let answer = limit("secret", stream.message()).await?.map_err(text)?;
        let answer = DiscoveryResponse::decode(answer).map_err(|e| e.to_string())?;
        let ack = DiscoveryRequest {
            node: None,
            version_info: answer.version_info,
            response_nonce: answer.nonce,
            ..request
        };
        stream.send(&ack).map_err(text)?;
        open.push(stream);
    }
    Ok(open)
}

async fn opened(agent: &Agent, names: impl Iterator<Item = String>) -> Result<[f64; 2], String> {
    let proc = agent.proc();
    let (cpu, anon) = (proc.cpu(), proc.memory().anon);
    let open = secrets(agent, names).await?;
    let values = [(proc.cpu() - cpu).as_secs_f64() * 1e3, mb(proc.memory().anon, anon)];
    drop(open);
    Ok(values)
}

async fn secret_names(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    for count in counts(curve) {
        let istiod = MockIstiod::start().await;
        let (agent, _held) = started(binary, &istiod, &[]).await?;
        for number in 0..count {
            std::fs::write(agent.path(&format!("root-{number}.pem")), istiod.root_pem()).map_err(text)?;
        }
        let names = (0..count)
            .map(|number| format!("file-root:{}", agent.path(&format!("root-{number}.pem")).display()));
        curve.add(n, &opened(&agent, names).await?);
    }
    Ok(())
}

async fn open_streams(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    for count in counts(curve) {
        let istiod = MockIstiod::start().await;
        let (agent, _held) = started(binary, &istiod, &[]).await?;
        curve.add(n, &opened(&agent, (0..count).map(|_| "default".to_owned())).await?);
    }
    Ok(())
}

fn host(number: usize) -> String {
    format!("service-{number:06}.shop.svc.cluster.local")
}

fn table(count: usize) -> DiscoveryResponse {
    let info = |number: usize| {
        let ip = format!("10.{}.{}.{}", number >> 16, (number >> 8) & 255, number & 255);
        (host(number), NameInfo::service(&host(number), "shop", &ip))
    };
    names::response("names", (0..count).map(info))
}

async fn dns_hosts(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
    for count in counts(curve) {
        let istiod = MockIstiod::start().await;
        istiod.record().off();
        let mut streams = istiod.take_streams();
        let port = mock_istiod::net::free_port();
        let env =
            [("ISTIO_META_DNS_CAPTURE", "true".to_owned()), ("DNS_PROXY_ADDR", format!("127.0.0.1:{port}"))];
        let (agent, _held) = started(binary, &istiod, &env).await?;
        let mut client = agent.stream(ADS).await.map_err(text)?;
        let first = DiscoveryRequest {
            node: Some(node()),
            type_url: LISTENER.to_owned(),
            ..DiscoveryRequest::default()
        };
        client.send(&first).map_err(text)?;
        let mut server = limit("stream at istiod", streams.recv()).await?.ok_or("istiod is gone")?;
        while limit("request for names", server.requests.recv()).await?.ok_or("the stream ended")?.type_url
            != names::TYPE
        {}
        tokio::time::sleep(SETTLE).await;
        let proc = agent.proc();
        let idle = proc.memory();
        proc.reset_peak();
        server.responses.sotw(&table(count)).await.map_err(|_| "istiod's stream ended")?;
        let look = UdpSocket::bind("127.0.0.1:0").await.map_err(text)?;
        look.connect(("127.0.0.1", port)).await.map_err(text)?;
        // Answered with an address once the table is there.
        let until = Instant::now() + LIMIT;
        while !answered(&look, &host(count - 1)).await {
            if Instant::now() > until {
                return Err(format!("{count} hosts are not served in {LIMIT:?}\n{}", agent.log()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let peak = proc.memory().peak;
        tokio::time::sleep(SETTLE).await;
        let held = proc.memory().anon;
        let mut times = Vec::new();
        for number in 0..1000 {
            let begin = Instant::now();
            if !answered(&look, &host(number * 7919 % count)).await {
                return Err("a host of the table has no address".to_owned());
            }
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        curve.add(n, &[mb(held, idle.anon), mb(peak, idle.rss), times[times.len() / 2]]);
    }
    Ok(())
}

// Whether a query for an A record has an answer with at least one record.
async fn answered(socket: &UdpSocket, host: &str) -> bool {
    let mut query = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in host.split('.') {
        query.push(u8::try_from(label.len()).unwrap_or(63));
        query.extend_from_slice(label.as_bytes());
    }
    query.extend_from_slice(&[0, 0, 1, 0, 1]);
    let mut answer = [0; 512];
    let exchange = async {
        socket.send(&query).await.ok()?;
        socket.recv(&mut answer).await.ok()
    };
    let length = tokio::time::timeout(Duration::from_secs(2), exchange).await.ok().flatten().unwrap_or(0);
    length > 12 && answer[3] & 15 == 0 && answer[7] > 0
}

async fn scrapes(binary: &Path, n: usize, curve: &mut Curve) -> Result<(), String> {
    for count in counts(curve) {
        curve.add(n, &status::scrape_of(binary, count).await?);
    }
    Ok(())
}
