//! The agent's own token, exchanged before it goes to a CA (`PLUGINS=GoogleTokenExchange`, Google's Mesh CA).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rustls::crypto::CryptoProvider;

use super::call::Client;
use super::google::{Audience, Calls};
use super::request::Ask;
use crate::base::clock::{Clock, Until};
use crate::istiod::auth::{Error, Token, TokenSource};

/// A federated token is used again while more than this remains of it: a request to the CA takes less.
const GRACE: Duration = Duration::from_secs(60);

/// Tokens of `inner`, exchanged for Google's federated ones. A CA's attempts share one exchange.
pub(crate) struct Exchanging {
    inner: Arc<dyn TokenSource>,
    audience: Audience,
    calls: Calls,
    kept: tokio::sync::Mutex<Option<([u8; 32], Token, Until)>>,
}

impl fmt::Debug for Exchanging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchanging").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Exchanging {
    /// Tokens of `inner` for `audience`.
    #[must_use]
    pub(crate) fn new(
        inner: Arc<dyn TokenSource>,
        audience: Audience,
        crypto: Arc<CryptoProvider>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let calls = Calls { client: Client::new(crypto), clock };
        Self { inner, audience, calls, kept: tokio::sync::Mutex::default() }
    }
}

impl TokenSource for Exchanging {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async {
            let Some(own) = self.inner.token().await? else { return Ok(None) };
            let ask = Ask::own(own.expose(), "");
            // Held while it is exchanged: who comes meanwhile gets the same one. Bounded by the call itself.
            let mut kept = self.kept.lock().await;
            if let Some((key, token, ends)) = &*kept
                && *key == ask.key()
                && ends.left(self.calls.clock.now()) > GRACE
            {
                return Ok(Some(token.clone()));
            }
            let (token, ends) = self.calls.federated(&self.audience, &ask).await.map_err(Error::new)?;
            let Some(token) = Token::new(&token) else {
                return Err(Error::new("the federated token is empty"));
            };
            let ends = Until::new(ends, self.calls.clock.now());
            *kept = Some((ask.key(), token.clone(), ends));
            Ok(Some(token))
        })
    }
}
