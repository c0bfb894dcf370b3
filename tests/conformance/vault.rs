//! Certificates from Vault (`CA_PROVIDER=VaultCA`), and names of providers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mock_istiod::pki::{Leaf, read_request};
use serde_json::{Value, json};

use crate::support::agent::Builder;
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::web::{self, Web};
use crate::support::{MockIstiod, TestAgent};

/// What the double does next, in place of answering.
#[derive(Debug, Clone)]
enum Next {
    Status(u16),
    Body(&'static str),
    Hang,
}

#[derive(Default)]
struct State {
    /// For logins and for signatures.
    next: [VecDeque<Next>; 2],
    asked: Vec<(String, Value, Option<String>, Option<String>)>,
}

type Shared = Arc<Mutex<State>>;

/// A Vault with an auth method and a role that signs by the mesh's authority.
async fn vault(mock: &MockIstiod) -> (Web, Shared) {
    let state = Shared::default();
    let (told, authority, identity) = (state.clone(), mock.authority(), mock.identity("ns", "sa"));
    let web = Web::start(move |head, body| {
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let header = |name: &str| head.headers.get(name).and_then(|v| v.to_str().ok()).map(ToOwned::to_owned);
        let path = head.uri.path().to_owned();
        let signs = path.contains("/sign/");
        let next = {
            let mut state = told.lock().unwrap();
            state.asked.push((path, body.clone(), header("x-vault-token"), header("x-vault-namespace")));
            state.next[usize::from(signs)].pop_front()
        };
        let good = if signs {
            let key = body["csr"].as_str().and_then(|csr| read_request(csr).ok());
            key.map(|key| {
                let leaf = Leaf::workload(identity.clone(), Duration::from_secs(3600));
                let certificate = authority.sign(&key, &leaf);
                let mut chain: Vec<&str> = authority.intermediates().map(str::trim_end).collect();
                chain.push(authority.root_pem().trim_end());
                json!({ "data": { "certificate": certificate.trim_end(), "ca_chain": chain } })
            })
        } else {
            Some(json!({ "auth": { "client_token": "S3CRET-CLIENT" } }))
        };
        async move {
            match next {
                None => web::json(if good.is_some() { 200 } else { 400 }, &good.unwrap_or_default()),
                Some(Next::Status(status)) => web::json(status, &json!({ "errors": ["S3CRET-ERROR"] })),
                Some(Next::Body(text)) => http::Response::new(bytes::Bytes::from(text).into()),
                Some(Next::Hang) => std::future::pending().await,
            }
        }
    })
    .await;
    (web, state)
}

fn builder(mock: &MockIstiod, vault: &Web) -> Builder {
    TestAgent::with()
        .istiod(mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("CA_PROVIDER", "VaultCA")
        .env("VAULT_ADDR", format!("http://127.0.0.1:{}", vault.port))
        .env("VAULT_ROLE", "istio-cert")
        .env("VAULT_AUTH_PATH", "auth/kubernetes/login")
        .env("VAULT_SIGN_CSR_PATH", "istio_ca/sign/istio-pki-role")
        .env("VAULT_NAMESPACE", "team")
        .env("SECRET_TTL", "1h")
        .arg("--log_output_level=all:debug")
}

#[tokio::test]
async fn vault_signs_after_everything_that_can_go_wrong() {
    let mock = MockIstiod::start().await;
    let (web, state) = vault(&mock).await;
    // Worth another try within the call; then one that is not; then answers of every bad shape.
    state.lock().unwrap().next = [
        [Next::Status(503), Next::Status(429), Next::Status(403), Next::Body("{\"auth\": {}}"), Next::Hang]
            .into(),
        [
            Next::Status(472),
            Next::Status(400),
            Next::Status(307),
            Next::Body("S3CRET-NO-JSON"),
            Next::Body("{\"data\": {\"certificate\": 7}}"),
            Next::Body("{\"data\": {\"certificate\": \"x\", \"ca_chain\": [\"y\"]}}"),
        ]
        .into(),
    ];
    let mut agent = builder(&mock, &web).env("CA_ATTEMPT_TIMEOUT", "1s").start();
    let client = agent.sds().await;
    let pem = crate::support::eventually("a certificate of Vault's", async || {
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("default"));
        secrets(&stream.next().await.ok()?).into_iter().next()
    })
    .await;
    assert!(matches!(pem, (_, Pem::Identity { .. })));
    let state = state.lock().unwrap();
    assert!(state.next.iter().all(VecDeque::is_empty), "every fault was met: {:?}", state.next);
    let (path, body, token, namespace) = state.asked.last().unwrap().clone();
    assert_eq!(path, "/v1/istio_ca/sign/istio-pki-role");
    assert_eq!((token.as_deref(), namespace.as_deref()), (Some("S3CRET-CLIENT"), Some("team")));
    assert_eq!(body["ttl"], "3600s");
    assert_eq!((&body["format"], &body["exclude_cn_from_sans"]), (&json!("pem"), &json!(true)));
    let (path, body, ..) = state.asked[0].clone();
    let own = std::fs::read_to_string(agent.path(crate::support::agent::TOKEN)).unwrap();
    assert_eq!(
        (path.as_str(), &body["role"], body["jwt"].as_str().unwrap()),
        ("/v1/auth/kubernetes/login", &json!("istio-cert"), own.trim())
    );
    for said in [
        "login: HTTP status 503",
        "login: HTTP status 403",
        "auth.client_token",
        "redirects are not followed",
        "data.certificate",
    ] {
        assert!(agent.log().contains(said), "{said} is not in the log:\n{}", agent.log().text());
    }
    assert!(!agent.log().contains("S3CRET"), "{}", agent.log().text());
}

#[tokio::test]
async fn what_a_provider_lacks_is_named_at_the_start() {
    let mock = MockIstiod::start().await;
    let (web, _) = vault(&mock).await;
    for (name, value, said) in [
        ("VAULT_ROLE", "", "VAULT_ROLE"),
        ("VAULT_ADDR", "vault:8200", "VAULT_ADDR"),
        ("VAULT_TLS_ROOT_CERT", "no-such-file", "VAULT_TLS_ROOT_CERT"),
        ("CA_PROVIDER", "Vault", "CA_PROVIDER is one of Citadel"),
        ("CA_PROVIDER", "GoogleCA", "needs CA_ADDR"),
        ("CA_PROVIDER", "GoogleCAS", "needs CA_ADDR"),
        ("CA_ADDR", "meshca.googleapis.com:443", "name the provider"),
        ("PLUGINS", "GoogleTokenExchange", "GKE_CLUSTER_URL"),
    ] {
        let mut agent = builder(&mock, &web).env("GCE_METADATA_HOST", "127.0.0.1:1").env(name, value).start();
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{name}={value}");
        said_by(&agent, said).await;
    }
    let mut agent = TestAgent::with().istiod(&mock).env("CA_PROVIDER", "Istiod").start();
    agent.wait_ready().await;
    agent.stop().await;
}

/// What an agent that has ended left in its log; the last lines may still be on their way.
async fn said_by(agent: &TestAgent, part: &str) {
    crate::support::eventually(part, async || agent.log().contains(part).then_some(())).await;
}
