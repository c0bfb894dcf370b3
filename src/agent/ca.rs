//! The CA that signs: which client, and with whose token.

use std::sync::Arc;

use super::{metadata_server, said};
use crate::base::clock::Clock;
use crate::base::metrics::Metrics;
use crate::ca::CaClient;
use crate::ca::provider::{self, Provider};
use crate::ca::vault;
use crate::config::Config;
use crate::config::env::var;
use crate::config::parts::{self, Error};
use crate::istiod::Connector;
use crate::istiod::auth::{AccessToken, TokenSource};
use crate::sts::Exchanging;
use crate::trouble::Reporter;

/// The client; `None` where certificates are only mounted.
///
/// # Errors
/// When there is no such CA, or it lacks a setting.
pub async fn client(
    config: &Config,
    tokens: Arc<dyn TokenSource>,
    metrics: &Metrics,
    clock: &Arc<dyn Clock>,
    trouble: &Arc<Reporter>,
) -> Result<Option<Arc<dyn CaClient>>, Error> {
    let s = &config.settings;
    let address = s.some_text(var::CA_ADDR).unwrap_or(&config.mesh.proxy.discovery_address);
    let provider =
        Provider::resolve(s.text(var::CA_PROVIDER), address, s.flag(var::ENABLE_GOOGLE_CA)).map_err(said)?;
    let own = match parts::sts::exchanged(config, &provider).await? {
        Some((audience, crypto)) => {
            let source = Exchanging::new(tokens, audience, crypto, clock.clone());
            Arc::new(source) as Arc<dyn TokenSource>
        }
        None => tokens,
    };
    let (connection, token) = match provider {
        // Mesh CA takes the workload's token, the service that of the machine's account.
        Provider::GoogleCa => (parts::istiod::google_ca(config, false)?, own),
        Provider::GoogleCas => {
            let account: Arc<dyn TokenSource> =
                Arc::new(AccessToken::new(metadata_server(config), clock.clone()));
            (parts::istiod::google_ca(config, true)?, account)
        }
        Provider::Citadel => (parts::istiod::ca(config)?, own),
        Provider::Vault => {
            let client = vault::Client::new(parts::istiod::vault(config, own)?, metrics).map_err(said)?;
            return Ok(Some(Arc::new(client)));
        }
        Provider::GkeWorkloadCertificate => return Ok(None),
    };
    let (attempt_timeout, total_timeout) = parts::istiod::ca_limits(config);
    let calls = provider::Calls {
        connector: Connector::with_clock(connection, clock.clone()).map_err(said)?,
        tokens: token,
        headers: parts::istiod::headers(config, "CA_HEADER_"),
        attempt_timeout,
        total_timeout,
        trouble: trouble.clone(),
    };
    let details = provider::Details {
        cert_signer: s.text(var::ISTIO_META_CERT_SIGNER).to_owned(),
        cluster_url: s.text(var::GKE_CLUSTER_URL).to_owned(),
        pool: s.text(var::CA_ADDR).to_owned(),
    };
    Ok(provider::client(&provider, calls, details, metrics))
}
