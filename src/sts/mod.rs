//! The security token service: any process of the pod changes its token for another one here (RFC 8693).
//!
//! Envoy's gRPC client does it by `sts_service` call credentials: it posts the pod's Kubernetes token to
//! `http://localhost:<port>/token` and gets a short-lived access token back.
//!
//! Promises:
//! - One loopback address is listened on and no other; pages in a browser are refused (`Origin`, foreign
//!   `Host`).
//! - No token, nor a part of one, is in a log line, an error, a metric or the dump. What a caller or an
//!   endpoint said is never repeated.
//! - A token is used until `broker::GRACE` before its end, for the subject token and scope it was made for
//!   and for nobody else; callers that arrive together cause one exchange; a failed renewal hands out the old
//!   token while it lives.
//! - An endpoint that hangs, floods or redirects costs a bounded time and memory, and is not followed.
//!
//! | file | is about |
//! |---|---|
//! | `form`, `request` | what is asked, and what is refused before anything else happens |
//! | `broker` | kept tokens, one exchange for many callers |
//! | `call` | one call to an endpoint: tries, limits, members of its answer |
//! | `google`, `upstream` | the two plug-ins: Google's pair of endpoints, any RFC 8693 endpoint |
//! | `answer` | what callers read |
//! | `source` | the same exchange for the agent's own calls to a CA |
//!
//! Without a port none of it exists: no task, no client, no memory. Uses `serve`, `fetch`, and `istiod`
//! for claims of tokens and for `source`.

mod answer;
mod broker;
mod call;
mod form;
mod google;
mod request;
mod source;
mod upstream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use tokio::net::TcpListener;

use self::broker::Broker;
use crate::base::clock::Clock;
use crate::base::metrics::Metrics;
use crate::base::tasks::{Group, Stop};
use crate::net::accept::bound;
use crate::serve::respond::{Answer, TEXT, not_found, page, redirect};
use crate::serve::{self, ConnState, Limits, Names, Site, path};

/// What bytes reach first.
#[cfg(debug_assertions)]
pub mod fuzz {
    use super::form::Form;

    /// A request's body in pieces: it says the same as in one.
    pub fn form(pieces: &[&[u8]]) {
        let read = |pieces: &[&[u8]]| {
            let mut form = Form::new(["subject_token", "scope"]);
            pieces.iter().for_each(|piece| form.feed(piece));
            form.end().map(|values| values.map(|value| value.to_string()))
        };
        assert_eq!(read(pieces), read(&[&pieces.concat()]));
    }
}

pub(crate) use broker::Handle;
pub(crate) use google::{Audience, Google};
pub(crate) use source::Exchanging;
pub(crate) use upstream::Upstream;

/// Connections at a time.
const CONNECTIONS: usize = 2048;
/// Those with a request, about 23 kB each, 16 of them in two buffers of the HTTP library's: a pod's worth of callers that
/// all start at once. Half of them may stand still.
const ASKING: usize = 1024;
/// How long a connection may be kept without a request; the Go agent's limit.
const IDLE: Duration = Duration::from_secs(90);

/// Who changes tokens.
#[derive(Debug, Clone)]
pub(crate) enum Plugin {
    /// `GoogleTokenExchange`.
    Google(Google),
    /// `Passthrough`, ours.
    Upstream(Upstream),
    /// Any other name: the service runs and says that it can do nothing, as the Go agent's did.
    None,
}

/// What is served and where.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Loopback address and port.
    pub address: SocketAddr,
    /// Who changes tokens.
    pub plugin: Plugin,
    /// What endpoints are called with.
    pub crypto: Arc<rustls::crypto::CryptoProvider>,
}

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
#[error("security token service cannot listen on {address}: is the port of --stsPort taken?")]
pub(crate) struct Error {
    address: SocketAddr,
    #[source]
    source: std::io::Error,
}

/// A service that is bound.
pub(crate) struct Bound {
    listener: TcpListener,
    config: Config,
}

/// Opens the port.
///
/// # Errors
/// When it cannot be opened, which ends the agent: Envoy would be without its tokens.
pub(crate) fn bind(config: Config) -> Result<Bound, Error> {
    let address = config.address;
    let listener = serve::listen(address).map_err(|source| Error { address, source })?;
    Ok(Bound { listener, config })
}

impl Bound {
    /// Starts serving in `group`, until that is stopped; `handle` is told how it goes.
    pub(crate) fn spawn(self, group: &Group, metrics: &Metrics, clock: Arc<dyn Clock>, handle: Handle) {
        let Config { address, plugin, crypto } = self.config;
        let exchanger = match plugin {
            Plugin::None => None,
            Plugin::Google(google) => Some(google.exchanger(crypto, clock.clone())),
            Plugin::Upstream(upstream) => Some(upstream.exchanger(crypto, clock.clone())),
        };
        tracing::info!(target: "security",
            "security token service listens on {address}, plugin {}", handle.plugin());
        let broker = exchanger.map(|exchanger| Broker::new(exchanger, clock, group.clone(), metrics, handle));
        let site = Arc::new(Service { broker: broker.clone() });
        let limits = Limits { connections: bound(CONNECTIONS), asking: ASKING, idle: Some(IDLE) };
        let (listener, stop) = (self.listener, group.token());
        group.spawn("token service", async move {
            let over = Stop::new();
            let last = async {
                stop.cancelled().await;
                if let Some(broker) = &broker {
                    broker.settled().await;
                }
                over.cancel();
                std::future::pending::<()>().await;
            };
            let served = serve::serve(Some(listener), site, limits, stop.clone(), over.clone());
            tokio::select! {
                served = served => served,
                () = last => Ok(()),
            }
        });
    }
}

struct Service {
    broker: Option<Arc<Broker>>,
}

impl Service {
    async fn token(&self, asked: &Request<()>, body: &mut Incoming, conn: &ConnState) -> Answer {
        let ask = match request::read(asked, body, conn).await {
            Ok(ask) => ask,
            Err(refusal) => {
                tracing::debug!(target: "security", "a request was refused: {}", refusal.why);
                return answer::invalid_request(&refusal);
            }
        };
        let Some(broker) = &self.broker else {
            return answer::invalid_target("no plugin is found");
        };
        // On the heap: who has not sent all of a request needs no room for what comes after it.
        match Box::pin(broker.get(ask)).await {
            Ok(access) => answer::access(&access, broker.now()),
            Err(fault) => answer::invalid_target(&fault.to_string()),
        }
    }

    fn dump(&self) -> Answer {
        match &self.broker {
            Some(broker) => answer::dump(&broker.dump()),
            None => page(
                StatusCode::INTERNAL_SERVER_ERROR,
                TEXT,
                "failure in dumping STS server status: no plugin is found",
            ),
        }
    }
}

impl Site for Service {
    const NAMES: Names = Names {
        server: "security token service",
        listener: "token service",
        connection: "token service connection",
        request: "token request",
    };

    async fn answer(
        self: &Arc<Self>,
        request: &Request<()>,
        body: &mut Incoming,
        _peer: SocketAddr,
        conn: &Arc<ConnState>,
    ) -> Answer {
        let raw = request.uri().path();
        let clean = path::clean(raw);
        if clean != raw && request.method() != http::Method::CONNECT {
            let query = request.uri().query().map(|q| format!("?{q}")).unwrap_or_default();
            return redirect(&format!("{clean}{query}"));
        }
        let segments = path::segments(raw);
        let known = matches!(segments.as_slice(), [one] if one == "token" || one == "stsStatus");
        if known && let Some(refusal) = request::foreign(request.headers()) {
            return answer::invalid_request(&refusal);
        }
        match segments.first().filter(|_| known).map(String::as_str) {
            Some("token") => self.token(request, body, conn).await,
            Some(_) => self.dump(),
            None => not_found(),
        }
    }
}
