//! From a request to its handler: Host and path rules, who may ask, methods.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use hyper::body::Incoming;

use super::shared::Shared;
use super::{compress, debug, levels, ready, stats};
use crate::base::seldom::Seldom;
use crate::serve::respond::{Answer, TEXT, error, not_found, page, redirect};
use crate::serve::{ConnState, Names, Site, path, read_off};

/// A drain is answered after this at the latest: within the 60 s that `pilot-agent request` waits.
const DRAIN: Duration = Duration::from_secs(55);

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    /// Whether it is this machine: loopback, also as an IPv4 address mapped into IPv6, but not with a zone.
    local: bool,
}

impl Peer {
    pub(super) fn new(addr: SocketAddr) -> Self {
        let zone = matches!(addr, SocketAddr::V6(v6) if v6.scope_id() != 0);
        let local = match addr.ip() {
            IpAddr::V4(ip) => ip.is_loopback(),
            IpAddr::V6(ip) => ip.to_ipv4_mapped().map_or(ip.is_loopback(), |ip| ip.is_loopback()),
        };
        Self { local: local && !zone }
    }
}

impl Site for Shared {
    const VARIES: bool = true;
    const NAMES: Names = Names {
        server: "status server",
        listener: "status",
        connection: "status connection",
        request: "status request",
    };

    async fn answer(
        self: &Arc<Self>,
        request: &Request<()>,
        body: &mut Incoming,
        peer: SocketAddr,
        conn: &Arc<ConnState>,
    ) -> Answer {
        let coding = compress::Coding::choose(request.headers(), request.method());
        // On the heap, so that it is gone while the rest of a body is read: it has 7 kB.
        let answer = Box::pin(dispatch(request, body, Peer::new(peer), conn, self)).await;
        let mut answer = compress::apply(answer, coding).await;
        debug::held(&mut answer);
        answer.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
        answer
    }

    fn quit(&self) {
        self.handles.agent.quit();
    }

    fn connections(&self, now: usize) {
        self.connections.fetch_max(now, std::sync::atomic::Ordering::Relaxed);
    }
}

async fn dispatch(
    request: &Request<()>,
    body: &mut Incoming,
    peer: Peer,
    conn: &Arc<ConnState>,
    shared: &Arc<Shared>,
) -> Answer {
    let raw = request.uri().path();
    let clean = if request.method() == Method::CONNECT { raw.to_owned() } else { path::clean(raw) };
    let segments = path::segments(&clean);
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    if let Some(root) = subtree(&segments, shared.profiling) {
        return redirect(&with_query(root, request));
    }
    if clean != raw {
        return redirect(&with_query(&clean, request));
    }
    match segments.as_slice() {
        ["healthz", "ready"] => {
            ready::answer(&shared.ready, &*shared.handles.agent, request.uri().query()).await
        }
        ["stats", "prometheus"] | ["metrics"] => {
            if shared.stats.local_only() && !peer.local {
                return only_local();
            }
            stats::answer(&shared.stats, conn, request.headers(), request.uri().query()).await
        }
        ["quitquitquit"] => match control(peer, request.method()) {
            Some(refused) => refused,
            None => quit(body, conn).await,
        },
        ["drain"] => match control(peer, request.method()) {
            Some(refused) => refused,
            None => drain(shared).await,
        },
        ["app-health" | "app-lifecycle", ..] => {
            let path = path::decode(raw).unwrap_or_else(|| raw.to_owned());
            shared.probes.answer(&path, &addressed(request), conn).await
        }
        ["logging"] if !peer.local => only_local(),
        ["logging"] if foreign(request) => misdirected(),
        ["logging"] => levels::answer(request.method(), request.uri().query().unwrap_or("")),
        ["debug", "" | "agentz"] if peer.local && foreign(request) => misdirected(),
        ["debug", "hot_restart"] => match control(peer, request.method()) {
            Some(refused) => refused,
            None => hot_restart(shared),
        },
        ["debug", rest @ ..] if !rest.is_empty() => match debug::find(rest, shared.profiling) {
            None => not_found(),
            Some(_) if !peer.local => only_local(),
            Some(page) => debug::answer(page, shared, request.uri().query().unwrap_or(""), conn).await,
        },
        _ => not_found(),
    }
}

/// The root of a subtree that was asked for without its slash. One redirect leads there, whatever else is to be cleaned.
fn subtree(segments: &[&str], profiling: bool) -> Option<&'static str> {
    match segments {
        ["app-health"] => Some("/app-health/"),
        ["app-lifecycle"] => Some("/app-lifecycle/"),
        ["debug", "pprof"] if profiling => Some("/debug/pprof/"),
        _ => None,
    }
}

fn with_query<B>(path: &str, request: &Request<B>) -> String {
    match request.uri().query().filter(|query| !query.is_empty()) {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    }
}

fn only_local() -> Answer {
    error(StatusCode::FORBIDDEN, "Only requests from localhost are allowed")
}

/// A request's headers. A whole address in its first line names the host before `Host` does.
fn addressed(request: &Request<()>) -> Cow<'_, HeaderMap> {
    let authority = request.uri().authority().map(http::uri::Authority::as_str);
    let host = authority.map(|all| all.rsplit_once('@').map_or(all, |(_, host)| host));
    let Some(host) = host.and_then(|host| HeaderValue::from_str(host).ok()) else {
        return Cow::Borrowed(request.headers());
    };
    let mut headers = request.headers().clone();
    headers.insert(header::HOST, host);
    Cow::Owned(headers)
}

/// Whether the `Host` names another place than this machine: a page of some web site whose name was made to lead
/// here (DNS rebinding) must not read what this pod alone may see.
fn foreign<B>(request: &Request<B>) -> bool {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok());
    let Some(host) = host.or_else(|| request.uri().host()) else { return false };
    let name = match host.strip_prefix('[') {
        Some(inner) => inner.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let local = name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok();
    !local && !name.is_empty()
}

fn misdirected() -> Answer {
    error(StatusCode::MISDIRECTED_REQUEST, "ask for this page by localhost or an address, not by a name")
}

/// A hook asks once; more lines than this tell of somebody who asks without pause.
static QUIT: Seldom = Seldom::new(10);
static DRAINS: Seldom = Seldom::new(10);
static NO_ANSWER: Seldom = Seldom::new(10);

/// `/quitquitquit` and `/drain` are for this pod, by POST; who asks is looked at before how.
fn control(peer: Peer, method: &Method) -> Option<Answer> {
    if !peer.local {
        return Some(only_local());
    }
    (method != Method::POST).then(|| error(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"))
}

async fn quit(body: &mut Incoming, conn: &Arc<ConnState>) -> Answer {
    if let Some(more) = QUIT.may() {
        tracing::info!("/quitquitquit called: the agent stops once the answer is out{more}");
    }
    // Bytes of the caller that nobody read would turn the end of this process into a reset, which can
    // destroy the answer on its way. A caller that is slow with its body is not waited for.
    read_off(body, conn, Duration::from_millis(250)).await;
    conn.quit_after_answer();
    page(StatusCode::OK, TEXT, "OK")
}

async fn drain(shared: &Arc<Shared>) -> Answer {
    if let Some(more) = DRAINS.may() {
        tracing::info!("/drain called: Envoy is asked to drain its listeners{more}");
    }
    if tokio::time::timeout(DRAIN, shared.handles.agent.drain()).await.is_err()
        && let Some(more) = NO_ANSWER.may()
    {
        tracing::warn!(
            "Envoy did not answer the drain request within {DRAIN:?}; /drain is answered without it{more}"
        );
    }
    page(StatusCode::OK, TEXT, "OK")
}

/// Ours: replaces Envoy by a new epoch, though nothing has changed.
fn hot_restart(shared: &Arc<Shared>) -> Answer {
    match shared.handles.agent.hot_restart() {
        Ok(()) => page(StatusCode::OK, TEXT, "OK"),
        Err(why) => error(StatusCode::CONFLICT, &why.to_string()),
    }
}

#[cfg(test)]
mod tests;
