//! Where the workload's token comes from.

use std::path::PathBuf;
use std::sync::Arc;

use crate::base::clock::Clock;
use crate::config::parts;
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

/// The file whose change means another token. What the agent itself writes at every call says nothing new.
pub(super) fn followed(tokens: &parts::identity::Tokens) -> Option<PathBuf> {
    matches!(tokens.fetcher, Fetcher::File).then(|| tokens.path.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::istiod::auth::MetadataServer;

    #[test]
    fn a_token_that_the_agent_itself_writes_at_each_call_is_no_news() {
        let of = |fetcher| followed(&parts::identity::Tokens { path: "token".into(), fetcher });
        assert_eq!(of(Fetcher::File), Some("token".into()));
        assert_eq!(of(Fetcher::GoogleComputeEngine(MetadataServer::default())), None);
    }
}
