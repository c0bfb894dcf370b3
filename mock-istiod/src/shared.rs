//! What all connections share: the scripts, the record, the resources, the authority.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use http::HeaderMap;
use rustls::RootCertStore;
use rustls::server::{NoServerSessionStorage, ServerConfig, WebPkiClientVerifier};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::mpsc;

use crate::admission::Admission;
use crate::fault::Script;
use crate::pki::Authority;
use crate::record::Record;
use crate::resources::Store;
use crate::stream::AdsStream;

/// A value that a test may change while the server runs.
#[derive(Debug, Default)]
pub(crate) struct Setting<T>(Mutex<T>);

impl<T: Clone> Setting<T> {
    pub(crate) fn get(&self) -> T {
        self.0.lock().expect("no panic holds this lock").clone()
    }

    pub(crate) fn set(&self, value: T) {
        *self.0.lock().expect("no panic holds this lock") = value;
    }
}

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) record: Record,
    pub(crate) ca: Script,
    pub(crate) ads: Script,
    pub(crate) admission: Admission,
    pub(crate) connections: Script,
    pub(crate) resources: Store,
    pub(crate) trust_domain: String,
    pub(crate) dns_names: Vec<String>,
    pub(crate) plaintext: bool,
    pub(crate) plaintext_auth: bool,
    pub(crate) ads_auth: AtomicBool,
    pub(crate) eager_headers: AtomicBool,
    pub(crate) ttl: Setting<Option<Duration>>,
    /// Where streams go when a test plays the server itself.
    pub(crate) takers: Setting<Option<mpsc::UnboundedSender<AdsStream>>>,
    pub(crate) pki: RwLock<Pki>,
    pub(crate) next_connection: AtomicU64,
    pub(crate) next_stream: AtomicU64,
}

pub(crate) struct Pki {
    pub(crate) authority: Authority,
    /// What workloads are told to trust: more than one root during a rotation.
    pub(crate) bundle: String,
    pub(crate) tls: Arc<ServerConfig>,
}

impl Shared {
    pub(crate) fn authority(&self) -> Authority {
        self.pki.read().expect("no panic holds this lock").authority.clone()
    }

    pub(crate) fn root_bundle(&self) -> String {
        self.pki.read().expect("no panic holds this lock").bundle.clone()
    }

    pub(crate) fn tls(&self) -> Arc<ServerConfig> {
        self.pki.read().expect("no panic holds this lock").tls.clone()
    }
}

/// A TLS configuration with a fresh certificate of `authority`; client certificates of these roots are verified
/// when they are shown.
pub(crate) fn tls_config(authority: &Authority, trusted: &[&Authority], dns: &[String]) -> Arc<ServerConfig> {
    tls_config_of(authority.server(dns), trusted)
}

/// The same with this certificate.
pub(crate) fn tls_config_of(
    (chain, key): (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    trusted: &[&Authority],
) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    for trusted in trusted {
        roots.add(trusted.root_der()).expect("our own root");
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .expect("there is a root");
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the default versions")
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .expect("our own chain and key");
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Arc::new(config)
}

/// What a call may do to its connection.
pub(crate) enum Command {
    GoAway,
    Drop,
}

/// Headers in order, values that are not text escaped.
pub(crate) fn pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &http::HeaderValue| match value.to_str() {
        Ok(text) => text.to_owned(),
        Err(_) => value.as_bytes().escape_ascii().to_string(),
    };
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}
