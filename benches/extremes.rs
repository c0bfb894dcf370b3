//! Far ends: a gateway with thousands of listeners, and an agent that is given a tenth of a processor.
//!
//! The gateway's Envoy asks for a certificate of its own for each listener, on a stream each as Envoy does, while on its
//! one configuration stream 50 MB pass, among them as many secrets that istiod serves. All of it is compared.
//!
//! The slow agent has to answer readiness while 50 MB pass. The kernel gives it its 10 ms of each 100 ms and holds it
//! for the rest, so nothing can be answered in the 90 ms after; whoever has asked meanwhile must be answered at the next
//! turn. Callers ask at fixed times, whether or not the answer before has come: else each slow answer would hide the next.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{DataSource, data_source::Specifier};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{Secret, TlsCertificate, secret};
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::google::protobuf::Any;
use mock_istiod::bulk::{self, Kind};
use mock_istiod::{MockIstiod, Pair as Certificate};
use prost::Message;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::ads::Stream;
use crate::agent::{ADS, Agent, SDS, Setup, secret_request};
use crate::cgroup::Share;
use crate::proc::{Memory, Proc};
use crate::relay::{Pair, limit, pair};
use crate::status;
use crate::table::{Row, Value};
use crate::web::{Caller, Web};

const MB: usize = 1_000_000;
const CONFIG: usize = 50 * MB;
/// Listeners of the gateway, with a certificate each.
const NAMES: usize = 5_000;
/// Time for what a transfer leaves to do.
const SETTLE: Duration = Duration::from_secs(3);
/// How long nothing happens, with all streams open.
const IDLE: Duration = Duration::from_secs(20);
/// Of one processor.
const PERCENT: u64 = 10;
/// Callers that keep their connection, and as many that do not; each asks so often, none at the same time as another.
const CALLERS: u32 = 10;
const EVERY: Duration = Duration::from_millis(200);
/// How long nothing passes, for comparison.
const QUIET: Duration = Duration::from_secs(10);
/// Times that the 50 MB pass in one run.
const PASSES: usize = 10;

/// All rows.
pub(crate) async fn all(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    let mut rows = Rows(Vec::new());
    for binary in binaries {
        for n in 1..=runs.min(3) {
            eprintln!("  {}: gateway, run {n}", binary.display());
            gateway(binary, &mut rows).await?;
        }
        rows.next();
    }
    for binary in binaries {
        eprintln!("  {}: {PERCENT} % of a processor", binary.display());
        match slow(binary, runs.min(3), &mut rows).await? {
            Ok(()) => rows.next(),
            Err(why) => {
                eprintln!("bench: the agent with {PERCENT} % of a processor is not measured: {why}");
                break;
            }
        }
    }
    Ok(rows.0.into_iter().map(Growing::row).collect())
}

/// Values of one quantity, by agent.
struct Growing {
    what: String,
    target: &'static str,
    values: Vec<Vec<f64>>,
    done: usize,
}

impl Growing {
    fn row(self) -> Row {
        let mut values = self.values.into_iter().map(Value::of);
        let (ours, peer) = (values.next().flatten(), values.next().flatten());
        Row { what: self.what, ours, peer, wire: None, direct: None, target: self.target }
    }
}

struct Rows(Vec<Growing>);

impl Rows {
    fn add(&mut self, what: &str, target: &'static str, value: f64) {
        let at = self.0.iter().position(|row| row.what == what).unwrap_or_else(|| {
            self.0.push(Growing { what: what.to_owned(), target, values: Vec::new(), done: 0 });
            self.0.len() - 1
        });
        let row = &mut self.0[at];
        row.values.resize(row.done + 1, Vec::new());
        row.values[row.done].push(value);
    }

    // What comes next is of the next agent.
    fn next(&mut self) {
        self.0.iter_mut().for_each(|row| row.done = row.values.len());
    }
}

fn text(error: std::io::Error) -> String {
    error.to_string()
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn over(now: u64, before: u64) -> f64 {
    (now as f64 - before as f64) / 1e6
}

/// Keeps looking how much anonymous memory there is; the most that was seen when it is stopped.
struct Watch {
    task: JoinSet<u64>,
    over: Arc<AtomicBool>,
}

impl Watch {
    fn start(proc: Proc) -> Self {
        let over = Arc::<AtomicBool>::default();
        let (until, mut task) = (over.clone(), JoinSet::new());
        task.spawn(async move {
            let mut most = 0;
            while !until.load(Relaxed) {
                most = most.max(proc.memory().anon);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            most
        });
        Self { task, over }
    }

    async fn most(mut self) -> u64 {
        self.over.store(true, Relaxed);
        self.task.join_next().await.and_then(Result::ok).unwrap_or(0)
    }
}

async fn gateway(binary: &Path, rows: &mut Rows) -> Result<(), String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let env = vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())];
    let mut agent = Agent::prepare(&Setup { binary, envoy: None, env }, "router", &istiod).map_err(text)?;
    agent.go().map_err(text)?;
    agent.certificate().await.map_err(text)?;
    let certificate = istiod.issue("spiffe://cluster.local/ns/default/sa/bench", Duration::from_secs(3600));
    for n in 0..NAMES {
        std::fs::write(agent.path(&format!("{n}.pem")), &certificate.chain).map_err(text)?;
        std::fs::write(agent.path(&format!("{n}.key")), &certificate.key).map_err(text)?;
    }
    let client = agent.stream(ADS).await.map_err(text)?;
    let mut both = pair(client, &mut streams, false).await?;
    tokio::time::sleep(SETTLE).await;
    let proc = agent.proc();
    let (idle, cpu, watch) = (proc.memory(), proc.cpu(), Watch::start(proc));
    proc.reset_peak();
    let begin = Instant::now();
    let (configured, (mut open, served)) = tokio::try_join!(
        configuration(&mut both, &certificate, begin),
        listeners(&agent, &certificate, begin)
    )?;
    let spent = proc.cpu() - cpu;
    let Memory { peak, .. } = proc.memory();
    tokio::time::sleep(SETTLE).await;
    let (held, cpu, since) = (proc.memory(), proc.cpu(), Instant::now());
    tokio::time::sleep(IDLE).await;
    let idling = (proc.cpu() - cpu).as_secs_f64() * 1e3 / since.elapsed().as_secs_f64();
    let (cpu, begin) = (proc.cpu(), Instant::now());
    let fresh = istiod.issue("spiffe://cluster.local/ns/default/sa/bench", Duration::from_secs(7200));
    renewed(&agent, &mut open, &fresh).await?;
    let (pushed, pushing) = (begin.elapsed(), proc.cpu() - cpu);
    drop((open, both));
    tokio::time::sleep(SETTLE).await;
    let left = proc.memory();
    let mut add = |what: &str, target, value| {
        rows.add(&format!("gateway, {NAMES} SDS names while 50 MB pass: {what}"), target, value);
    };
    add("to the last secret (ms)", "–", ms(served));
    add("to the last byte of configuration (ms)", "–", ms(configured));
    add("agent CPU (ms)", "–", ms(spent));
    add("peak over idle (MB)", "–", over(peak, idle.rss));
    add("anonymous, most seen over idle (MB)", "–", over(watch.most().await, idle.anon));
    add("anonymous with all open, over idle (MB)", "–", over(held.anon, idle.anon));
    add("CPU a second when nothing happens, all open (ms)", "–", idling);
    add("one certificate renewed, until it is pushed (ms)", "–", ms(pushed));
    add("one certificate renewed, agent CPU (ms)", "–", ms(pushing));
    add("anonymous after all are closed, over idle (MB)", "–", over(left.anon, idle.anon));
    Ok(())
}

/// 50 MB on the one stream: clusters, and among the last as many secrets as there are listeners; compared byte by byte.
async fn configuration(
    both: &mut Pair,
    certificate: &Certificate,
    begin: Instant,
) -> Result<Duration, String> {
    let names: Vec<String> = (0..NAMES).map(|n| format!("kubernetes://credential-{n}")).collect();
    let resource = |name: &String| {
        let secret = inline(name, certificate);
        Any { type_url: mock_istiod::resources::SECRET.to_owned(), value: secret.encode_to_vec() }
    };
    let response = DiscoveryResponse {
        version_info: "1".to_owned(),
        type_url: mock_istiod::resources::SECRET.to_owned(),
        nonce: "secrets".to_owned(),
        resources: names.iter().map(resource).collect(),
        ..DiscoveryResponse::default()
    };
    let secrets = mock_istiod::grpc::frame(&response.encode_to_vec());
    let clusters = bulk::many(Kind::Clusters, CONFIG - secrets.len(), MB);
    let sent: Bytes = [clusters, secrets].concat().into();
    let request = DiscoveryRequest {
        type_url: response.type_url,
        resource_names: names,
        ..DiscoveryRequest::default()
    };
    both.client.send(&request).map_err(text)?;
    let asked = limit("request for secrets", both.server.requests.recv()).await?.ok_or("the stream ended")?;
    if asked.names != request.resource_names {
        return Err(format!("istiod was asked for {} of {NAMES} secrets", asked.names.len()));
    }
    both.server.responses.raw(sent.clone()).await.map_err(|_| "istiod's stream ended")?;
    let mut rest = sent;
    while !rest.is_empty() {
        let message = limit("configuration", both.client.message()).await?.map_err(text)?;
        let expected = rest.split_to((5 + message.len()).min(rest.len()));
        if expected.get(5..) != Some(&message) {
            return Err(format!("a message of {} bytes is not what istiod sent", message.len()));
        }
    }
    Ok(begin.elapsed())
}

fn inline(name: &str, certificate: &Certificate) -> Secret {
    let data = |text: &str| {
        let specifier = Some(Specifier::InlineBytes(text.as_bytes().to_vec()));
        Some(DataSource { specifier, ..DataSource::default() })
    };
    let pair = TlsCertificate {
        certificate_chain: data(&certificate.chain),
        private_key: data(&certificate.key),
        ..TlsCertificate::default()
    };
    Secret { name: name.to_owned(), r#type: Some(secret::Type::TlsCertificate(pair)) }
}

/// A stream for each listener's certificate, all on one connection; when the last has its own.
async fn listeners(
    agent: &Agent,
    certificate: &Certificate,
    begin: Instant,
) -> Result<(Vec<Stream>, Duration), String> {
    let name = |n: usize| {
        let at = |end: &str| agent.path(&format!("{n}.{end}")).display().to_string();
        format!("file-cert:{}~{}", at("pem"), at("key"))
    };
    let mut open = vec![agent.secrets().await.map_err(text)?];
    while open.len() < NAMES {
        let stream = limit("a stream for a secret", open[0].another("sds-grpc", SDS)).await?;
        open.push(stream.map_err(text)?);
    }
    for (n, stream) in open.iter_mut().enumerate() {
        stream.send(&secret_request(&name(n))).map_err(text)?;
    }
    for (n, stream) in open.iter_mut().enumerate() {
        let answer = limit("a secret", stream.message()).await?.map_err(text)?;
        let answer = DiscoveryResponse::decode(answer).map_err(|e| e.to_string())?;
        let secrets = answer.resources.iter().map(|any| Secret::decode(any.value.as_slice()));
        if !secrets.eq([Ok(inline(&name(n), certificate))]) {
            return Err(format!("the answer for {} is not its secret", name(n)));
        }
        let ack = DiscoveryRequest {
            node: None,
            version_info: answer.version_info,
            response_nonce: answer.nonce,
            ..secret_request(&name(n))
        };
        stream.send(&ack).map_err(text)?;
    }
    Ok((open, begin.elapsed()))
}

/// Replaces one listener's pair in its files, as a mounted volume does, and waits for it.
async fn renewed(agent: &Agent, open: &mut [Stream], fresh: &Certificate) -> Result<(), String> {
    let one = NAMES / 2;
    // The certificate decides, so it comes last.
    for (end, text) in [("key", &fresh.key), ("pem", &fresh.chain)] {
        let path = agent.path(&format!("{one}.{end}"));
        std::fs::write(path.with_extension("fresh"), text).map_err(self::text)?;
        std::fs::rename(path.with_extension("fresh"), path).map_err(self::text)?;
    }
    let answer = limit("the renewed certificate", open[one].message()).await?.map_err(self::text)?;
    let answer = DiscoveryResponse::decode(answer).map_err(|e| e.to_string())?;
    let secret = answer.resources.first().map(|any| Secret::decode(any.value.as_slice()));
    match secret {
        Some(Ok(secret)) if secret.r#type == inline("", fresh).r#type => Ok(()),
        _ => Err("what was pushed is not the renewed certificate".to_owned()),
    }
}

/// An agent with little of a processor, ready.
struct Slow {
    agent: Agent,
    _envoy: Web,
    share: Share,
    streams: UnboundedReceiver<mock_istiod::AdsStream>,
    _istiod: MockIstiod,
}

/// All rows of it; the inner error: there can be no such agent here.
async fn slow(binary: &Path, runs: usize, rows: &mut Rows) -> Result<Result<(), String>, String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let streams = istiod.take_streams();
    let env = vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned())];
    let agent = Agent::start(&Setup { binary, envoy: None, env }, &istiod).map_err(text)?;
    let envoy = status::admin(agent.admin_port).await.map_err(text)?;
    agent.certificate().await.map_err(text)?;
    agent.ready().await.map_err(text)?;
    let share = match Share::of(agent.proc().id, agent.group.as_ref(), PERCENT) {
        Ok(share) => share,
        Err(why) => return Ok(Err(why)),
    };
    let mut slow = Slow { agent, _envoy: envoy, share, streams, _istiod: istiod };
    tokio::time::sleep(SETTLE).await;
    slow.during("nothing passes", rows, tokio::time::sleep(QUIET)).await?;
    for (what, each) in [
        ("50 MB as one message", CONFIG),
        ("50 MB as 64 KB messages", 64_000),
        ("50 MB as 4 KB messages", 4_000),
    ] {
        let payload = bulk::many(Kind::Clusters, CONFIG, each);
        let count = CONFIG / each;
        for _ in 0..runs {
            let client = slow.agent.stream(ADS).await.map_err(text)?;
            let mut both = pair(client, &mut slow.streams, false).await?;
            let passes = async {
                let mut times = Vec::new();
                for _ in 0..PASSES {
                    let begin = Instant::now();
                    both.server.responses.raw(payload.clone()).await.map_err(|_| "istiod's stream ended")?;
                    limit("messages", both.client.count(count)).await?.map_err(text)?;
                    times.push(ms(begin.elapsed()));
                }
                Ok::<_, String>(times)
            };
            for time in slow.during(what, rows, passes).await?? {
                rows.add(
                    &format!("{PERCENT} % of a processor, {what}: until all is through (ms)"),
                    "–",
                    time,
                );
            }
        }
    }
    Ok(Ok(()))
}

impl Slow {
    /// Asks for readiness, in turn on kept and on new connections, as long as `work` takes.
    async fn during<T>(
        &self,
        what: &str,
        rows: &mut Rows,
        work: impl Future<Output = T>,
    ) -> Result<T, String> {
        let over = Arc::<AtomicBool>::default();
        let port = self.agent.status_port;
        let (mut kept, mut fresh) = (JoinSet::new(), JoinSet::new());
        for n in 0..CALLERS {
            let after = EVERY * (2 * n) / (2 * CALLERS);
            kept.spawn(ask(port, true, after, over.clone()));
            fresh.spawn(ask(port, false, after + EVERY / (2 * CALLERS), over.clone()));
        }
        let (watch, before) = (Watch::start(self.agent.proc()), self.share.waited());
        let done = work.await;
        over.store(true, Relaxed);
        let after = self.share.waited();
        let mut add = |of: &str, target, value| {
            rows.add(&format!("{PERCENT} % of a processor, {what}: {of}"), target, value);
        };
        for (how, calls) in [("kept connection", kept), ("new connection", fresh)] {
            let mut times = Vec::new();
            for calls in calls.join_all().await {
                times.extend(calls.map_err(|e| format!("readiness, {how}, while {what}: {e}"))?);
            }
            times.sort_by(f64::total_cmp);
            let at = |part: usize| {
                times.get(times.len() * part / 100).or(times.last()).copied().unwrap_or(f64::NAN)
            };
            add(&format!("readiness, {how}, p50 (ms)"), "–", at(50));
            add(&format!("readiness, {how}, p99 (ms)"), "≤ 100", at(99));
            add(&format!("readiness, {how}, slowest (ms)"), "–", at(100));
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^53")]
        let (periods, held) = ((after.0 - before.0) as f64, (after.1 - before.1) as f64);
        add("periods in which it was held (%)", "–", 100.0 * held / periods.max(1.0));
        add("anonymous, most seen (MB)", "–", over_zero(watch.most().await));
        Ok(done)
    }
}

fn over_zero(bytes: u64) -> f64 {
    over(bytes, 0)
}

/// One caller, at its own time within each [`EVERY`]; how long each answer took, in ms.
async fn ask(port: u16, keep: bool, after: Duration, over: Arc<AtomicBool>) -> std::io::Result<Vec<f64>> {
    let mut caller = Caller::connect(port).await?;
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + after, EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut times = Vec::new();
    loop {
        tick.tick().await;
        if over.load(Relaxed) {
            return Ok(times);
        }
        let begin = Instant::now();
        if !keep {
            caller = Caller::connect(port).await?;
        }
        match caller.ask("/healthz/ready").await? {
            200 => times.push(ms(begin.elapsed())),
            status => return Err(std::io::Error::other(format!("status {status}"))),
        }
    }
}
