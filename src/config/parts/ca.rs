//! The CA that signs: which, the way to it, and with whose token.

use std::time::Duration;

use super::{Error, Sources, istiod, sts};
use crate::ca::provider::{CaProvider, Details};
use crate::ca::vault;
use crate::config::env::var;
use crate::istiod::auth::{CallHeaders, MetadataServer};

/// Who signs, and the way there.
#[derive(Debug, Clone)]
pub(crate) struct Signer {
    /// Which CA.
    pub provider: CaProvider,
    /// The way to it.
    pub way: Way,
    /// Whether the workload's token is changed for another one before.
    pub exchange: Option<sts::Exchange>,
    /// Headers of calls.
    pub headers: CallHeaders,
    /// Bounds of one attempt, and of a call with all its attempts.
    pub limits: (Duration, Duration),
    /// What single providers need.
    pub details: Details,
}

/// How a CA is reached.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    /// By gRPC.
    Grpc(crate::istiod::Config),
    /// By gRPC, with the token of the machine's account, which its metadata server gives.
    Account(crate::istiod::Config, MetadataServer),
    /// By HTTP.
    Vault(vault::Config),
}

impl Signer {
    /// The connection, where it is one for gRPC.
    #[must_use]
    pub(crate) fn connection(&self) -> Option<&crate::istiod::Config> {
        match &self.way {
            Way::Grpc(connection) | Way::Account(connection, _) => Some(connection),
            Way::Vault(_) => None,
        }
    }
}

/// Which CA signs.
///
/// # Errors
/// When there is no such CA.
pub(crate) fn provider(config: &Sources) -> Result<CaProvider, Error> {
    let s = &config.settings;
    let address = s.some_text(var::CA_ADDR).unwrap_or(&config.mesh.proxy.discovery_address);
    CaProvider::resolve(s.text(var::CA_PROVIDER), address, s.flag(var::ENABLE_GOOGLE_CA))
        .map_err(|e| Error::new(e.to_string()))
}

/// Who signs; `None` where certificates are only mounted.
///
/// # Errors
/// When there is no such CA, or it lacks a setting or its root.
pub(crate) fn signer(config: &Sources, file_mounted: bool) -> Result<Option<Signer>, Error> {
    if file_mounted {
        return Ok(None);
    }
    let s = &config.settings;
    let provider = provider(config)?;
    let way = match provider {
        // Mesh CA takes the workload's token, the service that of the machine's account.
        CaProvider::GoogleCa => Way::Grpc(istiod::google_ca(config, false)?),
        CaProvider::GoogleCas => Way::Account(istiod::google_ca(config, true)?, metadata_server(config)),
        CaProvider::Citadel => Way::Grpc(istiod::ca(config)?),
        CaProvider::Vault => Way::Vault(istiod::vault(config)?),
        CaProvider::GkeWorkloadCertificate => return Ok(None),
    };
    Ok(Some(Signer {
        exchange: sts::exchange(config, &provider),
        provider,
        way,
        headers: istiod::headers(config, "CA_HEADER_"),
        limits: istiod::ca_limits(config),
        details: Details {
            cert_signer: s.text(var::ISTIO_META_CERT_SIGNER).to_owned(),
            cluster_url: s.text(var::GKE_CLUSTER_URL).to_owned(),
            pool: s.text(var::CA_ADDR).to_owned(),
        },
    }))
}

/// Where connections to the CA go, `host:port`, and the proxy for them; `None` where none is asked, or where it cannot be
/// told. A root that cannot be located hides it not.
#[must_use]
pub(crate) fn place(config: &Sources, file_mounted: bool) -> Option<(String, Option<(String, String)>)> {
    match signer(config, file_mounted) {
        Ok(signer) => signer.map(|signer| match signer.way {
            Way::Grpc(ca) | Way::Account(ca, _) => (ca.address, ca.proxy),
            Way::Vault(vault) => {
                let plain = vault.address.starts_with("http://");
                let proxies = vault.proxies;
                (host_port(&vault.address), if plain { proxies.http } else { proxies.https })
            }
        }),
        Err(_) if provider(config).is_ok_and(|of| of == CaProvider::Citadel) => {
            let given = config.settings.some_text(var::CA_ADDR)?;
            Some((given.to_owned(), istiod::proxy(config, "HTTPS_PROXY")))
        }
        Err(_) => None,
    }
}

// Of a URL, which was looked at when it was read.
fn host_port(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let named = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if named { host.to_owned() } else { format!("{host}:{}", if scheme == "http" { 80 } else { 443 }) }
}

/// The metadata server of Google's machines, or what stands in for it.
#[must_use]
pub(crate) fn metadata_server(config: &Sources) -> MetadataServer {
    let host = config.settings.some_text(var::GCE_METADATA_HOST);
    host.map_or_else(MetadataServer::default, |host| MetadataServer { host: host.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_urls_server_has_a_port() {
        for (url, at) in [
            ("https://vault.example", "vault.example:443"),
            ("http://vault.example/v1", "vault.example:80"),
            ("https://vault.example:8200/", "vault.example:8200"),
            ("https://[::1]/", "[::1]:443"),
            ("https://[::1]:8200", "[::1]:8200"),
        ] {
            assert_eq!(host_port(url), at, "{url}");
        }
    }
}
