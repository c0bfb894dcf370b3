//! What istiod sees when it comes back: real agents, beside the model behind docs/SCALE.md.
//!
//! This process plays their Envoys: each opens its stream again up to half a second after it has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use mock_istiod::MockIstiod;
use mock_istiod::ads::AdsStream;
use mock_istiod::bulk::{self, Kind};
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
#[derive(Debug, Clone)]
pub(crate) struct Outage {
    /// How many agents there are.
    pub agents: usize,
    /// How long istiod is away.
    pub away: Duration,
    /// `XDS_RECONNECT_SPREAD`, in seconds.
    pub spread: Option<u64>,
}

/// All rows.
pub(crate) async fn herd(binary: &Path, outage: &Outage) -> Result<Vec<Row>, String> {
    let Outage { agents: count, away, spread } = *outage;
    let env: Vec<_> = spread.iter().map(|over| ("XDS_RECONNECT_SPREAD", format!("{over}s"))).collect();
    let istiod = MockIstiod::start().await;
    istiod.record().off();
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
    tokio::time::sleep(away).await;
    istiod.up().await.map_err(|e| e.to_string())?;
    let (_held, mut at) = all(&mut streams, count, Instant::now()).await?;
    envoys.shutdown().await;
    density::end(agents).await;
    at.sort_by(f64::total_cmp);
    let busiest =
        at.iter().map(|first| at.iter().filter(|t| (*first..first + 1.0).contains(*t)).count()).max();
    let row = |what: &str, value: f64| {
        let set = spread.map_or_else(String::new, |over| format!(", in turns over {over} s"));
        let what = format!("{count} agents{set}, istiod away for {} s: {what}", away.as_secs());
        Row { what, ours: Value::of(vec![value]), peer: None, wire: None, direct: None, target: "–" }
    };
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    Ok(vec![
        row("half are back (s)", at[count / 2]),
        row("99 % are back (s)", at[count * 99 / 100]),
        row("all are back (s)", at[count - 1]),
        row("most within a second", busiest.unwrap_or_default() as f64),
    ])
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
