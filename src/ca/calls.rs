//! One logical call to a CA that speaks gRPC: several attempts, bounded each and in the whole.
//!
//! Each call dials anew (so rotated roots and certificates count at once) and keeps the connection for
//! its retries. What is retried are the codes that the Go agent retries ([`super::attempts`]).
//! Calls are independent: one that hangs blocks no other.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::Error;
use super::attempts::{Attempts, Failed, watched};
use super::unary::{Broken, UnaryConnection};
use crate::base::both::both;
use crate::base::metrics::Metrics;
use crate::base::quote::cut;
use crate::istiod::auth::{CallHeaders, TokenSource, beside, root_cause};
use crate::istiod::{self, Connector, Transport};
use crate::trouble::{Report, Reporter};

/// Codes worth another attempt within one call. Not Canceled and DeadlineExceeded: the Go agent lists
/// them, but its library refuses to retry them.
const RETRIED: [Code; 4] = [Code::ResourceExhausted, Code::Aborted, Code::Internal, Code::Unavailable];

/// Longest text of a CA that is told.
const CAUSE: usize = 2048;

/// How calls reach a CA.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// How to reach the CA.
    pub connector: Connector,
    /// Tokens, asked for at each attempt.
    pub tokens: Arc<dyn TokenSource>,
    /// Metadata of every call.
    pub headers: CallHeaders,
    /// Bound of one attempt, dial included (the Go agent has none).
    pub attempt_timeout: Duration,
    /// Bound of a call with all its attempts (the Go agent has none).
    pub total_timeout: Duration,
    /// Who is told why an attempt failed; whoever calls ends the trouble.
    pub trouble: Arc<Reporter>,
}

impl Config {
    /// Default of [`Config::attempt_timeout`]: an istiod that has another CA sign may take seconds, a
    /// Kubernetes signer tens of seconds.
    pub(crate) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);
    /// Default of [`Config::total_timeout`]: below the minute after which people look at a pod that
    /// does not start.
    pub(crate) const TOTAL_TIMEOUT: Duration = Duration::from_secs(50);
}

/// Makes calls.
#[derive(Debug)]
pub(super) struct Caller {
    config: Config,
    pub(super) attempts: Attempts,
    /// What is wrong with the token while the way is.
    token: Reporter,
}

/// What a call has come to.
#[derive(Default)]
struct Talk {
    session: Option<UnaryConnection>,
    /// The message may have left, whatever became of it.
    sent: bool,
}

/// What is called.
#[derive(Clone, Copy)]
pub(super) struct Method<'a> {
    /// `/package.Service/Method`.
    pub(super) path: &'static str,
    /// A header of this call beside the configured ones.
    pub(super) header: Option<(&'static str, &'a str)>,
}

impl Caller {
    /// A caller, and its counter of retries in `metrics`.
    ///
    /// # Panics
    /// When called twice for one registry.
    pub(super) fn new(config: Config, metrics: &Metrics) -> Self {
        let attempts = Attempts::new(config.attempt_timeout, config.total_timeout, metrics);
        let token = config.trouble.sibling();
        Self { config, attempts, token }
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.config.connector.config().address
    }

    /// An answer that is there but cannot be used.
    pub(super) fn unusable(&self, reason: impl Into<String>) -> Error {
        Error::Answer { endpoint: self.endpoint().to_owned(), reason: reason.into() }
    }

    /// The bytes of the answer to `message`.
    pub(super) async fn call(&self, method: Method<'_>, message: Bytes) -> Result<Bytes, Error> {
        let mut series = self.attempts.begin();
        let mut talk = Talk::default();
        let outcome = loop {
            let (number, until) = (series.number, series.until());
            let failed = match self.attempt(&mut talk, method, number, message.clone(), until).await {
                Ok(answer) => break Ok(answer),
                Err(failed) => failed,
            };
            self.tell(failed.error.report());
            let (wait, said) = match series.again(failed, talk.sent) {
                Ok(next) => next,
                Err(error) => break Err(error),
            };
            tracing::debug!(target: "citadelclient", "{said}");
            tokio::time::sleep(wait).await;
        };
        if let Some(session) = talk.session {
            session.close();
        }
        if outcome.is_ok() {
            self.token.end();
        }
        outcome
    }

    /// As [`super::CaClient::left`].
    pub(super) fn left(&self) {
        self.token.end();
    }

    // A token that is no good is told beside a way that fails, so that both are repaired at once.
    fn tell(&self, report: Report) {
        let report = root_cause(report, &*self.config.tokens);
        let token = beside(&report, &*self.config.tokens).filter(|_| !self.shows_certificate());
        let is_good = token.is_none();
        // In this order what is told already is not told anew.
        token.into_iter().for_each(|token| self.token.report(token));
        self.config.trouble.report(report);
        if is_good {
            self.token.end();
        }
    }

    // Who shows a certificate may need no token.
    fn shows_certificate(&self) -> bool {
        matches!(&self.config.connector.config().transport, Transport::Tls(tls) if tls.client.is_some())
    }

    async fn attempt(
        &self,
        talk: &mut Talk,
        method: Method<'_>,
        number: u32,
        message: Bytes,
        until: Instant,
    ) -> Result<Bytes, Failed> {
        let exchange = self.exchange(talk, method, number, message, until);
        let done = watched(exchange, until, self.endpoint(), &self.config.trouble).await;
        if matches!(&done, Err(Failed { error: Error::Deadline { .. }, .. })) {
            // Whatever it was doing, this connection is not to be trusted again.
            talk.session = None;
        }
        done
    }

    async fn exchange(
        &self,
        talk: &mut Talk,
        method: Method<'_>,
        number: u32,
        message: Bytes,
        until: Instant,
    ) -> Result<Bytes, Failed> {
        let metadata = async { self.metadata(method, number).await.map_err(|status| self.refused(status)) };
        let kept = talk.session.take().filter(UnaryConnection::usable);
        let opened = async {
            match kept {
                Some(session) => Ok(session),
                None => self.open(until).await,
            }
        };
        let (metadata, session) = both(metadata, opened).await?;
        let session = talk.session.insert(session);
        talk.sent = true;
        let left = until.saturating_duration_since(Instant::now());
        session.call(method.path, metadata, message, left).await.map_err(|e| self.broken(e))
    }

    async fn open(&self, until: Instant) -> Result<UnaryConnection, Failed> {
        let late = |error: istiod::Error| self.tell(error.report());
        let connection = self.config.connector.connect_by(until, &late).await;
        let connection = connection.map_err(|e| self.unreachable(e))?;
        UnaryConnection::open(connection).await.map_err(|e| self.broken(e))
    }

    async fn metadata(&self, method: Method<'_>, number: u32) -> Result<HeaderMap, Status> {
        let token = self.config.tokens.token().await.map_err(|e| Status::unauthenticated(e.to_string()))?;
        let mut headers = HeaderMap::new();
        self.config
            .headers
            .apply(token.as_ref(), &mut headers)
            .map_err(|e| Status::internal(e.to_string()))?;
        if let Some((name, text)) = method.header {
            let value = HeaderValue::from_str(text)
                .map_err(|_| Status::internal(format!("header {name} cannot hold {text:?}")))?;
            headers.insert(name, value);
        }
        if number > 0 {
            headers.insert("x-retry-attempt", number.into());
        }
        Ok(headers)
    }

    fn broken(&self, broken: Broken) -> Failed {
        match broken {
            Broken::Answered(status) => self.refused(status),
            // It would bring as much again.
            Broken::Unusable(why) => Failed { error: self.unusable(why), retry: false },
            Broken::Transport(status) => {
                let retry = RETRIED.contains(&status.code());
                // A farewell may carry a text of the server's.
                let status = Box::new(short(&status));
                Failed { error: Error::Broke { endpoint: self.endpoint().to_owned(), status }, retry }
            }
        }
    }

    fn refused(&self, status: Status) -> Failed {
        let status = short(&status);
        let retry = RETRIED.contains(&status.code());
        let hint = hint(&status);
        let error = Error::Status { endpoint: self.endpoint().to_owned(), status: Box::new(status), hint };
        Failed { error, retry }
    }

    fn unreachable(&self, error: istiod::Error) -> Failed {
        // A dial that used its whole time is not repeated within one call.
        let retry = !matches!(error, istiod::Error::Timeout { .. });
        let error = Error::Connect { endpoint: self.endpoint().to_owned(), source: Box::new(error) };
        Failed { error, retry }
    }
}

// It is kept, and told in several places.
fn short(status: &Status) -> Status {
    Status::new(status.code(), cut(status.message(), CAUSE))
}

/// What usually is behind a code.
fn hint(status: &Status) -> &'static str {
    if istiod::auth::hint_for(status.message()).is_some() {
        return "; nothing was sent, for want of a token: does what it comes from (the metadata server, a token endpoint) answer this machine?";
    }
    match status.code() {
        Code::Unauthenticated => {
            "; the CA accepted neither the token nor a client certificate: is the token there, fresh, for its audience (istiod's: istio-ca), and of this cluster?"
        }
        Code::PermissionDenied => "; the CA does not issue for this identity",
        Code::InvalidArgument => "; does SECRET_TTL ask for more than istiod's MAX_WORKLOAD_CERT_TTL?",
        Code::ResourceExhausted => {
            "; the CA is overloaded or limits requests; the agent asks again by itself"
        }
        Code::Unimplemented => "; is CA_ADDR an istiod with its CA switched on?",
        _ => "",
    }
}
