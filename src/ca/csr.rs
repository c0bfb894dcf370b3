//! The certificate request: one key, one SPIFFE identity, nothing else.
//!
//! Shape of the Go agent's requests: subject with one empty Organization, a critical
//! subjectAltName as the only extension, signature by the key's own algorithm. Uses `tls` for keys.

use std::net::IpAddr;

use rcgen::string::PrintableString;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, DnValue};

pub(crate) use crate::tls::keys::{Effort, Key, KeyOptions, generate_off_runtime};

/// Why there is no request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No key.
    #[error(transparent)]
    Key(#[from] crate::tls::keys::Error),
    /// The request could not be encoded or signed.
    #[error("cannot make the certificate request for {host:?}: {reason}")]
    Request {
        /// The identity it was for.
        host: String,
        /// The library's word.
        reason: String,
    },
}

/// The SPIFFE ID of a service account. The parts go in verbatim, as in the Go agent: istiod does not
/// read the name in the request, it issues for whom it has authenticated.
#[must_use]
pub(crate) fn spiffe_id(trust_domain: &str, namespace: &str, service_account: &str) -> String {
    format!("spiffe://{trust_domain}/ns/{namespace}/sa/{service_account}")
}

/// A PEM `CERTIFICATE REQUEST` for `host`, signed by `key`.
///
/// `host` follows the Go helper's rule: split at commas, an IP address becomes an IP entry, text that
/// starts with `spiffe://` a URI, all else a DNS name.
///
/// # Errors
/// When signing fails.
pub(crate) fn request(key: &Key, host: &str) -> Result<String, Error> {
    let failed = |e: rcgen::Error| Error::Request { host: host.to_owned(), reason: e.to_string() };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let empty = PrintableString::try_from("").map_err(failed)?;
    params.distinguished_name.push(DnType::OrganizationName, DnValue::PrintableString(empty));
    // rcgen marks the extension critical only below an empty subject, so it is written here.
    let mut names = CustomExtension::from_oid_content(&[2, 5, 29, 17], general_names(host));
    names.set_criticality(true);
    params.custom_extensions.push(names);
    let request = params.serialize_request(key).map_err(failed)?;
    Ok(crate::tls::keys::pem("CERTIFICATE REQUEST", request.der()).to_string())
}

/// DER of `GeneralNames` for `host`, by the rule of [`request`].
#[must_use]
pub fn general_names(host: &str) -> Vec<u8> {
    let mut entries = Vec::with_capacity(host.len() + 8);
    for name in host.split(',') {
        match name.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
            Ok(IpAddr::V4(ip)) => tagged(&mut entries, 0x87, &ip.octets()),
            Ok(IpAddr::V6(ip)) => tagged(&mut entries, 0x87, &ip.octets()),
            Err(_) if name.starts_with("spiffe://") => tagged(&mut entries, 0x86, name.as_bytes()),
            Err(_) => tagged(&mut entries, 0x82, name.as_bytes()),
        }
    }
    let mut out = Vec::with_capacity(entries.len() + 4);
    tagged(&mut out, 0x30, &entries);
    out
}

/// Appends one DER element.
fn tagged(out: &mut Vec<u8>, tag: u8, content: &[u8]) {
    out.push(tag);
    let length = content.len().to_be_bytes();
    let digits = &length[length.iter().position(|b| *b != 0).unwrap_or(length.len() - 1)..];
    if content.len() >= 0x80 {
        out.push(0x80 | u8::try_from(digits.len()).expect("a length has at most eight bytes"));
    }
    out.extend_from_slice(digits);
    out.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::keys::{Algorithm, Curve, generate};
    use rustls_pki_types::pem::{PemObject, SectionKind};
    use x509_parser::certification_request::X509CertificationRequest;
    use x509_parser::extensions::{GeneralName, ParsedExtension};
    use x509_parser::prelude::FromDer;

    struct Block(Vec<u8>);
    impl PemObject for Block {
        fn from_pem(kind: SectionKind, der: Vec<u8>) -> Option<Self> {
            (kind == SectionKind::Csr).then_some(Self(der))
        }
    }

    fn made(algorithm: Algorithm, host: &str) -> (Key, Vec<u8>) {
        let key = generate(&KeyOptions { algorithm, pkcs8: false }).unwrap();
        let text = request(&key, host).unwrap();
        assert!(text.starts_with("-----BEGIN CERTIFICATE REQUEST-----\n"));
        assert!(text.ends_with("-----END CERTIFICATE REQUEST-----\n"));
        (key, Block::from_pem_slice(text.as_bytes()).unwrap().0)
    }

    #[test]
    fn a_request_has_the_reference_shape() {
        for (algorithm, oid) in [
            (Algorithm::Rsa(2048), "1.2.840.113549.1.1.11"),
            (Algorithm::Ecdsa(Curve::P256), "1.2.840.10045.4.3.2"),
            (Algorithm::Ecdsa(Curve::P384), "1.2.840.10045.4.3.3"),
        ] {
            let id = spiffe_id("cluster.local", "default", "a");
            let (key, der) = made(algorithm, &id);
            let (_, csr) = X509CertificationRequest::from_der(&der).unwrap();
            let info = &csr.certification_request_info;
            assert_eq!(csr.signature_algorithm.algorithm.to_id_string(), oid);
            assert_eq!(info.subject_pki.raw, key.spki());
            let organisations: Vec<_> = info.subject.iter_organization().collect();
            assert_eq!(organisations.len(), 1);
            assert_eq!(organisations[0].as_str().unwrap(), "");
            assert_eq!(info.subject.iter_attributes().count(), 1);
            let extensions: Vec<_> = csr.requested_extensions().unwrap().collect();
            assert_eq!(extensions.len(), 1);
            let ParsedExtension::SubjectAlternativeName(names) = extensions[0] else { panic!("no names") };
            assert!(matches!(names.general_names[..], [GeneralName::URI(u)] if u == id));
            assert!(der.windows(8).any(|w| w == [0x06, 3, 0x55, 0x1d, 0x11, 1, 1, 0xff]), "critical");
        }
    }

    #[test]
    fn the_name_rule_splits_at_commas() {
        assert_eq!(
            general_names("10.0.0.1,::ffff:10.0.0.2,a.b,spiffe://t"),
            [
                &[0x30, 29, 0x87, 4, 10, 0, 0, 1, 0x87, 4, 10, 0, 0, 2, 0x82, 3][..],
                b"a.b",
                &[0x86, 10],
                b"spiffe://t"
            ]
            .concat()
        );
    }

    #[test]
    fn long_names_have_long_lengths() {
        for n in [119, 120, 127, 128, 245, 246, 255, 256, 70_000] {
            let id = format!("spiffe://{}", "x".repeat(n));
            let der = general_names(&id);
            let (rest, names) = x509_parser::extensions::SubjectAlternativeName::from_der(&der).unwrap();
            assert!(rest.is_empty());
            assert!(matches!(names.general_names[..], [GeneralName::URI(u)] if u == id), "{n}");
        }
    }
}
