//! Callers' tokens: two identities through one socket.

use std::collections::BTreeSet;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use mock_istiod::{Code, Fault};

use crate::support::client::{EnvoyClient, Pem, node, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent, eventually};

mod many;
mod random;

const SOCKET: &str = "node.sock";

async fn agent(mock: &MockIstiod, level: &str) -> (TestAgent, EnvoyClient) {
    let mut agent = TestAgent::with()
        .istiod(mock)
        .example("callers.env")
        .env("WORKLOAD_SDS", "./node.sock")
        .arg(format!("--log_output_level={level}"))
        .start();
    let client = agent.client(SOCKET).await;
    (agent, client)
}

/// Key and identity that a stream is given.
async fn given(client: &EnvoyClient) -> Result<(String, String), tonic::Status> {
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    match secrets(&stream.next().await?).remove(0).1 {
        Pem::Identity { chain, key } => Ok((key, identity(&chain))),
        other => panic!("{other:?}"),
    }
}

fn identity(chain: &str) -> String {
    use rustls_pki_types::pem::PemObject;
    let der = rustls_pki_types::CertificateDer::from_pem_slice(chain.as_bytes()).unwrap();
    mock_istiod::pki::names(&der).unwrap().remove(0)
}

#[tokio::test]
async fn each_stream_gets_the_certificate_of_its_own_caller() {
    let mock = MockIstiod::start().await;
    let (mut agent, client) = agent(&mock, "all:debug").await;
    // Refusals first.
    for (headers, part) in [
        (vec![], "no token was brought"),
        (vec![("authorization", " ")], "is empty"),
        (vec![("authorization", "a"), ("authorization", "b")], "more than once"),
        (vec![("authorization", "Bearer nonsense")], "failed to generate"),
    ] {
        let status = given(&client.with_headers(&headers)).await.unwrap_err();
        assert!(status.message().contains(part), "{headers:?}: {status:?}");
    }
    let document = agent.get("/debug/agentz").await.unwrap().text();
    assert!(document.contains("CallerNotServed") && !document.contains("nonsense"), "{document}");
    let tokens: Vec<(String, String)> =
        ["a", "b", "c"].map(|account| (mock.mint("team", account), mock.identity("team", account))).into();
    // Streams of three callers, opened and dropped in every order; none sees another's key or name.
    let mut streams = tokio::task::JoinSet::new();
    for n in 0..30 {
        let (token, wanted) = tokens[(n * 7 + n / 5) % tokens.len()].clone();
        let bearer = if n % 2 == 0 { format!("Bearer {token}") } else { token };
        let client = client.with_headers(&[("authorization", &bearer)]);
        streams.spawn(async move {
            let (key, identity) = given(&client).await.unwrap();
            assert_eq!(identity, wanted);
            key
        });
    }
    let mut keys = BTreeSet::new();
    while let Some(key) = streams.join_next().await {
        keys.insert(key.unwrap());
    }
    assert_eq!(keys.len(), 30, "no two streams share a key");

    // Files are the node's.
    let own = client.with_headers(&[("authorization", &tokens[0].0)]);
    let mut stream = own.stream_secrets();
    stream.send(&secret_request("file-root:var/run/secrets/istio/root-cert.pem"));
    assert!(stream.next().await.is_err());
    let part = tokens[0].0.split('.').next_back().unwrap();
    assert!(!agent.log().contains(part), "a token is in the log");
    // Who was refused is told and takes nothing away.
    let document = agent.get("/debug/agentz").await.unwrap().text();
    assert!(document.contains("\"callerTokens\"") && !document.contains(part), "{document}");
    let ready = agent.get("/healthz/ready").await.unwrap();
    assert_eq!(ready.status.as_u16(), 200, "{}", ready.text());
    // The agent's own socket is as it was.
    assert!(given(&agent.sds().await).await.unwrap().1.ends_with("/ns/ns/sa/sa"));
    agent.stop().await;
}

fn subscription(subscribe: &[&str], leave: &[&str]) -> DeltaDiscoveryRequest {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    DeltaDiscoveryRequest {
        node: Some(node("sidecar~1")),
        resource_names_subscribe: owned(subscribe),
        resource_names_unsubscribe: owned(leave),
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn who_leaves_makes_no_room_for_another_first_certificate() {
    let mock = MockIstiod::start().await;
    let (mut agent, client) = agent(&mock, "all:info").await;
    assert!(given(&agent.sds().await).await.is_ok());
    mock.ca().always(vec![Fault::Delay(Duration::from_secs(60))]);
    let before = mock.record().connections().len();
    let mut streams = Vec::new();
    for nth in 0..24 {
        let token = mock.mint("team", &format!("account-{nth}"));
        let stream = client.with_headers(&[("authorization", &token)]).delta_secrets();
        stream.send(&subscription(&["default"], &[]));
        streams.push(stream);
    }
    let asked = async || (mock.record().connections().len() - before >= 8).then_some(());
    eventually("the first ones ask the CA", asked).await;
    for stream in &streams {
        stream.send(&subscription(&[], &["default"]));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(mock.record().connections().len() - before, 8);
    // Who is gone does.
    streams.truncate(12);
    mock.ca().clear();
    let own = client.with_headers(&[("authorization", &mock.mint("team", "another"))]);
    drop(streams);
    assert!(given(&own).await.unwrap().1.ends_with("/ns/team/sa/another"));
    agent.stop().await;
}

#[tokio::test]
async fn for_a_caller_that_was_refused_and_has_left_the_ca_is_not_asked_again() {
    let mock = MockIstiod::start().await;
    let (mut agent, client) = agent(&mock, "all:info").await;
    assert!(given(&agent.sds().await).await.is_ok());
    let late = vec![Fault::Delay(Duration::from_secs(1)), Fault::refuse(Code::PermissionDenied)];
    mock.ca().always(late);
    // Each attempt dials.
    let calls = || mock.record().connections().len();
    let before = calls();
    let mut stream = client.with_headers(&[("authorization", &mock.mint("team", "caller"))]).delta_secrets();
    stream.send(&subscription(&["default"], &[]));
    eventually("the CA is asked", async || (calls() > before).then_some(())).await;
    stream.send(&subscription(&[], &["default"]));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(calls() - before, 1);
    // On the same stream it may ask again.
    mock.ca().clear();
    stream.send(&subscription(&["default"], &[]));
    assert_eq!(stream.next().await.unwrap().resources[0].name, "default");
    agent.stop().await;
}
