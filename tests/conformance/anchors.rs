//! Certificates of istiod that a careful library refuses and the Go agent accepts; and those that nobody may.

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustls_pki_types::PrivateKeyDer;

use super::streams::served;
use crate::support::agent::ROOT;
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent};

/// The name that agents expect.
const NAME: &str = "istiod.istio-system.svc";

fn params(name: &str, ca: bool) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.is_ca = if ca { IsCa::Ca(BasicConstraints::Unconstrained) } else { IsCa::ExplicitNoCa };
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params
}

fn present(mock: &MockIstiod, certificate: &Certificate, key: &KeyPair) {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    mock.present(vec![certificate.der().clone()], key);
}

/// An agent whose root file has this and the root of the mesh.
fn agent(mock: &MockIstiod, root: &str) -> TestAgent {
    TestAgent::with().istiod(mock).file(ROOT, format!("{root}{}", mock.root_pem())).start()
}

#[tokio::test]
async fn a_server_that_is_a_ca_too_is_accepted_where_a_root_has_signed_it() {
    let mock = MockIstiod::start().await;
    let (root_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut root = CertificateParams::default();
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = root.self_signed(&root_key).unwrap().pem();
    let certificate = params(NAME, true).signed_by(&key, &Issuer::new(root, root_key)).unwrap();
    present(&mock, &certificate, &key);
    let mut known = agent(&mock, &pem);
    served(&mut known).await;
    known.wait_ready().await;
    known.stop().await;
    // Nobody whom the file names has signed it.
    let calls = mock.record().ca_calls().len();
    let mut stranger = agent(&mock, "");
    stranger.wait_log("none of the roots in").await;
    assert_eq!(mock.record().ca_calls().len(), calls, "nothing is sent to it");
    stranger.stop().await;
}

#[tokio::test]
async fn a_server_that_is_itself_in_the_root_file_is_accepted_and_no_other_that_looks_like_it() {
    let mock = MockIstiod::start().await;
    let key = KeyPair::generate().unwrap();
    let certificate = params(NAME, false).self_signed(&key).unwrap();
    present(&mock, &certificate, &key);
    let mut pinned = agent(&mock, &certificate.pem());
    served(&mut pinned).await;
    pinned.wait_log("is itself in the root file and is accepted as it is").await;
    pinned.wait_ready().await;
    pinned.stop().await;
    // The same name and key, signed anew.
    let again = params(NAME, false).self_signed(&key).unwrap();
    present(&mock, &again, &key);
    let mut deceived = agent(&mock, &certificate.pem());
    deceived.wait_log("none of the roots in").await;
    deceived.stop().await;
}

/// As somebody leaves it who appends to a file that was cut.
#[tokio::test]
async fn a_block_without_an_end_hides_no_root_behind_it() {
    let mock = MockIstiod::start().await;
    let cut = "-----BEGIN CERTIFICATE-----\nMIIB\n";
    let mut agent = agent(&mock, cut);
    served(&mut agent).await;
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request(&format!("file-root:{ROOT}")));
    let (_, roots) = secrets(&stream.next().await.unwrap()).remove(0);
    assert_eq!(roots, Pem::Roots(mock.root_pem()));
    agent.stop().await;
}

/// As `cat` makes it of two files of which the first has no line break at its end.
#[tokio::test]
async fn a_root_behind_one_without_a_line_break_counts() {
    let mock = MockIstiod::start().await;
    let other = CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
    let other = other.replace('\r', "");
    let mut agent = agent(&mock, other.trim_end());
    served(&mut agent).await;
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request(&format!("file-root:{ROOT}")));
    let (_, roots) = secrets(&stream.next().await.unwrap()).remove(0);
    assert_eq!(roots, Pem::Roots(format!("{other}{}", mock.root_pem())));
    agent.stop().await;
}

/// What a root says of itself counts, as for Go and for Envoy.
#[tokio::test]
async fn a_root_that_has_expired_vouches_for_nobody() {
    let mock = MockIstiod::start().await;
    let (root_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut root = CertificateParams::default();
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    root.not_after = rcgen::date_time_ymd(2020, 1, 2);
    let pem = root.self_signed(&root_key).unwrap().pem();
    let certificate = params(NAME, false).signed_by(&key, &Issuer::new(root, root_key)).unwrap();
    present(&mock, &certificate, &key);
    let mut agent = agent(&mock, &pem);
    agent.wait_log("the root that signed it has expired at 2020-01-02T00:00:00Z").await;
    assert!(mock.record().ca_calls().is_empty(), "nothing is sent to it");
    agent.stop().await;
}

/// As companies' authorities write it.
#[tokio::test]
async fn a_server_certificate_for_any_purpose_is_accepted() {
    let mock = MockIstiod::start().await;
    let (root_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut root = CertificateParams::default();
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = root.self_signed(&root_key).unwrap().pem();
    let mut any = params(NAME, false);
    any.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any];
    let certificate = any.signed_by(&key, &Issuer::new(root, root_key)).unwrap();
    present(&mock, &certificate, &key);
    let mut agent = agent(&mock, &pem);
    served(&mut agent).await;
    agent.stop().await;
}
