//! The client against a CA that really signs, failures first.

use std::path::PathBuf;

use mock_istiod::{Code as MockCode, Fault, MockIstiod};
use tempfile::TempDir;

use super::*;
use crate::base::clock;
use crate::ca::CaClient;
use crate::ca::csr;
use crate::istiod::auth::TokenFile;
use crate::istiod::{self, ClientFiles, Compliance, Roots, Tls, Transport};
use crate::tls::cert;
use crate::tls::keys::{Algorithm, Curve, Key, KeyOptions, generate};

struct World {
    istiod: MockIstiod,
    dir: TempDir,
    key: Key,
}

impl World {
    async fn new() -> Self {
        let world = Self {
            istiod: MockIstiod::start().await,
            dir: tempfile::tempdir().unwrap(),
            key: generate(&KeyOptions { algorithm: Algorithm::Ecdsa(Curve::P256), pkcs8: false }).unwrap(),
        };
        world.write("root.pem", &world.istiod.root_pem());
        world.write("token", &world.istiod.mint("default", "a"));
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn client(&self) -> Client {
        self.client_with(|_| {})
    }

    fn client_with(&self, change: impl FnOnce(&mut Config)) -> Client {
        let connector = Connector::new(istiod::Config {
            address: self.istiod.discovery_address(),
            transport: Transport::Tls(Tls {
                roots: Roots::File(self.path("root.pem")),
                server_name: None,
                client: Some(ClientFiles {
                    cert: self.path("cert-chain.pem"),
                    key: self.path("key.pem"),
                    written: false,
                }),
                compliance: Compliance::None,
            }),
            connect_timeout: Duration::from_secs(20),
            shuffle: false,
            user_timeout: None,
            proxy: None,
        })
        .unwrap();
        let tokens = TokenFile::new(self.path("token"), "istio-ca", Arc::new(clock::System));
        let mut config = Config {
            connector,
            tokens: Arc::new(tokens),
            headers: CallHeaders {
                cluster_id: "Kubernetes".to_owned(),
                extra: vec![("baz".to_owned(), "=qux".to_owned())],
            },
            cert_signer: String::new(),
            attempt_timeout: Calls::ATTEMPT_TIMEOUT,
            total_timeout: Calls::TOTAL_TIMEOUT,
            trouble: Arc::default(),
        };
        change(&mut config);
        Client::new(config, &Metrics::new())
    }

    async fn sign(&self, client: &Client) -> Result<Vec<String>, Error> {
        let request = csr::request(&self.key, "spiffe://cluster.local/ns/default/sa/a").unwrap();
        client.sign(&request, Duration::from_secs(3600)).await
    }

    /// `x-retry-attempt` of each call so far.
    fn attempts(&self) -> Vec<String> {
        let header = |call: mock_istiod::record::CaCall| {
            let found = call.headers.into_iter().find(|(n, _)| n == "x-retry-attempt");
            found.map_or("first".to_owned(), |(_, v)| v)
        };
        self.istiod.record().ca_calls().into_iter().map(header).collect()
    }
}

fn retries(client: &Client) -> u64 {
    client.caller.attempts.retries.with_label_values(&["csr"]).get()
}

#[tokio::test]
async fn a_request_is_signed_and_carries_what_istiod_expects() {
    let world = World::new().await;
    let client = world.client_with(|c| c.cert_signer = "signer".to_owned());
    let chain = world.sign(&client).await.unwrap();
    let leaf = &cert::parse_chain(chain[0].as_bytes()).unwrap()[0];
    assert_eq!(leaf.spki, world.key.spki());
    assert_eq!(leaf.uris, ["spiffe://cluster.local/ns/default/sa/a"]);
    let call = &world.istiod.record().ca_calls()[0];
    assert_eq!(call.validity_seconds, 3600);
    assert_eq!(call.metadata, serde_json::json!({"CertSigner": "signer"}));
    assert_eq!(call.authority, "istiod.istio-system.svc");
    let value = |name: &str| call.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    assert_eq!(
        (value("clusterid"), value("baz"), value("te")),
        (Some("Kubernetes"), Some("=qux"), Some("trailers"))
    );
    assert!(value("authorization").unwrap().starts_with("Bearer e"));
    assert_eq!(world.attempts(), ["first"]);
    assert!(!format!("{client:?}").contains("Bearer"));
}

#[tokio::test]
async fn each_code_is_retried_as_the_go_agent_does() {
    use MockCode as C;
    for (code, calls) in [
        (C::ResourceExhausted, 5),
        (C::Aborted, 5),
        (C::Internal, 5),
        (C::Unavailable, 5),
        (C::Cancelled, 1),
        (C::DeadlineExceeded, 1),
        (C::Unauthenticated, 1),
        (C::PermissionDenied, 1),
        (C::InvalidArgument, 1),
        (C::Unknown, 1),
        (C::NotFound, 1),
        (C::FailedPrecondition, 1),
        (C::Unimplemented, 1),
    ] {
        let world = World::new().await;
        let client = world.client();
        world.istiod.ca().always(vec![Fault::refuse(code)]);
        let error = world.sign(&client).await.unwrap_err();
        let all = ["first", "1", "2", "3", "4"];
        assert_eq!(world.attempts(), &all[..calls], "{code:?}");
        assert_eq!(retries(&client), calls as u64 - 1, "{code:?}");
        assert!(error.to_string().contains("refused by the script"), "{error}");
        assert!(
            matches!(&error, Error::Status { status, .. } if status.code() as i32 == code as i32),
            "{error:?}"
        );
        // All attempts of one call share a connection while it works.
        assert_eq!(world.istiod.record().connections().len(), 1, "{code:?}");
        // And the next call works as if nothing had been.
        world.istiod.ca().clear();
        world.sign(&client).await.unwrap();
    }
}

#[tokio::test]
async fn a_broken_connection_is_replaced_within_the_call() {
    for fault in [Fault::Drop, Fault::GoAway] {
        let world = World::new().await;
        let client = world.client();
        world.istiod.ca().step(vec![fault.clone(), Fault::refuse(MockCode::Unavailable)]);
        world.sign(&client).await.unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        assert_eq!(retries(&client), 1, "{fault:?}");
    }
}

#[tokio::test]
async fn an_answer_cut_off_is_asked_for_again() {
    let world = World::new().await;
    let client = world.client();
    world.istiod.ca().next(Fault::Cut(20));
    world.sign(&client).await.unwrap();
    assert_eq!(world.attempts(), ["first", "1"]);
    // Slowly is not broken.
    world.istiod.ca().next(Fault::Drip(400, Duration::from_millis(1)));
    world.sign(&client).await.unwrap();
}

#[tokio::test]
async fn a_ca_that_hangs_costs_one_attempt_and_blocks_nobody() {
    let world = World::new().await;
    let client = world.client_with(|c| c.attempt_timeout = Duration::from_secs(5));
    world.istiod.ca().next(Fault::HalfOpen);
    let (hanging, fine) = tokio::join!(world.sign(&client), async {
        world
            .istiod
            .record()
            .wait("a call", Duration::from_secs(10), |_| {
                // The first call is not recorded before it is answered; its connection is.
                (!world.istiod.record().connections().is_empty()).then_some(())
            })
            .await
            .unwrap();
        world.sign(&client).await
    });
    // Whichever came first got the step.
    let (errors, answers): (Vec<_>, Vec<_>) = [hanging, fine].into_iter().partition(Result::is_err);
    assert_eq!((errors.len(), answers.len()), (1, 1));
    let error = errors.into_iter().next().unwrap().unwrap_err();
    assert_eq!(error.label(), "deadline");
    assert!(!matches!(error, Error::Unsent(_)), "the CA has had the request: {error:?}");
    assert_eq!(retries(&client), 0);
    world.sign(&client).await.unwrap();
}

#[tokio::test]
async fn a_silent_listener_and_a_closed_port_end_and_heal() {
    let world = World::new().await;
    let hasty = world.client_with(|c| c.attempt_timeout = Duration::from_millis(300));
    world.istiod.connections().next(Fault::HalfOpen);
    let error = world.sign(&hasty).await.unwrap_err();
    // The time of the attempt is over while it dials, and that is what it says.
    assert_eq!(error.label(), "connect");
    assert!(matches!(error, Error::Unsent(_)), "{error:?}");
    assert_eq!(error.report().kind, crate::trouble::Kind::IstiodSilent, "{error:?}");
    // What must succeed has time on a slow machine too.
    let client = world.client();
    world.istiod.down().await;
    let error = world.sign(&client).await.unwrap_err();
    assert_eq!((error.label(), retries(&client)), ("connect", 4));
    assert!(matches!(error, Error::Unsent(_)), "{error:?}");
    let text = crate::base::error::chain(&error);
    assert!(text.contains("is istiod running"), "{text}");
    world.istiod.up().await.unwrap();
    world.sign(&client).await.unwrap();
}

#[tokio::test]
async fn useless_answers_are_refused() {
    let world = World::new().await;
    let client = world.client();
    for fault in [Fault::EmptyChain, Fault::OneCertificate] {
        world.istiod.ca().next(fault.clone());
        let error = world.sign(&client).await.unwrap_err();
        assert!(error.to_string().contains("invalid empty CertChain"), "{error}");
        assert_eq!(error.label(), "answer", "{fault:?}");
    }
    assert_eq!(retries(&client), 0);
}

#[tokio::test]
async fn the_token_is_read_at_every_attempt() {
    let world = World::new().await;
    std::fs::remove_file(world.path("token")).unwrap();
    let client = world.client();
    let error = world.sign(&client).await.unwrap_err();
    assert_eq!(error.label(), "UNAUTHENTICATED");
    assert!(error.to_string().contains("is the token there"), "{error}");
    let call = &world.istiod.record().ca_calls()[0];
    assert!(!call.headers.iter().any(|(n, _)| n == "authorization"));
    world.write("token", &format!("  {}\n", world.istiod.mint("default", "a")));
    world.sign(&client).await.unwrap();
}

#[tokio::test]
async fn metadata_that_cannot_be_sent_fails_before_it_leaves() {
    let world = World::new().await;
    let client = world.client_with(|c| c.headers.extra.push(("a b".to_owned(), String::new())));
    let error = world.sign(&client).await.unwrap_err();
    assert!(error.to_string().contains("\"a b\""), "{error}");
    assert!(matches!(error, Error::Unsent(_)), "{error:?}");
    // There may be a connection, which is made meanwhile.
    assert!(world.attempts().is_empty());
}

#[tokio::test]
async fn a_rotated_root_counts_at_the_next_call() {
    let world = World::new().await;
    let client = world.client();
    world.sign(&client).await.unwrap();
    world.istiod.rotate_root(false);
    let error = world.sign(&client).await.unwrap_err();
    let text = crate::base::error::chain(&error);
    assert!(text.contains("is it the root of this istiod?"), "{text}");
    world.write("root.pem", &world.istiod.root_pem());
    world.sign(&client).await.unwrap();
    // A missing file takes nothing away that works.
    std::fs::remove_file(world.path("root.pem")).unwrap();
    world.sign(&client).await.unwrap();
}

#[tokio::test]
async fn a_client_certificate_opens_the_door_without_a_token() {
    let world = World::new().await;
    std::fs::remove_file(world.path("token")).unwrap();
    let client = world.client();
    let identity = world.istiod.identity("vm", "b");
    for (life, works) in [(Duration::from_secs(600), true), (Duration::ZERO, false)] {
        let pair = world.istiod.issue(&identity, life);
        world.write("cert-chain.pem", &pair.chain);
        world.write("key.pem", &pair.key);
        let chain = world.sign(&client).await;
        assert_eq!(chain.is_ok(), works, "{chain:?}");
        if let Ok(chain) = chain {
            assert_eq!(
                cert::parse_chain(chain[0].as_bytes()).unwrap()[0].uris,
                std::slice::from_ref(&identity)
            );
        }
    }
}
