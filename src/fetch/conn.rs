//! Connecting: from which address, to which of a host's addresses, with TLS or not.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use super::{Error, Tls, Url, records};
use crate::base::lane::Lane;
use crate::net::proxy::Proxy;

/// A connection of either kind.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection, and what was agreed on it.
pub(crate) struct Io {
    pub(crate) stream: Box<dyn Stream>,
    pub(crate) h2: bool,
    /// The proxy at its other end, which is told the whole address.
    pub(crate) proxy: Option<Proxy>,
}

/// Proxies by scheme: each its URL, and whom it is not for (`NO_PROXY`).
#[derive(Clone, Default)]
pub(crate) struct Proxies {
    /// `HTTP_PROXY`.
    pub http: Option<(String, String)>,
    /// `HTTPS_PROXY`.
    pub https: Option<(String, String)>,
}

impl std::fmt::Debug for Proxies {
    // URLs may hold passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { http, https } = self;
        write!(f, "Proxies {{ http: {}, https: {} }}", http.is_some(), https.is_some())
    }
}

/// The Go agent's limit of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Go's wait before another address is tried beside one that is silent (RFC 6555, 300 ms).
const NEXT: Duration = Duration::from_millis(300);

/// Look-ups of names that others have chosen: servers of modules, and where an application leads a scrape.
static NAMES: Lane = Lane::new("names of others", 8);

/// How to connect.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    /// The address to leave from, which marks a probe; `None`: whatever the kernel takes.
    pub(crate) source: Option<IpAddr>,
    /// For `https`.
    pub(crate) tls: Option<Arc<Tls>>,
    /// For what is not next door.
    pub(crate) proxies: Proxies,
    /// Where names are looked up: one that is not answered holds up the others of its lane.
    pub(crate) names: &'static Lane,
}

impl Default for Dialer {
    fn default() -> Self {
        Self { source: None, tls: None, proxies: Proxies::default(), names: &NAMES }
    }
}

impl Dialer {
    /// Connects to the host: to each of its addresses in turn, the next as soon as one has failed, or
    /// beside it once it has been silent for [`NEXT`].
    pub(crate) async fn tcp(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
        let mut addresses = self.addresses(host).await?.into_iter();
        let mut tries = FuturesUnordered::new();
        loop {
            tries.extend(addresses.next().map(|ip| self.one(SocketAddr::new(ip, port))));
            tokio::select! {
                tried = tries.next() => match tried {
                    Some(Ok(stream)) => return Ok(stream),
                    Some(Err(error)) => last = error,
                    None => return Err(last),
                },
                () = tokio::time::sleep(NEXT), if addresses.len() > 0 => {}
            }
        }
    }

    async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            // As Go dials: ::ffff:10.0.0.1 is an IPv4 address, and so within reach of an IPv4 source.
            return Ok(vec![ip.to_canonical()]);
        }
        let mut ips: Vec<IpAddr> = if host.eq_ignore_ascii_case("localhost") {
            // Asking the resolver would take a thread, which costs more memory than all else here.
            // The order is that of RFC 6724, which Go and C libraries follow.
            vec![Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]
        } else {
            self.names.look_up(host, 0).await?.into_iter().map(|addr| addr.ip()).collect()
        };
        if let Some(source) = self.source {
            ips.retain(|ip| ip.is_ipv4() == source.is_ipv4());
        }
        Ok(ips)
    }

    async fn one(&self, addr: SocketAddr) -> io::Result<TcpStream> {
        let Some(source) = self.source else {
            let stream = TcpStream::connect(addr).await?;
            // Speed, no more: a sandbox that refuses the option has a connection all the same.
            let _ = stream.set_nodelay(true);
            return Ok(stream);
        };
        if source.is_ipv4() != addr.is_ipv4() {
            return Err(io::Error::new(
                io::ErrorKind::AddrNotAvailable,
                format!("probes leave from {source}, which cannot reach {addr}"),
            ));
        }
        let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        let _ = socket.set_nodelay(true);
        socket.bind(SocketAddr::new(source, 0))?;
        // Without the second of lingering that the kubelet's own probes have: it blocks the thread that closes, and an
        // application whose queue is full has each of its probes wait for all of it.
        socket.connect(addr).await
    }

    pub(crate) async fn dial(&self, url: &Url) -> Result<Io, Error> {
        let to = || format!("{}:{}", if url.host.is_empty() { "?" } else { &url.host }, url.port());
        let settings = if url.https { &self.proxies.https } else { &self.proxies.http };
        let port = url.port().to_string();
        let proxy = Proxy::for_target(settings.as_ref(), &url.host, &port).map_err(Error::Proxy)?;
        let connected = match &proxy {
            // A port that is none was refused with the proxy's URL.
            Some(proxy) => self.tcp(&proxy.host, proxy.port.parse().unwrap_or_default()).await,
            None => self.tcp(&url.host, url.port()).await,
        };
        let mut stream = connected.map_err(|source| Error::Connect { to: to(), source })?;
        if !url.https {
            return Ok(Io { stream: Box::new(stream), h2: false, proxy });
        }
        if let Some(proxy) = &proxy {
            let host = if url.host.contains(':') { format!("[{}]", url.host) } else { url.host.clone() };
            proxy.tunnel(&mut stream, &format!("{host}:{port}")).await.map_err(Error::Proxy)?;
        }
        let tls = self.tls.as_ref().ok_or(Error::NoTls)?;
        let failed = |source| Error::Tls { to: to(), source };
        let name = ServerName::try_from(url.host.clone()).map_err(|e| failed(io::Error::other(e)))?;
        let (stream, between) = records::watched(stream);
        let handshake = TlsConnector::from(tls.config().await.map_err(failed)?).connect(name, stream);
        let stream = tokio::time::timeout(HANDSHAKE, handshake)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(failed)?;
        let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok(Io { stream: Box::new(records::Ending::new(stream, between)), h2, proxy: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_probes_socket_does_not_linger() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let source = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 6));
        let dialer = Dialer { source: Some(source), ..Dialer::default() };
        let stream = dialer.tcp("127.0.0.1", listener.local_addr().unwrap().port()).await.unwrap();
        assert_eq!(stream.local_addr().unwrap().ip(), source);
        let mapped = dialer.tcp("::ffff:127.0.0.1", listener.local_addr().unwrap().port()).await.unwrap();
        assert_eq!(mapped.local_addr().unwrap().ip(), source);
        assert_eq!(socket2::SockRef::from(&stream).linger().unwrap(), None);
    }
}
