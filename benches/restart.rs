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

const AGENTS: usize = 200;
/// Envoy's first back-off.
const BACK_OFF: Duration = Duration::from_millis(500);

/// All rows: istiod is away for `away`.
pub(crate) async fn herd(binary: &Path, away: Duration) -> Result<Vec<Row>, String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let (agents, _) = density::started(binary, AGENTS, &istiod).await?;
    let agents: Vec<Arc<Agent>> = agents.into_iter().map(Arc::new).collect();
    let mut envoys = JoinSet::new();
    for agent in &agents {
        envoys.spawn(envoy(agent.clone()));
    }
    let (held, _) = all(&mut streams, Instant::now()).await?;
    limit("the end of istiod", istiod.down()).await?;
    drop(held);
    tokio::time::sleep(away).await;
    istiod.up().await.map_err(|e| e.to_string())?;
    let (_held, mut at) = all(&mut streams, Instant::now()).await?;
    envoys.shutdown().await;
    density::end(agents).await;
    at.sort_by(f64::total_cmp);
    let busiest =
        at.iter().map(|first| at.iter().filter(|t| (*first..first + 1.0).contains(*t)).count()).max();
    let row = |what: &str, value: f64| {
        let what = format!("{AGENTS} agents, istiod away for {} s: {what}", away.as_secs());
        Row { what, ours: Value::of(vec![value]), peer: None, wire: None, direct: None, target: "–" }
    };
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    Ok(vec![
        row("half are back (s)", at[AGENTS / 2]),
        row("99 % are back (s)", at[AGENTS * 99 / 100]),
        row("all are back (s)", at[AGENTS - 1]),
        row("most within a second", busiest.unwrap_or_default() as f64),
    ])
}

/// A stream of each agent, answered; and when it came, in seconds.
async fn all(
    streams: &mut UnboundedReceiver<AdsStream>,
    since: Instant,
) -> Result<(Vec<AdsStream>, Vec<f64>), String> {
    let config = bulk::sotw(Kind::Clusters, 1000, "herd");
    let (mut held, mut at) = (Vec::new(), Vec::new());
    while held.len() < AGENTS {
        let stream = limit("a stream at istiod", streams.recv()).await?.ok_or("istiod is gone")?;
        at.push(since.elapsed().as_secs_f64());
        stream.responses.raw(config.clone()).await.map_err(|_| "a stream has ended")?;
        held.push(stream);
    }
    Ok((held, at))
}

async fn envoy(agent: Arc<Agent>) {
    let type_url = Kind::Clusters.type_url().to_owned();
    let first = DiscoveryRequest { node: Some(node()), type_url, ..Default::default() };
    loop {
        if let Ok(mut stream) = agent.stream(ADS).await
            && stream.send(&first).is_ok()
        {
            while stream.message().await.is_ok() {}
        }
        tokio::time::sleep(BACK_OFF.mul_f64(rand::random())).await;
    }
}
