//! The client of the CA that signs.

use std::sync::Arc;

use super::said;
use crate::base::clock::Clock;
use crate::base::metrics::Metrics;
use crate::ca::CaClient;
use crate::ca::{provider, vault};
use crate::config::parts::Error;
use crate::config::parts::ca::{Signer, Way};
use crate::istiod::auth::{AccessToken, TokenSource};
use crate::istiod::{Connector, RootFiles};
use crate::sts::Exchanging;
use crate::trouble::Reporter;

/// The client; `None` where certificates are only mounted.
///
/// # Errors
/// When it cannot be made: a root without certificates, a token that cannot be exchanged.
pub(crate) async fn client(
    signer: &Signer,
    tokens: Arc<dyn TokenSource>,
    metrics: &Metrics,
    clock: &Arc<dyn Clock>,
    roots: &RootFiles,
    trouble: &Arc<Reporter>,
) -> Result<Option<Arc<dyn CaClient>>, Error> {
    let own: Arc<dyn TokenSource> = match &signer.exchange {
        Some(exchange) => {
            let (audience, crypto) = exchange.settle().await?;
            Arc::new(Exchanging::new(tokens, audience, crypto, clock.clone()))
        }
        None => tokens,
    };
    let (connection, tokens) = match &signer.way {
        Way::Grpc(connection) => (connection, own),
        Way::Account(connection, server) => {
            (connection, Arc::new(AccessToken::new(server.clone(), clock.clone())) as Arc<dyn TokenSource>)
        }
        Way::Vault(config) => {
            let client = vault::Client::new(config.clone(), own, metrics, trouble.clone()).map_err(said)?;
            return Ok(Some(Arc::new(client)));
        }
    };
    let (attempt_timeout, total_timeout) = signer.limits;
    let calls = provider::Calls {
        connector: Connector::sharing(connection.clone(), clock.clone(), roots).map_err(said)?,
        tokens,
        headers: signer.headers.clone(),
        attempt_timeout,
        total_timeout,
        trouble: trouble.clone(),
    };
    Ok(provider::client(&signer.provider, calls, signer.details.clone(), metrics))
}
