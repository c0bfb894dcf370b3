//! Verification of server certificates: what Go's verifier accepts and the library alone would refuse.
//!
//! * A certificate that is itself in the root file, byte for byte, whether it may sign others or not. Its dates, its
//!   name and its purpose count all the same. What in the file may not sign others is pinned so and nothing else:
//!   it vouches for itself alone.
//! * A certificate for any purpose (`anyExtendedKeyUsage`), a server's or one between it and its root.
//! * A certificate that is a CA's as well (`CA:TRUE`), signed by a root of the file. The library refuses every such
//!   one before it looks at the chain, so it is shown one with that single bit taken back; where it then asks
//!   whether the issuer has signed that, the bytes that were signed are put back. So names, dates, purposes,
//!   constraints and the chain are still the library's judgement.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, ExtendedKeyPurpose, OtherError, SignatureScheme,
};
use rustls_pki_types::{
    AlgorithmIdentifier, CertificateDer, InvalidSignature, ServerName, SignatureVerificationAlgorithm,
    UnixTime,
};
use webpki::{
    EndEntityCert, ExtendedKeyUsageValidator, KeyPurposeId, KeyPurposeIdIter, KeyUsage, VerifiedPath,
};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

use super::anchors::{Anchors, Unvouched};
use crate::base::seldom::Seldom;

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
        let unvouched: Cell<Option<Unvouched>> = Cell::new(None);
        // Another root may have signed it, too: the search goes on.
        let vouched = |path: &VerifiedPath<'_>| {
            let between = path.intermediate_certificates().map(webpki::Cert::der);
            self.anchors.vouches(path.anchor(), between, now).map_err(|why| {
                unvouched.set(Some(why));
                webpki::Error::UnknownIssuer
            })
        };
        let parsed = EndEntityCert::try_from(leaf).map_err(refusal)?;
        parsed
            .verify_for_usage(
                algorithms,
                &self.anchors.signers,
                intermediates,
                now,
                Serves,
                None,
                Some(&vouched),
            )
            .map_err(|said| match (said, unvouched.get()) {
                (webpki::Error::UnknownIssuer, Some(why)) => other(why),
                (said, _) => refusal(said),
            })?;
        verify_server_name(&ParsedCertificate::try_from(leaf)?, name)
    }
}

/// For servers, or for anything: Go's verifier takes both, the library the first only.
struct Serves;

/// `anyExtendedKeyUsage`, 2.5.29.37.0.
const ANY: KeyPurposeId<'static> = KeyPurposeId::new(&[0x55, 0x1d, 0x25, 0x00]);
/// `id-kp-serverAuth`, 1.3.6.1.5.5.7.3.1.
const SERVER: KeyPurposeId<'static> = KeyPurposeId::new(&[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01]);

impl ExtendedKeyUsageValidator for Serves {
    fn validate(&self, purposes: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let mut present = Vec::new();
        for purpose in purposes {
            let purpose = purpose?;
            if purpose == SERVER || purpose == ANY {
                return Ok(());
            }
            present.push(purpose.to_decoded_oid());
        }
        // Whoever names no purpose is for all.
        if present.is_empty() {
            return Ok(());
        }
        let required = KeyUsage::server_auth();
        Err(webpki::Error::RequiredEkuNotFoundContext(webpki::RequiredEkuNotFoundContext {
            required,
            present,
        }))
    }
}

/// What the library's refusal is called by the one above it; what that has no name for keeps its own words.
fn refusal(said: webpki::Error) -> Error {
    use webpki::Error as Said;
    Error::InvalidCertificate(match said {
        Said::BadDer | Said::BadDerTime | Said::TrailingData(_) => CertificateError::BadEncoding,
        Said::CertNotValidYet { time, not_before } => {
            CertificateError::NotValidYetContext { time, not_before }
        }
        Said::CertExpired { time, not_after } => CertificateError::ExpiredContext { time, not_after },
        Said::InvalidCertValidity => CertificateError::Expired,
        Said::UnknownIssuer => CertificateError::UnknownIssuer,
        Said::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        Said::UnsupportedSignatureAlgorithmContext(it) => {
            CertificateError::UnsupportedSignatureAlgorithmContext {
                signature_algorithm_id: it.signature_algorithm_id,
                supported_algorithms: it.supported_algorithms,
            }
        }
        Said::UnsupportedSignatureAlgorithmForPublicKeyContext(it) => {
            CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
                signature_algorithm_id: it.signature_algorithm_id,
                public_key_algorithm_id: it.public_key_algorithm_id,
            }
        }
        Said::RequiredEkuNotFoundContext(it) => CertificateError::InvalidPurposeContext {
            required: ExtendedKeyPurpose::ServerAuth,
            presented: it.present.into_iter().map(purpose).collect(),
        },
        said => return other(said),
    })
}

fn purpose(oid: Vec<usize>) -> ExtendedKeyPurpose {
    if oid == KeyUsage::CLIENT_AUTH_REPR {
        ExtendedKeyPurpose::ClientAuth
    } else {
        ExtendedKeyPurpose::Other(oid)
    }
}

fn other(why: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(why))))
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
            other(Weak(key.key_size()))
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
