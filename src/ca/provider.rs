//! Which CA: from `CA_PROVIDER` and `CA_ADDR` to a client.

use std::sync::Arc;

pub(crate) use super::calls::Config as Calls;
use super::{CaClient, citadel, google};
use crate::base::metrics::Metrics;

/// Which CA is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CaProvider {
    /// istiod's.
    Citadel,
    /// Nobody: certificates are mounted under the names that GKE gives them.
    GkeWorkloadCertificate,
    /// Google's Mesh CA at `CA_ADDR`.
    GoogleCa,
    /// Google's Certificate Authority Service; `CA_ADDR` is the pool.
    GoogleCas,
    /// A Vault; its client is made by [`vault::Client::new`](super::vault::Client::new).
    Vault,
}

/// A provider that this agent does not have; the words are those of the Go agent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CA provider {name:?} not registered ({hint})")]
pub(crate) struct NotRegistered {
    name: String,
    hint: &'static str,
}

const NAMES: &str =
    "CA_PROVIDER is one of Citadel, Istiod, GkeWorkloadCertificate, GoogleCA, GoogleCAS, VaultCA";
const UNNAMED: &str = "CA_ADDR is one of googleapis.com: name the provider, CA_PROVIDER=GoogleCA";

impl CaProvider {
    /// From `CA_PROVIDER` and `CA_ADDR`. As in the Go agent, an address of `googleapis.com` means Google's Mesh
    /// CA whatever else the provider says; but a workload is sent there only when Google is asked for, by the
    /// provider's name or by `google` (`ENABLE_GOOGLE_CA`).
    ///
    /// # Errors
    /// When there is no such provider.
    pub(crate) fn resolve(name: &str, address: &str, google: bool) -> Result<Self, NotRegistered> {
        let refused = |name: &str, hint| Err(NotRegistered { name: name.to_owned(), hint });
        match name {
            "GoogleCA" => Ok(Self::GoogleCa),
            "GoogleCAS" if !address.contains("googleapis.com") => Ok(Self::GoogleCas),
            _ if address.contains("googleapis.com") => {
                if google || name == "GoogleCAS" {
                    Ok(Self::GoogleCa)
                } else {
                    refused("GoogleCA", UNNAMED)
                }
            }
            "Citadel" | "Istiod" => Ok(Self::Citadel),
            "GkeWorkloadCertificate" => Ok(Self::GkeWorkloadCertificate),
            "VaultCA" => Ok(Self::Vault),
            other => refused(other, NAMES),
        }
    }
}

/// What one provider needs beside the way to it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Details {
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
pub(crate) fn client(
    provider: &CaProvider,
    calls: Calls,
    details: Details,
    metrics: &Metrics,
) -> Option<Arc<dyn CaClient>> {
    Some(match provider {
        CaProvider::GkeWorkloadCertificate | CaProvider::Vault => return None,
        CaProvider::Citadel => {
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
        CaProvider::GoogleCa => Arc::new(google::MeshCa::new(calls, &details.cluster_url, metrics)),
        CaProvider::GoogleCas => {
            Arc::new(google::CertificateAuthorityService::new(calls, details.pool, metrics))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naming_a_provider_is_asking_for_it() {
        let google = "meshca.googleapis.com:443";
        for (name, address, switched, wanted) in [
            ("Citadel", "", false, Ok(CaProvider::Citadel)),
            ("Istiod", "", false, Ok(CaProvider::Citadel)),
            // Set but empty is no default.
            ("", "istiod:15012", false, Err("")),
            ("GkeWorkloadCertificate", "", false, Ok(CaProvider::GkeWorkloadCertificate)),
            ("GoogleCA", google, false, Ok(CaProvider::GoogleCa)),
            ("GoogleCA", "ca:1", false, Ok(CaProvider::GoogleCa)),
            ("GoogleCAS", "projects/p/locations/l/caPools/c", false, Ok(CaProvider::GoogleCas)),
            ("VaultCA", "", false, Ok(CaProvider::Vault)),
            ("Citadel", google, false, Err("GoogleCA")),
            ("Citadel", google, true, Ok(CaProvider::GoogleCa)),
            ("Vault", "", true, Err("Vault")),
            ("vaultca", "", true, Err("vaultca")),
        ] {
            let got = CaProvider::resolve(name, address, switched).map_err(|e| e.name);
            assert_eq!(got, wanted.map_err(str::to_owned), "{name} {address}");
        }
        let text = CaProvider::resolve("Vault", "", false).unwrap_err().to_string();
        assert!(
            text.starts_with("CA provider \"Vault\" not registered (") && text.contains("VaultCA"),
            "{text}"
        );
    }
}
