//! Credentials of a call: the bearer token, read at each attempt, and the call's metadata.

pub(crate) mod claims;
mod file;
mod gce;
mod headers;

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

use crate::base::clock;
use crate::trouble::{Kind, Report};

pub use file::TokenFile;
pub(crate) use file::text_of;
pub(crate) use gce::{AccessToken, GoogleComputeEngine, MetadataServer};
pub use headers::CallHeaders;

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
    pub(crate) fn expose(&self) -> &str {
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
pub struct Error(#[source] Arc<dyn std::error::Error + Send + Sync>);

/// What to do where a call ended with the text of an [`struct@Error`]: nobody at the other end has said anything then.
#[must_use]
pub(crate) fn hint_for(message: &str) -> Option<&'static str> {
    message.starts_with("transport: per-RPC creds failed").then_some(
        "nothing was sent, for want of a token: does what it comes from (the metadata server, a token endpoint) answer this \
         machine?",
    )
}

impl Error {
    /// Because of `cause`.
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into().into())
    }
}

/// Where tokens come from.
pub trait TokenSource: Send + Sync + fmt::Debug {
    /// The token to send now; `None` sends no header.
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>>;

    /// Looks at the token anew, for [`Self::trouble`], where that takes no call.
    fn look(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// What is wrong with the token, as it was when it was used or looked at last.
    fn trouble(&self) -> Option<Report> {
        None
    }
}

/// What stands behind a failure: a refused call because of the token, dates that disagree because of this
/// machine's clock.
#[must_use]
pub(crate) fn root_cause(report: Report, tokens: &dyn TokenSource) -> Report {
    let because = |token: Report| {
        let detail = format!("{}; istiod answers: {}", token.detail, report.detail);
        Report { detail, code: report.code.clone(), ..token }
    };
    match report.kind {
        Kind::CertificateRefused | Kind::AdsRefused if report.code.as_deref() == Some("UNAUTHENTICATED") => {
            tokens.trouble().map_or_else(|| report.clone(), because)
        }
        Kind::ServerCertificateNotYetValid | Kind::ServerCertificateExpired => {
            let now = std::time::SystemTime::now();
            let token = tokens.trouble().map(|token| token.kind);
            let expired = report.kind == Kind::ServerCertificateExpired && token == Some(Kind::TokenExpired);
            if clock::is_behind(now) || expired || token == Some(Kind::ClockWrong) {
                let shown = clock::rfc3339(now);
                let detail = format!(
                    "this machine's clock says {shown}, which istiod's certificate and the token contradict: {}",
                    report.detail
                );
                return Report::new(Kind::ClockWrong, detail);
            }
            report
        }
        _ => report,
    }
}

/// What is wrong with the token beside a way to istiod that fails: it is to be repaired as well, and needs no word of
/// istiod's. What istiod may take all the same is not told.
#[must_use]
pub(crate) fn beside(report: &Report, tokens: &dyn TokenSource) -> Option<Report> {
    let sure = Kind::TokenMissing..=Kind::TokenExpired;
    tokens.trouble().filter(|token| report.kind.is_way() && sure.contains(&token.kind))
}

/// `CREDENTIAL_FETCHER_TYPE=Mock`: always the same token. For tests only, as in the Go agent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mock;

impl TokenSource for Mock {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async { Ok(Token::new("test_token")) })
    }
}
