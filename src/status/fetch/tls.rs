//! TLS of HTTPS probes: any certificate will do, as with the kubelet's own probes.
//!
//! A probe asks whether the application lives, over loopback, and sends no secret; nobody gives it a
//! certificate for the pod's address. Nothing else in the agent may use this.

use std::sync::{Arc, OnceLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, Resumption};
use rustls::crypto::CryptoProvider;
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

/// Settings that are made when the first probe needs them: most pods have no HTTPS probe.
#[derive(Debug)]
pub(in super::super) struct Tls {
    crypto: Arc<CryptoProvider>,
    h2: bool,
    made: OnceLock<Result<Arc<ClientConfig>, Error>>,
}

impl Tls {
    /// `h2`: whether HTTP/2 is offered.
    pub(in super::super) fn new(crypto: Arc<CryptoProvider>, h2: bool) -> Self {
        Self { crypto, h2, made: OnceLock::new() }
    }

    pub(super) fn config(&self) -> Result<Arc<ClientConfig>, Error> {
        self.made.get_or_init(|| self.make()).clone()
    }

    fn make(&self) -> Result<Arc<ClientConfig>, Error> {
        let mut config = ClientConfig::builder_with_provider(self.crypto.clone())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anybody(self.crypto.clone())))
            .with_no_client_auth();
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
