//! The token is exchanged before it goes to a CA: `PLUGINS=GoogleTokenExchange`, Mesh CA, and Google's Certificate
//! Authority Service with the token of the machine's account.

use std::time::Duration;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::json;

use crate::support::agent::{Builder, TOKEN};
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::google::Google;
use crate::support::web::{self, Web};
use crate::support::{EnvoyClient, Fault, MockIstiod, TestAgent, eventually, eventually_within};

/// The names of the certificate that is served, when one is.
async fn served(client: &EnvoyClient) -> Option<Vec<String>> {
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    match secrets(&stream.next().await.ok()?).into_iter().next()? {
        (_, Pem::Identity { chain, .. }) => {
            mock_istiod::pki::names(&CertificateDer::from_pem_slice(chain.as_bytes()).unwrap())
        }
        other => panic!("{other:?}"),
    }
}

/// A CA by the name of Mesh CA too, and an agent that finds Google's names and trusts their doubles.
async fn world() -> (MockIstiod, Google) {
    let names = ["localhost", "istiod.istio-system.svc", "meshca.googleapis.com"].map(ToOwned::to_owned);
    let mock = MockIstiod::builder().dns_names(names).start().await.unwrap();
    let google = Google::start().await;
    // What is exchanged comes back as the token of somebody else, so that it can be told apart at the CA.
    std::fs::write(google.path("federated"), mock.mint("ns", "federated")).unwrap();
    let both = std::fs::read_to_string(google.path("ca.pem")).unwrap() + &mock.root_pem();
    std::fs::write(google.path("bundle.pem"), both).unwrap();
    (mock, google)
}

fn builder(mock: &MockIstiod, google: &Google) -> Builder {
    TestAgent::with()
        .istiod(mock)
        .before(&google.names())
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("SSL_CERT_FILE", google.path("bundle.pem").to_string_lossy())
        .env("GCE_METADATA_HOST", "127.0.0.1:1")
        .env("CLOUD_PLATFORM", "none")
        .arg("--log_output_level=all:debug")
}

#[tokio::test]
async fn istiod_is_shown_the_exchanged_token_and_mesh_ca_too() {
    if !crate::support::root_for("port 443 and a mount namespace") {
        return;
    }
    let (mock, google) = world().await;
    let mesh_ca = format!("meshca.googleapis.com:{}", mock.address().port());
    let mut asked = 0;
    for start in [
        builder(&mock, &google).example("exchange.env"),
        builder(&mock, &google).example("google-ca.env").env("CA_ADDR", mesh_ca),
    ] {
        let audience = format!(
            "identitynamespace:{}:{}",
            start.variable("TRUST_DOMAIN"),
            start.variable("GKE_CLUSTER_URL")
        );
        // A CA that refuses at first is asked again with the same federated token.
        mock.ca().next(Fault::refuse(crate::support::Code::Unavailable));
        let mut agent = start.start();
        let client = agent.sds().await;
        let names = eventually("a certificate", async || served(&client).await).await;
        assert_eq!(names, [mock.identity("ns", "federated")]);
        let own = std::fs::read_to_string(agent.path(TOKEN)).unwrap();
        let seen = google.asked();
        assert_eq!(seen.len(), asked + 1, "one exchange for all attempts: {seen:?}");
        asked = seen.len();
        let body = &seen[asked - 1]["json"];
        assert_eq!(body["subjectToken"], own.trim());
        assert_eq!(body["audience"], audience);
        for token in [own.trim(), mock.mint("ns", "federated").rsplit('.').next().unwrap()] {
            assert!(!agent.log().contains(token), "a token is in the log");
        }
        agent.stop().await;
    }
}

#[tokio::test]
async fn the_authority_service_is_asked_with_the_machines_account() {
    if !crate::support::root_for("port 443 and a mount namespace") {
        return;
    }
    let (mock, google) = world().await;
    let token = mock.mint("ns", "machine");
    let metadata = Web::start(move |head, _| {
        let known = head.uri.path().ends_with("/instance/service-accounts/default/token");
        let body = json!({ "access_token": token.clone(), "expires_in": 3600, "token_type": "Bearer" });
        async move { web::json(if known { 200 } else { 404 }, &body) }
    })
    .await;
    let mut agent = builder(&mock, &google)
        .example("google-cas.env")
        .env("GOOGLE_CAS_ENDPOINT", format!("localhost:{}", mock.address().port()))
        .env("GCE_METADATA_HOST", format!("127.0.0.1:{}", metadata.port))
        .start();
    let client = agent.sds().await;
    let names = eventually("a certificate of the pool", async || served(&client).await).await;
    assert_eq!(names, [mock.identity("ns", "machine")]);
    let mut roots = client.stream_secrets();
    roots.send(&secret_request("ROOTCA"));
    let (_, pem) = secrets(&roots.next().await.unwrap()).remove(0);
    assert!(matches!(pem, Pem::Roots(text) if text.contains(mock.root_pem().trim())));
    assert!(google.asked().is_empty(), "nothing is exchanged for it");
    agent.stop().await;
}

/// The matrix of faults, at the endpoint that exchanges.
#[tokio::test]
async fn whatever_is_in_googles_place_is_told_and_outlived() {
    if !crate::support::root_for("port 443 and a mount namespace") {
        return;
    }
    let (mock, google) = world().await;
    let elsewhere = crate::support::free_port();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", elsewhere)).await.unwrap();
    let redirect = format!("redirect https://localhost:{elsewhere}/v1/token");
    // Those that are worth another try come first: one call takes five.
    let faults = [
        ("reset", ""),
        ("status 500", ""),
        ("garbage", ""),
        ("status 503", ""),
        ("silent", "no answer within 5 s"),
        ("status 403", "HTTP status 403"),
        ("status 400", "HTTP status 400"),
        (&*redirect, "redirects are not followed"),
        ("cut", "was cut off"),
        ("endless", "is longer than"),
        ("body S3CRET-NO-JSON", "is no JSON object"),
        ("body []", "is no JSON object"),
        ("body {}", "federated token"),
        (r#"body {"access_token": 7}"#, "federated token"),
        (r#"body {"access_token": "", "expires_in": "S3CRET"}"#, "federated token"),
    ];
    let lines: String = faults.iter().map(|(fault, _)| format!("{fault}\n")).collect();
    std::fs::write(google.path("faults"), lines).unwrap();
    let left = || std::fs::read_to_string(google.path("faults")).unwrap_or_default().lines().count();
    let mut agent = builder(&mock, &google).example("exchange.env").start();
    let client = agent.sds().await;
    eventually_within(Duration::from_secs(90), "no fault is left, and a certificate is served", async || {
        (served(&client).await.is_some() && left() == 0).then_some(())
    })
    .await;
    let text = agent.log().text();
    for (fault, said) in faults {
        assert!(text.contains(said), "{fault} is not told:\n{text}");
    }
    assert!(!text.contains("S3CRET"), "{text}");
    let visited = tokio::time::timeout(Duration::from_millis(1), listener.accept()).await;
    assert!(visited.is_err(), "a redirect was followed");
    assert!(
        mock.record().ca_calls().iter().all(|call| call.identity.is_some()),
        "no bad token reached the CA"
    );
    agent.stop().await;
}
