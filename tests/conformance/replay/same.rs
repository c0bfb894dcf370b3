//! What an Envoy ends up with behind an agent that keeps the last good configuration, and behind one that does not: the
//! same, whatever changed while istiod was away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use mock_istiod::{Resource, Set};

use crate::ads::{Delta, Sotw};
use crate::support::client::node;
use crate::support::{LIMIT, MockIstiod, TestAgent, eventually};

const NODE: &str = "sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local";
const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const EDS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const RDS: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
/// The second is asked for by the names of the first.
const PAIRS: [(&str, &str); 2] = [(CDS, EDS), (LDS, RDS)];
const QUIET: Duration = Duration::from_millis(30);

type Have = BTreeMap<String, u64>;

// A resource whose version is in its bytes.
fn value(name: &str, version: u64) -> Vec<u8> {
    let mut out = vec![0x0a, u8::try_from(name.len()).unwrap()];
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&[0xc2, 0x3e, 8]);
    out.extend_from_slice(&version.to_be_bytes());
    out
}

fn version_of(value: &[u8]) -> (String, u64) {
    let (head, version) = value.split_at(value.len() - 8);
    let name = String::from_utf8(head[2..2 + usize::from(head[1])].to_vec()).unwrap();
    (name, u64::from_be_bytes(version.try_into().unwrap()))
}

enum Stream {
    Delta(Delta),
    Sotw(Sotw),
}

/// An Envoy as far as the discovery protocol sees it.
struct Envoy {
    agent: TestAgent,
    delta: bool,
    stream: Option<Stream>,
    have: BTreeMap<&'static str, Have>,
    asked: BTreeMap<&'static str, BTreeSet<String>>,
    version: BTreeMap<&'static str, (String, String)>,
    nonces: BTreeSet<String>,
    from_memory: u64,
}

impl Envoy {
    async fn of(mut agent: TestAgent, delta: bool) -> Self {
        drop(agent.xds().await);
        let (have, asked, version) = Default::default();
        Self { agent, delta, stream: None, have, asked, version, nonces: BTreeSet::new(), from_memory: 0 }
    }

    /// Another process: it knows nothing.
    fn crash(&mut self) {
        self.stream = None;
        self.have.clear();
        self.version.clear();
    }

    async fn open(&mut self) {
        let client = self.agent.xds().await;
        self.nonces.clear();
        self.asked.clear();
        self.version.clear();
        let stream = if self.delta { Stream::Delta(client.delta_ads()) } else { Stream::Sotw(client.ads()) };
        self.stream = Some(stream);
        for (of, by_name) in PAIRS {
            self.ask(of, &BTreeSet::new());
            self.follow(of, by_name);
        }
    }

    fn names(&self, of: &str) -> BTreeSet<String> {
        self.have.get(of).into_iter().flatten().map(|(name, _)| name.clone()).collect()
    }

    // Of what depends on `of` the names that it has now.
    fn follow(&mut self, of: &'static str, by_name: &'static str) {
        let names = self.names(of);
        if self.asked.get(by_name).map_or(!names.is_empty(), |asked| *asked != names) {
            self.ask(by_name, &names);
        }
        self.have.entry(by_name).or_default().retain(|name, _| names.contains(name));
    }

    fn ask(&mut self, of: &'static str, names: &BTreeSet<String>) {
        let before = self.asked.insert(of, names.clone());
        let (first, before) = (before.is_none(), before.unwrap_or_default());
        let id = Some(node(NODE)).filter(|_| of == CDS && first);
        match &self.stream {
            Some(Stream::Delta(stream)) => {
                let has = self.have.get(of).filter(|_| first).into_iter().flatten();
                stream.send(&DeltaDiscoveryRequest {
                    node: id,
                    type_url: of.to_owned(),
                    resource_names_subscribe: names.difference(&before).cloned().collect(),
                    resource_names_unsubscribe: before.difference(names).cloned().collect(),
                    initial_resource_versions: has.map(|(name, v)| (name.clone(), v.to_string())).collect(),
                    ..Default::default()
                });
            }
            Some(Stream::Sotw(stream)) => {
                let (version_info, response_nonce) = self.version.get(of).cloned().unwrap_or_default();
                stream.send(&DiscoveryRequest {
                    node: id,
                    type_url: of.to_owned(),
                    resource_names: names.iter().cloned().collect(),
                    version_info,
                    response_nonce,
                    ..Default::default()
                });
            }
            None => {}
        }
    }

    fn heard(&mut self, type_url: &str, nonce: &str, resources: &[&[u8]]) -> (&'static str, Have) {
        let of =
            [CDS, EDS, LDS, RDS].into_iter().find(|of| *of == type_url).expect("a type that was asked for");
        assert!(self.nonces.insert(format!("{of} {nonce}")), "{nonce} comes twice");
        self.from_memory += u64::from(nonce.starts_with("memory-"));
        let all: Have = resources.iter().map(|value| version_of(value)).collect();
        assert_eq!(all.len(), resources.len(), "a name comes twice in one response");
        for (name, version) in &all {
            let before = self.have.get(of).and_then(|have| have.get(name)).copied().unwrap_or(0);
            assert!(*version >= before, "{name} goes back from {before} to {version}");
        }
        (of, all)
    }

    fn delta(&mut self, response: &DeltaDiscoveryResponse) {
        let values: Vec<&[u8]> =
            response.resources.iter().map(|r| &r.resource.as_ref().unwrap().value[..]).collect();
        let (of, all) = self.heard(&response.type_url, &response.nonce, &values);
        let asked = self.asked[of].clone();
        let have = self.have.entry(of).or_default();
        have.retain(|name, _| !response.removed_resources.contains(name));
        have.extend(all.into_iter().filter(|(name, _)| asked.is_empty() || asked.contains(name)));
        if let Some(Stream::Delta(stream)) = &self.stream {
            stream.send(&super::answer_delta(of, &response.nonce));
        }
        self.accepted(of);
    }

    fn sotw(&mut self, response: &DiscoveryResponse) {
        let values: Vec<&[u8]> = response.resources.iter().map(|any| &any.value[..]).collect();
        let (of, all) = self.heard(&response.type_url, &response.nonce, &values);
        let asked = self.asked[of].clone();
        let have = self.have.entry(of).or_default();
        if of == CDS || of == LDS {
            *have = all;
        } else {
            have.extend(all.into_iter().filter(|(name, _)| asked.contains(name)));
        }
        self.version.insert(of, (response.version_info.clone(), response.nonce.clone()));
        if let Some(Stream::Sotw(stream)) = &self.stream {
            let mut answer = super::ack(response);
            answer.resource_names = asked.into_iter().collect();
            stream.send(&answer);
        }
        self.accepted(of);
    }

    fn accepted(&mut self, of: &'static str) {
        if let Some((of, by_name)) = PAIRS.into_iter().find(|pair| pair.0 == of) {
            self.follow(of, by_name);
        }
    }

    /// Waits until istiod has heard all answers: what is on its way when it goes was not accepted for the agent.
    async fn told(&self, mock: &MockIstiod) {
        eventually("istiod has heard all answers", || async {
            let heard: BTreeSet<String> =
                mock.record().ads_requests().iter().map(|r| format!("{} {}", r.type_url, r.nonce)).collect();
            let from_istiod = |nonce: &&String| !nonce.contains(" memory-");
            self.nonces.iter().filter(from_istiod).all(|nonce| heard.contains(nonce)).then_some(())
        })
        .await;
    }

    /// Goes on until it has this.
    async fn until(&mut self, truth: &BTreeMap<&'static str, Have>) {
        let came = tokio::time::timeout(LIMIT, async {
            while self.have != *truth {
                if self.stream.is_none() {
                    self.open().await;
                }
                // A response that is only half read stays where it is.
                let next = match self.stream.as_mut().unwrap() {
                    Stream::Delta(stream) => {
                        tokio::time::timeout(QUIET, stream.next()).await.map(|r| r.map(|r| (Some(r), None)))
                    }
                    Stream::Sotw(stream) => {
                        tokio::time::timeout(QUIET, stream.next()).await.map(|r| r.map(|r| (None, Some(r))))
                    }
                };
                match next {
                    Ok(Ok((Some(response), _))) => self.delta(&response),
                    Ok(Ok((_, Some(response)))) => self.sotw(&response),
                    Ok(Err(_)) => {
                        self.stream = None;
                        tokio::time::sleep(QUIET).await;
                    }
                    _ => {}
                }
            }
        });
        if came.await.is_err() {
            panic!("it has {:?}\nand should have {truth:?}", self.have);
        }
    }
}

// As a program would draw them; the same in each run.
fn drawn(seed: &mut u64, below: u64) -> u64 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) % below
}

/// Some names come, go or change; those of the second types are always all there.
fn change(truth: &mut BTreeMap<&'static str, Have>, seed: &mut u64, now: &mut u64) {
    for _ in 0..=drawn(seed, 3) {
        *now += 1;
        let (of, by_name) = PAIRS[usize::try_from(drawn(seed, 2)).unwrap()];
        let name = format!("n{}", drawn(seed, 6));
        let all = truth.entry(of).or_default();
        // One stays, so that there always is a configuration.
        if all.contains_key(&name) && all.len() > 1 && drawn(seed, 3) == 0 {
            all.remove(&name);
            truth.entry(by_name).or_default().remove(&name);
        } else {
            all.insert(name.clone(), *now);
            truth.entry(by_name).or_default().insert(name, *now);
        }
    }
}

fn tell(mock: &MockIstiod, truth: &BTreeMap<&'static str, Have>) {
    let of = |(of, all): (&&'static str, &Have)| {
        let of = *of;
        all.iter().map(move |(name, v)| Resource::new(of, name.clone(), value(name, *v))).collect::<Vec<_>>()
    };
    mock.resources().replace(Set { common: truth.iter().flat_map(of).collect(), ..Set::default() });
}

async fn same(delta: bool) {
    let mock = MockIstiod::start().await;
    let agent = |replay: &str| {
        let builder = TestAgent::with().istiod(&mock).env("XDS_REPLAY", replay);
        builder.env("XDS_REPLAY_AFTER", "100ms").env("ISTIO_DELTA_XDS", delta.to_string()).start()
    };
    let mut keeps = Envoy::of(agent("memory"), delta).await;
    let mut plain = Envoy::of(agent("off"), delta).await;
    let (mut truth, mut seed, mut now) = (BTreeMap::new(), 7, 0);
    for (of, by_name) in PAIRS {
        truth.insert(of, Have::from([("n0".to_owned(), 0)]));
        truth.insert(by_name, Have::from([("n0".to_owned(), 0)]));
    }
    for round in 0..8 {
        change(&mut truth, &mut seed, &mut now);
        tell(&mock, &truth);
        keeps.until(&truth).await;
        plain.until(&truth).await;
        if round % 2 == 0 {
            continue;
        }
        keeps.told(&mock).await;
        mock.down().await;
        if round % 4 == 1 {
            keeps.crash();
            plain.crash();
        } else {
            keeps.stream = None;
        }
        // From memory, and the other one has nothing.
        keeps.until(&truth).await;
        change(&mut truth, &mut seed, &mut now);
        tell(&mock, &truth);
        mock.up().await.unwrap();
        keeps.until(&truth).await;
        plain.until(&truth).await;
    }
    assert!(keeps.from_memory > 0 && plain.from_memory == 0, "{}", keeps.from_memory);
    keeps.agent.stop().await;
    plain.agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delta_ends_with_the_same_as_without_memory() {
    same(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_older_protocol_ends_with_the_same_as_without_memory() {
    same(false).await;
}
