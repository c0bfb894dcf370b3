//! TLS towards istiod and other servers: roots, and the client certificate as the files stand at the
//! moment of a handshake.
//!
//! Configurations are made per dial and thrown away, so a rotated file counts at the next connection
//! and nothing of a session stays in memory.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::CryptoProvider;
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureAlgorithm, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use super::anchors::Anchors;
use super::provider::{Compliance, provider};
use super::verify::Verifier;
use crate::base::bounded;
use crate::base::clock::Clock;
use crate::base::lane::Lane;
use crate::base::seldom::Seldom;
use crate::trouble::{Kind, span};

/// Read at each dial, by two connectors at most.
static FILES: Lane = Lane::new("client certificate", 2);

/// Far above what a disk needs that works, and well within a dial's own limit.
const PATIENCE: Duration = Duration::from_secs(2);
/// Each stream of a client is a connection, and each connection a handshake.
static WITHOUT: Seldom = Seldom::new(10);

/// A client certificate on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientFiles {
    /// PEM chain.
    pub cert: PathBuf,
    /// PEM key.
    pub key: PathBuf,
    /// The agent itself writes them, as soon as it has a certificate.
    pub written: bool,
}

/// A configuration that speaks HTTP/2 only, verifies the server against `roots`, and shows
/// `identity`'s certificate when the server asks.
///
/// # Errors
/// When the crypto crate refuses the combination.
pub(crate) fn config(
    roots: Arc<Anchors>,
    identity: Option<Arc<Identity>>,
    policy: Compliance,
) -> Result<ClientConfig, rustls::Error> {
    let (provider, versions) = provider(policy);
    let verifier = Verifier::new(roots, provider.clone());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match identity {
        Some(identity) => builder.with_client_cert_resolver(identity),
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// What a server showed, whether or not it was accepted.
#[derive(Debug, Default)]
pub(crate) struct Seen(Mutex<Vec<Vec<u8>>>);

impl Seen {
    /// Its certificates in DER, its own first; empty when the handshake did not come so far.
    #[must_use]
    pub(crate) fn chain(&self) -> Vec<Vec<u8>> {
        self.0.lock().expect("no panic holds this lock").clone()
    }
}

/// As [`config`], and what the server shows is kept in `seen`: for a diagnosis. Nothing more is accepted.
///
/// # Errors
/// As [`config`].
pub(crate) fn watched(
    roots: Arc<Anchors>,
    identity: Option<Arc<Identity>>,
    policy: Compliance,
    seen: Arc<Seen>,
) -> Result<ClientConfig, rustls::Error> {
    let inner = Verifier::new(roots.clone(), provider(policy).0);
    let mut config = config(roots, identity, policy)?;
    config.dangerous().set_certificate_verifier(Arc::new(Watch { inner, seen }));
    Ok(config)
}

/// Notes the chain and leaves the judgement to the verifier that counts.
#[derive(Debug)]
struct Watch {
    inner: Arc<Verifier>,
    seen: Arc<Seen>,
}

impl ServerCertVerifier for Watch {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates).map(|der| der.to_vec()).collect();
        *self.seen.0.lock().expect("no panic holds this lock") = chain;
        self.inner.verify_server_cert(end_entity, intermediates, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// The certificates of a PEM text that can be trusted; blocks that cannot are passed over.
#[must_use]
pub fn roots_of(pem: &[u8]) -> Anchors {
    Anchors::of(super::cert::each_cert(pem).filter_map(Result::ok))
}

/// The system's pool, about 150 certificates, read anew at each call and never kept.
#[must_use]
pub(crate) fn system_roots() -> RootCertStore {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    store
}

/// What the files of a client certificate held when a connection was begun.
pub(crate) struct Read {
    cert: std::io::Result<Vec<u8>>,
    key: std::io::Result<zeroize::Zeroizing<Vec<u8>>>,
}

impl Read {
    /// Reads both, on a thread: a disk that does not answer within [`PATIENCE`] holds none of them.
    pub(crate) async fn of(files: &ClientFiles) -> Self {
        let (cert, key) = (files.cert.clone(), files.key.clone());
        let read = move || Self { cert: bounded::usual(&cert), key: bounded::usual(&key).map(Into::into) };
        FILES.within(PATIENCE, read).await.unwrap_or_else(|error| {
            let same = std::io::Error::new(error.kind(), error.to_string());
            Self { cert: Err(error), key: Err(same) }
        })
    }
}

#[cfg(test)]
impl Read {
    /// A certificate whose key the system does not give.
    pub(crate) fn without_key(cert: &str, why: std::io::Error) -> Self {
        Self { cert: Ok(cert.as_bytes().to_vec()), key: Err(why) }
    }
}

/// A client certificate that is examined only when a server asks for one.
///
/// * certificate file unreadable, or its first block no certificate: none is sent, with a warning;
/// * its first certificate expired: none is sent, with a warning;
/// * otherwise the pair must load, or the connection fails ([`Identity::failure`]).
pub(crate) struct Identity {
    files: ClientFiles,
    read: Read,
    clock: Arc<dyn Clock>,
    provider: Arc<CryptoProvider>,
    failure: Mutex<Option<String>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("files", &self.files).finish_non_exhaustive()
    }
}

/// What the files offer at one moment.
enum Offer {
    /// Not usable for this connection, which goes on without.
    Without(String),
    /// Nothing may be sent in its place.
    Broken(String),
    Usable(CertifiedKey),
}

impl Identity {
    /// For one connection.
    #[must_use]
    pub(crate) fn new(files: ClientFiles, read: Read, clock: Arc<dyn Clock>) -> Arc<Self> {
        let (provider, _) = provider(Compliance::None);
        Arc::new(Self { files, read, clock, provider, failure: Mutex::default() })
    }

    /// Why the pair could not be loaded, when the server asked and it could not.
    #[must_use]
    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.lock().expect("no panic holds this lock").clone()
    }

    /// What of this machine kept the files from being read, where that has a kind of its own.
    #[must_use]
    pub(crate) fn unread(&self) -> Option<Kind> {
        let Read { cert, key } = &self.read;
        cert.as_ref().err().or(key.as_ref().err()).and_then(Kind::of_io)
    }

    // As at the first start of a machine: there is nothing to repair.
    fn is_to_come(&self) -> bool {
        let gone =
            |error: Option<&std::io::Error>| error.is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound);
        self.files.written && gone(self.read.cert.as_ref().err()) && gone(self.read.key.as_ref().err())
    }

    fn examine(&self, now: SystemTime) -> Offer {
        let cert = self.files.cert.display();
        let pem = match &self.read.cert {
            Ok(pem) => pem,
            Err(e) => return Offer::Without(format!("cannot read the client certificate {cert}: {e}")),
        };
        if !begins_with_a_certificate(pem) {
            return Offer::Without(format!(
                "the client certificate {cert} does not begin with a certificate"
            ));
        }
        let chain: Vec<_> = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect();
        let first = match chain.first().map(|der| super::cert::parse_der(der)) {
            Some(Ok(first)) => first,
            Some(Err(e)) => {
                return Offer::Without(format!("the client certificate {cert} does not parse: {e}"));
            }
            None => return Offer::Without(format!("the client certificate {cert} holds no certificate")),
        };
        if first.not_after < now {
            let ago = span(now.duration_since(first.not_after).unwrap_or_default());
            return Offer::Without(format!("the client certificate {cert} expired {ago} ago"));
        }
        let broken = |e: &dyn fmt::Display| {
            Offer::Broken(format!(
                "cannot load the client certificate {cert} with its key {}: {e}",
                self.files.key.display()
            ))
        };
        let key = match &self.read.key {
            Ok(pem) => match PrivateKeyDer::from_pem_slice(pem) {
                Ok(key) => key,
                Err(e) => return broken(&e),
            },
            Err(e) => return broken(e),
        };
        match CertifiedKey::from_der(chain, key, &self.provider) {
            Ok(pair) => Offer::Usable(pair),
            Err(e) => broken(&e),
        }
    }
}

/// Whether the first block of a PEM text is a certificate: the Go agent looks no further.
fn begins_with_a_certificate(pem: &[u8]) -> bool {
    const BEGIN: &[u8] = b"-----BEGIN ";
    let first = memchr::memmem::find(pem, BEGIN).map(|at| &pem[at + BEGIN.len()..]);
    first.is_some_and(|label| label.starts_with(b"CERTIFICATE-----"))
}

/// Stands for a key that cannot be used: the handshake ends when it is to sign, as Go's ends, and the server never
/// sees a finished connection.
#[derive(Debug)]
struct Broken;

impl SigningKey for Broken {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        offered.first().map(|scheme| -> Box<dyn Signer> { Box::new(BrokenSigner(*scheme)) })
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ECDSA
    }
}

#[derive(Debug)]
struct BrokenSigner(SignatureScheme);

impl Signer for BrokenSigner {
    fn sign(&self, _message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        Err(rustls::Error::General("the client certificate cannot be loaded".to_owned()))
    }

    fn scheme(&self) -> SignatureScheme {
        self.0
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        match self.examine(self.clock.now()) {
            Offer::Usable(pair) => Some(Arc::new(pair)),
            Offer::Without(why) if self.is_to_come() => {
                tracing::debug!(target: "security", "{why}; it is written when there is one");
                None
            }
            Offer::Without(why) => {
                if let Some(more) = WITHOUT.may() {
                    tracing::warn!(target: "security", "{why}; connecting without a client certificate{more}");
                }
                None
            }
            Offer::Broken(why) => {
                *self.failure.lock().expect("no panic holds this lock") = Some(why);
                // Not `None`: that would finish the handshake without a certificate.
                Some(Arc::new(CertifiedKey::new(Vec::new(), Arc::new(Broken))))
            }
        }
    }

    fn has_certs(&self) -> bool {
        true
    }
}
