//! What istiod sees when it comes back: real agents, beside the model behind docs/SCALE.md.
//!
//! This process plays their Envoys: each opens its stream again up to half a second after it has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use mock_istiod::MockIstiod;
use mock_istiod::ads::AdsStream;
use mock_istiod::bulk::{self, Kind};
use mock_istiod::record::Event;
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;

use crate::agent::{ADS, Agent, node};
use crate::density;
use crate::relay::limit;
use crate::table::{Row, Value};

const NONCE: &str = "herd";
/// Until every Envoy has said that it has taken what it was given.
const TAKEN: Duration = Duration::from_secs(2);
/// Envoy's first back-off.
const BACK_OFF: Duration = Duration::from_millis(500);

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outage {
    /// How many agents there are.
    pub agents: usize,
    /// How long istiod is away.
    pub away: Duration,
    /// `XDS_RECONNECT_SPREAD`, in seconds.
    pub spread: Option<u64>,
    /// Streams that istiod admits a second once it is back; 0: all.
    pub admitted: u32,
}

/// Spread and admission rate of each herd that docs/SCALE.md compares with its model. The last is what its rule gives for
/// 200 agents at that rate.
pub(crate) const CASES: [(Option<u64>, u32); 4] = [(None, 0), (Some(20), 0), (None, 20), (Some(13), 20)];

/// What istiod saw, in seconds since it could be reached again.
#[derive(Debug)]
pub(crate) struct Herd {
    outage: Outage,
    /// Every stream that came, refused or not.
    attempts: Vec<f64>,
    /// Each agent's stream that was admitted.
    served: Vec<f64>,
}

impl Herd {
    /// All rows.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let Outage { agents, away, spread, admitted } = self.outage;
        let set = spread.map_or_else(String::new, |over| format!(", in turns over {over} s"));
        let rate = if admitted == 0 { String::new() } else { format!(", {admitted} a second admitted") };
        let row = |what: &str, value: f64| {
            let what = format!("{agents} agents{set}, istiod away for {} s{rate}: {what}", away.as_secs());
            Row { what, ours: Value::of(vec![value]), peer: None, wire: None, direct: None, target: "–" }
        };
        let busiest = self.attempts.iter().map(|first| {
            let second = *first..first + 1.0;
            self.attempts.iter().filter(|t| second.contains(*t)).count()
        });
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let (busiest, each) =
            (busiest.max().unwrap_or_default() as f64, self.attempts.len() as f64 / agents as f64);
        vec![
            row("half are back (s)", self.served[agents / 2]),
            row("99 % are back (s)", self.served[agents * 99 / 100]),
            row("all are back (s)", self.served[agents - 1]),
            row("most attempts within a second", busiest),
            row("attempts each", each),
        ]
    }

    /// For `make scale`: times as text, since there are hundreds.
    pub(crate) fn json(&self) -> serde_json::Value {
        let Outage { agents, away, spread, admitted } = self.outage;
        let times = |at: &[f64]| at.iter().map(|t| format!("{t:.2}")).collect::<Vec<_>>().join(" ");
        json!({
            "agents": agents, "away": away.as_secs(), "spread": spread, "admitted": admitted,
            "attempts": times(&self.attempts), "served": times(&self.served),
        })
    }
}

/// One herd.
pub(crate) async fn herd(binary: &Path, outage: &Outage) -> Result<Herd, String> {
    let Outage { agents: count, away, spread, admitted } = *outage;
    let env: Vec<_> = spread.iter().map(|over| ("XDS_RECONNECT_SPREAD", format!("{over}s"))).collect();
    let istiod = MockIstiod::start().await;
    let mut streams = istiod.take_streams();
    let agents = density::started(binary, count, &istiod, &env).await?;
    let agents: Vec<Arc<Agent>> = agents.into_iter().map(|one| Arc::new(one.agent)).collect();
    let mut envoys = JoinSet::new();
    for agent in &agents {
        envoys.spawn(envoy(agent.clone()));
    }
    let (held, _) = all(&mut streams, count, Instant::now()).await?;
    tokio::time::sleep(TAKEN).await;
    limit("the end of istiod", istiod.down()).await?;
    drop(held);
    istiod.set_admitted(admitted);
    tokio::time::sleep(away).await;
    let (mark, zero) = (istiod.record().len(), SystemTime::now());
    istiod.up().await.map_err(|e| e.to_string())?;
    let (_held, served) = all(&mut streams, count, Instant::now()).await?;
    let opened = istiod.record().since(mark).into_iter().filter(|e| matches!(e.event, Event::AdsOpened(_)));
    let attempts = opened.map(|e| e.at.duration_since(zero).unwrap_or_default().as_secs_f64()).collect();
    envoys.shutdown().await;
    density::end(agents).await;
    Ok(Herd { outage: *outage, attempts, served })
}

/// A stream of each agent, answered; and when it came, in seconds.
async fn all(
    streams: &mut UnboundedReceiver<AdsStream>,
    count: usize,
    since: Instant,
) -> Result<(Vec<AdsStream>, Vec<f64>), String> {
    let config = bulk::sotw(Kind::Listeners, 1000, NONCE);
    let (mut held, mut at) = (Vec::new(), Vec::new());
    while held.len() < count {
        let stream = limit("a stream at istiod", streams.recv()).await?.ok_or("istiod is gone")?;
        at.push(since.elapsed().as_secs_f64());
        stream.responses.raw(config.clone()).await.map_err(|_| "a stream has ended")?;
        held.push(stream);
    }
    Ok((held, at))
}

async fn envoy(agent: Arc<Agent>) {
    let type_url = Kind::Listeners.type_url().to_owned();
    let mut first = DiscoveryRequest { node: Some(node()), type_url, ..Default::default() };
    loop {
        if let Ok(mut stream) = agent.stream(ADS).await
            && stream.send(&first).is_ok()
        {
            while stream.message().await.is_ok() {
                // From now on it has something, and says so.
                "1".clone_into(&mut first.version_info);
                let taken = DiscoveryRequest { response_nonce: NONCE.to_owned(), ..first.clone() };
                if stream.send(&taken).is_err() {
                    break;
                }
            }
        }
        tokio::time::sleep(BACK_OFF.mul_f64(rand::random())).await;
    }
}
