//! Clients of Google's two CAs, Mesh CA and Certificate Authority Service.
//!
//! The Go agent had both until release 1.22; 1.30 ends with "not registered" when asked for them, and so
//! do we unless the operator switches them on (see docs/COMPATIBILITY.md). Messages are written down
//! here from their field numbers, only the fields that are used: they are sent and read, never relayed.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::BoxFuture;
use prost::Message;
use rand::Rng;

use super::calls::{Caller, Config as Calls, Method};
use super::{CaClient, Error};
use crate::base::metrics::Metrics;

/// `CA_PROVIDER=GoogleCA`.
#[derive(Debug)]
pub(crate) struct MeshCa {
    caller: Caller,
    /// `location=locations/<zone>`, by which Google routes the call.
    routing: Option<String>,
}

impl MeshCa {
    /// A client; `cluster_url` is `GKE_CLUSTER_URL` or what the metadata server says, and may be empty.
    ///
    /// # Panics
    /// When a second CA client is made for one registry.
    #[must_use]
    pub(crate) fn new(calls: Calls, cluster_url: &str, metrics: &Metrics) -> Self {
        let routing = zone(cluster_url).map(|zone| format!("location=locations/{zone}"));
        Self { caller: Caller::new(calls, metrics), routing }
    }
}

impl CaClient for MeshCa {
    fn sign<'a>(&'a self, csr_pem: &'a str, ttl: Duration) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        Box::pin(async move {
            let method = Method {
                path: "/google.security.meshca.v1.MeshCertificateService/CreateCertificate",
                header: self.routing.as_deref().map(|routing| ("x-goog-request-params", routing)),
            };
            let request = MeshRequest {
                // One per call: the server drops repeats of an attempt that did arrive.
                request_id: uuid::Uuid::new_v4().to_string(),
                csr: csr_pem.to_owned(),
                validity: Some(span(ttl)),
            };
            let answer = self.caller.call(method, request.encode_to_vec().into()).await?;
            let answer = MeshResponse::decode(answer).map_err(|e| self.caller.unusable(e.to_string()))?;
            if answer.cert_chain.len() < 2 {
                return Err(self.caller.unusable("invalid response cert chain: leaf and root are needed"));
            }
            Ok(answer.cert_chain)
        })
    }

    fn left(&self) {
        self.caller.left();
    }
}

/// The location in `.../projects/P/locations/L/clusters/C`.
fn zone(cluster_url: &str) -> Option<&str> {
    let (front, _) = cluster_url.rsplit_once("/clusters/")?;
    let (front, zone) = front.rsplit_once("/locations/")?;
    front.contains("/projects/").then_some(zone).filter(|z| !z.is_empty())
}

/// `CA_PROVIDER=GoogleCAS`.
#[derive(Debug)]
pub(crate) struct CertificateAuthorityService {
    caller: Caller,
    /// `projects/P/locations/L/caPools/C`, as `CA_ADDR` names it.
    pool: String,
}

impl CertificateAuthorityService {
    /// A client for certificates of `pool`.
    ///
    /// # Panics
    /// When a second CA client is made for one registry.
    #[must_use]
    pub(crate) fn new(calls: Calls, pool: impl Into<String>, metrics: &Metrics) -> Self {
        Self { caller: Caller::new(calls, metrics), pool: pool.into() }
    }

    fn request(&self, csr_pem: &str, ttl: Duration) -> CreateRequest {
        let mut random = rand::rng();
        let letters = b"bcdfghjklmnpqrstvwxz2456789";
        let id: String = (0..8).map(|_| char::from(letters[random.random_range(0..letters.len())])).collect();
        // The service takes only the public key from the request; the identity is the caller's own.
        let config = CertificateConfig {
            subject: Some(SubjectConfig { subject: Some(Subject {}) }),
            x509: Some(X509Parameters {
                key_usage: Some(KeyUsage {
                    base: Some(BaseKeyUsage { digital_signature: true, key_encipherment: true }),
                    extended: Some(ExtendedKeyUsage { server_auth: true, client_auth: true }),
                }),
                ca: Some(CaOptions { is_ca: Some(false) }),
            }),
            public_key: Some(PublicKey { key: csr_pem.as_bytes().to_vec(), format: PublicKey::PEM }),
        };
        CreateRequest {
            parent: self.pool.clone(),
            certificate_id: format!("csr-workload-{id}"),
            certificate: Some(Certificate {
                config: Some(config),
                lifetime: Some(span(ttl)),
                subject_mode: Certificate::REFLECTED_SPIFFE,
                ..Certificate::default()
            }),
        }
    }
}

impl CaClient for CertificateAuthorityService {
    fn sign<'a>(&'a self, csr_pem: &'a str, ttl: Duration) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        Box::pin(async move {
            let routing = format!("parent={}", self.pool.replace('/', "%2F"));
            let method = Method {
                path: "/google.cloud.security.privateca.v1.CertificateAuthorityService/CreateCertificate",
                header: Some(("x-goog-request-params", &routing)),
            };
            let request = self.request(csr_pem, ttl);
            let answer = self.caller.call(method, request.encode_to_vec().into()).await?;
            let answer = Certificate::decode(answer).map_err(|e| self.caller.unusable(e.to_string()))?;
            if answer.pem_certificate.is_empty() {
                return Err(self.caller.unusable("it holds no certificate"));
            }
            Ok(std::iter::once(answer.pem_certificate).chain(answer.pem_certificate_chain).collect())
        })
    }

    fn root_bundle(&self) -> BoxFuture<'_, Result<Vec<String>, Error>> {
        Box::pin(async move {
            let routing = format!("ca_pool={}", self.pool.replace('/', "%2F"));
            let method = Method {
                path: "/google.cloud.security.privateca.v1.CertificateAuthorityService/FetchCaCerts",
                header: Some(("x-goog-request-params", &routing)),
            };
            let request = FetchRequest { ca_pool: self.pool.clone() };
            let answer = self.caller.call(method, request.encode_to_vec().into()).await?;
            let answer = FetchResponse::decode(answer).map_err(|e| self.caller.unusable(e.to_string()))?;
            // Each chain ends with its root; sorted, so that the bundle only changes when a root does.
            let roots: BTreeSet<String> = answer
                .ca_certs
                .into_iter()
                .filter_map(|chain| chain.certificates.into_iter().next_back())
                .collect();
            if roots.is_empty() {
                return Err(self.caller.unusable("the pool has no root certificate"));
            }
            Ok(roots.into_iter().collect())
        })
    }

    fn left(&self) {
        self.caller.left();
    }
}

fn span(of: Duration) -> prost_types::Duration {
    prost_types::Duration { seconds: i64::try_from(of.as_secs()).unwrap_or(i64::MAX), nanos: 0 }
}

/// `google.security.meshca.v1.MeshCertificateRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct MeshRequest {
    #[prost(string, tag = "1")]
    request_id: String,
    #[prost(string, tag = "2")]
    csr: String,
    #[prost(message, optional, tag = "3")]
    validity: Option<prost_types::Duration>,
}

/// `google.security.meshca.v1.MeshCertificateResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct MeshResponse {
    #[prost(string, repeated, tag = "1")]
    cert_chain: Vec<String>,
}

/// `google.cloud.security.privateca.v1.CreateCertificateRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct CreateRequest {
    #[prost(string, tag = "1")]
    parent: String,
    #[prost(string, tag = "2")]
    certificate_id: String,
    #[prost(message, optional, tag = "3")]
    certificate: Option<Certificate>,
}

/// `google.cloud.security.privateca.v1.Certificate`.
#[derive(Clone, PartialEq, prost::Message)]
struct Certificate {
    #[prost(message, optional, tag = "3")]
    config: Option<CertificateConfig>,
    #[prost(message, optional, tag = "5")]
    lifetime: Option<prost_types::Duration>,
    #[prost(int32, tag = "7")]
    subject_mode: i32,
    #[prost(string, tag = "9")]
    pem_certificate: String,
    #[prost(string, repeated, tag = "11")]
    pem_certificate_chain: Vec<String>,
}

impl Certificate {
    /// `SubjectRequestMode.REFLECTED_SPIFFE`: the caller's own identity.
    const REFLECTED_SPIFFE: i32 = 2;
}

/// `google.cloud.security.privateca.v1.CertificateConfig`.
#[derive(Clone, PartialEq, prost::Message)]
struct CertificateConfig {
    #[prost(message, optional, tag = "1")]
    subject: Option<SubjectConfig>,
    #[prost(message, optional, tag = "2")]
    x509: Option<X509Parameters>,
    #[prost(message, optional, tag = "3")]
    public_key: Option<PublicKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SubjectConfig {
    #[prost(message, optional, tag = "1")]
    subject: Option<Subject>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Subject {}

#[derive(Clone, PartialEq, prost::Message)]
struct X509Parameters {
    #[prost(message, optional, tag = "1")]
    key_usage: Option<KeyUsage>,
    #[prost(message, optional, tag = "2")]
    ca: Option<CaOptions>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KeyUsage {
    #[prost(message, optional, tag = "1")]
    base: Option<BaseKeyUsage>,
    #[prost(message, optional, tag = "2")]
    extended: Option<ExtendedKeyUsage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct BaseKeyUsage {
    #[prost(bool, tag = "1")]
    digital_signature: bool,
    #[prost(bool, tag = "3")]
    key_encipherment: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ExtendedKeyUsage {
    #[prost(bool, tag = "1")]
    server_auth: bool,
    #[prost(bool, tag = "2")]
    client_auth: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CaOptions {
    #[prost(bool, optional, tag = "1")]
    is_ca: Option<bool>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PublicKey {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int32, tag = "2")]
    format: i32,
}

impl PublicKey {
    /// `KeyFormat.PEM`.
    const PEM: i32 = 1;
}

/// `google.cloud.security.privateca.v1.FetchCaCertsRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct FetchRequest {
    #[prost(string, tag = "1")]
    ca_pool: String,
}

/// `google.cloud.security.privateca.v1.FetchCaCertsResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct FetchResponse {
    #[prost(message, repeated, tag = "1")]
    ca_certs: Vec<CertChain>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CertChain {
    #[prost(string, repeated, tag = "1")]
    certificates: Vec<String>,
}

#[cfg(test)]
mod tests;
