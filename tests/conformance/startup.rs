//! Coming up: sockets, first certificate, readiness, and what stands in the way.

use crate::support::client::{Pem, ack, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent};

#[tokio::test]
async fn the_first_certificate_is_what_istiod_signed() {
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).start();
    let client = agent.sds().await;

    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    let response = stream.next().await.unwrap();
    let [(name, Pem::Identity { chain, key })] = &secrets(&response)[..] else { panic!("{response:?}") };
    assert_eq!(name, "default");
    assert!(key.starts_with("-----BEGIN RSA PRIVATE KEY-----"), "the default key is RSA in PKCS#1");
    stream.send(&ack(&response, &["default"]));

    let signed = mock.record().signed();
    let call = signed.last().expect("istiod has signed");
    let sent: String = call.chain[..call.chain.len() - 1].concat();
    assert_eq!(chain.trim_end(), sent.trim_end(), "leaf and intermediates, in istiod's order");
    assert_eq!(call.identity.as_deref(), Some("spiffe://cluster.local/ns/ns/sa/sa"));
    assert_eq!(call.validity_seconds, 24 * 3600);
    assert_eq!(call.metadata, serde_json::json!({"CertSigner": ""}));

    let mut roots = client.stream_secrets();
    roots.send(&secret_request("ROOTCA"));
    let response = roots.next().await.unwrap();
    let [(name, Pem::Roots(bundle))] = &secrets(&response)[..] else { panic!("{response:?}") };
    assert_eq!((name.as_str(), bundle.trim_end()), ("ROOTCA", mock.root_pem().trim_end()));
    drop((stream, roots, client));
    agent.stop().await;
}
