//! Opens the upstream stream: one connection, one stream on it.

use std::fmt;
use std::net::SocketAddr;

use base64::Engine;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use h2::client::{Connection as Http2, ResponseFuture};
use h2::{PingPong, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use tonic::Status;

use super::io::{Reads, Tracked};
use super::protocol::Protocol;
use crate::istiod::auth::{CallHeaders, TokenSource};

use crate::istiod::{Connection, Connector, Error, Stream};

/// Whoever can open a connection to istiod.
pub trait Upstream: Send + Sync + fmt::Debug {
    /// A fresh connection.
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>>;

    /// Where to, as configured: `host:port`.
    fn address(&self) -> &str;

    /// Whether the address is resolved here (and not by a proxy), so that a change of it is worth a look.
    fn resolves(&self) -> bool {
        true
    }
}

impl Upstream for Connector {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
        Box::pin(Connector::connect(self))
    }

    fn address(&self) -> &str {
        &self.config().address
    }

    fn resolves(&self) -> bool {
        self.config().proxy.is_none()
    }
}

/// Flow-control windows towards istiod, in bytes: what may be on its way to us and not yet passed on.
/// A larger one costs memory by the difference; other sizes have not been measured yet.
const WINDOW: u32 = 256 * 1024;
/// Bytes of requests queued inside the HTTP/2 library at most.
const SEND_BUFFER: usize = 64 * 1024;
/// Largest header list accepted, as the library of the Go agent would take 16 MiB: statuses with details
/// are a few KiB.
const HEADER_LIST: u32 = 256 * 1024;
/// The library's guard against floods of tiny DATA frames would end a connection whose reader is merely
/// slow; the windows bound the memory already.
pub(super) const FRAME_BUDGET: usize = 64 << 20;

/// The driver of a connection's HTTP/2.
pub(super) type Driver = Http2<Tracked<Stream>, Bytes>;

/// An open upstream stream. The driver must be polled for anything to happen.
pub(super) struct Link {
    pub(super) driver: Driver,
    pub(super) sink: SendStream<Bytes>,
    pub(super) response: ResponseFuture,
    pub(super) ping: Option<PingPong>,
    pub(super) reads: Reads,
    pub(super) peer: SocketAddr,
}

/// Why no stream was opened.
pub(super) struct Unopened {
    /// What Envoy is told.
    pub(super) status: Status,
    /// The connection could not even be set up, for want of roots.
    pub(super) roots: bool,
}

impl From<Status> for Unopened {
    fn from(status: Status) -> Self {
        Self { status, roots: false }
    }
}

impl From<Error> for Unopened {
    fn from(error: Error) -> Self {
        let text = format!("connection error: desc = \"{}\"", crate::base::error::chain(&error));
        Self { status: Status::unavailable(text), roots: matches!(error, Error::Roots { .. }) }
    }
}

/// Connects and opens the stream; does not wait for an answer, since istiod sends even its headers only
/// with its first response.
pub(super) async fn open(
    upstream: &dyn Upstream,
    tokens: &dyn TokenSource,
    headers: &CallHeaders,
    protocol: Protocol,
) -> Result<Link, Unopened> {
    let connection = upstream.connect().await?;
    let token = tokens.token().await.map_err(|e| Status::unauthenticated(e.to_string()))?;
    let mut map = call_headers(headers)?;
    if let Some(token) = token {
        let mut value = HeaderValue::try_from(format!("Bearer {}", token.expose()))
            .map_err(|_| Status::unauthenticated("the token holds characters that a header cannot carry"))?;
        value.set_sensitive(true);
        // Beside a header of the same name that was configured, as the Go agent does.
        map.append(http::header::AUTHORIZATION, value);
    }
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
    *request.headers_mut() = map;
    let (io, reads) = Tracked::new(connection.io);
    let gone = |e: h2::Error| super::status::of_upstream(&e).0;
    let (send, mut driver) = h2::client::Builder::new()
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_send_buffer_size(SEND_BUFFER)
        .max_header_list_size(HEADER_LIST)
        .data_frame_budget(FRAME_BUDGET)
        .enable_push(false)
        .handshake::<_, Bytes>(io)
        .await
        .map_err(gone)?;
    let ping = driver.ping_pong();
    let mut send = send.ready().await.map_err(gone)?;
    let (response, sink) = send.send_request(request, false).map_err(gone)?;
    Ok(Link { driver, sink, response, ping, reads, peer: connection.peer })
}

// Names that the Go library drops from what the application gives it.
const RESERVED: [&str; 3] = ["content-type", "te", "user-agent"];

fn call_headers(headers: &CallHeaders) -> Result<HeaderMap, Status> {
    let mut map = HeaderMap::new();
    map.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    map.insert(http::header::TE, HeaderValue::from_static("trailers"));
    map.insert(
        http::header::USER_AGENT,
        HeaderValue::from_static(concat!("pilot-agent/", env!("CARGO_PKG_VERSION"))),
    );
    let cluster = HeaderValue::try_from(headers.cluster_id.as_str())
        .map_err(|_| Status::internal("the cluster id cannot stand in a header"))?;
    map.append(HeaderName::from_static("clusterid"), cluster);
    for (name, value) in &headers.extra {
        if RESERVED.contains(&name.as_str()) || name.starts_with("grpc-") {
            continue;
        }
        let bad = || Status::internal(format!("header key {name:?} contains illegal characters"));
        let key = HeaderName::try_from(name.as_str()).map_err(|_| bad())?;
        let value = if name.ends_with("-bin") {
            HeaderValue::try_from(base64::engine::general_purpose::STANDARD_NO_PAD.encode(value))
        } else {
            HeaderValue::try_from(value.as_str())
        };
        map.append(key, value.map_err(|_| bad())?);
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_what_the_go_agent_sends() {
        let extra = [
            ("x-two", "a=b=c"),
            ("x-space", " y z "),
            ("clusterid", "second"),
            ("x-data-bin", "hello"),
            ("grpc-timeout", "1S"),
            ("te", "no"),
            ("x-empty", ""),
        ];
        let extra = extra.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec();
        let map = call_headers(&CallHeaders { cluster_id: String::new(), extra }).unwrap();
        let all = |name: &str| map.get_all(name).iter().map(|v| v.to_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(all("clusterid"), ["", "second"]);
        assert_eq!(all("x-two"), ["a=b=c"]);
        assert_eq!(all("x-space"), [" y z "]);
        assert_eq!(all("x-empty"), [""]);
        assert_eq!(all("x-data-bin"), ["aGVsbG8"]);
        assert_eq!(all("te"), ["trailers"]);
        assert!(all("grpc-timeout").is_empty());
    }

    #[test]
    fn a_name_that_http2_forbids_fails_the_call() {
        let extra = vec![("x one".to_owned(), "1".to_owned())];
        let error = call_headers(&CallHeaders { cluster_id: String::new(), extra }).unwrap_err();
        assert!(error.message().contains("x one"), "{error}");
    }
}
