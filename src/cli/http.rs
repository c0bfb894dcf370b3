//! One HTTP exchange as Go's client makes it ([`crate::net::http`] sends it): redirects, packed answers, both addresses of a
//! name, and its rules for what a path may hold.
//!
//! Why not a client crate: they bring TLS, proxies and pools, where this asks one local port once.
//! `https` is therefore refused, and proxy variables have no effect (Go passes over them for `localhost`
//! as well).

use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ::http::{Request, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use tokio::net::TcpStream;

use crate::base::error::{BoxError, chain, in_words};
use crate::base::lane;
use crate::base::quote::without_users;
use crate::net::{http, percent};

/// The tenth answer that redirects is the last.
const REDIRECTS: usize = 10;

/// An answer, read whole.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
    /// The agent's word on why it is not ready.
    pub(super) why: Option<String>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Url(#[from] NoUrl),
    #[error("failed to parse Location header {location:?}: {source}")]
    Location { location: String, source: NoUrl },
    #[error("{what}: {}", chain(.source))]
    Exchange { what: String, source: Failure },
    #[error("{0}: stopped after {REDIRECTS} redirects")]
    Redirects(String),
}

/// What went wrong with one exchange.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("invalid method {0:?}")]
    Method(String),
    #[error("invalid request: {0}")]
    Request(#[source] ::http::Error),
    #[error("lookup {host}: {source}")]
    LookUp { host: String, source: std::io::Error },
    #[error("lookup {0}: no address")]
    NoAddress(String),
    #[error("dial tcp {}; does something listen there?", in_words(.0))]
    Dial(std::io::Error),
    #[error(transparent)]
    Http(#[from] http::Error),
    #[error("the answer's gzip is broken: {0}")]
    Gzip(#[source] std::io::Error),
}

/// A text that is no URL to ask.
#[derive(Debug, thiserror::Error)]
#[error("parse {text:?}: {why}")]
pub(super) struct NoUrl {
    text: String,
    why: String,
}

/// Runs `future` on a runtime of its own; commands are one exchange long.
pub(super) fn block_on<T>(future: impl Future<Output = Result<T, BoxError>>) -> Result<T, BoxError> {
    let runtime = super::runtime::build()?;
    let result = runtime.block_on(future);
    // A look-up of a name may still hold its thread; nobody waits for it.
    runtime.shutdown_background();
    result
}

/// Sends and follows redirects; the caller bounds the time.
pub(super) async fn exchange(method: &str, url: &str, body: &str) -> Result<Reply, Error> {
    let mut method = if method.is_empty() { "GET".to_owned() } else { method.to_owned() };
    let mut body = body.to_owned();
    let mut url = Url::parse(url)?;
    let mut from: Option<Url> = None;
    for _ in 0..REDIRECTS {
        let failed = |source| Error::Exchange { what: format!("{method} {url}"), source };
        let (reply, location) = once(&method, &url, from.as_ref(), &body).await.map_err(failed)?;
        let follow = matches!(reply.status, 301 | 302 | 303 | 307 | 308);
        let Some(location) = location.filter(|_| follow) else { return Ok(reply) };
        let next = url
            .join(&location)
            .map_err(|source| Error::Location { location: without_users(&location), source })?;
        from = Some(std::mem::replace(&mut url, next));
        if reply.status < 307 {
            if method != "GET" && method != "HEAD" {
                method = "GET".to_owned();
            }
            body.clear();
        }
    }
    Err(Error::Redirects(format!("{method} {url}")))
}

async fn once(
    method: &str,
    url: &Url,
    from: Option<&Url>,
    body: &str,
) -> Result<(Reply, Option<String>), Failure> {
    let verb =
        ::http::Method::from_bytes(method.as_bytes()).map_err(|_| Failure::Method(method.to_owned()))?;
    let mut request = Request::builder()
        .method(verb)
        .uri(&url.target)
        .header(header::HOST, &url.authority)
        .header(header::USER_AGENT, "Go-http-client/1.1")
        .header(header::ACCEPT_ENCODING, "gzip");
    if let Some(from) = from {
        request = request.header(header::REFERER, from.to_string().trim_matches('"'));
    }
    if let Some(user) = &url.user {
        request = request.header(header::AUTHORIZATION, format!("Basic {}", STANDARD.encode(user)));
    }
    let request = request.body(Bytes::from(body.to_owned())).map_err(Failure::Request)?;
    let io = connect(url).await?;
    let answer = http::exchange(io, request, usize::MAX).await;
    let (head, body) = answer?.into_parts();
    let text = |name| head.headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    // Letters beyond ASCII come as they are, and are escaped when they are asked for.
    let location =
        head.headers.get(header::LOCATION).map(|l| String::from_utf8_lossy(l.as_bytes()).into_owned());
    let location = location.filter(|l| !l.is_empty());
    let packed = text(header::CONTENT_ENCODING).is_some_and(|e| e.eq_ignore_ascii_case("gzip"));
    let mut bytes = body.to_vec();
    if packed && !bytes.is_empty() {
        let mut plain = Vec::new();
        flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_end(&mut plain).map_err(Failure::Gzip)?;
        bytes = plain;
    }
    let why = text(header::HeaderName::from_static("x-not-ready"));
    Ok((Reply { status: head.status.as_u16(), body: bytes, why }, location))
}

async fn connect(url: &Url) -> Result<TcpStream, Failure> {
    let found = lane::NAMES.look_up(&url.host, url.port).await;
    let mut found = found.map_err(|source| Failure::LookUp { host: url.host.clone(), source })?;
    if url.host == "localhost" {
        // The C library gives one line of the hosts file unless /etc/host.conf says `multi on`.
        let both = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
        let both = both.map(|ip| SocketAddr::new(ip, url.port));
        found.extend(both.into_iter().filter(|a| !found.contains(a)).collect::<Vec<_>>());
    }
    if found.is_empty() {
        return Err(Failure::NoAddress(url.host.clone()));
    }
    http::connect(found).await.map_err(Failure::Dial)
}

/// What is needed of a URL.
#[derive(Clone, PartialEq, Eq)]
struct Url {
    /// `name:password`, decoded; shown nowhere.
    user: Option<Vec<u8>>,
    authority: String,
    host: String,
    port: u16,
    target: String,
}

/// `url` as it may be shown, in quotes.
pub(super) fn shown(url: &str) -> String {
    Url::parse(url).map_or_else(|_| format!("{:?}", without_users(url)), |url| url.to_string())
}

impl std::fmt::Debug for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"http://{}{}\"", self.authority, self.target)
    }
}

impl Url {
    fn parse(text: &str) -> Result<Self, NoUrl> {
        let bad = |why: &str| NoUrl { text: without_users(text), why: why.to_owned() };
        if text.bytes().any(|b| b < 0x20 || b == 0x7f) {
            return Err(bad("net/url: invalid control character in URL"));
        }
        let rest = match text.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => {
                return Err(bad(&format!("unsupported protocol scheme {scheme:?}; only http")));
            }
            None => return Err(bad("unsupported protocol scheme \"\"; it begins with http://")),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(credentials(user).map_err(|why| bad(&why.to_string()))?), host),
            None => (None, authority),
        };
        let (host, port) = match authority.strip_prefix('[') {
            Some(inner) => {
                let (host, after) = inner.split_once(']').ok_or_else(|| bad("missing ']' in host"))?;
                (host, after.strip_prefix(':').unwrap_or(after))
            }
            None => authority.split_once(':').unwrap_or((authority, "")),
        };
        // `parse` takes a plus sign, Go does not.
        let number = |port: &str| port.parse().ok().filter(|_| !port.starts_with('+'));
        let port = if port.is_empty() { 80 } else { number(port).ok_or_else(|| bad("invalid port"))? };
        if host.is_empty() {
            return Err(bad("http: no Host in request URL"));
        }
        Ok(Self {
            user,
            authority: authority.to_owned(),
            host: host.to_owned(),
            port,
            target: target(rest).map_err(|why| bad(&why.to_string()))?,
        })
    }

    // Where a redirect leads.
    fn join(&self, location: &str) -> Result<Self, NoUrl> {
        let scheme = location.find(':').filter(|at| !location[..*at].contains(['/', '?', '#']));
        let whole = if scheme.is_some() {
            location.to_owned()
        } else if location.starts_with("//") {
            format!("http:{location}")
        } else {
            let here = self.target.split('?').next().unwrap_or("/");
            let folder = here.rsplit_once('/').map_or("", |(folder, _)| folder);
            let path = match location.as_bytes().first() {
                Some(b'/') => location.to_owned(),
                Some(b'?') => format!("{here}{location}"),
                Some(b'#') | None => self.target.clone(),
                Some(_) => format!("{folder}/{location}"),
            };
            let (path, query) = path.split_once('?').map_or((path.as_str(), None), |(p, q)| (p, Some(q)));
            let query = query.map(|q| format!("?{q}")).unwrap_or_default();
            format!("http://{}{}{query}", self.authority, without_dots(path))
        };
        let mut there = Self::parse(&whole)?;
        // What is relative is asked by the same user.
        if scheme.is_none() && !location.starts_with("//") {
            there.user.clone_from(&self.user);
        }
        Ok(there)
    }
}

// Of `name:password`, each escaped for itself; without a password it is empty.
fn credentials(user: &str) -> Result<Vec<u8>, percent::Broken> {
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    Ok([&percent::decode(name)?, b":" as &[u8], &percent::decode(password)?].concat())
}

// RFC 3986, 5.2.4; only redirects are resolved, a path as typed keeps its dots.
fn without_dots(path: &str) -> String {
    let mut out: Vec<&str> = Vec::new();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    for (n, segment) in segments.iter().enumerate() {
        let last = n + 1 == segments.len();
        match *segment {
            "." if last => out.push(""),
            "." => {}
            ".." => {
                out.pop();
                if last {
                    out.push("");
                }
            }
            segment => out.push(segment),
        }
    }
    format!("/{}", out.join("/"))
}

// Path and query as Go sends them: no fragment; a path that holds anything to escape is escaped anew as a
// whole; the query goes out as typed, but for bytes that no request line can hold.
fn target(rest: &str) -> Result<String, percent::Broken> {
    let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
    percent::decode(fragment)?;
    let (path, query) = rest.split_once('?').map_or((rest, None), |(p, q)| (p, Some(q)));
    let plain = percent::decode(path)?;
    let as_typed = path.bytes().all(|b| b"!$&'()*+,;=:@[]%/-_.~".contains(&b) || b.is_ascii_alphanumeric());
    let mut out = if as_typed { path.to_owned() } else { percent::encode_path(&plain) };
    if !out.starts_with('/') {
        out.insert(0, '/');
    }
    if let Some(query) = query {
        out.push('?');
        for c in query.chars() {
            match c {
                ' ' | '"' | '<' | '>' => out.push_str(&format!("%{:02X}", u32::from(c))),
                c => out.push(c),
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
