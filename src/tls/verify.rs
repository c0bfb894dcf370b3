//! Verification of server certificates: what Go's verifier accepts and the library alone would refuse.
//!
//! * A certificate that is itself in the root file, byte for byte, whether it may sign others or not. Its dates, its
//!   name and its purpose count all the same. What in the file may not sign others is pinned so and nothing else:
//!   it vouches for itself alone.
//! * A certificate that is a CA's as well (`CA:TRUE`), signed by a root of the file. The library refuses every such
//!   one before it looks at the chain, so it is shown one with that single bit taken back; where it then asks
//!   whether the issuer has signed that, the bytes that were signed are put back. So names, dates, purposes,
//!   constraints and the chain are still the library's judgement.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme};
use rustls_pki_types::{
    AlgorithmIdentifier, CertificateDer, InvalidSignature, ServerName, SignatureVerificationAlgorithm,
    UnixTime,
};
use x509_parser::prelude::{FromDer, X509Certificate, X509Version};
use x509_parser::public_key::PublicKey;

use crate::base::seldom::Seldom;

/// What a connection trusts.
pub struct Anchors {
    /// Those that may sign others.
    signers: RootCertStore,
    /// SHA-256 of every certificate of the file: in bytes a fraction of the certificates.
    pinned: Vec<[u8; 32]>,
}

impl fmt::Debug for Anchors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anchors")
            .field("signers", &self.signers.len())
            .field("pinned", &self.pinned.len())
            .finish()
    }
}

/// Nothing of it is pinned.
impl From<RootCertStore> for Anchors {
    fn from(signers: RootCertStore) -> Self {
        Self { signers, pinned: Vec::new() }
    }
}

impl Anchors {
    /// Of the certificates of a file; what cannot be read is passed over.
    #[must_use]
    pub fn of<'a>(certificates: impl Iterator<Item = CertificateDer<'a>>) -> Self {
        let mut all = Self { signers: RootCertStore::empty(), pinned: Vec::new() };
        for der in certificates {
            let Ok((_, parsed)) = X509Certificate::from_der(&der) else { continue };
            // As in Go: only the first version of certificates has no way of saying whether it signs.
            let signs = parsed.version() == X509Version::V1 || parsed.is_ca();
            let hash = hash(&der);
            if !signs || all.signers.add(der.into_owned()).is_ok() {
                all.pinned.push(hash);
            }
        }
        all
    }

    /// Whether nobody is trusted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.signers.is_empty() && self.pinned.is_empty()
    }

    fn pins(&self, der: &[u8]) -> bool {
        self.pinned.contains(&hash(der))
    }
}

fn hash(der: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest(&SHA256, der).as_ref());
    out
}

/// Verifies servers against [`Anchors`].
#[derive(Debug)]
pub(crate) struct Verifier {
    anchors: Arc<Anchors>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    /// For one connection or many.
    #[must_use]
    pub(crate) fn new(anchors: Arc<Anchors>, provider: Arc<CryptoProvider>) -> Arc<Self> {
        Arc::new(Self { anchors, provider })
    }

    fn chain(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
        algorithms: &[&dyn SignatureVerificationAlgorithm],
    ) -> Result<(), Error> {
        let leaf = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(
            &leaf,
            &self.anchors.signers,
            intermediates,
            now,
            algorithms,
        )?;
        verify_server_name(&leaf, name)
    }
}

/// Each stream of a client is a connection, and each connection a handshake.
static PINNED: Seldom = Seldom::new(10);

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let usual = self.provider.signature_verification_algorithms.all;
        if self.anchors.pins(leaf) {
            pinned(leaf, name, now)?;
            if let Some(more) = PINNED.may() {
                tracing::info!(target: "security", "the certificate of {} is itself in the root file and is accepted \
                    as it is{more}", name.to_str());
            }
        } else if let Some(edited) = Edited::of(leaf) {
            let restoring: Vec<_> =
                usual.iter().map(|inner| Restoring { inner: *inner, edited: &edited }).collect();
            let algorithms: Vec<_> =
                restoring.iter().map(|a| a as &dyn SignatureVerificationAlgorithm).collect();
            self.chain(&edited.der, intermediates, name, now, &algorithms)?;
        } else {
            self.chain(leaf, intermediates, name, now, usual)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
            .map_err(|said| why_bad(said, cert))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
            .map_err(|said| why_bad(said, cert))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// An RSA key of so few bits that the crypto library verifies nothing with it.
#[derive(Debug, thiserror::Error)]
#[error("its RSA key has {0} bits, and at least {LEAST} are needed")]
struct Weak(usize);

/// Bits of an RSA key (`RSA_PKCS1_2048_8192_*` of the library).
const LEAST: usize = 2048;

/// The library calls the handshake's signature bad, though it may only be that of a short key.
fn why_bad(said: Error, leaf: &CertificateDer<'_>) -> Error {
    let parsed = X509Certificate::from_der(leaf).ok();
    let key = parsed.as_ref().and_then(|(_, parsed)| parsed.public_key().parsed().ok());
    match (&said, key) {
        (Error::InvalidCertificate(CertificateError::BadSignature), Some(PublicKey::RSA(key)))
            if key.key_size() < LEAST =>
        {
            Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(Weak(key.key_size())))))
        }
        _ => said,
    }
}

/// What still counts of a certificate that is trusted as it is.
fn pinned(der: &CertificateDer<'_>, name: &ServerName<'_>, now: UnixTime) -> Result<(), Error> {
    let bad = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
    let (_, parsed) = X509Certificate::from_der(der).map_err(bad)?;
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let refuse = |why| Err(Error::InvalidCertificate(why));
    if now < parsed.validity().not_before.timestamp() {
        return refuse(CertificateError::NotValidYet);
    }
    if now > parsed.validity().not_after.timestamp() {
        return refuse(CertificateError::Expired);
    }
    let purposes = parsed.extended_key_usage().ok().flatten();
    if purposes.is_some_and(|p| !p.value.any && !p.value.server_auth) {
        return refuse(CertificateError::InvalidPurpose);
    }
    verify_server_name(&ParsedCertificate::try_from(der)?, name)
}

/// A certificate whose `CA:TRUE` was taken back.
#[derive(Debug)]
struct Edited {
    der: CertificateDer<'static>,
    /// What the issuer signs, as it is now and as it was signed.
    now: Range<usize>,
    signed: Vec<u8>,
}

impl Edited {
    /// `None` for certificates that are no CA's.
    fn of(der: &[u8]) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(der).ok()?;
        let at = |part: &[u8]| (part.as_ptr() as usize).checked_sub(der.as_ptr() as usize);
        let constraints = parsed
            .extensions()
            .iter()
            .find(|e| e.oid == x509_parser::oid_registry::OID_X509_EXT_BASIC_CONSTRAINTS && parsed.is_ca())?;
        // SEQUENCE, its length, BOOLEAN of one byte, which is TRUE.
        let [0x30, _, 0x01, 0x01, 0xff, ..] = constraints.value else { return None };
        let bit = at(constraints.value)? + 4;
        let tbs: &[u8] = parsed.tbs_certificate.as_ref();
        let start = at(tbs)?;
        let mut edited = der.to_vec();
        *edited.get_mut(bit)? = 0;
        Some(Self { der: edited.into(), now: start..start + tbs.len(), signed: tbs.to_vec() })
    }
}

/// Judges the bytes that were signed in the place of the edited ones.
struct Restoring<'a> {
    inner: &'a dyn SignatureVerificationAlgorithm,
    edited: &'a Edited,
}

impl fmt::Debug for Restoring<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Restoring").field(&self.inner).finish()
    }
}

impl SignatureVerificationAlgorithm for Restoring<'_> {
    fn verify_signature(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), InvalidSignature> {
        let edited = self.edited.der.get(self.edited.now.clone()) == Some(message);
        let message = if edited { &self.edited.signed } else { message };
        self.inner.verify_signature(key, message, signature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        self.inner.public_key_alg_id()
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.inner.signature_alg_id()
    }

    fn fips(&self) -> bool {
        self.inner.fips()
    }
}

#[cfg(test)]
mod tests;
