//! Opens the upstream stream: one connection, one stream on it.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::future::{Either, Ready};
use h2::RecvStream;
use h2::client::{Connection as Http2, ResponseFuture};
use h2::{PingPong, SendStream};
use http::{HeaderValue, Method, Request};
use tonic::Status;

use super::protocol::Protocol;
use crate::base::lane;
use crate::istiod::auth::{self, CallHeaders, TokenSource, claims};
use crate::istiod::{Connection, Connector, Error, Stream};
use crate::net::grpc::HEADERS;
use crate::net::io::{Reads, Tracked, tracked};
use crate::trouble::{Kind, Report};

/// Whoever can open a connection to istiod.
pub trait Upstream: Send + Sync + fmt::Debug {
    /// A fresh connection.
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>>;

    /// As [`Upstream::connect`]; `late` hears once what it waits for when it takes long.
    fn connect_told<'a>(
        &'a self,
        _late: &'a (dyn Fn(Error) + Send + Sync),
    ) -> BoxFuture<'a, Result<Connection, Error>> {
        self.connect()
    }

    /// Where to, as configured: `host:port`.
    fn address(&self) -> &str;

    /// Whether the address is resolved here (and not by a proxy), so that a change of it is worth a look.
    fn resolves(&self) -> bool {
        true
    }

    /// What the address resolves to now; nothing while it does not.
    fn look_up(&self) -> BoxFuture<'_, BTreeSet<SocketAddr>> {
        Box::pin(async {
            let Some((host, port)) = self.address().rsplit_once(':') else { return BTreeSet::new() };
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let Ok(port) = port.parse() else { return BTreeSet::new() };
            lane::NAMES.look_up(host, port).await.map(|all| all.into_iter().collect()).unwrap_or_default()
        })
    }
}

impl Upstream for Connector {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
        Box::pin(Connector::connect(self))
    }

    fn connect_told<'a>(
        &'a self,
        late: &'a (dyn Fn(Error) + Send + Sync),
    ) -> BoxFuture<'a, Result<Connection, Error>> {
        Box::pin(Connector::connect_told(self, late))
    }

    fn address(&self) -> &str {
        &self.config().address
    }

    fn resolves(&self) -> bool {
        Connector::resolves(self)
    }
}

/// Flow-control windows towards istiod, in bytes: what may be on its way to us and not yet passed on.
/// Peak memory follows it; CPU does not get better above (benches/README.md has the table).
const WINDOW: u32 = 256 * 1024;
/// Largest frame that istiod may send: a sixth less CPU than with HTTP/2's least, 16 KB, where the server
/// makes use of it (Go's does not).
const FRAME: u32 = 64 * 1024;
/// Bytes of requests queued inside the HTTP/2 library at most.
const SEND_BUFFER: usize = 64 * 1024;
/// What small DATA frames that nobody has read yet may weigh together, where each weighs what it lacks to 256 bytes:
/// windows count bytes, and a frame takes about 300 bytes of memory however few it brings. Above this the HTTP/2
/// library ends the connection, so a reader that is merely slow must never get there: with a window full of frames of
/// 29 bytes it does not, and the shortest response (its type alone has more) is longer. A byte a frame, it is 2.5 MB.
const FRAME_BUDGET: usize = 2 << 20;

const USER_AGENT: &str = concat!("pilot-agent/", env!("CARGO_PKG_VERSION"));

/// The driver of a connection's HTTP/2.
pub(super) type Driver = Http2<Tracked<Stream>, Bytes>;

/// Istiod's answer: waited for, or begun.
pub(super) type Answer = Either<ResponseFuture, Ready<Result<http::Response<RecvStream>, h2::Error>>>;

/// An open upstream stream. The driver must be polled for anything to happen.
pub(super) struct Link {
    pub(super) driver: Driver,
    pub(super) sink: SendStream<Bytes>,
    pub(super) response: Answer,
    pub(super) ping: Option<PingPong>,
    pub(super) reads: Reads,
    pub(super) peer: SocketAddr,
    /// When the token that was sent expires, as it says itself.
    pub(super) token_expires: Option<SystemTime>,
}

/// Why no stream was opened.
pub(super) struct Unopened {
    /// What Envoy is told.
    pub(super) status: Status,
    /// The connection could not even be set up, for want of roots.
    pub(super) roots: bool,
    /// The trouble, where the connection failed.
    pub(super) report: Option<Box<Report>>,
}

impl From<Status> for Unopened {
    fn from(status: Status) -> Self {
        Self { status, roots: false, report: None }
    }
}

impl Unopened {
    // For want of a token, istiod was not asked. So this is none of the refusals after which memory does not stand in.
    fn without_token(error: &auth::Error) -> Self {
        let text = error.to_string();
        let report =
            Report::new(Kind::TokenNotHad, format!("the stream of configuration is not opened: {text}"));
        Self { status: Status::unavailable(text), roots: false, report: Some(Box::new(report)) }
    }
}

/// What Envoy is told of a stream that was not opened: for want of a token what the gRPC library says then.
pub(super) fn told(status: &Status, report: &Report) -> Status {
    match report.kind {
        Kind::TokenNotHad => Status::unauthenticated(status.message()),
        _ => status.clone(),
    }
}

impl From<Error> for Unopened {
    fn from(error: Error) -> Self {
        let text = crate::base::error::chain(&error);
        // In the Go agent's terms the channel could not be built; over an empty system's pool it can, and trusts nobody.
        let roots = matches!(&error, Error::Roots { path, .. } if path.as_os_str() != "SYSTEM");
        let status = if roots {
            Status::unknown(text)
        } else {
            Status::unavailable(format!("connection error: desc = \"{text}\""))
        };
        Self { status, roots, report: Some(Box::new(error.report())) }
    }
}

#[cfg(test)]
#[test]
fn only_a_root_file_keeps_a_connection_from_being_set_up() {
    for (path, roots, code) in
        [("/etc/root.pem", true, tonic::Code::Unknown), ("SYSTEM", false, tonic::Code::Unavailable)]
    {
        let unopened = Unopened::from(Error::Roots { path: path.into(), reason: "empty".to_owned() });
        assert_eq!((unopened.roots, unopened.status.code()), (roots, code), "{path}");
    }
}

/// Connects and opens the stream; does not wait for an answer, since istiod sends even its headers only
/// with its first response.
pub(super) async fn open(
    upstream: &dyn Upstream,
    tokens: &dyn TokenSource,
    headers: &CallHeaders,
    protocol: Protocol,
    late: &(dyn Fn(Error) + Send + Sync),
) -> Result<Link, Unopened> {
    let connection = match upstream.connect_told(late).await {
        Ok(connection) => connection,
        Err(error) => {
            // Told beside it: it has to be good when istiod is back.
            tokens.look().await;
            return Err(error.into());
        }
    };
    let token = tokens.token().await.map_err(|error| Unopened::without_token(&error))?;
    let uri = http::Uri::builder()
        .scheme(connection.scheme)
        .authority(connection.authority.as_str())
        .path_and_query(protocol.path())
        .build()
        .map_err(|e| Status::internal(format!("{:?} cannot be an authority: {e}", connection.authority)))?;
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(uri)
        .body(())
        .map_err(|e| Status::internal(e.to_string()))?;
    let map = request.headers_mut();
    map.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    map.insert(http::header::TE, HeaderValue::from_static("trailers"));
    map.insert(http::header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
    headers.apply(token.as_ref(), map).map_err(|e| Status::internal(e.to_string()))?;
    let (io, reads) = tracked(connection.io);
    let gone = |e: h2::Error| super::end_status::of_upstream(&e).0;
    let (send, mut driver) = h2::client::Builder::new()
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_frame_size(FRAME)
        .max_send_buffer_size(SEND_BUFFER)
        .max_header_list_size(HEADERS)
        .data_frame_budget(FRAME_BUDGET)
        .enable_push(false)
        .handshake::<_, Bytes>(io)
        .await
        .map_err(gone)?;
    let ping = driver.ping_pong();
    let mut send = send.ready().await.map_err(gone)?;
    let (response, sink) = send.send_request(request, false).map_err(gone)?;
    let claims = token.and_then(|token| claims::read(token.expose()));
    let token_expires = claims.and_then(|claims| claims.expires);
    let response = Either::Left(response);
    Ok(Link { driver, sink, response, ping, reads, peer: connection.peer, token_expires })
}
