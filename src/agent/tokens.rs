//! Where the workload's token comes from.

use std::sync::Arc;

use crate::base::clock::Clock;
use crate::config::parts::identity::{Fetcher, Identity};
use crate::istiod::auth::{GoogleComputeEngine, Mock, TokenFile, TokenSource};

/// What istiod's tokens are made for; only named in log lines.
pub(crate) const AUDIENCE: &str = "istio-ca";

/// A source of tokens, and what keeps it fresh.
pub(super) struct Tokens {
    /// The source.
    pub source: Arc<dyn TokenSource>,
    /// To be run beside it.
    pub refresh: Option<Arc<GoogleComputeEngine>>,
}

/// The source that `CREDENTIAL_FETCHER_TYPE` names.
pub(super) fn source(identity: &Identity, clock: &Arc<dyn Clock>) -> Tokens {
    let path = identity.tokens.path.clone();
    match &identity.tokens.fetcher {
        Fetcher::File => {
            Tokens { source: Arc::new(TokenFile::new(path, AUDIENCE, clock.clone())), refresh: None }
        }
        Fetcher::Mock => Tokens { source: Arc::new(Mock), refresh: None },
        Fetcher::GoogleComputeEngine(server) => {
            let engine =
                GoogleComputeEngine::new(server.clone(), &identity.trust_domain, path, clock.clone());
            let engine = Arc::new(engine);
            Tokens { source: engine.clone(), refresh: Some(engine) }
        }
    }
}
