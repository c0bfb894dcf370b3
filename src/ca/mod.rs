//! Has certificate requests signed.
//!
//! `secrets` asks for a [`CaClient`] and knows nothing of istiod; the client knows nothing of caching
//! and rotation. A client bounds each attempt and the whole by deadlines of its own, so a caller never
//! waits for ever; an [`Error`] tells why it failed, and `secrets` decides when to ask again.
//!
//! | file | is about |
//! |---|---|
//! | `csr` | keys and certificate requests |
//! | `provider` | from `CA_PROVIDER` to a client |
//! | `citadel`, `google`, `vault` | the clients: istiod, Google's two CAs, Vault |
//! | `attempts` | how many there are of a call, how far apart, with which deadlines |
//! | `calls`, `unary` | calls by gRPC, and the connection under them |

mod attempts;
mod calls;
pub(crate) mod citadel;
pub(crate) mod csr;
pub(crate) mod google;
pub(crate) mod provider;
mod unary;
pub(crate) mod vault;

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::istiod::auth::hint_for;
pub(crate) use crate::istiod::code_name;
use crate::istiod::refused_late;
use crate::trouble::{Kind, Report, span};

/// Signs certificate requests.
pub(crate) trait CaClient: Send + Sync + fmt::Debug {
    /// Sends a PEM `CERTIFICATE REQUEST` asking for `ttl` of validity; gives the PEM entries of the
    /// answer as the CA returned them: leaf first, last entry the trust bundle.
    fn sign<'a>(&'a self, csr_pem: &'a str, ttl: Duration) -> BoxFuture<'a, Result<Vec<String>, Error>>;

    /// An explicit trust bundle, for CAs whose answers do not end with one; empty for istiod.
    fn root_bundle(&self) -> BoxFuture<'_, Result<Vec<String>, Error>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Nobody asks it at present: what it has told beside its errors counts no more.
    fn left(&self) {}
}

/// Why a request was not signed. Each carries the endpoint; none carries a token or a key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The CA, or the way to it, answered with a gRPC status.
    #[error("create certificate: {endpoint}: {}: {}{hint}", code_name(status.code()), status.message())]
    Status {
        /// Where the request went.
        endpoint: String,
        /// What came back.
        status: Box<tonic::Status>,
        /// The usual cause of this answer, starting with `; `, or empty.
        hint: &'static str,
    },
    /// The connection ended before there was an answer.
    #[error("create certificate: {endpoint}: {}: {}", code_name(status.code()), status.message())]
    Broke {
        /// Where the request went.
        endpoint: String,
        /// How, as gRPC maps it.
        status: Box<tonic::Status>,
    },
    /// No answer in time.
    #[error("create certificate: {endpoint} gave no answer within {}", span(*after))]
    Deadline {
        /// Where the request went.
        endpoint: String,
        /// The deadline that passed.
        after: Duration,
    },
    /// The answer cannot be used.
    #[error("create certificate: {endpoint} sent an unusable answer: {reason}")]
    Answer {
        /// Where the request went.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The client cannot be built or its channel cannot be opened.
    #[error("cannot reach the CA at {endpoint}")]
    Connect {
        /// Where it wanted to go.
        endpoint: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Any of the others, while nothing of the request has left this machine: its key is as good as new.
    #[error(transparent)]
    Unsent(Box<Error>),
}

impl Error {
    /// As a trouble: cause, hint and, where the CA answered, its code.
    #[must_use]
    pub(crate) fn report(&self) -> Report {
        match self {
            Self::Unsent(error) => error.report(),
            Self::Status { endpoint, status, .. } | Self::Broke { endpoint, status }
                if refused_late(status.message()) =>
            {
                let detail = format!("create certificate: {endpoint}: {}", status.message());
                Report::new(Kind::ClientCertificateRefused, detail).about(endpoint.clone())
            }
            Self::Status { endpoint, status, hint } => {
                let code = code_name(status.code());
                let detail = format!("create certificate: {endpoint}: {code}: {}", status.message());
                let said = status.message();
                // The CA has not been asked then.
                let unasked = hint_for(said.strip_prefix(vault::LOGIN).unwrap_or(said)).is_some();
                let kind = if unasked { Kind::TokenNotHad } else { Kind::CertificateRefused };
                Report::new(kind, detail).hint(*hint).code(code).about(code)
            }
            Self::Broke { endpoint, status } => {
                let report = Report::new(Kind::CertificateNotAnswered, self.to_string());
                report.code(code_name(status.code())).about(endpoint.clone())
            }
            Self::Deadline { endpoint, .. } => {
                Report::new(Kind::CertificateNotAnswered, self.to_string()).about(endpoint.clone())
            }
            Self::Answer { .. } => Report::new(Kind::CertificateUnusable, self.to_string()),
            Self::Connect { source, endpoint } => match source.downcast_ref::<crate::istiod::Error>() {
                Some(error) => error.report(),
                None => {
                    let kind = Kind::of_chain(self).unwrap_or(Kind::CaUnreachable);
                    Report::new(kind, crate::base::error::chain(self)).about(endpoint.clone())
                }
            },
        }
    }

    /// Of a call after the one that has sent the request.
    #[must_use]
    pub(crate) fn once_sent(self) -> Self {
        match self {
            Self::Unsent(error) => *error,
            other => other,
        }
    }

    /// A label for metrics, from a closed set: a gRPC code's name, `deadline`, `answer` or `connect`.
    #[must_use]
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Status { status, .. } | Self::Broke { status, .. } => code_name(status.code()),
            Self::Deadline { .. } => "deadline",
            Self::Answer { .. } => "answer",
            Self::Connect { .. } => "connect",
            Self::Unsent(error) => error.label(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ca_that_was_not_asked_for_want_of_a_token_has_not_refused() {
        let kind = |text: String| {
            let status = Box::new(tonic::Status::unauthenticated(text));
            Error::Status { endpoint: "ca:443".to_owned(), status, hint: "" }.report().kind
        };
        let gone = crate::istiod::auth::Error::new("the metadata server is away");
        assert_eq!(kind(gone.to_string()), Kind::TokenNotHad);
        assert_eq!(kind(format!("{}{gone}", vault::LOGIN)), Kind::TokenNotHad);
        assert_eq!(kind("a token is wanted".to_owned()), Kind::CertificateRefused);
    }

    #[test]
    fn a_ca_that_there_is_no_descriptor_to_ask_with_is_not_what_is_wrong() {
        let kind = |number| {
            let source = Box::new(std::io::Error::from_raw_os_error(number));
            Error::Connect { endpoint: "vault".to_owned(), source }.report().kind
        };
        assert_eq!([kind(111), kind(24)], [Kind::CaUnreachable, Kind::OpenFiles]);
    }
}
