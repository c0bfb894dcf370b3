//! Certificates from Vault (`CA_PROVIDER=VaultCA`), and names of providers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mock_istiod::pki::{Leaf, read_request};
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};

use crate::support::agent::Builder;
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::web::{self, Gate, Rough, Web};
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
    /// How long certificates live; an hour unless said otherwise.
    life: Option<Duration>,
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
        let (next, life) = {
            let mut state = told.lock().unwrap();
            state.asked.push((path, body.clone(), header("x-vault-token"), header("x-vault-namespace")));
            (state.next[usize::from(signs)].pop_front(), state.life.unwrap_or(Duration::from_secs(3600)))
        };
        let good = if signs {
            let key = body["csr"].as_str().and_then(|csr| read_request(csr).ok());
            key.map(|key| {
                let leaf = Leaf::workload(identity.clone(), life);
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

fn builder(mock: &MockIstiod, port: u16) -> Builder {
    TestAgent::with()
        .istiod(mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .example("vault.env")
        .env("VAULT_ADDR", format!("http://127.0.0.1:{port}"))
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
    let mut agent = builder(&mock, web.port).env("CA_ATTEMPT_TIMEOUT", "1s").start();
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
    // As those of the other CAs: what an attempt met is a trouble, which has its own line.
    let log = agent.log().text();
    let attempts: Vec<&str> = log.lines().filter(|line| line.contains("; attempt ")).collect();
    assert!(!attempts.is_empty() && attempts.iter().all(|line| line.contains("\tdebug\t")), "{attempts:?}");
}

async fn served(client: &crate::support::EnvoyClient) -> Option<String> {
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    match secrets(&stream.next().await.ok()?).into_iter().next() {
        Some((_, Pem::Identity { chain, .. })) => Some(chain),
        _ => None,
    }
}

/// The matrix of faults: each at the login, and each at the signature.
#[tokio::test]
async fn whatever_is_in_vaults_place_is_told_and_outlived() {
    let mock = MockIstiod::start().await;
    let (web, state) = vault(&mock).await;
    let (elsewhere, asked) = {
        let asked = Arc::<std::sync::atomic::AtomicUsize>::default();
        let count = asked.clone();
        let web = Web::start(move |_, _| {
            count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            async { web::json(200, &json!({})) }
        });
        (web.await, asked)
    };
    let gate = Gate::before(web.port).await;
    let wrong = r#"{"auth": {"client_token": 7}, "data": {"certificate": ["S3CRET"], "ca_chain": "S3CRET"}}"#;
    let faults = [
        (Rough::Reset, ""),
        (Rough::Silent, "gave no answer within"),
        (Rough::Cut, ""),
        (Rough::Garbage, ""),
        (Rough::Endless, "it is longer than"),
        (Rough::Drip, "gave no answer within"),
        (Rough::Body(""), "it is no JSON"),
        (Rough::Body("[]"), "there is no"),
        (Rough::Body(wrong), "there is no text"),
        (Rough::Redirect(elsewhere.port), "redirects are not followed"),
        (Rough::Status(204), "HTTP status 204"),
        (Rough::Status(500), "HTTP status 500"),
    ];
    let agent = |port| builder(&mock, port).env("CA_ATTEMPT_TIMEOUT", "1s");
    for step in ["login", "signature"] {
        let before = if step == "login" { &[][..] } else { &[Rough::Pass][..] };
        gate.next(faults.iter().flat_map(|(rough, _)| before.iter().copied().chain([*rough])));
        let mut agent = agent(gate.port).start();
        let client = agent.sds().await;
        crate::support::eventually(&format!("a certificate after all faults at the {step}"), async || {
            served(&client).await.filter(|_| gate.left() == 0)
        })
        .await;
        let text = agent.log().text();
        for (rough, said) in faults {
            assert!(text.contains(said), "{rough:?} at the {step} is not told:\n{text}");
        }
        assert!(text.contains(&format!("{step}: ")) && !text.contains("S3CRET"), "{text}");
    }
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 0, "nothing was sent elsewhere");
    // A port where nobody listens.
    let mut refused = agent(crate::support::free_port()).start();
    refused.sds().await.stream_secrets().send(&secret_request("default"));
    refused.wait_log("onnection refused").await;
    crate::support::eventually("Vault, not istiod, is what cannot be reached", async || {
        let document = refused.get("/debug/agentz").await.ok()?.text();
        document.contains("\"CaUnreachable\"").then_some(())
    })
    .await;
    assert!(!refused.log().contains("istiod cannot be reached"));

    // With a certificate in hand none of it takes it away, and readiness and the list of troubles tell.
    state.lock().unwrap().life = Some(Duration::from_secs(60));
    let mut agent = agent(gate.port).env("SECRET_GRACE_PERIOD_RATIO", "0.95").start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    let first = served(&client).await.unwrap();
    gate.next([Rough::Status(403), Rough::Garbage, Rough::Body("[]")]);
    agent.wait_log("the current certificate stays in use").await;
    crate::support::eventually("the trouble is told", async || {
        let document = agent.get("/debug/agentz").await.ok()?.text();
        document.contains("\"CertificateRefused\"").then_some(())
    })
    .await;
    assert_eq!(served(&client).await.unwrap(), first, "the last good one is served");
    crate::support::eventually("a renewal after that", async || {
        served(&client).await.filter(|chain| *chain != first && gate.left() == 0)
    })
    .await;
    agent.stop().await;
}

/// A Vault or OpenBao itself, in its development mode, set up as its documentation says for Kubernetes but that the
/// login takes any signed token of ours (`auth/jwt`).
#[tokio::test]
async fn a_real_vault_signs() {
    let Some(binary) = crate::support::vault_bin() else {
        println!("\n*** NO REAL VAULT WAS ASKED: name one with VAULT_BIN=/path/to/vault (or bao) ***\n");
        eprintln!("\n*** NO REAL VAULT WAS ASKED: name one with VAULT_BIN=/path/to/vault (or bao) ***\n");
        return;
    };
    let mock = MockIstiod::start().await;
    let port = crate::support::free_port();
    let dir = tempfile::tempdir().unwrap();
    let address = format!("http://127.0.0.1:{port}");
    let mut server = tokio::process::Command::new(&binary)
        .args(["server", "-dev", "-dev-root-token-id=root", &format!("-dev-listen-address=127.0.0.1:{port}")])
        .env("HOME", dir.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let run = async |args: &[&str]| {
        let mut command = tokio::process::Command::new(&binary);
        command.args(args).env("VAULT_ADDR", &address).env("BAO_ADDR", &address).env("HOME", dir.path());
        command.env("VAULT_TOKEN", "root").env("BAO_TOKEN", "root");
        let output = command.output().await.unwrap();
        output.status.success().then_some(()).ok_or(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    crate::support::eventually("Vault is up", async || run(&["status"]).await.ok()).await;
    std::fs::write(dir.path().join("key.pem"), mock_istiod::jwt::public_key_pem()).unwrap();
    std::fs::write(dir.path().join("policy.hcl"), "path \"istio_ca/sign/*\" { capabilities = [\"update\"] }")
        .unwrap();
    let file = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    for step in [
        vec!["secrets", "enable", "-path=istio_ca", "pki"],
        vec!["write", "istio_ca/root/generate/internal", "common_name=mesh", "ttl=24h"],
        vec![
            "write",
            "istio_ca/roles/istio-pki-role",
            "allow_any_name=true",
            "enforce_hostnames=false",
            "require_cn=false",
            "allowed_uri_sans=spiffe://*",
            "key_type=any",
            "max_ttl=12h",
        ],
        vec!["policy", "write", "istio", &file("policy.hcl")],
        vec!["auth", "enable", "jwt"],
        vec!["write", "auth/jwt/config", &format!("jwt_validation_pubkeys=@{}", file("key.pem"))],
        vec![
            "write",
            "auth/jwt/role/istio-cert",
            "role_type=jwt",
            "bound_audiences=istio-ca",
            "user_claim=sub",
            "policies=istio",
        ],
    ] {
        run(&step).await.unwrap_or_else(|error| panic!("{step:?}: {error}"));
    }
    let mut agent =
        builder(&mock, port).env("VAULT_AUTH_PATH", "auth/jwt/login").without_env("VAULT_NAMESPACE").start();
    let client = agent.sds().await;
    let chain = crate::support::eventually("a certificate of Vault's", async || served(&client).await).await;
    let leaf = rustls_pki_types::CertificateDer::from_pem_slice(chain.as_bytes()).unwrap();
    assert_eq!(mock_istiod::pki::names(&leaf).unwrap(), ["spiffe://cluster.local/ns/ns/sa/sa"]);
    println!("a certificate of {}", binary.display());
    agent.stop().await;
    server.kill().await.unwrap();
}

#[tokio::test]
async fn what_a_provider_lacks_is_named_at_the_start() {
    let mock = MockIstiod::start().await;
    let (web, _) = vault(&mock).await;
    for (name, value, said) in [
        ("VAULT_ROLE", "", "VAULT_ROLE"),
        ("VAULT_ADDR", "vault:8200", "VAULT_ADDR"),
        ("VAULT_TLS_ROOT_CERT", "no-such-file", "VAULT_TLS_ROOT_CERT"),
        ("VAULT_TLS_ROOT_CERT", "-----BEGIN CERTIFICATE-----\nx", "no readable certificate"),
        ("VAULT_AUTH_PATH", "", "VAULT_AUTH_PATH"),
        ("VAULT_AUTH_PATH", "/", "VAULT_AUTH_PATH"),
        ("VAULT_SIGN_CSR_PATH", "pki/sign?x", "VAULT_SIGN_CSR_PATH"),
        ("VAULT_NAMESPACE", "a\nb", "VAULT_NAMESPACE"),
        ("CA_PROVIDER", "Vault", "CA_PROVIDER is one of Citadel"),
        ("CA_PROVIDER", "GoogleCA", "needs CA_ADDR"),
        ("CA_PROVIDER", "GoogleCAS", "needs CA_ADDR"),
        ("CA_ADDR", "meshca.googleapis.com:443", "name the provider"),
        ("PLUGINS", "GoogleTokenExchange", "GKE_CLUSTER_URL"),
    ] {
        let mut agent =
            builder(&mock, web.port).env("GCE_METADATA_HOST", "127.0.0.1:1").env(name, value).start();
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{name}={value}");
        said_by(&agent, said).await;
    }
}

#[tokio::test]
async fn istiod_by_its_name_and_files_that_gke_mounts() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .example("istiod.env")
        .env("CA_ADDR", mock.discovery_address())
        .start();
    assert!(served(&agent.sds().await).await.is_some());
    agent.stop().await;

    let signed = mock.record().signed().len();
    let pair = mock.issue(&mock.identity("ns", "gke"), Duration::from_secs(3600));
    let credentials = "var/run/secrets/workload-spiffe-credentials";
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .example("gke-workload-certificate.env")
        .file(&format!("{credentials}/certificates.pem"), pair.chain.clone())
        .file_mode(&format!("{credentials}/private_key.pem"), pair.key, 0o600)
        .file(&format!("{credentials}/ca_certificates.pem"), mock.root_pem())
        .start();
    let client = agent.client(crate::support::agent::SDS).await;
    assert_eq!(served(&client).await.unwrap(), pair.chain);
    assert_eq!(mock.record().signed().len(), signed, "nobody was asked");
    agent.stop().await;
}

/// What an agent that has ended left in its log; the last lines may still be on their way.
async fn said_by(agent: &TestAgent, part: &str) {
    crate::support::eventually(part, async || agent.log().contains(part).then_some(())).await;
}
