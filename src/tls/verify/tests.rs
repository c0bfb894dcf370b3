use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustls_pki_types::pem::PemObject;

use super::*;
use crate::tls::provider::{Compliance, provider};

const NAME: &str = "istiod.istio-system.svc";

fn params(name: &str, ca: bool) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.is_ca = if ca { IsCa::Ca(BasicConstraints::Constrained(0)) } else { IsCa::NoCa };
    params.distinguished_name.push(rcgen::DnType::CommonName, format!("{name} {ca}"));
    params
}

fn root() -> (Certificate, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    (params.self_signed(&key).unwrap(), Issuer::new(params, key))
}

fn judge(roots: &[&Certificate], leaf: &Certificate) -> Result<(), Error> {
    judge_der(roots, leaf.der(), SystemTime::now())
}

fn judge_der(roots: &[&Certificate], leaf: &CertificateDer<'_>, now: SystemTime) -> Result<(), Error> {
    let anchors = Anchors::of(roots.iter().map(|c| c.der().clone()));
    let verifier = Verifier::new(Arc::new(anchors), provider(Compliance::None).0);
    let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap());
    verifier.verify_server_cert(leaf, &[], &NAME.try_into().unwrap(), &[], now).map(|_| ())
}

#[test]
fn a_leaf_that_is_a_ca_too_is_judged_by_its_chain() {
    let (root_cert, root_key) = root();
    let (other, other_key) = root();
    let key = KeyPair::generate().unwrap();
    let sign = |params: CertificateParams, by| params.signed_by(&key, by).unwrap();
    let leaf = sign(params(NAME, true), &root_key);
    judge(&[&root_cert], &leaf).unwrap();
    judge(&[&root_cert, &other], &leaf).unwrap();
    judge(&[&other], &leaf).unwrap_err();
    judge(&[&root_cert], &sign(params(NAME, true), &other_key)).unwrap_err();
    judge(&[&root_cert], &sign(params("other", true), &root_key)).unwrap_err();
    let mut old = params(NAME, true);
    old.not_after = rcgen::date_time_ymd(2020, 1, 2);
    judge(&[&root_cert], &sign(old, &root_key)).unwrap_err();
    let mut client = params(NAME, true);
    client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    judge(&[&root_cert], &sign(client, &root_key)).unwrap_err();
    // Whatever byte is changed, the signature does not hold any more.
    let der = leaf.der().to_vec();
    for at in (0..der.len()).step_by(7) {
        let mut bad = der.clone();
        bad[at] ^= 1;
        assert!(judge_der(&[&root_cert], &bad.into(), SystemTime::now()).is_err(), "byte {at}");
    }
}

#[test]
fn a_certificate_of_the_root_file_is_accepted_as_it_is_and_signs_nobody() {
    for ca in [false, true] {
        let key = KeyPair::generate().unwrap();
        let pinned = params(NAME, ca).self_signed(&key).unwrap();
        judge(&[&pinned], &pinned).unwrap();
        judge_der(&[&pinned], pinned.der(), SystemTime::now() + Duration::from_secs(1 << 40)).unwrap_err();
        let other = params("other", ca).self_signed(&key).unwrap();
        judge(&[&other], &other).unwrap_err();
        // The same key and names, and yet another certificate.
        let again = params(NAME, ca).self_signed(&key).unwrap();
        assert_eq!(judge(&[&pinned], &again).is_ok(), ca, "a CA signs for itself too, a server never");
    }
}

/// A certificate with an RSA key of 1024 bits, which the crypto library makes no more.
const WEAK: &[u8] = b"-----BEGIN CERTIFICATE-----
MIIB9jCCAV+gAwIBAgIUf0F/qMBwXrS11e8aXEl0LvtLCIcwDQYJKoZIhvcNAQEL
BQAwDDEKMAgGA1UEAwwBYTAgFw0yNjExMjMyMzA0NTFaGA8yMTI2MTAzMDIzMDQ1
MVowDDEKMAgGA1UEAwwBYTCBnzANBgkqhkiG9w0BAQEFAAOBjQAwgYkCgYEAtHiD
lpBEBIMoOWdjXEeFGZSbX+/8vujZjeoFjqnWJugfMyZvN1mfyu7Hjw4QQbyT9uJp
+nExJD6t9Agun//wCT3b65S4vBwE45KMOuzqxYmf+BCOxDqbQNSx9EhE8QLtWXt2
4BjlkeP1xcYf3nJNCuqfClydoBjqwWZmYWOmERMCAwEAAaNTMFEwHQYDVR0OBBYE
FKdZelj3KQO78RxDF0SA04svVBA1MB8GA1UdIwQYMBaAFKdZelj3KQO78RxDF0SA
04svVBA1MA8GA1UdEwEB/wQFMAMBAf8wDQYJKoZIhvcNAQELBQADgYEAnMxj4wzO
VxMaw7HIqe1f3VWa4l0YR/2xK5rnLZqn0yYPr3zjUn2l468szk8P6NouopPyyPD/
7E2bUU68LRGAuizbp6T+ENYyTFw9Me7Ewcz5xUiuW+8X6srNaQZL7tK7PURVWRtK
Z8A5cE6N5gHMU5A0fjtBbriU6Knzu1IFuuA=
-----END CERTIFICATE-----";

#[test]
fn a_key_that_is_too_short_is_named() {
    let weak = CertificateDer::from_pem_slice(WEAK).unwrap();
    let bad = || Error::InvalidCertificate(CertificateError::BadSignature);
    let Error::InvalidCertificate(CertificateError::Other(why)) = why_bad(bad(), &weak) else {
        panic!("not named")
    };
    assert_eq!(why.to_string(), "its RSA key has 1024 bits, and at least 2048 are needed");
    // What else is wrong stays what it was.
    let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
    assert_eq!(why_bad(unknown.clone(), &weak), unknown);
    let (strong, _) = root();
    assert_eq!(why_bad(bad(), strong.der()), bad());
}
