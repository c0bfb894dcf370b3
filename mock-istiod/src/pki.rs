//! The certificate authority: a root, optional intermediates, and what they sign.
//!
//! What a workload certificate contains is istiod's: the names come from the authenticated identity and not
//! from the request, the subject is empty, validity begins two minutes ago.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, RevokedCertParams, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer};
use x509_parser::prelude::FromDer;

/// How far back validity begins (istiod's allowance for clocks that differ).
pub const CLOCK_SKEW: Duration = Duration::from_secs(120);

/// Why a signing request was refused; the texts are istiod's.
#[derive(Debug, thiserror::Error)]
#[error("CSR signing error ({0})")]
pub struct BadRequest(pub String);

/// One link of the chain that signs: its certificate and key.
struct Link {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
}

/// A certificate authority with its root and intermediates. Cheap to clone.
#[derive(Clone)]
pub struct Authority {
    root: Arc<Link>,
    /// From the one below the root to the one that signs.
    intermediates: Arc<Vec<Link>>,
}

/// What to put into a certificate.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// URI names, usually one SPIFFE ID.
    pub uris: Vec<String>,
    /// DNS names.
    pub dns: Vec<String>,
    /// Start of validity.
    pub not_before: SystemTime,
    /// End of validity.
    pub not_after: SystemTime,
}

impl Leaf {
    /// A workload's certificate, valid for `ttl` from now.
    #[must_use]
    pub fn workload(uri: impl Into<String>, ttl: Duration) -> Self {
        let now = SystemTime::now();
        Self { uris: vec![uri.into()], dns: Vec::new(), not_before: now - CLOCK_SKEW, not_after: now + ttl }
    }
}

/// A certificate with its key, as PEM: what a VM has on its disk, or a server shows.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The chain, leaf first, without the root.
    pub chain: String,
    /// The key, PKCS#8.
    pub key: String,
}

impl Authority {
    /// A new root for `trust_domain` with so many intermediates below it.
    #[must_use]
    pub fn new(trust_domain: &str, intermediates: usize) -> Self {
        let root = Link::root(trust_domain);
        let mut below: Vec<Link> = Vec::new();
        for depth in 0..intermediates {
            let parent = below.last().unwrap_or(&root);
            below.push(Link::below(parent, trust_domain, depth + 1));
        }
        Self { root: Arc::new(root), intermediates: Arc::new(below) }
    }

    /// The root certificate, PEM with a trailing newline.
    #[must_use]
    pub fn root_pem(&self) -> &str {
        &self.root.pem
    }

    /// The root certificate, DER.
    #[must_use]
    pub fn root_der(&self) -> CertificateDer<'static> {
        self.root.der.clone()
    }

    fn signer(&self) -> &Link {
        self.intermediates.last().unwrap_or(&self.root)
    }

    /// The intermediates that follow a leaf, nearest first.
    pub fn intermediates(&self) -> impl Iterator<Item = &str> {
        self.intermediates.iter().rev().map(|link| link.pem.as_str())
    }

    /// Signs `key` with the names and dates of `leaf`; PEM with a trailing newline.
    ///
    /// # Panics
    /// If a name is not ASCII.
    #[must_use]
    pub fn sign(&self, key: &impl PublicKeyData, leaf: &Leaf) -> String {
        self.sign_certificate(key, leaf).pem()
    }

    fn sign_certificate(&self, key: &impl PublicKeyData, leaf: &Leaf) -> Certificate {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = leaf
            .uris
            .iter()
            .map(|uri| SanType::URI(uri.as_str().try_into().expect("URI names are ASCII")))
            .chain(
                leaf.dns
                    .iter()
                    .map(|dns| SanType::DnsName(dns.as_str().try_into().expect("DNS names are ASCII"))),
            )
            .collect();
        params.not_before = leaf.not_before.into();
        params.not_after = leaf.not_after.into();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial());
        params.signed_by(key, &self.signer().issuer).expect("a leaf with ASCII names can be signed")
    }

    /// A fresh P-256 key with a certificate and the intermediates.
    #[must_use]
    pub fn pair(&self, leaf: &Leaf) -> Pair {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("P-256 keys can be made");
        let mut chain = self.sign(&key, leaf);
        chain.extend(self.intermediates());
        Pair { chain, key: key.serialize_pem() }
    }

    /// The revocation lists of the root and of every intermediate, PEM: the leaf of each of these chains is
    /// revoked, nothing else.
    ///
    /// # Panics
    /// If a chain does not begin with a certificate in PEM.
    #[must_use]
    pub fn revocation_lists(&self, revoked: &[&str]) -> String {
        let now = SystemTime::now();
        let entry = |chain: &&str| {
            let der = CertificateDer::from_pem_slice(chain.as_bytes()).expect("a chain in PEM");
            let (_, leaf) = x509_parser::certificate::X509Certificate::from_der(&der).expect("a certificate");
            RevokedCertParams {
                serial_number: SerialNumber::from_slice(leaf.raw_serial()),
                revocation_time: (now - CLOCK_SKEW).into(),
                reason_code: None,
                invalidity_date: None,
            }
        };
        let list = |link: &Link, revoked: &[&str]| {
            let params = CertificateRevocationListParams {
                this_update: (now - CLOCK_SKEW).into(),
                next_update: (now + Duration::from_secs(24 * 3600)).into(),
                crl_number: SerialNumber::from(1),
                issuing_distribution_point: None,
                revoked_certs: revoked.iter().map(entry).collect(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            let signed = params.signed_by(&link.issuer).expect("a link that may sign lists");
            signed.pem().expect("a list can be printed")
        };
        let mut text = list(self.signer(), revoked);
        let above = std::iter::once(&*self.root).chain(self.intermediates.iter());
        for link in above.filter(|link| !std::ptr::eq(*link, self.signer())) {
            text.push_str(&list(link, &[]));
        }
        text
    }

    /// The chain and key for a TLS server with these DNS names, valid for ten days.
    #[must_use]
    pub fn server(&self, dns: &[String]) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let now = SystemTime::now();
        let day = Duration::from_secs(24 * 3600);
        self.server_within(dns, now - CLOCK_SKEW..now + 10 * day)
    }

    /// The same, valid in this time.
    #[must_use]
    pub fn server_within(
        &self,
        dns: &[String],
        valid: Range<SystemTime>,
    ) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let pair = self.pair(&Leaf {
            uris: Vec::new(),
            dns: dns.to_vec(),
            not_before: valid.start,
            not_after: valid.end,
        });
        let chain = CertificateDer::pem_slice_iter(pair.chain.as_bytes()).collect::<Result<_, _>>();
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes());
        (chain.expect("our own PEM"), key.expect("our own PEM"))
    }
}

impl Link {
    fn root(trust_domain: &str) -> Self {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("P-256 keys can be made");
        let params = Self::params(trust_domain, "root", BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).expect("a root can be signed");
        Self { pem: certificate.pem(), der: certificate.der().clone(), issuer: Issuer::new(params, key) }
    }

    fn below(parent: &Self, trust_domain: &str, depth: usize) -> Self {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("P-256 keys can be made");
        let params =
            Self::params(trust_domain, &format!("intermediate {depth}"), BasicConstraints::Unconstrained);
        let certificate = params.signed_by(&key, &parent.issuer).expect("an intermediate can be signed");
        Self { pem: certificate.pem(), der: certificate.der().clone(), issuer: Issuer::new(params, key) }
    }

    fn params(trust_domain: &str, name: &str, constraints: BasicConstraints) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, trust_domain);
        params.distinguished_name.push(DnType::CommonName, format!("mock istiod {name}"));
        params.is_ca = IsCa::Ca(constraints);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial());
        let now = SystemTime::now();
        params.not_before = (now - CLOCK_SKEW).into();
        params.not_after = (now + Duration::from_secs(3650 * 24 * 3600)).into();
        params
    }
}

/// 128 random bits, positive.
fn serial() -> SerialNumber {
    let mut bytes: [u8; 16] = rand::random();
    bytes[0] &= 0x7f;
    SerialNumber::from_slice(&bytes)
}

/// The public key of a signing request, after its form and signature have been checked.
///
/// # Errors
/// With istiod's wording when the text is not PEM, does not parse, or is not signed by its own key.
pub fn read_request(pem: &str) -> Result<SubjectPublicKeyInfo, BadRequest> {
    let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
        .map_err(|e| BadRequest(format!("certificate signing request is not properly encoded: {e:?}")))?;
    let (rest, request) = x509_parser::certification_request::X509CertificationRequest::from_der(&der)
        .map_err(|e| BadRequest(format!("failed to parse X.509 certificate signing request: {e}")))?;
    if !rest.is_empty() {
        return Err(BadRequest("trailing data after the request".to_owned()));
    }
    request.verify_signature().map_err(|e| BadRequest(format!("the request's signature is wrong: {e}")))?;
    let spki = request.certification_request_info.subject_pki.raw;
    SubjectPublicKeyInfo::from_der(spki).map_err(|e| BadRequest(format!("unknown kind of public key: {e}")))
}

/// The URI names of a certificate, and the end of its validity.
#[must_use]
pub fn names(der: &[u8]) -> Option<Vec<String>> {
    let (_, certificate) = x509_parser::certificate::X509Certificate::from_der(der).ok()?;
    let san = certificate.subject_alternative_name().ok()??;
    let uris = san.value.general_names.iter().filter_map(|name| match name {
        x509_parser::extensions::GeneralName::URI(uri) => Some((*uri).to_owned()),
        _ => None,
    });
    Some(uris.collect())
}
