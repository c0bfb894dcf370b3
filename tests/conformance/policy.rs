//! `COMPLIANCE_POLICY` on every way on which the agent speaks TLS: what it offers is read off its greeting.

use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::ads::World;
use super::wasm;
use crate::support::agent::Builder;
use crate::support::client::secret_request;
use crate::support::{MockIstiod, TestAgent, eventually, free_port, http, root_for};

/// What a client offers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    versions: Vec<u16>,
    suites: Vec<u16>,
    groups: Vec<u16>,
}

/// The fields of a TLS message, from the front.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(n);
        self.0 = rest;
        first
    }

    /// A field whose length stands before it in so many bytes.
    fn field(&mut self, bytes: usize) -> Bytes<'a> {
        let length = self.take(bytes).iter().fold(0, |n, b| n << 8 | usize::from(*b));
        Bytes(self.take(length))
    }

    fn numbers(self) -> Vec<u16> {
        // Clients put in values without a meaning (RFC 8701) and the signal of RFC 5746.
        let all = self.0.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        all.filter(|n| n & 0x0f0f != 0x0a0a && *n != 0x00ff).collect()
    }
}

/// Reads it from the first record, which holds it whole.
fn hello(record: &[u8]) -> Hello {
    let mut all = Bytes(record);
    assert_eq!(all.take(1), [0x01], "a greeting comes first");
    let mut message = all.field(3);
    let version = u16::from_be_bytes(message.take(2).try_into().unwrap());
    message.take(32);
    message.field(1);
    let mut out = Hello { versions: vec![version], suites: message.field(2).numbers(), groups: Vec::new() };
    message.field(1);
    let mut extensions = message.field(2);
    while !extensions.0.is_empty() {
        let kind = u16::from_be_bytes(extensions.take(2).try_into().unwrap());
        let mut content = extensions.field(2);
        match kind {
            10 => out.groups = content.field(2).numbers(),
            43 => out.versions = content.field(1).numbers(),
            _ => {}
        }
    }
    out.versions.sort_unstable();
    out
}

/// Notes the greeting of each connection and passes it on, or lets it fall.
struct Witness {
    port: u16,
    seen: Arc<Mutex<Vec<Hello>>>,
    _serving: JoinSet<()>,
}

impl Witness {
    async fn start(on_to: Option<u16>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::<Mutex<Vec<Hello>>>::default();
        let noted = seen.clone();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let noted = noted.clone();
                open.spawn(async move {
                    let mut head = [0; 5];
                    if client.read_exact(&mut head).await.is_err() || head[0] != 0x16 {
                        return;
                    }
                    let mut record = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
                    if client.read_exact(&mut record).await.is_err() {
                        return;
                    }
                    noted.lock().unwrap().push(hello(&record));
                    let Some(port) = on_to else { return };
                    let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                    if server.write_all(&[&head[..], &record].concat()).await.is_ok() {
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Self { port, seen, _serving: serving }
    }

    async fn offered(&self, way: &str) -> Vec<Hello> {
        eventually(&format!("a greeting: {way}"), async || {
            let seen = self.seen.lock().unwrap().clone();
            (!seen.is_empty()).then_some(seen)
        })
        .await
    }
}

const GCM_12: [u16; 4] = [0xc02b, 0xc02c, 0xc02f, 0xc030];
const GCM_13: [u16; 2] = [0x1301, 0x1302];

/// Every greeting on this way is within the policy, and not empty.
async fn within(policy: &str, way: &str, witness: &Witness) {
    let both = [&GCM_12[..], &GCM_13].concat();
    let (versions, suites, groups): (&[u16], &[u16], &[u16]) = match policy {
        "fips-140-2" => (&[0x0303], &GCM_12, &[0x0017]),
        "fips-140-3" => (&[0x0303, 0x0304], &both, &[0x0017, 0x0018]),
        "pqc" => (&[0x0304], &GCM_13, &[0x11ec]),
        _ => unreachable!("a policy"),
    };
    for hello in witness.offered(way).await {
        assert_eq!(hello.versions, versions, "{policy}, {way}");
        assert!(hello.suites.iter().all(|s| suites.contains(s)), "{policy}, {way}: {:04x?}", hello.suites);
        assert_eq!(hello.suites.len(), suites.len(), "{policy}, {way}: {:04x?}", hello.suites);
        assert_eq!(hello.groups, groups, "{policy}, {way}");
    }
}

const POLICIES: [&str; 3] = ["fips-140-2", "fips-140-3", "pqc"];

#[tokio::test]
async fn the_policy_holds_towards_istiod_probes_modules_registries_and_token_endpoints() {
    for policy in POLICIES {
        let mock = MockIstiod::start().await;
        let on_to = mock.discovery_address().rsplit(':').next().unwrap().parse().unwrap();
        let (xds, ca) = (Witness::start(Some(on_to)).await, Witness::start(Some(on_to)).await);
        let (probe, health) = (Witness::start(None).await, Witness::start(None).await);
        let (module, registry, tokens) =
            (Witness::start(None).await, Witness::start(None).await, Witness::start(None).await);
        let sts = free_port();
        let prober =
            json!({"httpGet": {"path": "/", "port": probe.port, "scheme": "HTTPS"}, "timeoutSeconds": 1});
        let with_modules = root_for("a mount namespace");
        let streams = mock.take_streams();
        let builder = TestAgent::with()
            .istiod(&mock)
            .proxy_config("discoveryAddress", format!("localhost:{}", xds.port))
            .proxy_config(
                "readinessProbe",
                json!({"httpGet": {"path": "/", "port": health.port, "scheme": "HTTPS"}, "periodSeconds": 1}),
            )
            .env("CA_ADDR", format!("localhost:{}", ca.port))
            .env("COMPLIANCE_POLICY", policy)
            .env("ISTIO_KUBE_APP_PROBERS", json!({"/app-health/app/livez": prober}).to_string())
            .env("STS_PORT", sts.to_string())
            .env("TOKEN_MANAGER_PLUGIN", "Passthrough")
            .env("STS_UPSTREAM_URL", format!("https://localhost:{}/token", tokens.port));
        let agent = if with_modules { wasm::with_folder(builder) } else { builder }.start();
        let mut world = World { mock, streams, agent };

        let (mut envoy, istiod) = world.sotw().await;
        within(policy, "istiod", &xds).await;
        let client = world.agent.sds().await;
        let mut stream = client.stream_secrets();
        stream.send(&secret_request("default"));
        stream.next().await.expect("a certificate within the policy");
        within(policy, "the CA", &ca).await;
        world.agent.wait_ready().await;
        let _ = world.agent.get("/app-health/app/livez").await;
        within(policy, "a probe", &probe).await;
        within(policy, "the application's health", &health).await;
        let form = "grant_type=urn:ietf:params:oauth:grant-type:token-exchange&subject_token=x\
                    &subject_token_type=urn:ietf:params:oauth:token-type:jwt";
        let kind = ("content-type", "application/x-www-form-urlencoded");
        let mut asking = JoinSet::new();
        asking.spawn(async move { http::call_with("POST", sts, "/token", form, &[kind]).await });
        within(policy, "a token endpoint", &tokens).await;
        drop(asking);
        if with_modules {
            let uris = [
                format!("https://localhost:{}/m.wasm", module.port),
                format!("oci://localhost:{}/mod:1", registry.port),
            ];
            let filters = uris.map(|uri| wasm::remote("f", uri, |_, _| {}));
            istiod.responses.sotw(&wasm::push("n1", filters.into())).await.unwrap();
            within(policy, "a module", &module).await;
            within(policy, "a registry", &registry).await;
            assert_eq!(envoy.next().await.unwrap().nonce, "n1", "what cannot be had is replaced");
        }
    }
}

fn older(policy: &str, mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).env("COMPLIANCE_POLICY", policy).env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
}

#[tokio::test]
async fn the_policy_holds_towards_vault_and_the_api_server() {
    for policy in POLICIES {
        let mock = MockIstiod::start().await;
        let (vault, api) = (Witness::start(None).await, Witness::start(None).await);
        let account = "var/run/secrets/kubernetes.io/serviceaccount";
        let mut agent = older(policy, &mock)
            .env("CA_PROVIDER", "VaultCA")
            .env("VAULT_ADDR", format!("https://localhost:{}", vault.port))
            .env("VAULT_ROLE", "r")
            .env("VAULT_AUTH_PATH", "auth/kubernetes/login")
            .env("VAULT_SIGN_CSR_PATH", "pki/sign/r")
            .env("ENABLE_INGRESS_GATEWAY_SDS", "true")
            .env("KUBERNETES_SERVICE_HOST", "localhost")
            .env("KUBERNETES_SERVICE_PORT", api.port.to_string())
            .file(&format!("{account}/token"), "x")
            .file(&format!("{account}/ca.crt"), mock.root_pem())
            .start();
        let client = agent.sds().await;
        let stream = client.stream_secrets();
        stream.send(&secret_request("default"));
        within(policy, "Vault", &vault).await;
        let gateway = agent.client("var/run/ingress_gateway/sds").await;
        let names = gateway.stream_secrets();
        names.send(&secret_request("web"));
        within(policy, "the API server", &api).await;
    }
}

/// Which build this is, its own version says.
#[tokio::test]
async fn the_module_is_demanded_only_of_those_who_have_it() {
    let mock = MockIstiod::start().await;
    let start = || older("fips-140-3", &mock).env("FIPS_MODULE_REQUIRED", "true");
    let version = std::process::Command::new(crate::support::agent_bin()).arg("--version").output().unwrap();
    if String::from_utf8_lossy(&version.stdout).contains("FIPS module") {
        let mut agent = start().start();
        agent.wait_ready().await;
        agent.stop().await;
    } else {
        let mut agent = start().start();
        assert_eq!(agent.wait_exit().await.code(), Some(255));
        agent
            .wait_log("FIPS_MODULE_REQUIRED=true: the crypto library of this build is not the FIPS module")
            .await;
        let mut agent = older("fips-140-3", &mock).start();
        agent.wait_ready().await;
        agent.stop().await;
    }
}
