//! Which CA: from `CA_PROVIDER` and `CA_ADDR` to a client.

use std::sync::Arc;

pub use super::calls::Config as Calls;
use super::{CaClient, citadel, google};
use crate::base::metrics::Metrics;

/// Which CA is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Provider {
    /// istiod's.
    Citadel,
    /// Nobody: certificates are mounted under the names that GKE gives them.
    GkeWorkloadCertificate,
    /// Google's Mesh CA at `CA_ADDR`.
    GoogleCa,
    /// Google's Certificate Authority Service; `CA_ADDR` is the pool.
    GoogleCas,
}

/// A provider that this agent does not have; the words are those of the Go agent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CA provider {0:?} not registered{hint}", hint = self.hint())]
pub struct NotRegistered(pub String);

impl NotRegistered {
    fn hint(&self) -> &'static str {
        match self.0.as_str() {
            "GoogleCA" | "GoogleCAS" => {
                " (its client left the agent in 1.23; ENABLE_GOOGLE_CA=true brings ours)"
            }
            _ => " (set CA_PROVIDER to Citadel or GkeWorkloadCertificate)",
        }
    }
}

impl Provider {
    /// From `CA_PROVIDER` and `CA_ADDR`. As in the Go agent, an address of `googleapis.com` means
    /// Google's Mesh CA whatever the provider says. `google` is `ENABLE_GOOGLE_CA`, a variable of ours:
    /// without it Google's CAs are refused as in release 1.30.
    ///
    /// # Errors
    /// When there is no such provider.
    pub fn resolve(name: &str, address: &str, google: bool) -> Result<Self, NotRegistered> {
        let name = if address.contains("googleapis.com") { "GoogleCA" } else { name };
        match name {
            "" | "Citadel" => Ok(Self::Citadel),
            "GkeWorkloadCertificate" => Ok(Self::GkeWorkloadCertificate),
            "GoogleCA" if google => Ok(Self::GoogleCa),
            "GoogleCAS" if google => Ok(Self::GoogleCas),
            other => Err(NotRegistered(other.to_owned())),
        }
    }
}

/// What one provider needs beside the way to it.
#[derive(Debug, Clone, Default)]
pub struct Details {
    /// `ISTIO_META_CERT_SIGNER`, for istiod.
    pub cert_signer: String,
    /// `GKE_CLUSTER_URL`, for Mesh CA.
    pub cluster_url: String,
    /// `CA_ADDR`, for the Certificate Authority Service.
    pub pool: String,
}

/// The client of a provider; `None` where certificates are only mounted.
///
/// # Panics
/// When a second CA client is made for one registry.
#[must_use]
pub fn client(
    provider: &Provider,
    calls: Calls,
    details: Details,
    metrics: &Metrics,
) -> Option<Arc<dyn CaClient>> {
    Some(match provider {
        Provider::GkeWorkloadCertificate => return None,
        Provider::Citadel => {
            let Calls { connector, tokens, headers, attempt_timeout, total_timeout, trouble } = calls;
            let cert_signer = details.cert_signer;
            let config = citadel::Config {
                connector,
                tokens,
                headers,
                cert_signer,
                attempt_timeout,
                total_timeout,
                trouble,
            };
            Arc::new(citadel::Client::new(config, metrics))
        }
        Provider::GoogleCa => Arc::new(google::MeshCa::new(calls, &details.cluster_url, metrics)),
        Provider::GoogleCas => {
            Arc::new(google::CertificateAuthorityService::new(calls, details.pool, metrics))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn providers_resolve_as_in_release_1_30() {
        let google = "meshca.googleapis.com:443";
        for (name, address, switched, wanted) in [
            ("Citadel", "", false, Ok(Provider::Citadel)),
            ("", "istiod:15012", false, Ok(Provider::Citadel)),
            ("GkeWorkloadCertificate", "", false, Ok(Provider::GkeWorkloadCertificate)),
            ("GoogleCA", "", false, Err("GoogleCA")),
            ("GoogleCAS", "", false, Err("GoogleCAS")),
            ("Vault", "", true, Err("Vault")),
            ("Citadel", google, false, Err("GoogleCA")),
            ("Citadel", google, true, Ok(Provider::GoogleCa)),
            ("GoogleCAS", "projects/p/locations/l/caPools/c", true, Ok(Provider::GoogleCas)),
        ] {
            let got = Provider::resolve(name, address, switched);
            assert_eq!(got, wanted.map_err(|e| NotRegistered(e.to_owned())), "{name} {address}");
        }
        let text = NotRegistered("Vault".to_owned()).to_string();
        assert!(text.starts_with("CA provider \"Vault\" not registered"), "{text}");
    }
}
