//! Callers of several identities in random order: nothing of one ever reaches another.
//!
//! The model is small: a stream belongs to whoever opened it. Each certificate that comes on it must be that
//! caller's, and its key must never have been seen on another stream. Certificates live for seconds, so renewals
//! come between the steps.

use std::collections::BTreeMap;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::{SOCKET, identity};
use crate::support::client::{Duplex, EnvoyClient, Pem, ack, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent};

const ACCOUNTS: [&str; 4] = ["a", "b", "c", "d"];
const SLOTS: usize = 5;

#[derive(Debug, Clone)]
enum Step {
    /// A stream of this caller in this place; the one that was there is dropped.
    Open { slot: usize, caller: usize, bearer: bool },
    /// The first answer on a stream, or what has come meanwhile.
    Read { slot: usize },
    /// The stream is dropped, whatever is under way on it.
    Close { slot: usize },
    /// A call of its own for one caller.
    Fetch { caller: usize },
    /// Roots on a stream of their own.
    Roots { caller: usize },
    /// A stream with nobody's token, or with two.
    Refused { twice: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (slot, caller) = (0..SLOTS, 0..ACCOUNTS.len());
    let step = prop_oneof![
        4 => (slot.clone(), caller.clone(), any::<bool>())
            .prop_map(|(slot, caller, bearer)| Step::Open { slot, caller, bearer }),
        6 => slot.clone().prop_map(|slot| Step::Read { slot }),
        2 => slot.prop_map(|slot| Step::Close { slot }),
        2 => caller.clone().prop_map(|caller| Step::Fetch { caller }),
        1 => caller.prop_map(|caller| Step::Roots { caller }),
        1 => any::<bool>().prop_map(|twice| Step::Refused { twice }),
    ];
    vec(step, 8..40)
}

struct Held {
    number: usize,
    caller: usize,
    read: bool,
    stream: Duplex<DiscoveryRequest, DiscoveryResponse>,
}

struct World {
    mock: MockIstiod,
    clients: [EnvoyClient; 2],
    tokens: Vec<String>,
    opened: usize,
    /// On which stream a key was seen.
    keys: BTreeMap<String, usize>,
}

impl World {
    fn of(&self, caller: usize, bearer: bool) -> EnvoyClient {
        let token = &self.tokens[caller];
        let value = if bearer { format!("Bearer {token}") } else { token.clone() };
        // Streams of different callers share a connection, and one caller has streams on both.
        self.clients[self.opened % 2].with_headers(&[("authorization", &value)])
    }

    /// What came belongs to `caller`, on stream `number`.
    fn check(&mut self, response: &DiscoveryResponse, caller: usize, number: usize) {
        for (_, pem) in secrets(response) {
            match pem {
                Pem::Identity { chain, key } => {
                    assert_eq!(identity(&chain), self.mock.identity("team", ACCOUNTS[caller]));
                    let first = *self.keys.entry(key).or_insert(number);
                    assert_eq!(first, number, "a key was given to two streams");
                }
                Pem::Roots(roots) => assert_eq!(roots.trim(), self.mock.root_pem().trim()),
            }
        }
    }

    async fn read(&mut self, held: &mut Held) {
        let response = if held.read {
            // Only a renewal comes now; it is not waited for.
            match tokio::time::timeout(Duration::from_millis(5), held.stream.next()).await {
                Ok(response) => response,
                Err(_) => return,
            }
        } else {
            held.stream.next().await
        };
        let response = response.expect("a stream goes on");
        held.read = true;
        self.check(&response, held.caller, held.number);
        held.stream.send(&ack(&response, &["default"]));
    }

    async fn run(&mut self, steps: &[Step]) {
        let mut slots: [Option<Held>; SLOTS] = Default::default();
        for step in steps {
            self.opened += 1;
            let number = self.opened;
            match *step {
                Step::Open { slot, caller, bearer } => {
                    let stream = self.of(caller, bearer).stream_secrets();
                    stream.send(&secret_request("default"));
                    slots[slot] = Some(Held { number, caller, read: false, stream });
                }
                Step::Read { slot } => {
                    if let Some(mut held) = slots[slot].take() {
                        self.read(&mut held).await;
                        slots[slot] = Some(held);
                    }
                }
                Step::Close { slot } => slots[slot] = None,
                Step::Fetch { caller } => {
                    let client = self.of(caller, true);
                    let response = client.fetch_secrets(&secret_request("default")).await.unwrap();
                    self.check(&response, caller, number);
                }
                Step::Roots { caller } => {
                    let mut stream = self.of(caller, true).stream_secrets();
                    stream.send(&secret_request("ROOTCA"));
                    let response = stream.next().await.unwrap();
                    self.check(&response, caller, number);
                }
                Step::Refused { twice } => {
                    let both =
                        [("authorization", self.tokens[0].as_str()), ("authorization", &self.tokens[1])];
                    let brought: &[(&'static str, &str)] = if twice { &both } else { &[] };
                    let client = self.clients[0].with_headers(brought);
                    let mut stream = client.stream_secrets();
                    stream.send(&secret_request("default"));
                    assert!(stream.next().await.is_err(), "nobody's stream is not served");
                }
            }
        }
        // Whoever is still there gets what is its own, and the CA saw each caller with its own token only.
        for mut held in slots.into_iter().flatten() {
            self.read(&mut held).await;
        }
        let known: Vec<String> = ACCOUNTS.iter().map(|account| self.mock.identity("team", account)).collect();
        for call in self.mock.record().ca_calls() {
            let from = call.identity.expect("only known callers ask");
            assert!(known.contains(&from) || from.ends_with("/ns/ns/sa/sa"), "{from}");
        }
    }
}

#[test]
fn nothing_of_one_caller_reaches_another_in_any_order() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut agent, world) = runtime.block_on(async {
        let mock = MockIstiod::builder().ttl(Duration::from_secs(3)).start().await.unwrap();
        let mut agent = TestAgent::with()
            .istiod(&mock)
            .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
            .env("SDS_CALLER_TOKENS", "true")
            .env("WORKLOAD_SDS", "./node.sock")
            .start();
        let clients = [agent.client(SOCKET).await, agent.client(SOCKET).await];
        let tokens = ACCOUNTS.map(|account| mock.mint("team", account)).to_vec();
        (agent, World { mock, clients, tokens, opened: 0, keys: BTreeMap::new() })
    });
    let world = std::sync::Mutex::new(world);
    let config = Config { cases: 12, failure_persistence: None, max_shrink_iters: 40, ..Config::default() };
    let run = TestRunner::new(config).run(&steps(), |steps| {
        let mut world = world.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        runtime.block_on(world.run(&steps));
        Ok(())
    });
    runtime.block_on(async {
        agent.assert_running();
        if let Err(error) = run {
            panic!("{error}");
        }
        let world = world.into_inner().unwrap();
        assert!(world.keys.len() > 50, "{} keys were seen", world.keys.len());
        drop(world);
        agent.stop().await;
    });
}
