//! Client of istiod's CA.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use prost::Message;
use tokio::time::Instant;

use super::calls::{Caller, Config as Calls, Method};
use super::{CaClient, Error};
use crate::base::metrics::Metrics;
use crate::istiod::Connector;
use crate::istiod::auth::{CallHeaders, TokenSource};
use crate::proto::ca::{IstioCertificateRequest, IstioCertificateResponse};
use crate::trouble::Reporter;

const CREATE: Method<'_> =
    Method { path: "/istio.v1.auth.IstioCertificateService/CreateCertificate", header: None };

/// What a client needs.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// How to reach the CA.
    pub connector: Connector,
    /// Tokens, asked for at each attempt.
    pub tokens: Arc<dyn TokenSource>,
    /// `clusterid` and `CA_HEADER_*`.
    pub headers: CallHeaders,
    /// `ISTIO_META_CERT_SIGNER`, sent even when empty.
    pub cert_signer: String,
    /// Bound of one attempt, dial included (the Go agent has none).
    pub attempt_timeout: Duration,
    /// Bound of a call with all its attempts (the Go agent has none).
    pub total_timeout: Duration,
    /// Who is told why an attempt failed.
    pub trouble: Arc<Reporter>,
}

/// The client.
#[derive(Debug)]
pub(crate) struct Client {
    caller: Caller,
    cert_signer: String,
}

impl Client {
    /// A client, and its counter of retries in `metrics`.
    ///
    /// # Panics
    /// When a second CA client is made for one registry.
    #[must_use]
    pub(crate) fn new(config: Config, metrics: &Metrics) -> Self {
        let Config { connector, tokens, headers, cert_signer, attempt_timeout, total_timeout, trouble } =
            config;
        let calls = Calls { connector, tokens, headers, attempt_timeout, total_timeout, trouble };
        Self { caller: Caller::new(calls, metrics), cert_signer }
    }

    async fn create(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, Error> {
        let request = IstioCertificateRequest {
            csr: csr_pem.to_owned(),
            validity_duration: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(signer_metadata(&self.cert_signer)),
        };
        let answer = self.caller.call(CREATE, request.encode_to_vec().into()).await?;
        let answer =
            IstioCertificateResponse::decode(answer).map_err(|e| self.caller.unusable(e.to_string()))?;
        // Go's words; it refuses a single entry too, whatever that holds.
        let entries = answer.cert_chain.len();
        if entries < 2 {
            return Err(self.caller.unusable(format!(
                "invalid empty CertChain: {entries} of at least 2 entries (leaf and root)"
            )));
        }
        Ok(answer.cert_chain)
    }
}

impl CaClient for Client {
    fn sign<'a>(&'a self, csr_pem: &'a str, ttl: Duration) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        Box::pin(async move {
            let started = Instant::now();
            let outcome = self.create(csr_pem, ttl).await;
            match &outcome {
                Ok(_) => tracing::debug!(target: "citadelclient",
                    "{} signed in {} ms", self.caller.endpoint(), started.elapsed().as_millis()),
                Err(e) => tracing::debug!(target: "citadelclient", "{e} ({})", e.label()),
            }
            outcome
        })
    }

    fn left(&self) {
        self.caller.left();
    }
}

/// `{"CertSigner": <name>}`.
fn signer_metadata(signer: &str) -> prost_types::Struct {
    let kind = Some(prost_types::value::Kind::StringValue(signer.to_owned()));
    prost_types::Struct { fields: [("CertSigner".to_owned(), prost_types::Value { kind })].into() }
}

#[cfg(test)]
mod tests;
