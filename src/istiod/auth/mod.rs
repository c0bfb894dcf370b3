//! Credentials of a call: the bearer token, read at each attempt, and the call's metadata.

pub mod claims;
mod file;
mod gce;
mod headers;

use std::fmt;

use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

pub use file::TokenFile;
pub use gce::{AccessToken, GoogleComputeEngine, MetadataServer};
pub use headers::{CallHeaders, HeaderError};

/// A bearer token; its text never reaches `Debug`, a log or an error.
#[derive(Clone)]
pub struct Token(Zeroizing<String>);

impl Token {
    /// Takes a token's text, trimmed. `None` when nothing is left.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(Zeroizing::new(text.to_owned())))
    }

    /// The text, for the `authorization` header only.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Why no token could be had (only for sources that call out; an unreadable file is no error).
#[derive(Debug, Clone, thiserror::Error)]
#[error("transport: per-RPC creds failed due to error: {0}")]
pub struct Error(pub String);

/// Where tokens come from.
pub trait TokenSource: Send + Sync + fmt::Debug {
    /// The token to send now; `None` sends no header.
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>>;
}

/// `CREDENTIAL_FETCHER_TYPE=Mock`: always the same token. For tests only, as in the Go agent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mock;

impl TokenSource for Mock {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async { Ok(Token::new("test_token")) })
    }
}
