//! All who tell of a trouble agree: two faults at once, faults of the first seconds, and what only one of them saw.

use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use mock_istiod::jwt::Expiry;
use serde_json::{Value, json};

use super::CLUSTER;
use crate::support::agent::{Builder, Envoy, TOKEN};
use crate::support::client::{Duplex, Pem, node, secret_request, secrets};
use crate::support::commands::Said;
use crate::support::{Code, Fault, MockIstiod, TestAgent, Token, eventually, root_for};

const HOUR: Duration = Duration::from_secs(3600);

fn well(mock: &MockIstiod) -> Builder {
    TestAgent::with().istiod(mock).env("CLOUD_PLATFORM", "none")
}

fn kinds(json: &Value) -> Vec<&str> {
    let all = json["troubles"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(|trouble| trouble["kind"].as_str()).collect()
}

/// The details of checks in this state.
fn details(said: &Said, state: &str) -> Vec<String> {
    let json = said.json();
    let all = json["checks"].as_array().cloned().unwrap_or_default();
    let text = |check: &Value| check["detail"].as_str().unwrap_or_default().to_owned();
    all.iter().filter(|check| check["state"] == state).map(text).collect()
}

async fn document(agent: &TestAgent) -> Value {
    let reply = agent.get("/debug/agentz").await.map(|reply| reply.text()).unwrap_or_default();
    serde_json::from_str(&reply).unwrap_or_default()
}

fn first_request() -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(node("sidecar~127.0.0.1~pod.ns~ns.svc.cluster.local")),
        type_url: CLUSTER.to_owned(),
        ..DiscoveryRequest::default()
    }
}

/// A stream that waits for istiod: of failures in a row Envoy is given the first.
async fn held(agent: &mut TestAgent) -> Duplex<DiscoveryRequest, DiscoveryResponse> {
    let client = agent.xds().await;
    let mut first = client.ads();
    first.send(&first_request());
    first.next().await.expect_err("it fails");
    let stream = client.ads();
    stream.send(&first_request());
    stream
}

async fn until(agent: &TestAgent, what: &str, good: impl Fn(&Value) -> bool) -> Value {
    eventually(what, async || Some(document(agent).await).filter(|json| good(json))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_that_is_bad_from_the_start_is_told_while_envoy_waits_for_it() {
    let mock = MockIstiod::start().await;
    let pair = || mock.issue(&mock.identity("ns", "sa"), HOUR);
    let (one, other) = (pair(), pair());
    let mut agent = well(&mock)
        .env("FILE_MOUNTED_CERTS", "true")
        .file("etc/certs/cert-chain.pem", one.chain.clone())
        .file_mode("etc/certs/key.pem", other.key, 0o600)
        .file("etc/certs/root-cert.pem", mock.root_pem())
        .start();
    let mut stream = agent.sds().await.stream_secrets();
    stream.send(&secret_request("default"));
    until(&agent, "it is told", |json| kinds(json).contains(&"CertificateFiles")).await;
    let doctor = agent.run(&["doctor", "--json"]).await.json();
    assert_eq!(doctor["verdict"]["kind"], "CertificateFiles", "{doctor}");
    // Who waits is served when it is mended, on the stream that it has.
    agent.put("etc/certs/key.pem", one.key);
    let answer = stream.next().await.expect("the stream lives");
    let (_, pem) = secrets(&answer).remove(0);
    assert!(matches!(&pem, Pem::Identity { chain, .. } if *chain == one.chain), "{pem:?}");
    until(&agent, "it is over", |json| !kinds(json).contains(&"CertificateFiles")).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_no_good_is_told_beside_an_istiod_that_is_away() {
    let mock = MockIstiod::start().await;
    let old = Token { expires: Expiry::Ago(HOUR), ..Token::of("ns", "sa") }.sign();
    mock.down().await;
    for (kind, builder) in [
        ("TokenExpired", well(&mock).file_mode(TOKEN, old, 0o600)),
        ("TokenMalformed", well(&mock).file_mode(TOKEN, "junk", 0o600)),
        ("TokenMissing", well(&mock).without_file(TOKEN)),
    ] {
        let agent = builder.start();
        let json = until(&agent, kind, |json| kinds(json) == [kind, "ConnectionRefused"]).await;
        assert_eq!(json["verdict"]["kind"], kind, "{json}");
        let doctor = agent.run(&["doctor", "--json"]).await.json();
        assert_eq!(doctor["verdict"]["kind"], kind, "{doctor}");
        let log = agent.log().text();
        assert!(log.contains("Connection refused") && log.contains("istio-token"), "{log}");
        // Each goes when it is mended.
        agent.put(TOKEN, mock.mint("ns", "sa"));
        until(&agent, "the token is good", |json| kinds(json) == ["ConnectionRefused"]).await;
        mock.up().await.expect("the port is ours");
        until(&agent, "nothing is wrong", |json| kinds(json).is_empty()).await;
        agent.stop().await;
        mock.down().await;
    }
}

/// The certificate is good for long, so the CA is not asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_ends_while_istiod_is_away_is_told_before_the_ca_is_asked() {
    let mock = MockIstiod::start().await;
    let mut agent = well(&mock).start();
    agent.wait_log("generated new workload certificate").await;
    mock.down().await;
    let _held = held(&mut agent).await;
    let short = Token { expires: Expiry::In(Duration::from_secs(3)), ..Token::of("ns", "sa") }.sign();
    agent.put(TOKEN, short);
    let both = ["TokenExpired", "ConnectionRefused"];
    let json = until(&agent, "the token ends", |json| kinds(json).starts_with(&both)).await;
    let doctor = agent.run(&["doctor", "--json"]).await.json();
    assert_eq!((&json["verdict"]["kind"], &doctor["verdict"]["kind"]), (&json!(both[0]), &json!(both[0])));
    agent.put(TOKEN, mock.mint("ns", "sa"));
    until(&agent, "the token is good", |json| !kinds(json).contains(&both[0])).await;
    mock.up().await.expect("the port is ours");
    until(&agent, "the way is good", |json| !kinds(json).contains(&both[1])).await;
    agent.stop().await;
}

/// The document shows it before Envoy has the answer.
#[tokio::test(flavor = "multi_thread")]
async fn an_istiod_that_closed_is_well_as_soon_as_it_has_brought_something() {
    let mock = MockIstiod::start().await;
    mock.ads().always(vec![Fault::refuse(Code::Unavailable)]);
    let mut agent = well(&mock).start();
    let mut stream = held(&mut agent).await;
    until(&agent, "it closes", |json| kinds(json).contains(&"IstiodCloses")).await;
    mock.ads().always(Vec::new());
    stream.next().await.expect("the held stream is answered");
    let json = document(&agent).await;
    assert!(!kinds(&json).contains(&"IstiodCloses"), "{json}");
    agent.stop().await;
}

/// Istiod knows it by a certificate, or it needs none of istiod's.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_nobody_needs_is_not_told_of() {
    let mock = MockIstiod::start().await;
    let pair = mock.issue(&mock.identity("ns", "sa"), HOUR);
    mock.down().await;
    let files = || {
        well(&mock)
            .file("etc/certs/cert-chain.pem", pair.chain.clone())
            .file_mode("etc/certs/key.pem", pair.key.clone(), 0o600)
            .file("etc/certs/root-cert.pem", mock.root_pem())
            .without_file(TOKEN)
    };
    let shown = files().env("PROV_CERT", "etc/certs").env("OUTPUT_CERTS", "etc/certs");
    for builder in [shown, files().env("FILE_MOUNTED_CERTS", "true")] {
        let mut agent = builder.start();
        let _held = held(&mut agent).await;
        let json = until(&agent, "istiod is away", |json| kinds(json).contains(&"ConnectionRefused")).await;
        assert!(!kinds(&json).contains(&"TokenMissing"), "{json}");
        agent.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_and_doctor_advise_the_same_about_a_refused_stream() {
    let mock = MockIstiod::start().await;
    mock.ads().always(vec![Fault::refuse(Code::ResourceExhausted)]);
    let mut agent = well(&mock).start();
    let stream = agent.xds().await.ads();
    stream.send(&first_request());
    until(&agent, "it is refused", |json| kinds(json).contains(&"AdsRefused")).await;
    let json = agent.run(&["doctor", "--json"]).await.json();
    let checks = json["checks"].as_array().unwrap();
    let grpc = checks.iter().find(|check| check["check"] == "grpc").unwrap();
    assert_eq!(grpc["hint"], json["troubles"][0]["hint"], "{json}");
    assert!(grpc["hint"].as_str().unwrap().contains("PILOT_MAX_REQUESTS_PER_SECOND"), "{json}");
    agent.stop().await;
}

#[tokio::test]
async fn doctor_tells_what_a_start_passes_over() {
    let mock = MockIstiod::start().await;
    let scene = well(&mock)
        .env("ISTIO_METAJSON_LABELS", r#"{"a":"#)
        .env("ISTIO_METAJSON_X", "[1]")
        .env("ISTIO_BOOTSTRAP_OVERRIDE", "override.json")
        .file("override.json", "{\"admin\": ")
        .file("etc/istio/pod/labels", "a=b\n")
        .file("etc/istio/pod/annotations", vec![0xff, b'=', b'x', b'\n'])
        .scene();
    let said = scene.run(&["doctor", "--json"]).await;
    let told = details(&said, "warn");
    for word in
        ["ISTIO_METAJSON_LABELS", "ISTIO_METAJSON_X", "override.json", "pod/labels", "pod/annotations"]
    {
        assert_eq!(told.iter().filter(|line| line.contains(word)).count(), 1, "{word}: {told:#?}");
    }
    assert_eq!(said.code, Some(0), "{told:#?}");
}

#[tokio::test]
async fn doctor_looks_at_all_places_that_a_start_writes_to() {
    let mock = MockIstiod::start().await;
    let grpc = || well(&mock).file("file", "").env("GRPC_XDS_BOOTSTRAP", "file/grpc.json");
    let json = grpc().scene().run(&["doctor", "--json"]).await.json();
    assert_eq!(json["verdict"]["kind"], "GrpcBootstrapMissing", "{json}");
    let mut agent = grpc().start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    assert!(agent.log().text().contains("verdict: GrpcBootstrapMissing"));
    let taken = || well(&mock).file("dir/file", "").env("GRPC_XDS_BOOTSTRAP", "dir");
    let json = taken().scene().run(&["doctor", "--json"]).await.json();
    assert_eq!(json["verdict"]["kind"], "GrpcBootstrapMissing", "{json}");
    let mut agent = taken().start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    let unsealed = well(&mock).env("IDENTITY_PERSIST", "true").env("IDENTITY_PERSIST_KEY", "none");
    let told = details(&unsealed.scene().run(&["doctor", "--json"]).await, "warn");
    assert!(told.iter().any(|line| line.contains("none (IDENTITY_PERSIST_KEY): ")), "{told:#?}");
    let folder = || well(&mock).file("cfg", "").proxy_config("configPath", "./cfg");
    let json = folder().scene().run(&["doctor", "--json"]).await.json();
    assert_eq!(json["verdict"]["kind"], "SocketFolder", "{json}");
    let mut agent = folder().start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    assert!(agent.log().text().contains("cfg/XDS: Not a directory (os error 20); verdict: SocketFolder"));
}

#[tokio::test]
async fn doctor_names_the_read_only_disk_of_output_certs() {
    if !root_for("a read-only root") {
        return;
    }
    let mock = MockIstiod::start().await;
    let scene = well(&mock).owner(1337).env("OUTPUT_CERTS", "out").file("out/x", "").scene();
    let json = scene.run_read_only(1337, &["etc", "var"], &["doctor", "--json"]).await.json();
    assert_eq!(json["verdict"]["kind"], "DiskReadOnly", "{json}");
    assert!(json["verdict"]["detail"].as_str().unwrap().starts_with("OUTPUT_CERTS: "), "{json}");
}

#[tokio::test]
async fn doctor_has_envoy_judge_a_configuration_of_ones_own() {
    let mock = MockIstiod::start().await;
    let own = |text: &str| {
        well(&mock).envoy(Envoy::Real).file("own.yaml", text).proxy_config("customConfigFile", "own.yaml")
    };
    let said = own("static_resources: [\n").scene().run(&["doctor", "--json"]).await;
    assert_eq!(said.json()["verdict"]["kind"], "BootstrapRejected", "{}", said.stdout);
    let said = own("node: {id: a, cluster: b}\n").scene().run(&["doctor", "--json"]).await;
    assert_eq!((said.code, &said.json()["verdict"]), (Some(0), &json!(null)), "{}", said.stdout);
}

/// Its readiness ends in time, and says what is silent.
#[tokio::test]
async fn readiness_in_words_names_an_envoy_that_hangs() {
    let mock = MockIstiod::start().await;
    let mut agent = well(&mock).fake("hang", json!(["/stats"])).start();
    agent.wait_log("generated new workload certificate").await;
    let text = eventually("it is told", async || {
        let text = agent.get("/healthz/ready?verbose").await.ok()?.text();
        text.contains("verdict: EnvoyAdminSilent: ").then_some(text)
    })
    .await;
    assert!(text.contains("admin"), "{text}");
    agent.stop().await;
}

#[tokio::test]
async fn a_second_agent_is_told_whose_ports_it_wants() {
    let mock = MockIstiod::start().await;
    let mut first = well(&mock).envoy(Envoy::Real).start();
    eventually("Envoy listens", async || first.envoy()).await;
    let admin = first.ports().admin;
    eventually("its admin port", async || crate::support::http::get(admin, "/server_info").await.ok()).await;
    let mut second = well(&mock).envoy(Envoy::Real).proxy_config("proxyAdminPort", admin).start();
    assert_eq!(second.wait_exit().await.code(), Some(1));
    let log = second.log().text();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("PortTaken") && last.contains(&admin.to_string()), "{log}");
    assert!(last.contains("another agent runs here"), "{log}");
    first.assert_running();
    first.stop().await;
}
