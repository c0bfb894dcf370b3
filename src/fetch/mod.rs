//! The HTTP client behind readiness questions, probes, scrapes and downloads.
//!
//! A request owns its connection and drives it while it is polled: no task is started, so dropping the
//! future is all it takes to give up, and nothing outlives the one who asked. Redirects and gzip are
//! dealt with as Go's client does, because applications were written against it. Memory is bounded: a
//! body comes in pieces of at most 32 kB, also when it is decompressed.
//!
//! | file | is about |
//! |---|---|
//! | `conn`, `tls` | connecting: from where, to which address, whom to trust |
//! | `exchange` | one GET on one connection, HTTP/1.1 or HTTP/2 |
//! | `gunzip` | decompression in bounded pieces |
//! | `url` | addresses and references |
//! | `health` | the gRPC health service, asked on a connection of its own |
//!
//! Knows nothing of Istio. Uses `tls` for the system's roots.
//!
//! Why not the pooled client of `hyper-util`: it needs an executor for its connections, and pools; we
//! ask each address once in seconds, and kept connections are a variable nobody sets.

mod conn;
mod exchange;
#[cfg(test)]
pub(crate) mod fake;
mod gunzip;
pub(crate) mod health;
mod records;
mod tls;
pub(crate) mod url;

use std::borrow::Cow;

use base64::Engine as _;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tokio::sync::{Semaphore, SemaphorePermit};
use zeroize::Zeroizing;

pub(crate) use conn::Proxies;
pub(crate) use conn::{Dialer, Io};
pub(crate) use exchange::{Exchange, Kept};
pub(crate) use gunzip::Gunzip;
pub(crate) use tls::{Tls, Trust};

use crate::net::framing::Framing;
use crate::net::proxy;
use url::{Bad, Url};

/// The largest piece of a body handed on at once.
pub(crate) const PIECE: usize = 32 * 1024;
/// Room for a head and for read-ahead, where nothing else is said.
const BUFFER: usize = 64 * 1024;
/// Redirects end with an error at this many requests, as in Go's client.
pub(crate) const REQUESTS: usize = 10;

/// Why something could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Url(#[from] Bad),
    #[error("cannot connect to {to}")]
    Connect {
        to: String,
        #[source]
        source: std::io::Error,
    },
    #[error("TLS handshake with {to} failed")]
    Tls {
        to: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot go through the proxy: {0}")]
    Proxy(#[source] proxy::Error),
    #[error("https is not spoken here")]
    NoTls,
    #[error("HTTP exchange failed")]
    Http(#[from] hyper::Error),
    #[error("HTTP/2 exchange failed")]
    H2(#[from] h2::Error),
    #[error("the request cannot be made")]
    Request(#[from] http::Error),
    #[error(transparent)]
    Framing(#[from] Framing),
    #[error("stopped after {REQUESTS} redirects")]
    Redirects,
    #[error("the body is no valid gzip: {0}")]
    Gzip(&'static str),
    #[error("status {0}")]
    Status(StatusCode),
    #[error("the body is longer than {0} bytes")]
    TooLong(usize),
}

/// Whether a redirect is followed, from the first address to the next.
type Follow = Box<dyn Fn(&Url, &Url) -> bool + Send + Sync>;

impl Error {
    /// Whether the same request may well succeed in a moment: a connection broke off, or was too slow.
    pub(crate) fn is_temporary(&self) -> bool {
        use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof};
        let passing = |error: &std::io::Error| {
            matches!(
                error.kind(),
                BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof
            )
        };
        match self {
            Self::Connect { source, .. } | Self::Tls { source, .. } => passing(source),
            Self::Http(error) => {
                let cause = std::error::Error::source(error).and_then(|e| e.downcast_ref::<std::io::Error>());
                error.is_incomplete_message() || error.is_closed() || cause.is_some_and(passing)
            }
            Self::H2(error) => error.get_io().is_some_and(passing),
            _ => false,
        }
    }

    /// Whether the other side answered a TLS greeting with something that is no TLS.
    pub(crate) fn is_plain_answer(&self) -> bool {
        let Self::Tls { source, .. } = self else { return false };
        let cause = source.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
        matches!(cause, Some(rustls::Error::InvalidMessage(_)))
    }
}

/// A GET to be sent.
pub(crate) struct Get<'a> {
    url: Url,
    headers: HeaderMap,
    /// The `Host` header where it is not the address's own.
    host: Option<HeaderValue>,
    body: Bytes,
    dialer: Option<&'a Dialer>,
    follow: Follow,
    close: bool,
    kept: Option<&'a Kept>,
    buffer: usize,
    guarded: bool,
}

impl<'a> Get<'a> {
    pub(crate) fn new(url: &str) -> Result<Self, Error> {
        Ok(Self {
            url: Url::parse(url)?,
            headers: HeaderMap::new(),
            host: None,
            body: Bytes::new(),
            dialer: None,
            follow: Box::new(|_, _| true),
            close: false,
            kept: None,
            buffer: BUFFER,
            guarded: false,
        })
    }

    pub(crate) fn headers(mut self, headers: HeaderMap) -> Self {
        self.headers = headers;
        self
    }

    pub(crate) fn host(mut self, host: Option<HeaderValue>) -> Self {
        self.host = host;
        self
    }

    /// Makes it a POST of a form, encoded already; its redirects are not followed.
    pub(crate) fn form(self, form: &str) -> Self {
        self.post("application/x-www-form-urlencoded", Bytes::copy_from_slice(form.as_bytes()))
    }

    /// Makes it a POST of a body of this type, which must not be empty; its redirects are not followed.
    pub(crate) fn post(mut self, kind: &'static str, body: Bytes) -> Self {
        self.body = body;
        self.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        self.follow(|_, _| false)
    }

    pub(crate) fn dialer(mut self, dialer: &'a Dialer) -> Self {
        self.dialer = Some(dialer);
        self
    }

    /// Its authorization goes to the first address's host and port only, and in plain text only if it did so from the start; else
    /// it goes along to other ports of the host, as with Go's client.
    pub(crate) fn guarded(mut self) -> Self {
        self.guarded = true;
        self
    }

    /// Follows a redirect only when `follow` says so; else the redirect itself is the answer.
    pub(crate) fn follow(mut self, follow: impl Fn(&Url, &Url) -> bool + Send + Sync + 'static) -> Self {
        self.follow = Box::new(follow);
        self
    }

    /// Connections are taken from and given back to `kept`; `None` asks the other side to close.
    pub(crate) fn keep(mut self, kept: Option<&'a Kept>) -> Self {
        self.kept = kept;
        self.close = kept.is_none();
        self
    }

    /// Answers may have a head of so many bytes; a body is read ahead as far.
    pub(crate) fn buffer(mut self, bytes: usize) -> Self {
        self.buffer = bytes;
        self
    }

    pub(crate) async fn send(mut self) -> Result<Reply, Error> {
        let plain = Dialer::default();
        let dialer = self.dialer.unwrap_or(&plain);
        let said = |name: header::HeaderName| self.headers.get(name).is_some_and(|v| !v.is_empty());
        let unzip = !said(header::ACCEPT_ENCODING) && !said(header::RANGE);
        if unzip {
            self.headers.append(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        // One agent is sent: the first, ours where there is none, and none where it is empty.
        match self.headers.get(header::USER_AGENT).cloned() {
            None => drop(self.headers.insert(header::USER_AGENT, HeaderValue::from_static(AGENT))),
            Some(agent) if agent.is_empty() => drop(self.headers.remove(header::USER_AGENT)),
            Some(agent) => drop(self.headers.insert(header::USER_AGENT, agent)),
        }
        let first = self.url.clone();
        // One that is the address's own does not go along to another port.
        self.host.take_if(|host| host.as_bytes() == first.authority().as_bytes());
        let guarded = if self.guarded { self.headers.remove(header::AUTHORIZATION) } else { None };
        let own_referer = self.headers.contains_key(header::REFERER);
        for _ in 0..REQUESTS {
            let host = match &self.host {
                Some(host) => host.clone(),
                None => HeaderValue::from_str(&self.url.authority()).map_err(http::Error::from)?,
            };
            self.url.asked()?;
            if let Some(authorization) = &guarded {
                if self.url.is_served_with(&first) {
                    self.headers.insert(header::AUTHORIZATION, authorization.clone());
                } else {
                    self.headers.remove(header::AUTHORIZATION);
                }
            }
            let headers = self.authorized()?;
            let (url, headers, body, buffer) = (&self.url, &*headers, &self.body, self.buffer);
            let sent = exchange::Sent { url, headers, host: &host, body, close: self.close, buffer };
            let (head, exchange) = exchange::send(&sent, dialer, self.kept).await?;
            let location = match head.status.as_u16() {
                301 | 302 | 303 | 307 | 308 => head.headers.get(header::LOCATION).cloned(),
                _ => None,
            };
            let Some(location) = location.filter(|l| !l.is_empty()) else {
                return Ok(Reply::new(head, exchange, unzip));
            };
            let reference = String::from_utf8_lossy(location.as_bytes());
            let next = self.url.join(&reference)?;
            if !(self.follow)(&first, &next) {
                return Ok(Reply::new(head, exchange, unzip));
            }
            exchange.finish(self.kept).await;
            if self.url.https && !next.https && !own_referer {
                self.headers.remove(header::REFERER);
            } else if !own_referer {
                let from = HeaderValue::from_str(&self.url.to_string()).map_err(http::Error::from)?;
                self.headers.insert(header::REFERER, from);
            }
            // What told of a body tells nothing where the body is left behind.
            if head.status.as_u16() <= 303 {
                use header::{CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LOCATION, CONTENT_TYPE};
                for name in [CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LOCATION, CONTENT_TYPE] {
                    self.headers.remove(name);
                }
            }
            if next.host != first.host {
                for name in [header::AUTHORIZATION, header::COOKIE, header::WWW_AUTHENTICATE] {
                    self.headers.remove(name);
                }
            }
            // A Host of the caller's own goes along unless the redirect is a whole address.
            if url::has_scheme(&reference) {
                self.host = None;
            }
            self.url = next;
        }
        Err(Error::Redirects)
    }

    // A name and password in an address become a header, for this address only.
    fn authorized(&self) -> Result<Cow<'_, HeaderMap>, Error> {
        let user = self.url.user.as_ref().filter(|_| !self.headers.contains_key(header::AUTHORIZATION));
        let Some(user) = user else { return Ok(Cow::Borrowed(&self.headers)) };
        let colon = if user.contains(':') { "" } else { ":" };
        let coded = base64::engine::general_purpose::STANDARD.encode(format!("{user}{colon}"));
        let mut value = HeaderValue::from_str(&format!("Basic {coded}")).map_err(http::Error::from)?;
        value.set_sensitive(true);
        let mut headers = self.headers.clone();
        headers.insert(header::AUTHORIZATION, value);
        Ok(Cow::Owned(headers))
    }
}

/// Whether a server said of an HTTP/2 request that nothing was done for it (RFC 9113, 8.7): it may be made again. Go's client
/// does that.
fn refused(error: &h2::Error) -> bool {
    error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM)
}

const AGENT: &str = concat!("pilot-agent/", env!("CARGO_PKG_VERSION"));

/// An answer whose body is still to come.
pub(crate) struct Reply {
    head: http::response::Parts,
    exchange: Exchange,
    gunzip: Option<Gunzip>,
    ended: bool,
}

impl Reply {
    fn new(head: http::response::Parts, exchange: Exchange, unzip: bool) -> Self {
        let zipped = head
            .headers
            .get(header::CONTENT_ENCODING)
            .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"gzip"));
        Self { gunzip: (unzip && zipped).then(Gunzip::new), head, exchange, ended: false }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.head.status
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    /// The next piece; `None` at the proper end of the body.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(gunzip) = &mut self.gunzip else {
            return self.exchange.piece().await;
        };
        loop {
            if let Some(piece) = gunzip.piece()? {
                return Ok(Some(piece));
            }
            if self.ended {
                return Ok(None);
            }
            match self.exchange.piece().await? {
                Some(piece) => gunzip.feed(piece),
                None => {
                    self.ended = true;
                    // Go's client takes an empty body for an empty one, whatever its coding.
                    if gunzip.begun() {
                        gunzip.end()?;
                    }
                }
            }
        }
    }

    /// The whole body.
    pub(crate) async fn bytes(&mut self, limit: usize) -> Result<Vec<u8>, Error> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            if all.len() + piece.len() > limit {
                return Err(Error::TooLong(limit));
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }

    /// The whole body. A body of more than `usual` bytes waits for its turn, which lasts until what is given with it is
    /// dropped.
    pub(crate) async fn in_turn(
        &mut self,
        limit: usize,
        usual: usize,
        turns: &'static Semaphore,
    ) -> Result<(Zeroizing<Vec<u8>>, Option<SemaphorePermit<'static>>), Error> {
        let (mut all, mut turn) = (Zeroizing::new(Vec::new()), None);
        while let Some(piece) = self.piece().await? {
            if all.len() + piece.len() > limit {
                return Err(Error::TooLong(limit));
            }
            if turn.is_none() && all.len() + piece.len() > usual {
                turn = Some(turns.acquire().await.expect("it is never closed"));
            }
            all.extend_from_slice(&piece);
        }
        Ok((all, turn))
    }

    /// The whole body as text; bytes that are none are replaced.
    pub(crate) async fn text(&mut self, limit: usize) -> Result<String, Error> {
        self.bytes(limit).await.map(|all| String::from_utf8_lossy(&all).into_owned())
    }

    /// Done with; a connection that may be kept is given back.
    pub(crate) async fn finish(self, kept: Option<&Kept>) {
        self.exchange.finish(kept).await;
    }
}

#[cfg(test)]
mod tests;
