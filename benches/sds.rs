//! Many streams for one secret: how soon all have a renewed certificate, and what an open stream holds.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use mock_istiod::MockIstiod;
use prost::Message;
use tokio::task::JoinSet;

use crate::ads::Stream;
use crate::agent::{Agent, LIMIT, SDS, Setup, secret_request};
use crate::proc::Memory;
use crate::table::{Row, Value};

/// Streams on one agent: far more than any Envoy opens.
const STREAMS: usize = 1_000;
/// On one connection; Envoy has one or two.
const ON_ONE: usize = 100;
/// Life of a certificate; renewed after half of it, so the streams are open by then.
const LIFE: Duration = Duration::from_secs(12);

/// What one run gives.
struct Run {
    /// From the renewal's request at the CA to the first and to the last stream that has the new certificate.
    first: Duration,
    last: Duration,
    before: Memory,
    open: Memory,
    after: Memory,
}

/// Both figures for each binary.
#[expect(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^53")]
pub(crate) async fn fan_out(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    let mut all: Vec<Vec<Run>> = Vec::new();
    for binary in binaries {
        let mut of = Vec::new();
        for n in 1..=runs {
            eprint!("\r  run {n} of {runs} ");
            of.push(run(binary).await?);
        }
        eprintln!();
        all.push(of);
    }
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let row = |what: &str, target: &'static str, value: &dyn Fn(&Run) -> f64| {
        let mut values = all.iter().map(|runs| Value::of(runs.iter().map(value).collect()));
        let ours = values.next().flatten();
        Row { what: what.to_owned(), ours, peer: values.next().flatten(), wire: None, direct: None, target }
    };
    Ok(vec![
        row("request at the CA to first push (ms)", "–", &|r| ms(r.first)),
        row("request at the CA to last push (ms)", "–", &|r| ms(r.last)),
        row("resident before (MB)", "–", &|r| mb(r.before.rss)),
        row("resident with all open (MB)", "–", &|r| mb(r.open.rss)),
        row("resident after the pushes (MB)", "–", &|r| mb(r.after.rss)),
        row("anonymous, per open stream (KB)", "–", &|r| {
            mb(r.open.anon.saturating_sub(r.before.anon)) * 1e3 / STREAMS as f64
        }),
    ])
}

async fn run(binary: &Path) -> Result<Run, String> {
    tokio::time::timeout(2 * LIMIT, measure(binary)).await.map_err(|_| "the pushes never came".to_owned())?
}

async fn measure(binary: &Path) -> Result<Run, String> {
    let text = |e: std::io::Error| e.to_string();
    let istiod = MockIstiod::start().await;
    istiod.set_ttl(Some(LIFE));
    let env = vec![
        ("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()),
        ("SECRET_GRACE_PERIOD_RATIO_JITTER", "0".to_owned()),
    ];
    let agent = Agent::start(&Setup { binary, envoy: None, env }, &istiod).map_err(text)?;
    agent.certificate().await.map_err(text)?;
    let before = agent.proc().memory();
    let mut streams = Vec::with_capacity(STREAMS);
    while streams.len() < STREAMS {
        let lead = agent.secrets().await.map_err(text)?;
        let mut group = Vec::with_capacity(ON_ONE);
        for _ in 1..ON_ONE {
            group.push(lead.another("sds-grpc", SDS).await.map_err(text)?);
        }
        group.push(lead);
        streams.append(&mut group);
    }
    for stream in &mut streams {
        stream.send(&secret_request("default")).map_err(text)?;
        accept(stream).await?;
    }
    let open = agent.proc().memory();
    let mut pushes = JoinSet::new();
    for mut stream in streams {
        pushes.spawn(async move {
            accept(&mut stream).await?;
            // The stream stays open until all have theirs.
            Ok::<_, String>((SystemTime::now(), stream))
        });
    }
    let pushed = pushes.join_all().await.into_iter().collect::<Result<Vec<_>, String>>()?;
    let times: Vec<SystemTime> = pushed.iter().map(|(at, _)| *at).collect();
    let after = agent.proc().memory();
    let calls = istiod.record().ca_calls();
    let asked = calls.get(1).ok_or("no renewal")?.received;
    let since = |at: Option<&SystemTime>| {
        at.and_then(|at| at.duration_since(asked).ok())
            .ok_or_else(|| "pushed before it was signed".to_owned())
    };
    Ok(Run { first: since(times.iter().min())?, last: since(times.iter().max())?, before, open, after })
}

/// Takes one response and accepts it, as Envoy does.
async fn accept(stream: &mut Stream) -> Result<(), String> {
    let message = stream.message().await.map_err(|e| e.to_string())?;
    let response = DiscoveryResponse::decode(message).map_err(|e| e.to_string())?;
    let ack = DiscoveryRequest {
        node: None,
        version_info: response.version_info,
        response_nonce: response.nonce,
        ..secret_request("default")
    };
    stream.send(&ack).map_err(|e| e.to_string())
}
