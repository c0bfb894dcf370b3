use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DnType, IsCa, Issuer, KeyPair, PublicKeyData as _,
};

use super::*;
use crate::tls::cert::parse_der;

const HOUR: Duration = Duration::from_secs(3600);

struct Ca {
    cert: Cert,
    issuer: Issuer<'static, KeyPair>,
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    if !name.is_empty() {
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    params.not_before = (SystemTime::now() - HOUR).into();
    params.not_after = (SystemTime::now() + HOUR).into();
    params
}

/// Signed by another one, or by itself.
fn ca_with(name: &str, by: Option<&Ca>, change: impl FnOnce(&mut CertificateParams)) -> Ca {
    let key = KeyPair::generate().unwrap();
    let mut params = params(name);
    change(&mut params);
    let cert = match by {
        Some(by) => params.signed_by(&key, &by.issuer).unwrap(),
        None => params.self_signed(&key).unwrap(),
    };
    Ca { cert: parse_der(cert.der()).unwrap(), issuer: Issuer::new(params, key) }
}

fn ca(name: &str, by: Option<&Ca>) -> Ca {
    ca_with(name, by, |_| {})
}

fn leaf(by: &Ca) -> Cert {
    ca("", Some(by)).cert
}

fn said(chain: &[&Cert], roots: &[&Cert]) -> String {
    let owned = |certs: &[&Cert]| certs.iter().map(|c| (*c).clone()).collect::<Vec<_>>();
    flaw(&owned(chain), &owned(roots), SystemTime::now()).map(|f| f.to_string()).unwrap_or_default()
}

#[test]
fn any_good_way_to_a_root_will_do() {
    let (root, other) = (ca("root", None), ca("root", None));
    let below = ca("below", Some(&root));
    let last = ca("last", Some(&below));
    let leaf = leaf(&last);
    assert_eq!(said(&[&leaf, &last.cert, &below.cert], &[&root.cert]), "");
    assert_eq!(said(&[&leaf, &other.cert, &below.cert, &last.cert], &[&other.cert, &root.cert]), "");
    // One of the intermediates is itself trusted.
    assert_eq!(said(&[&leaf, &last.cert], &[&below.cert]), "");
    assert_eq!(said(&[&leaf], &[&last.cert]), "");
    // Signed twice, by one that has expired and by one that has not.
    let key = KeyPair::generate().unwrap();
    let mut twice = params("twice");
    let fresh = parse_der(twice.signed_by(&key, &root.issuer).unwrap().der()).unwrap();
    twice.not_after = (SystemTime::now() - HOUR / 2).into();
    let old = parse_der(twice.signed_by(&key, &root.issuer).unwrap().der()).unwrap();
    let twice = Ca { cert: fresh, issuer: Issuer::new(twice, key) };
    let leaf = self::leaf(&twice);
    assert_eq!(said(&[&leaf, &old, &twice.cert], &[&root.cert]), "");
    assert!(said(&[&leaf, &old], &[&root.cert]).starts_with("the certificate \"CN=twice\" expired at "));
}

#[test]
fn a_gap_is_named_where_it_is() {
    let (root, other) = (ca("root", None), ca("root", None));
    let (below, strange) = (ca("below", Some(&root)), ca("below", Some(&root)));
    let leaf = leaf(&below);
    let gap = "it has a gap: neither a certificate in it nor a root has signed";
    assert_eq!(said(&[&leaf], &[&root.cert]), format!("{gap} the workload's certificate"));
    // Of the same name, with another key.
    assert_eq!(said(&[&leaf, &strange.cert], &[&root.cert]), format!("{gap} the workload's certificate"));
    assert_eq!(said(&[&leaf, &below.cert], &[&other.cert]), format!("{gap} the certificate \"CN=below\""));
    assert_eq!(
        said(&[&leaf, &below.cert, &root.cert], &[&other.cert]),
        format!("{gap} the certificate \"CN=root\"")
    );
}

#[test]
fn what_peers_refuse_above_the_leaf_is_named() {
    let root = ca("root", None);
    let over = ca_with("over", Some(&root), |p| p.not_after = (SystemTime::now() - HOUR / 2).into());
    let early = ca_with("early", Some(&root), |p| p.not_before = (SystemTime::now() + HOUR / 2).into());
    let none = ca_with("none", Some(&root), |p| p.is_ca = IsCa::ExplicitNoCa);
    let mut strange = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
    let lax = strange.clone();
    strange.set_criticality(true);
    let critical = ca_with("critical", Some(&root), |p| p.custom_extensions = vec![strange.clone()]);
    let lax = ca_with("lax", Some(&root), |p| p.custom_extensions = vec![lax]);
    for (above, wanted) in [
        (&over, "the certificate \"CN=over\" expired at "),
        (&early, "the certificate \"CN=early\" is valid only from "),
        (&none, "the certificate \"CN=none\" is not a CA's"),
        (&critical, "the certificate \"CN=critical\" has the critical extension 1.2.3.4,"),
    ] {
        let told = said(&[&leaf(above), &above.cert], &[&root.cert]);
        assert!(told.starts_with(wanted), "{told}");
    }
    assert_eq!(said(&[&leaf(&lax), &lax.cert], &[&root.cert]), "");
    let own = ca_with("", Some(&root), |p| p.custom_extensions = vec![strange]).cert;
    let told = said(&[&own], &[&root.cert]);
    assert!(told.starts_with("the workload's certificate has the critical extension 1.2.3.4"), "{told}");
    // Of a clock that is behind, or of what is over, the leaf's own dates tell.
    let early_too = ca_with("", Some(&early), |p| p.not_before = (SystemTime::now() + HOUR / 2).into()).cert;
    assert_eq!(said(&[&early_too, &early.cert], &[&root.cert]), "");
    // The root counts too.
    let old = ca_with("old", None, |p| p.not_after = (SystemTime::now() - HOUR / 2).into());
    assert!(said(&[&leaf(&old)], &[&old.cert]).contains("CN=old\" expired at "));
}

#[test]
fn a_chain_of_thousands_is_looked_at_for_a_moment_only() {
    let root = ca("same", None);
    let many: Vec<Cert> = (0..40).map(|_| ca("same", Some(&root)).cert).cycle().take(4000).collect();
    let mut chain = vec![leaf(&ca("same", None))];
    chain.extend(many);
    assert_eq!(flaw(&chain, &[], SystemTime::now()), None, "beyond what is looked at nothing is told");
}

#[test]
fn keys_of_all_kinds_are_judged() {
    let kinds = [
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_RSA_SHA256,
    ];
    for kind in kinds {
        let key = KeyPair::generate_for(kind).unwrap();
        assert!(!key.der_bytes().is_empty());
        let params = params("root");
        let cert = parse_der(params.self_signed(&key).unwrap().der()).unwrap();
        let root = Ca { cert, issuer: Issuer::new(params, key) };
        assert_eq!(said(&[&leaf(&root)], &[&root.cert]), "");
        let other =
            parse_der(self::params("root").self_signed(&KeyPair::generate_for(kind).unwrap()).unwrap().der())
                .unwrap();
        assert!(said(&[&leaf(&root)], &[&other]).starts_with("it has a gap"));
    }
}

/// In place of ECDSA with SHA-256 with SHA-224, which no signature here is of.
fn with_sha224(cert: &Cert) -> Cert {
    let (known, unknown) = ([0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2], [0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 1]);
    let mut der = cert.der.clone();
    for at in 0..der.len() - known.len() {
        if der[at..at + known.len()] == known {
            der[at..at + known.len()].copy_from_slice(&unknown);
        }
    }
    parse_der(&der).unwrap()
}

#[test]
fn what_cannot_be_judged_is_taken_for_good() {
    let root = ca("root", None);
    let leaf = leaf(&root);
    assert_eq!(said(&[&with_sha224(&leaf)], &[&root.cert]), "");
    let mut broken = leaf.der.clone();
    *broken.last_mut().unwrap() ^= 1;
    assert!(said(&[&parse_der(&broken).unwrap()], &[&root.cert]).starts_with("it has a gap"));
}

#[test]
fn names_are_compared_as_envoys_library_does() {
    let root = ca("The root", None);
    let mut other = params("");
    let printed = rcgen::string::PrintableString::try_from("the  ROOT").unwrap();
    other.distinguished_name.push(DnType::CommonName, rcgen::DnValue::PrintableString(printed));
    other.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let written = parse_der(other.self_signed(root.issuer.key()).unwrap().der()).unwrap();
    assert_ne!(written.subject, root.cert.subject);
    let leaf = leaf(&root);
    assert_eq!(said(&[&leaf], &[&written]), "");
    let roots = vec![ca("another", None).cert, written.clone()];
    assert_eq!(concerned(roots, std::slice::from_ref(&leaf)).collect::<Vec<_>>(), [written]);
}

#[test]
fn a_root_may_stand_in_the_chain_too() {
    let root = ca("root", None);
    let below = ca("below", Some(&root));
    assert_eq!(said(&[&leaf(&below), &below.cert, &root.cert], &[&root.cert]), "");
    assert_eq!(said(&[&leaf(&root), &root.cert], &[&root.cert]), "");
}
