//! TLS of what is fetched: servers are verified against the system's roots, or not at all.
//!
//! Not at all is for probes, as with the kubelet's own: a probe asks whether the application lives, over
//! loopback, and sends no secret; nobody gives it a certificate for the pod's address. And for module
//! registries that a variable names as insecure. Nothing else may ask for it.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, Resumption};
use rustls::crypto::CryptoProvider;
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::base::lane::Lane;

/// As many as are begun at a time by readiness, downloads and tokens.
static POOL: Lane = Lane::new("the system's roots", 2);
/// How long they are waited for; they take some milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whose certificate is good enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Anybody's.
    Anybody,
    /// One for the host's name, signed by one of the system's roots.
    System,
    /// One for the host's name, signed by a root that is given.
    Given,
}

/// Settings that are made when the first request needs them: most pods fetch nothing over TLS.
#[derive(Debug)]
pub(crate) struct Tls {
    crypto: Arc<CryptoProvider>,
    h2: bool,
    trust: Trust,
    /// PEM, trusted beside the system's roots, or alone.
    more: Vec<u8>,
    made: OnceLock<Result<Arc<ClientConfig>, Error>>,
}

impl Tls {
    /// `h2`: whether HTTP/2 is offered.
    pub(crate) fn new(crypto: Arc<CryptoProvider>, h2: bool, trust: Trust) -> Self {
        Self { crypto, h2, trust, more: Vec::new(), made: OnceLock::new() }
    }

    /// HTTP/1.1 with a server that the system's roots or those in `pem` vouch for.
    pub(crate) fn with_more_roots(crypto: Arc<CryptoProvider>, pem: Vec<u8>) -> Self {
        Self { more: pem, ..Self::new(crypto, false, Trust::System) }
    }

    /// HTTP/1.1 with a server that a root in `pem` vouches for.
    pub(crate) fn with_roots(crypto: Arc<CryptoProvider>, pem: Vec<u8>) -> Self {
        Self { more: pem, ..Self::new(crypto, false, Trust::Given) }
    }

    /// The settings. The system's roots are a megabyte: they are read for each connection and not kept. A disk that stands
    /// still is waited for on a thread.
    ///
    /// # Errors
    /// Also when the roots could not be read in time, or on no thread.
    pub(crate) async fn config(self: &Arc<Self>) -> io::Result<Arc<ClientConfig>> {
        let made = match self.trust {
            Trust::Anybody => self.made.get_or_init(|| self.make()).clone(),
            Trust::Given => self.make(),
            Trust::System => {
                let tls = Arc::clone(self);
                POOL.within(PATIENCE, move || tls.make()).await?
            }
        };
        made.map_err(io::Error::other)
    }

    fn make(&self) -> Result<Arc<ClientConfig>, Error> {
        let builder =
            ClientConfig::builder_with_provider(self.crypto.clone()).with_safe_default_protocol_versions()?;
        let mut config = match self.trust {
            Trust::Anybody => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Anybody(self.crypto.clone())))
                .with_no_client_auth(),
            Trust::System | Trust::Given => {
                let mut roots = match self.trust {
                    Trust::System => crate::tls::client::system_roots(),
                    _ => rustls::RootCertStore::empty(),
                };
                roots.add_parsable_certificates(
                    crate::tls::cert::each_cert(&self.more).filter_map(Result::ok),
                );
                builder.with_root_certificates(roots).with_no_client_auth()
            }
        };
        if self.h2 {
            config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        }
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }
}

/// Takes any certificate, also one that cannot even be read.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    // Who signs is not known, so it does not matter whether the signature is right.
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
