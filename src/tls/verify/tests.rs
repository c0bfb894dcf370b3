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

/// A root that is as `change` makes it, and what it has signed: a server's certificate, or one between them that has.
fn vouched(change: impl FnOnce(&mut CertificateParams), between: bool) -> Result<(), Error> {
    signed(change, between.then_some(|_: &mut CertificateParams| {}))
}

fn signed(
    change: impl FnOnce(&mut CertificateParams),
    between: Option<impl FnOnce(&mut CertificateParams)>,
) -> Result<(), Error> {
    let key = KeyPair::generate().unwrap();
    let mut it = params("root", true);
    it.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    it.subject_alt_names.clear();
    change(&mut it);
    let root = it.self_signed(&key).unwrap();
    let issuer = Issuer::new(it, key);
    let leaf_key = KeyPair::generate().unwrap();
    let leaf = params(NAME, false);
    let Some(between) = between else {
        return judge(&[&root], &leaf.signed_by(&leaf_key, &issuer).unwrap());
    };
    let inter_key = KeyPair::generate().unwrap();
    let mut inter = params("between", true);
    between(&mut inter);
    let inter_cert = inter.signed_by(&inter_key, &issuer).unwrap();
    let leaf = leaf.signed_by(&leaf_key, &Issuer::new(inter, inter_key)).unwrap();
    let anchors = Anchors::of(std::iter::once(root.der().clone()));
    let verifier = Verifier::new(Arc::new(anchors), provider(Compliance::None).0);
    let now = UnixTime::now();
    verifier
        .verify_server_cert(leaf.der(), &[inter_cert.der().clone()], &NAME.try_into().unwrap(), &[], now)
        .map(|_| ())
}

#[test]
fn a_root_vouches_as_far_as_it_says() {
    vouched(|_| {}, false).unwrap();
    vouched(|_| {}, true).unwrap();
    let said = |refused: Error| match refused {
        Error::InvalidCertificate(CertificateError::Other(why)) => why.to_string(),
        other => other.to_string(),
    };
    let why = |change: fn(&mut CertificateParams), between| said(vouched(change, between).unwrap_err());
    let old = why(|it| it.not_after = rcgen::date_time_ymd(2020, 1, 2), false);
    assert!(old.starts_with("the root that signed it has expired at 2020-01-02T00:00:00Z"), "{old}");
    let early = why(|it| it.not_before = rcgen::date_time_ymd(4000, 1, 2), false);
    assert!(early.starts_with("the root that signed it is not valid yet: it is from 4000-01-02"), "{early}");
    let short: fn(&mut CertificateParams) = |it| it.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    vouched(short, false).unwrap();
    assert!(why(short, true).contains("allows 0 certificates between"), "{}", why(short, true));
    let client: fn(&mut CertificateParams) =
        |it| it.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let crl: fn(&mut CertificateParams) = |it| it.key_usages = vec![rcgen::KeyUsagePurpose::CrlSign];
    for no_signer in [client, crl] {
        assert!(why(no_signer, false).contains("UnknownIssuer"), "{}", why(no_signer, false));
    }
    for signer in [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::Any] {
        vouched(|it| it.extended_key_usages = vec![signer.clone()], true).unwrap();
        signed(|_| {}, Some(|it: &mut CertificateParams| it.extended_key_usages = vec![signer])).unwrap();
    }
    let idle = |it: &mut CertificateParams| it.key_usages = vec![rcgen::KeyUsagePurpose::DigitalSignature];
    let idle = said(signed(|_| {}, Some(idle)).unwrap_err());
    assert!(idle.contains("may sign others"), "{idle}");
}

/// A renewed root is written beside the old one, with the same name and key.
#[test]
fn of_two_roots_of_one_name_the_one_that_still_is_valid_counts() {
    let key = KeyPair::generate().unwrap();
    let mut it = params("root", true);
    it.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let new = it.self_signed(&key).unwrap();
    it.not_after = rcgen::date_time_ymd(2020, 1, 2);
    let old = it.self_signed(&key).unwrap();
    let leaf = params(NAME, false).signed_by(&KeyPair::generate().unwrap(), &Issuer::new(it, key)).unwrap();
    judge(&[&old, &new], &leaf).unwrap();
    judge(&[&new, &old], &leaf).unwrap();
    judge(&[&old], &leaf).unwrap_err();
}

#[test]
fn a_certificate_for_any_purpose_is_a_servers_too() {
    use ExtendedKeyUsagePurpose::{Any, ClientAuth, ServerAuth};
    let (root_cert, root_key) = root();
    let with = |purposes: &[ExtendedKeyUsagePurpose]| {
        let mut it = params(NAME, false);
        it.extended_key_usages = purposes.to_vec();
        judge(&[&root_cert], &it.signed_by(&KeyPair::generate().unwrap(), &root_key).unwrap())
    };
    with(&[Any]).unwrap();
    with(&[ClientAuth, Any]).unwrap();
    with(&[ClientAuth, ServerAuth]).unwrap();
    let refused = with(&[ClientAuth]).unwrap_err();
    assert!(
        matches!(&refused, Error::InvalidCertificate(CertificateError::InvalidPurposeContext { .. })),
        "{refused}"
    );
}
