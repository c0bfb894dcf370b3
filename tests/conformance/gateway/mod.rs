//! Secrets of gateways, from the API server and from a folder.

use std::time::Duration;

use mock_istiod::apiserver::{ApiFault, ApiServer};
use mock_istiod::pki::Pair;

use crate::support::agent::Builder;
use crate::support::client::{EnvoyClient, Pem, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent, eventually};

mod memory;
mod watch;

const SOCKET: &str = "var/run/ingress_gateway/sds";
const ACCOUNT: &str = "var/run/secrets/kubernetes.io/serviceaccount";

fn pair(mock: &MockIstiod, name: &str) -> Pair {
    mock.issue(&format!("spiffe://x/{name}"), Duration::from_secs(3600))
}

fn fields(pair: &Pair) -> [(&str, &[u8]); 2] {
    [("tls.crt", pair.chain.as_bytes()), ("tls.key", pair.key.as_bytes())]
}

type Stream = crate::support::client::Duplex<
    envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest,
    envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse,
>;

async fn next(stream: &mut Stream) -> Pem {
    secrets(&stream.next().await.unwrap()).remove(0).1
}

fn is(pem: &Pem, expected: &Pair) -> bool {
    matches!(pem, Pem::Identity { chain, key } if *chain == expected.chain && *key == expected.key)
}

fn from_api(mock: &MockIstiod, api: &ApiServer) -> Builder {
    TestAgent::with()
        .istiod(mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .example("gateway-api.env")
        .env("INGRESS_GATEWAY_NAMESPACE", "ns")
        .env("KUBERNETES_SERVICE_HOST", "localhost")
        .env("KUBERNETES_SERVICE_PORT", api.port().to_string())
        .file(&format!("{ACCOUNT}/token"), "S3CRET-ONE")
        .file(&format!("{ACCOUNT}/ca.crt"), mock.root_pem())
}

#[tokio::test]
async fn secrets_come_from_the_api_server_whatever_happens_there() {
    let mock = MockIstiod::start().await;
    let api = ApiServer::start(&mock.authority(), "S3CRET-ONE").await;
    let others = pair(&mock, "others");
    for n in 0..2000 {
        api.put(&format!("other-{n}"), &fields(&others));
    }
    let mut agent = from_api(&mock, &api).arg("--log_output_level=all:debug").start();
    let client = agent.client(SOCKET).await;

    // Refused, slow to be understood, then simply not there: the stream waits.
    // Two are under way, for the name and for the fallback.
    let refused = [ApiFault::Status(403), ApiFault::Status(500), ApiFault::Garbage, ApiFault::Cut];
    api.next(refused.iter().flat_map(|fault| [*fault; 2]));
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("web"));
    agent.wait_log("verbs get, list and watch on secrets").await;
    agent.wait_log("Envoy waits for it").await;
    let spare = pair(&mock, "spare");
    api.put("gateway-fallback", &fields(&spare));
    assert!(is(&next(&mut stream).await, &spare), "the fallback first");
    let spare = pair(&mock, "the next spare");
    api.put("gateway-fallback", &fields(&spare));
    assert!(is(&next(&mut stream).await, &spare), "a renewed fallback is served as well");
    let one = pair(&mock, "one");
    api.put("web", &fields(&one));
    assert!(is(&next(&mut stream).await, &one), "then the right one");

    // What cannot be served changes nothing; the next good one does, though its watch is cut, stale and refused.
    let two = pair(&mock, "two");
    let torn = [("tls.crt", two.chain.as_bytes()), ("tls.key", one.key.as_bytes())];
    api.put("web", &torn);
    agent.wait_log("its pair cannot be served").await;
    api.rotate("S3CRET-TWO");
    api.restart();
    agent.wait_log("(401)").await;
    agent.put(&format!("{ACCOUNT}/token"), "S3CRET-TWO");
    api.put("web", &fields(&two));
    assert!(is(&next(&mut stream).await, &two));
    let three = pair(&mock, "three");
    api.next([ApiFault::Gone, ApiFault::Status(410), ApiFault::Status(503)]);
    api.restart();
    eventually("the faults are met", async || (api.faults_left() == 0).then_some(())).await;
    api.put("web", &fields(&three));
    assert!(is(&next(&mut stream).await, &three));

    // Deleted: what was served stays.
    api.delete("web");
    agent.wait_log("what was served before stays").await;
    let mut again = client.stream_secrets();
    again.send(&secret_request("web"));
    assert!(is(&next(&mut again).await, &three));

    // Trust anchors of a compound secret, and names that are nobody's business.
    let root = mock.root_pem();
    let mut compound = fields(&one).to_vec();
    compound.push(("cacert", root.as_bytes()));
    api.put("both", &compound);
    let mut anchors = client.stream_secrets();
    anchors.send(&secret_request("both-cacert"));
    assert!(matches!(next(&mut anchors).await, Pem::Roots(pem) if pem == root));
    let mut stranger = client.stream_secrets();
    stranger.send(&secret_request("../web"));
    assert_eq!(stranger.next().await.unwrap_err().code(), tonic::Code::Unknown);

    assert!(api.asked().iter().all(|target| target.contains("fieldSelector") && !target.contains("other-")));
    let document = agent.get("/debug/agentz").await.unwrap().text();
    assert!(document.contains("gatewaySecrets"), "{document}");
    for secret in ["S3CRET-ONE", "S3CRET-TWO", "PRIVATE KEY"] {
        assert!(!agent.log().contains(secret) && !document.contains(secret));
    }
    agent.stop().await;
}

#[tokio::test]
async fn secrets_come_from_a_folder() {
    let mock = MockIstiod::start().await;
    let one = pair(&mock, "one");
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .file("gw/one/tls.crt", one.chain.clone())
        .file("gw/one/tls.key", one.key.clone())
        .file("gw/one/ca.crt", mock.root_pem())
        .example("gateway-folder.env")
        .env("INGRESS_GATEWAY_FALLBACK_SECRET", "gateway-fallback")
        .arg("--gateway-secrets-dir=gw")
        .start();
    let client: EnvoyClient = agent.client(SOCKET).await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("one"));
    assert!(is(&next(&mut stream).await, &one));
    let mut anchors = client.stream_secrets();
    anchors.send(&secret_request("one-cacert"));
    assert!(matches!(next(&mut anchors).await, Pem::Roots(pem) if pem == mock.root_pem()));
    let mut late = client.stream_secrets();
    late.send(&secret_request("two"));
    agent.wait_log("Envoy waits for it").await;
    for name in ["a spare", "the next spare"] {
        let spare = pair(&mock, name);
        agent.put("gw/gateway-fallback/tls.key", &spare.key);
        agent.put("gw/gateway-fallback/tls.crt", &spare.chain);
        assert!(is(&next(&mut late).await, &spare), "{name}");
    }
    let two = pair(&mock, "two");
    for secret in ["one", "two"] {
        agent.put(&format!("gw/{secret}/tls.key"), &two.key);
        agent.put(&format!("gw/{secret}/tls.crt"), &two.chain);
    }
    assert!(is(&next(&mut stream).await, &two), "a changed pair");
    assert!(is(&next(&mut late).await, &two), "a new one");
    agent.stop().await;
}

#[tokio::test]
async fn what_gateways_and_callers_lack_is_named_at_the_start() {
    let mock = MockIstiod::start().await;
    let api = ApiServer::start(&mock.authority(), "t").await;
    let callers = TestAgent::with().istiod(&mock).env("SDS_CALLER_TOKENS", "true");
    for (builder, part) in [
        (from_api(&mock, &api).without_env("KUBERNETES_SERVICE_HOST"), "KUBERNETES_SERVICE_HOST"),
        (from_api(&mock, &api).arg("--gateway-secrets-dir=nowhere"), "nowhere"),
        (
            from_api(&mock, &api).arg("--gatewayUdsPath=./var/run/secrets/workload-spiffe-uds/socket"),
            "workload's socket",
        ),
        (
            from_api(&mock, &api)
                .arg("--gatewayUdsPath=var/run/secrets/other/..//workload-spiffe-uds/socket"),
            "workload's socket",
        ),
        (from_api(&mock, &api).env("KUBERNETES_SERVICE_PORT", "https"), "KUBERNETES_SERVICE_PORT=https"),
        (from_api(&mock, &api).env("INGRESS_GATEWAY_NAMESPACE", "a/b"), "INGRESS_GATEWAY_NAMESPACE"),
        (
            from_api(&mock, &api).env("INGRESS_GATEWAY_FALLBACK_SECRET", "../web"),
            "INGRESS_GATEWAY_FALLBACK_SECRET=../web",
        ),
        (callers.clone().env("WORKLOAD_SDS", "on"), "WORKLOAD_SDS=on"),
        (callers.clone().arg("--workloadUDSPath=./var/run/ingress_gateway/sds"), "another part of the agent"),
        (callers.clone().arg("--workloadUDSPath=var/run/ingress_gateway/sds"), "another part of the agent"),
        (
            callers.clone().env("FILE_MOUNTED_CERTS", "true").env("XDS_ROOT_CA", "SYSTEM"),
            "no CA signs for callers",
        ),
    ] {
        let mut agent = builder.start();
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{part}");
        eventually(part, async || agent.log().contains(part).then_some(())).await;
    }
    // What is of the wrong type has its line and its default.
    let wrong = [
        ("ENABLE_INGRESS_GATEWAY_SDS", "perhaps"),
        ("SDS_CALLER_TOKENS", "perhaps"),
        ("SECRET_WATCHER_RESYNC_PERIOD", "soon"),
    ];
    let builder = TestAgent::with().istiod(&mock);
    let mut agent = wrong.iter().fold(builder, |builder, (name, value)| builder.env(name, *value)).start();
    agent.wait_ready().await;
    for (name, value) in wrong {
        agent.wait_log(&format!("Invalid environment variable value `{value}` for {name}")).await;
    }
    agent.stop().await;
}

/// A request over a connection of its own; gives the certificate that Envoy showed.
async fn shown(port: u16, root: &str) -> Result<Vec<u8>, String> {
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, ServerName};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(root.as_bytes()).flatten());
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let socket = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.map_err(|e| e.to_string())?;
    let name = ServerName::try_from("localhost").map_err(|e| e.to_string())?;
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let mut stream = connector.connect(name, socket).await.map_err(|e| e.to_string())?;
    let leaf = stream.get_ref().1.peer_certificates().map(|chain| chain[0].to_vec()).unwrap_or_default();
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await.map_err(|e| e.to_string())?;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    if answer.starts_with(b"HTTP/1.1 200") {
        Ok(leaf)
    } else {
        Err(String::from_utf8_lossy(&answer).into_owned())
    }
}

#[tokio::test]
async fn envoys_listener_changes_its_certificate_under_traffic() {
    let mock = MockIstiod::start().await;
    let api = ApiServer::start(&mock.authority(), "S3CRET-ONE").await;
    let port = crate::support::free_port();
    let root = mock.root_pem();
    let made = || {
        let now = std::time::SystemTime::now();
        mock.authority().pair(&mock_istiod::pki::Leaf {
            uris: Vec::new(),
            dns: vec!["localhost".to_owned()],
            not_before: now - Duration::from_secs(60),
            not_after: now + Duration::from_secs(3600),
        })
    };
    let yaml = include_str!("../../support/gateway_envoy.yaml").replace("{{listener}}", &port.to_string());
    let mut agent = from_api(&mock, &api)
        .env("ISTIO_BOOTSTRAP_OVERRIDE", "override.yaml")
        .file("override.yaml", yaml)
        .envoy(crate::support::Envoy::Real)
        .start();
    // Nothing is there: Envoy waits. Then the fallback, then the right one.
    agent.wait_log("Envoy waits for it").await;
    api.put("gateway-fallback", &fields(&made()));
    let fallback = eventually("the fallback", async || shown(port, &root).await.ok()).await;
    api.put("web", &fields(&made()));
    let mut last = eventually("the right certificate", async || {
        shown(port, &root).await.ok().filter(|leaf| *leaf != fallback)
    })
    .await;
    // Renewed again and again while requests go on; none fails.
    for _ in 0..3 {
        api.put("web", &fields(&made()));
        last = eventually("the next certificate", async || {
            let leaf = shown(port, &root).await.expect("no request fails while the certificate changes");
            (leaf != last).then_some(leaf)
        })
        .await;
    }
    agent.stop().await;
}
