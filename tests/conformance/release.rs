//! What release 1.31 added, and what older start lines mean.

use std::collections::BTreeSet;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::support::agent::Builder;
use crate::support::client::{EnvoyClient, Pem, secret_request, secrets};
use crate::support::mesh::Loop;
use crate::support::{Envoy, LIMIT, MockIstiod, TestAgent, eventually, free_port, http};

/// The tests compare the server's certificate themselves: it carries an identity and no name.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

async fn identity(client: &EnvoyClient) -> (String, String) {
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    match secrets(&stream.next().await.expect("a certificate")).remove(0).1 {
        Pem::Identity { chain, key } => (chain, key),
        Pem::Roots(_) => panic!("asked for default"),
    }
}

/// A scrape over TLS: the answer, and the leaf that the server showed.
async fn scrape(
    port: u16,
    path: &str,
    identity: Option<&(String, String)>,
) -> Result<(String, Vec<u8>), String> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody));
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).map(|c| c.expect("PEM")).collect();
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("PEM");
            builder.with_client_auth_cert(chain, key).expect("a pair")
        }
    };
    let exchange = async {
        let socket = TcpStream::connect(("127.0.0.1", port)).await.map_err(|e| e.to_string())?;
        let name = ServerName::try_from("metrics.test").expect("a name");
        let mut tls =
            TlsConnector::from(Arc::new(config)).connect(name, socket).await.map_err(|e| e.to_string())?;
        let leaf = tls.get_ref().1.peer_certificates().expect("a certificate")[0].to_vec();
        let request = format!("GET {path} HTTP/1.1\r\nHost: metrics.test\r\nConnection: close\r\n\r\n");
        tls.write_all(request.as_bytes()).await.map_err(|e| e.to_string())?;
        let mut answer = Vec::new();
        tls.read_to_end(&mut answer).await.map_err(|e| e.to_string())?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        match answer.starts_with("HTTP/1.1 200") {
            true => Ok((answer, leaf)),
            false => Err(answer),
        }
    };
    tokio::time::timeout(LIMIT, exchange).await.map_err(|_| "no end".to_owned())?
}

#[tokio::test]
async fn metrics_behind_mutual_tls_for_peers_only_and_through_rotations() {
    let mock = MockIstiod::start().await;
    let _mesh = Loop::serve(&mock);
    let (own, merged) = (free_port(), free_port());
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .envoy(Envoy::Real)
        .env("ENVOY_SECURE_METRICS_PORT", own.to_string())
        .env("ENVOY_SECURE_MERGED_METRICS_PORT", merged.to_string())
        .env("SECRET_TTL", "60s")
        .env("SECRET_GRACE_PERIOD_RATIO", "0.967")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0")
        .start();
    agent.wait_ready().await;
    let client = agent.sds().await;

    for port in [own, merged] {
        let refused = scrape(port, "/stats/prometheus", None).await;
        assert!(refused.is_err(), "without a certificate: {refused:?}");
        let plain = http::get(port, "/stats/prometheus").await;
        assert!(plain.is_err(), "without TLS: {plain:?}");
    }
    let stranger = rcgen::generate_simple_self_signed(vec!["stranger".to_owned()]).expect("a certificate");
    let stranger = (stranger.cert.pem(), stranger.signing_key.serialize_pem());
    assert!(scrape(own, "/stats/prometheus", Some(&stranger)).await.is_err(), "of another CA");

    let peer = identity(&client).await;
    let (envoy, _) = scrape(own, "/stats/prometheus", Some(&peer)).await.unwrap();
    assert!(envoy.contains("envoy_server_live") && !envoy.contains("istio_agent_"), "{envoy:.300}");
    for path in ["/stats/prometheus", "/metrics"] {
        let (all, _) = scrape(merged, path, Some(&peer)).await.unwrap();
        assert!(all.contains("istio_agent_") && all.contains("envoy_server_live"), "{path}: {all:.300}");
    }

    let seen = std::sync::Mutex::new(BTreeSet::new());
    eventually("three certificates were shown, and no scrape failed", || async {
        let peer = identity(&client).await;
        let (_, leaf) = scrape(merged, "/metrics", Some(&peer)).await.unwrap();
        let mut seen = seen.lock().unwrap();
        seen.insert(leaf);
        (seen.len() >= 3).then_some(())
    })
    .await;
    drop(client);
    agent.stop().await;
}

/// An agent that must refuse to start, with a line that holds both texts.
async fn refused(builder: Builder, named: &str, also: &str) {
    let mut agent = builder.start();
    let status = agent.wait_exit().await;
    assert_eq!(status.code(), Some(255), "{}", agent.log().text());
    assert!(agent.processes().is_empty());
    // What it wrote last may still be on its way here.
    eventually(&format!("a line with {named} and {also}"), || async {
        let log = agent.log().text();
        log.lines().any(|line| line.contains(named) && line.contains(also)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_1_31_refuses_and_1_30_takes() {
    let mock = MockIstiod::start().await;
    let start = || TestAgent::with().istiod(&mock);
    for (name, value, also) in [
        ("ISTIO_PROMETHEUS_ANNOTATIONS", r#"{"targets":[{"port":"15090"}]}"#, "merged already"),
        ("ISTIO_PROMETHEUS_ANNOTATIONS", r#"{"targets":[{"port":"80"},{"port":"http"}]}"#, "1 to 65535"),
        ("ISTIO_META_ENABLE_SELF_DISCOVERY", "yes", "true or false"),
        ("COMPLIANCE_POLICY", "fips-140-9", "fips-140-2, fips-140-3 or pqc"),
        ("ENVOY_SECURE_METRICS_PORT", "15001", "outbound capture"),
        ("ISTIO_COMPAT_VERSION", "1.29", "1.30 or 1.31"),
    ] {
        refused(start().env(name, value), name.trim_start_matches("ISTIO_META_"), also).await;
    }
    let bad = serde_json::json!({"httpMaxConcurrentStreams": 0});
    let field = "connectionSettings.httpMaxConcurrentStreams";
    refused(start().proxy_config("connectionSettings", bad.clone()), field, "at least 1").await;

    // The form of 1.30's injector, without a list: refused only by whoever asks for 1.31's rules.
    let as_before = || start().env("ISTIO_PROMETHEUS_ANNOTATIONS", r#"{"port":"http"}"#);
    refused(as_before().env("ISTIO_COMPAT_VERSION", "1.31"), "ISTIO_PROMETHEUS_ANNOTATIONS", "1 to 65535")
        .await;
    let mut lenient = as_before().start();
    lenient.wait_ready().await;
    lenient.stop().await;

    let mut older = start()
        .env("ISTIO_COMPAT_VERSION", "1.30")
        .env("ISTIO_PROMETHEUS_ANNOTATIONS", r#"{"port":"15090"}"#)
        .env("ISTIO_META_ENABLE_SELF_DISCOVERY", "yes")
        .env("DNS_PROXY_ADDR", "127.0.0.1:0")
        .proxy_config("connectionSettings", bad)
        .start();
    older.wait_ready().await;
    let text = std::fs::read_to_string(older.path("etc/istio/proxy/envoy-rev.json")).unwrap();
    let bootstrap: serde_json::Value = serde_json::from_str(&text).unwrap();
    let metadata = &bootstrap["node"]["metadata"];
    assert_eq!(metadata["ISTIO_VERSION"], "1.30.3");
    assert_eq!(metadata["PROXY_CONFIG"].get("connectionSettings"), None);
    assert_eq!(metadata.get("DNS_PROXY_ADDR"), None);
    older.stop().await;
}

#[tokio::test]
async fn a_start_line_of_1_5_runs_and_says_what_it_means_today() {
    let mock = MockIstiod::start().await;
    let builder = TestAgent::with().istiod(&mock);
    let admin = builder.ports().admin.to_string();
    let mut agent = builder
        .args(&["proxy", "ingress", "--domain", "ns.svc.cluster.local", "--configPath", "/nowhere"])
        .arg("--drainDuration=500ms")
        .arg("--parentShutdownDuration=1m0s")
        .arg("--discoveryAddress=old:15012")
        .arg("--connectTimeout=abc")
        .arg(format!("--proxyAdminPort={admin}"))
        .arg("--controlPlaneAuthPolicy=NONE")
        .arg("--id=gateway.ns")
        .arg("--availabilityZone=zone-7")
        .proxy_config("configPath", "./etc/istio/proxy")
        .start();
    agent.wait_ready().await;
    let log = agent.log().text();
    for told in ["--drainDuration", "connectTimeout", "--discoveryAddress=old:15012", "a router today"] {
        assert!(log.contains(told), "{told}: {log}");
    }
    let text = std::fs::read_to_string(agent.path("etc/istio/proxy/envoy-rev.json")).unwrap();
    let bootstrap: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(bootstrap["node"]["id"], "router~127.0.0.1~gateway.ns~ns.svc.cluster.local");
    assert_eq!(bootstrap["node"]["locality"], serde_json::json!({"zone": "zone-7"}));
    agent.stop().await;
}

/// The first bytes of whoever connects to `listener` first.
async fn greeting(listener: &tokio::net::TcpListener) -> [u8; 3] {
    let taken = tokio::time::timeout(LIMIT, listener.accept()).await;
    let (mut stream, _) = taken.expect("nobody connects").unwrap();
    let mut first = [0; 3];
    tokio::time::timeout(LIMIT, stream.read_exact(&mut first)).await.expect("nothing is said").unwrap();
    first
}

#[tokio::test]
async fn plain_text_towards_istiod_is_told_and_the_old_flag_keeps_tls_on_its_port() {
    let mock = MockIstiod::start().await;
    // An address of its own, since the port must be this one.
    let own = (1..250).map(|n| format!("127.15.12.{n}:15012"));
    let mut secure = None;
    for address in own {
        if let Ok(listener) = tokio::net::TcpListener::bind(&address).await {
            secure = Some((listener, address));
            break;
        }
    }
    let (listener, address) = secure.expect("a free address");
    let plain = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = format!("127.0.0.1:{}", plain.local_addr().unwrap().port());
    let told = "is called in plain text, token included";
    for (source, listener, address, tls) in [
        ("--controlPlaneAuthPolicy=NONE", &listener, &address, true),
        ("--controlPlaneAuthPolicy=NONE", &plain, &elsewhere, false),
        ("controlPlaneAuthPolicy", &plain, &elsewhere, false),
    ] {
        let mut builder = TestAgent::with()
            .istiod(&mock)
            .env("CA_ADDR", mock.discovery_address())
            .proxy_config("discoveryAddress", address.as_str());
        builder = match source.starts_with("--") {
            true => builder.arg(source),
            false => builder.proxy_config(source, "NONE"),
        };
        let mut agent = builder.start();
        let envoy = agent.xds().await.ads();
        let first = greeting(listener).await;
        if tls {
            assert_eq!(first[..2], [0x16, 3], "{source} {address}: a TLS greeting");
            assert!(!agent.log().contains(told), "{}", agent.log().text());
        } else {
            assert_eq!(&first, b"PRI", "{source} {address}: HTTP/2 as it is");
            agent.wait_log(told).await;
        }
        drop(envoy);
    }
}

/// What 1.5 to 1.20 mounted with `JWT_POLICY=first-party-jwt`: the pod's own token and no other.
#[tokio::test]
async fn a_first_party_token_opens_the_door_where_there_is_no_other() {
    let mock = MockIstiod::start().await;
    let token = mock.mint("ns", "sa");
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .without_file(crate::support::agent::TOKEN)
        .env("JWT_POLICY", "first-party-jwt")
        .file("var/run/secrets/kubernetes.io/serviceaccount/token", token)
        .start();
    let client = agent.sds().await;
    let (chain, _) = identity(&client).await;
    assert!(chain.contains("BEGIN CERTIFICATE"));
    agent.wait_log("the pod's own token").await;
    agent.stop().await;
}

#[tokio::test]
async fn a_negative_validity_asks_for_the_default() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).env("SECRET_TTL", "-1h").start();
    let client = agent.sds().await;
    identity(&client).await;
    assert_eq!(mock.record().ca_calls()[0].validity_seconds, 0);
    agent.stop().await;
}

#[tokio::test]
async fn a_changed_template_at_its_old_place_is_used_and_a_stock_one_passed_over() {
    let place = "var/lib/istio/envoy/envoy_bootstrap_tmpl.json";
    let mock = MockIstiod::start().await;
    let bootstrap = |agent: &TestAgent| -> serde_json::Value {
        let text = std::fs::read_to_string(agent.path("etc/istio/proxy/envoy-rev.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let mut plain = TestAgent::with().istiod(&mock).start();
    plain.wait_ready().await;
    let built_in = bootstrap(&plain);
    plain.stop().await;

    // In the form of Istio's own: with the parameters that every release's had.
    let mut stock = built_in.clone();
    stock["node"] =
        serde_json::json!({"id": "{{ .nodeID }}", "cluster": "{{ .cluster }}", "metadata": "META"});
    stock["admin"]["address"]["socket_address"]["port_value"] = "ADMIN".into();
    let mut clusters = stock["static_resources"]["clusters"].take();
    for cluster in clusters.as_array_mut().unwrap() {
        let port = match cluster["name"].as_str() {
            Some("agent") => "STATUS",
            Some("prometheus_stats") => "ADMIN",
            _ => continue,
        };
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
            ["port_value"] = port.into();
    }
    stock["static_resources"]["clusters"] = clusters;
    for (listener, port) in
        stock["static_resources"]["listeners"].as_array_mut().unwrap().iter_mut().zip(["STATS", "READY"])
    {
        listener["address"]["socket_address"]["port_value"] = port.into();
        listener.as_object_mut().unwrap().remove("name");
    }
    let mut changed = stock.clone();
    changed["static_resources"]["clusters"].as_array_mut().unwrap().push(serde_json::json!({"name": "mine"}));
    let text = |template: &serde_json::Value| {
        [
            ("\"META\"", "{{ .meta_json_str }}"),
            ("\"ADMIN\"", "{{ .config.ProxyAdminPort }}"),
            ("\"STATUS\"", "{{ .config.StatusPort }}"),
            ("\"STATS\"", "{{ .envoy_prometheus_port }}"),
            ("\"READY\"", "{{ .envoy_status_port }}"),
        ]
        .iter()
        .fold(template.to_string(), |text, (mark, parameter)| text.replace(mark, parameter))
    };

    let mut agent = TestAgent::with().istiod(&mock).file(place, text(&stock)).start();
    agent.wait_ready().await;
    agent.wait_log("is the unchanged one of a release and is ignored").await;
    assert!(
        bootstrap(&agent).get("node").is_some_and(|node| node.get("locality").is_some()),
        "the built-in one"
    );
    agent.stop().await;

    let mut agent = TestAgent::with().istiod(&mock).file(place, text(&changed)).start();
    agent.wait_ready().await;
    agent.wait_log("no release has static_resources.clusters.mine").await;
    let used = bootstrap(&agent);
    let named = |c: &serde_json::Value| c["name"] == "mine";
    assert!(used["static_resources"]["clusters"].as_array().unwrap().iter().any(named), "{used}");
    assert_eq!(used["node"]["metadata"]["NAME"], "pod");
    agent.stop().await;

    // Unlike one that is named, it does not end the start.
    let mut agent = TestAgent::with().istiod(&mock).file(place, "{{ nonsense }}").start();
    agent.wait_ready().await;
    agent.wait_log("is passed over: ").await;
    agent.stop().await;
}

// The template's questions are those of releases up to 1.5; the folder is the agent's own.
#[tokio::test]
async fn an_old_template_and_the_folder_the_agent_stands_in_are_understood_as_by_the_go_agent() {
    let mock = MockIstiod::start().await;
    let asked = r#"{"tls": {{ eq .config.ControlPlaneAuthPolicy 1 }}, "none": "{{ .nope.deeper }}",
        "drain": {{ .config.DrainDuration.Seconds }}, "admin": {"address": {"socket_address":
        {"address": "127.0.0.1", "port_value": {{ .config.ProxyAdminPort }}}}}}"#;
    let start = TestAgent::with().istiod(&mock).proxy_config("configPath", ".").file("t.json", asked);
    let mut agent = start.args(&["proxy", "sidecar", "--templateFile=t.json"]).start();
    agent.wait_ready().await;
    let text = std::fs::read_to_string(agent.path("envoy-rev.json")).unwrap();
    let bootstrap: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&bootstrap["tls"], &bootstrap["drain"]), (&true.into(), &45.into()));
    assert_eq!(bootstrap["none"], "<no value>");
    let notes = agent.fake_notes();
    let arguments = notes.iter().find_map(|note| note["args"].as_array()).unwrap();
    assert_eq!((&arguments[0], &arguments[1]), (&"-c".into(), &"envoy-rev.json".into()));
    agent.stop().await;
}
