//! Both sides write as fast as flow control lets them while both read slowly, for minutes: nothing may be
//! lost, reordered or stuck, and memory must stay where it is. Runs only when it is named (`--only flood`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::Any;
use mock_istiod::MockIstiod;
use mock_istiod::ads::{AdsStream, Responses};
use prost::Message;
use rand::Rng;
use tokio::sync::mpsc;

use crate::ads::{Receiver, Sender};
use crate::agent::{Agent, DELTA, LIMIT, Setup, node};
use crate::table::{Row, Value};

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const PCDS: &str = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";
/// Small next to what is pushed, so that most of it waits in istiod.
const WINDOW: u32 = 64 * 1024;
/// Every so many responses one is the agent's to answer.
const OWN_EVERY: u64 = 20;

/// What one direction has seen.
#[derive(Debug)]
struct Seen {
    count: u64,
    answers: u64,
    longest: Duration,
    last: Instant,
}

impl Seen {
    fn new() -> Self {
        Self { count: 0, answers: 0, longest: Duration::ZERO, last: Instant::now() }
    }

    fn one(&mut self) {
        self.longest = self.longest.max(self.last.elapsed());
        self.last = Instant::now();
    }
}

/// Floods each binary.
pub(crate) async fn both_ways(binaries: &[PathBuf], length: Duration) -> Result<Vec<Row>, String> {
    let mut figures: [Vec<Option<Value>>; 5] = Default::default();
    for binary in binaries {
        for (figure, value) in figures.iter_mut().zip(flood(binary, length).await?) {
            figure.push(Value::of(vec![value]));
        }
    }
    let names = [
        ("requests through", "–"),
        ("responses through", "–"),
        ("answers of the agent's own", "–"),
        ("longest halt of a direction (s)", "≤ 1"),
        ("peak over idle MB", "≤ 4"),
    ];
    let rows = names.into_iter().zip(figures).map(|((what, target), values)| {
        let mut values = values.into_iter();
        let ours = values.next().flatten();
        Row { what: what.to_owned(), ours, peer: values.next().flatten(), wire: None, direct: None, target }
    });
    Ok(rows.collect())
}

#[expect(clippy::cast_precision_loss, reason = "counts and sizes are far below 2^53")]
async fn flood(binary: &Path, length: Duration) -> Result<[f64; 5], String> {
    let istiod = MockIstiod::start().await;
    istiod.record().off();
    let mut streams = istiod.take_streams();
    let env =
        vec![("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()), ("PROXY_CONFIG_XDS_AGENT", "true".to_owned())];
    let agent = Agent::start(&Setup { binary, envoy: None, env }, &istiod).map_err(said)?;
    agent.certificate().await.map_err(said)?;
    let client = agent.stream_with(DELTA, WINDOW).await.map_err(said)?;
    let (mut sender, mut receiver, _connection) = client.split();
    let first = DeltaDiscoveryRequest { node: Some(node()), type_url: LDS.to_owned(), ..Default::default() };
    sender.send(&first).await.map_err(said)?;
    let AdsStream { mut requests, responses, .. } =
        tokio::time::timeout(LIMIT, streams.recv()).await.map_err(said)?.ok_or("istiod is gone")?;
    let idle = agent.proc().memory().rss;
    agent.proc().reset_peak();
    let until = Instant::now() + length;
    let (told_up, written_up) = tokio::sync::watch::channel(None);
    let (told_down, written_down) = tokio::sync::watch::channel(None);
    let writing = async { told_up.send(Some(ask(&mut sender, until).await?)).map_err(said) };
    let pushing = async { told_down.send(Some(push(&responses, until).await?)).map_err(said) };
    let serving = take_requests(&mut requests, &written_up, &written_down);
    let reading = take_responses(&mut receiver, &written_down);
    let ((), (), up, down) = tokio::try_join!(writing, pushing, serving, reading)?;
    let peak = agent.proc().memory().peak.saturating_sub(idle);
    let longest = up.longest.max(down.longest).as_secs_f64();
    Ok([up.count as f64, down.count as f64, up.answers as f64, longest, peak as f64 / 1e6])
}

/// Whether everything that was written has been seen; unknown while it is still being written.
type Written = tokio::sync::watch::Receiver<Option<u64>>;

fn all(written: &Written, seen: u64) -> bool {
    written.borrow().is_some_and(|count| seen == count)
}

async fn slowly() {
    // Now and then long enough for every window to fill.
    let pause = match rand::rng().random_range(0..100) {
        0 => 200,
        1..20 => 5,
        _ => return,
    };
    tokio::time::sleep(Duration::from_millis(pause)).await;
}

async fn ask(sender: &mut Sender, until: Instant) -> Result<u64, String> {
    let mut count = 0;
    while Instant::now() < until {
        let name = format!("{count:016}{}", "x".repeat(rand::rng().random_range(0..6000)));
        let names = vec![name];
        let request = DeltaDiscoveryRequest {
            type_url: CDS.to_owned(),
            resource_names_subscribe: names,
            ..Default::default()
        };
        sender.send(&request).await.map_err(said)?;
        count += 1;
    }
    Ok(count)
}

async fn push(responses: &Responses, until: Instant) -> Result<u64, String> {
    let mut count: u64 = 0;
    while Instant::now() < until {
        let own = count.is_multiple_of(OWN_EVERY);
        let (type_url, size) = if own { (PCDS, 0) } else { (CDS, rand::rng().random_range(0..400_000)) };
        let body = Any { type_url: type_url.to_owned(), value: vec![7; size] };
        let response = DeltaDiscoveryResponse {
            resources: vec![Resource { resource: Some(body), ..Default::default() }],
            type_url: type_url.to_owned(),
            nonce: format!("{count:016}"),
            ..Default::default()
        };
        responses.delta(&response).await.map_err(said)?;
        count += 1;
    }
    Ok(count)
}

// All of Envoy's in order, and one answer for each response that was the agent's.
async fn take_requests(
    requests: &mut mpsc::Receiver<mock_istiod::record::AdsRequest>,
    written: &Written,
    pushed: &Written,
) -> Result<Seen, String> {
    let mut seen = Seen::new();
    loop {
        let pushed = *pushed.borrow();
        if all(written, seen.count) && pushed.is_some_and(|n| seen.answers == n.div_ceil(OWN_EVERY)) {
            return Ok(seen);
        }
        let next = tokio::time::timeout(LIMIT, requests.recv()).await.map_err(|_| "requests are stuck")?;
        let request = next.ok_or("the stream ended at istiod")?;
        seen.one();
        match request.names.first().and_then(|name| name.get(..16)?.parse().ok()) {
            Some(number) => {
                expect("request", seen.count, number)?;
                seen.count += 1;
            }
            None if request.type_url == PCDS && !request.nonce.is_empty() => {
                let number = request.nonce.parse().map_err(said)?;
                expect("answer", seen.answers * OWN_EVERY, number)?;
                seen.answers += 1;
            }
            None => {}
        }
        slowly().await;
    }
}

async fn take_responses(receiver: &mut Receiver, written: &Written) -> Result<Seen, String> {
    let mut seen = Seen::new();
    let mut next = 0;
    loop {
        if next % OWN_EVERY == 0 {
            next += 1;
        }
        if written.borrow().is_some_and(|count| next >= count) {
            return Ok(seen);
        }
        let message: Bytes = match tokio::time::timeout(Duration::from_secs(1), receiver.message()).await {
            Ok(message) => message.map_err(said)?,
            // Perhaps the last one was the agent's; what is missing shows here as well.
            Err(_) if seen.last.elapsed() < LIMIT => continue,
            Err(_) => return Err("responses are stuck".to_owned()),
        };
        seen.one();
        let nonce = DeltaDiscoveryResponse::decode(message).map_err(said)?.nonce;
        expect("response", next, nonce.parse().map_err(said)?)?;
        next += 1;
        seen.count += 1;
        slowly().await;
    }
}

fn expect(what: &str, expected: u64, found: u64) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what} {expected} expected, {found} came")) }
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}
