//! Callers' tokens: two identities through one socket.

use std::collections::BTreeSet;

use crate::support::client::{EnvoyClient, Pem, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent};

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
