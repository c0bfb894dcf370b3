//! Dials: name to addresses, addresses side by side, TCP, proxy, TLS; one bound over all of it.

mod look;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rand::seq::SliceRandom;
use rustls_pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_rustls::TlsConnector;

use super::error::{tcp_kind, tls_hint, tls_kind, tls_reason};
use super::{Config, Error, Phase, Stream, Transport, name, roots};
use crate::base::clock::{self, Clock};
use crate::base::lane;
use crate::net::proxy::Proxy;
use crate::tls::client::{self, Identity, Read, Seen};
use crate::trouble::{Kind, Reporter};

pub(crate) use look::{Look, Peer};

/// After this long without a TCP connection the next address is tried beside it (RFC 8305 recommends
/// 250 ms, Go waits 300 ms).
const NEXT_ADDRESS: Duration = Duration::from_millis(300);
/// After this long without a finished handshake the next address is tried beside it: a listener that
/// accepts and says nothing must not hold up one that would answer.
const NEXT_HANDSHAKE: Duration = Duration::from_secs(1);
/// A dial that takes longer is told of before it ends.
const SLOW: Duration = Duration::from_secs(5);
/// What to do where the proxy itself cannot be reached.
const PROXY_DOWN: &str = "; does the HTTP proxy that HTTPS_PROXY names run there? Set NO_PROXY for istiod if it is reached directly";
/// Bytes read from the kernel at once, below TLS.
const READ_AHEAD: usize = 64 * 1024;
/// Idle time and interval of TCP keep-alive, as Go's dialer sets them.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// An open connection, TLS finished where TLS is used.
#[derive(Debug)]
pub struct Connection {
    /// The stream to speak HTTP/2 on.
    pub io: Stream,
    /// The address that answered (the proxy's, where one is used).
    pub peer: SocketAddr,
    /// `:authority` of calls: the TLS server name without port, or the dial address in plain text.
    pub authority: String,
    /// `https` or `http`.
    pub scheme: &'static str,
}

/// Dials on demand. Cheap to clone; clones share what was read last.
#[derive(Debug, Clone)]
pub(crate) struct Connector {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: Config,
    roots: Option<Arc<roots::Reader>>,
    clock: Arc<dyn Clock>,
}

impl Connector {
    /// Checks that roots can be read, so that bad settings end the agent at start and never later.
    /// The system's pool is not looked at before it is needed.
    ///
    /// # Errors
    /// When the root file is missing or holds no certificate.
    pub(crate) fn new(config: Config) -> Result<Self, Error> {
        Self::with_clock(config, Arc::new(clock::System))
    }

    /// As [`Connector::with_clock`]; `trouble` is told while a root file is of no use and the last good roots stay in use.
    ///
    /// # Errors
    /// As [`Connector::new`].
    pub(crate) fn telling(config: Config, clock: Arc<dyn Clock>, trouble: Reporter) -> Result<Self, Error> {
        Self::made(config, clock, Some(trouble))
    }

    /// As [`Connector::new`], with dates (of client certificates) from `clock`.
    ///
    /// # Errors
    /// As [`Connector::new`].
    pub(crate) fn with_clock(config: Config, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        Self::made(config, clock, None)
    }

    fn made(config: Config, clock: Arc<dyn Clock>, trouble: Option<Reporter>) -> Result<Self, Error> {
        let roots = match &config.transport {
            Transport::Plaintext => None,
            Transport::Tls(tls) => Some(Arc::new(roots::Reader::new(tls.roots.clone(), trouble))),
        };
        if let Some(reader) = roots.as_ref().filter(|reader| reader.file().is_some()) {
            reader.read()?;
        }
        Ok(Self { inner: Arc::new(Inner { config, roots, clock }) })
    }

    /// The settings it dials with.
    #[must_use]
    pub(crate) fn config(&self) -> &Config {
        &self.inner.config
    }

    /// The root file in use, where it is a file.
    #[must_use]
    pub(crate) fn root_file(&self) -> Option<std::path::PathBuf> {
        self.inner.roots.as_ref().and_then(|reader| reader.file())
    }

    /// Looks at the root file now, so that what is wrong with it is told, or over, before a dial needs it.
    pub(crate) async fn look_at_roots(&self) {
        if let Some(reader) = &self.inner.roots {
            // Without roots no dial succeeds, and says so.
            drop(reader.look().await);
        }
    }

    /// Whether the name is resolved on this machine, and not by a proxy.
    #[must_use]
    pub(crate) fn resolves(&self) -> bool {
        let config = &self.inner.config;
        name::split(&config.address).is_some_and(|(host, port)| {
            matches!(Proxy::for_target(config.proxy.as_ref(), host, port), Ok(None))
        })
    }

    /// A fresh connection, within [`Config::connect_timeout`]. Dropping the future ends the dial.
    ///
    /// # Errors
    /// With address, phase, cause and a hint.
    pub(crate) async fn connect(&self) -> Result<Connection, Error> {
        self.connect_told(&|_| {}).await
    }

    /// As [`Connector::connect`]; `late` hears once what the dial waits for when it takes longer than 5 s.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub(crate) async fn connect_told(
        &self,
        late: &(dyn Fn(Error) + Send + Sync),
    ) -> Result<Connection, Error> {
        self.connect_by(Instant::now() + self.inner.config.connect_timeout * 2, late).await
    }

    /// As [`Connector::connect_told`], but for who waits until `end` and no longer: what the dial waits for then is named.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub(crate) async fn connect_by(
        &self,
        end: Instant,
        late: &(dyn Fn(Error) + Send + Sync),
    ) -> Result<Connection, Error> {
        let inner = &*self.inner;
        let config = &inner.config;
        let began = Instant::now();
        let until = end.min(began + config.connect_timeout);
        let timeout = |after, phase| Error::Timeout { address: config.address.clone(), after, phase };
        let progress = Progress(Mutex::new((Phase::Address, Instant::now())));
        let mut dial = std::pin::pin!(async {
            let target = Target::new(inner).await?;
            progress.enter(Phase::Resolve);
            let addresses = inner.resolve(&target).await?;
            progress.enter(target.first());
            inner.race(&target, addresses, &progress).await
        });
        let slow = Instant::now() + SLOW;
        if slow < until {
            match timeout_at(slow, &mut dial).await {
                Ok(made) => return made,
                Err(_) => late(timeout(SLOW, progress.get().0)),
            }
        }
        match timeout_at(until, dial).await {
            Ok(made) => made,
            Err(_) => Err(timeout(rounded(until.saturating_duration_since(began)), progress.get().0)),
        }
    }
}

/// As people say it: what is left of two seconds is two seconds.
fn rounded(time: Duration) -> Duration {
    let second = Duration::from_secs(1);
    if time < second { time } else { Duration::from_secs((time + second / 2).as_secs()) }
}

/// What the newest attempt is doing (for the message when time runs out), and when the next address is
/// tried beside it. A lock because a dial's future must be able to move between threads.
struct Progress(Mutex<(Phase, Instant)>);

impl Progress {
    fn get(&self) -> (Phase, Instant) {
        *self.0.lock().expect("no panic holds this lock")
    }

    fn enter(&self, phase: Phase) {
        self.0.lock().expect("no panic holds this lock").0 = phase;
    }

    fn next_at(&self, at: Instant) {
        self.0.lock().expect("no panic holds this lock").1 = at;
    }
}

/// One dial's settings, read once for all its addresses.
struct Target<'a> {
    address: &'a str,
    host: &'a str,
    port: &'a str,
    proxy: Option<Proxy>,
    tls: Option<TargetTls>,
    /// Where the server's chain is kept, for a diagnosis.
    seen: Option<Arc<Seen>>,
}

struct TargetTls {
    name: String,
    server: ServerName<'static>,
    roots: Arc<crate::tls::verify::Anchors>,
}

impl<'a> Target<'a> {
    async fn new(inner: &'a Inner) -> Result<Self, Error> {
        let address = inner.config.address.as_str();
        let bad = |reason: String, hint: &str| Error::Dial {
            address: address.to_owned(),
            phase: Phase::Address,
            kind: Kind::AddressInvalid,
            reason,
            hint: hint.to_owned(),
        };
        let (host, port) = name::split(address)
            .ok_or_else(|| bad("it has no port".to_owned(), "; write host:port, and brackets around IPv6"))?;
        let proxy = Proxy::for_target(inner.config.proxy.as_ref(), host, port)
            .map_err(|e| bad(e.to_string(), "; set NO_PROXY for istiod if it is reached directly"))?;
        let tls = match (&inner.config.transport, &inner.roots) {
            (Transport::Tls(tls), Some(reader)) => {
                let name = name::server_name(address, tls.server_name.as_deref());
                let server = ServerName::try_from(name.clone()).map_err(|e| {
                    bad(
                        format!("{name:?} cannot be a server's name: {e}"),
                        "; set ISTIOD_SAN to a DNS name or an IP address",
                    )
                })?;
                Some(TargetTls { name, server, roots: reader.look().await? })
            }
            _ => None,
        };
        Ok(Self { address, host, port, proxy, tls, seen: None })
    }

    fn error(
        &self,
        peer: Option<SocketAddr>,
        phase: Phase,
        reason: String,
        hint: impl Into<String>,
    ) -> Error {
        let address = match (peer, &self.proxy) {
            (Some(peer), Some(_)) => format!("{} (proxy {peer})", self.address),
            (Some(peer), None) if self.host.parse::<std::net::IpAddr>().is_err() => {
                format!("{} ({peer})", self.address)
            }
            _ => self.address.to_owned(),
        };
        let kind = match phase {
            Phase::Address => Kind::AddressInvalid,
            Phase::Resolve => Kind::NameNotResolved,
            Phase::Connect => Kind::ConnectionFailed,
            Phase::Proxy => Kind::ProxyRefused,
            Phase::Tls => Kind::TlsFailed,
            Phase::ClientCertificate => Kind::CertificateFiles,
        };
        Error::Dial { address, phase, kind, reason, hint: hint.into() }
    }

    /// What comes first: a connection to istiod, or to the proxy on the way.
    fn first(&self) -> Phase {
        if self.proxy.is_some() { Phase::Proxy } else { Phase::Connect }
    }

    /// Why the client certificate could not be shown, if it could not.
    fn without(&self, peer: SocketAddr, identity: &Identity) -> Option<Error> {
        let error = self.error(Some(peer), Phase::ClientCertificate, identity.failure()?, "");
        Some(of_kind(error, identity.unread().unwrap_or(Kind::CertificateFiles)))
    }

    /// Why there is no address; `kind` where that is not the resolver's fault.
    fn unresolved(&self, reason: String, kind: Option<Kind>) -> Error {
        let (address, phase) = (self.address.to_owned(), Phase::Resolve);
        match kind {
            Some(kind) => Error::Dial { address, phase, kind, reason, hint: String::new() },
            None if self.proxy.is_some() => self.error(None, Phase::Proxy, reason, PROXY_DOWN),
            None => self.error(
                None,
                phase,
                reason,
                "; does DNS answer on this machine, and is this the name of a running istiod? \
                 (a VM outside the cluster's DNS needs it in /etc/hosts)",
            ),
        }
    }
}

impl Inner {
    async fn resolve(&self, target: &Target<'_>) -> Result<Vec<SocketAddr>, Error> {
        let (host, port) = match &target.proxy {
            Some(proxy) => (proxy.host.as_str(), proxy.port.as_str()),
            None => (target.host, target.port),
        };
        let port: u16 = port.parse().map_err(|_| {
            target.error(None, Phase::Address, format!("{port:?} is no port number"), "; write host:port")
        })?;
        // As in Go, no host means this machine.
        let host = if host.is_empty() { "localhost" } else { host };
        if let Ok(ip) = host.parse() {
            // A literal needs no resolver thread.
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let found = lane::look_up(host, port)
            .await
            .map_err(|e| target.unresolved(format!("{host}: {e}"), Kind::of_io(&e)))?;
        let addresses = interleave(order(found, self.config.shuffle).into_iter());
        if addresses.is_empty() {
            return Err(target.unresolved(format!("{host} has no address"), None));
        }
        Ok(addresses)
    }

    /// First connection that is complete wins. The next address starts when one fails, or when one is
    /// silent for too long; the error is the last to come in.
    async fn race(
        &self,
        target: &Target<'_>,
        addresses: Vec<SocketAddr>,
        progress: &Progress,
    ) -> Result<Connection, Error> {
        let mut waiting = addresses.into_iter();
        let mut running = FuturesUnordered::new();
        let mut failed = None;
        loop {
            if running.is_empty() || Instant::now() >= progress.get().1 {
                match waiting.next() {
                    Some(peer) => {
                        progress.enter(target.first());
                        progress.next_at(Instant::now() + NEXT_ADDRESS);
                        running.push(self.dial(target, peer, progress));
                    }
                    None if running.is_empty() => {
                        return Err(failed.unwrap_or_else(|| {
                            target.error(None, Phase::Resolve, "no address".to_owned(), "")
                        }));
                    }
                    // All are on their way; only the overall bound ends this.
                    None => progress.next_at(Instant::now() + Duration::from_secs(3600)),
                }
                continue;
            }
            let (_, at) = progress.get();
            tokio::select! {
                done = running.next() => match done {
                    Some(Ok(connection)) => return Ok(connection),
                    Some(Err(error)) => {
                        failed = Some(error);
                        progress.next_at(Instant::now());
                    }
                    None => {}
                },
                () = sleep_until(at) => {}
            }
        }
    }

    async fn dial(
        &self,
        target: &Target<'_>,
        peer: SocketAddr,
        progress: &Progress,
    ) -> Result<Connection, Error> {
        let fail = |phase, reason: String, hint: &str| target.error(Some(peer), phase, reason, hint);
        let started = Instant::now();
        let mut io = TcpStream::connect(peer).await.map_err(|e| {
            let own = Kind::of_io(&e);
            if target.proxy.is_some() && own.is_none() {
                return fail(Phase::Proxy, e.to_string(), PROXY_DOWN);
            }
            let hint = match e.kind() {
                std::io::ErrorKind::ConnectionRefused => {
                    "; is istiod running, and does it listen on this port?"
                }
                _ => "",
            };
            of_kind(fail(Phase::Connect, e.to_string(), hint), tcp_kind(&e))
        })?;
        // It is alive; its handshake may take a little longer.
        progress.next_at(started + NEXT_HANDSHAKE);
        tune(&io, self.config.user_timeout);
        if let Some(proxy) = &target.proxy {
            progress.enter(Phase::Proxy);
            proxy.tunnel(&mut io, target.address).await.map_err(|e| {
                fail(Phase::Proxy, e.to_string(), "; set NO_PROXY for istiod if it is reached directly")
            })?;
        }
        let Some(tls) = &target.tls else {
            let authority = target.address.to_owned();
            return Ok(Connection { io: Stream::Plain(io), peer, authority, scheme: "http" });
        };
        progress.enter(Phase::Tls);
        let io = self.handshake(target, tls, peer, io).await?;
        Ok(Connection { io, peer, authority: name::authority(&tls.name), scheme: "https" })
    }

    async fn handshake(
        &self,
        target: &Target<'_>,
        tls: &TargetTls,
        peer: SocketAddr,
        io: TcpStream,
    ) -> Result<Stream, Error> {
        let Transport::Tls(settings) = &self.config.transport else {
            return Ok(Stream::Plain(io));
        };
        let identity = match settings.client.clone() {
            Some(files) => {
                let read = Read::of(&files).await;
                Some(Identity::new(files, read, self.clock.clone()))
            }
            None => None,
        };
        let made = match &target.seen {
            None => client::config(tls.roots.clone(), identity.clone(), settings.compliance),
            Some(seen) => {
                client::watched(tls.roots.clone(), identity.clone(), settings.compliance, seen.clone())
            }
        };
        let config = made.map_err(|e| target.error(Some(peer), Phase::Tls, e.to_string(), ""))?;
        let connector = TlsConnector::from(Arc::new(config));
        let io = BufReader::with_capacity(READ_AHEAD, io);
        let shaken = connector.connect(tls.server.clone(), io).await;
        // Told first: a server that insists fails the handshake because of this.
        if let Some(error) = identity.and_then(|identity| target.without(peer, &identity)) {
            return Err(error);
        }
        let io = shaken.map_err(|e| {
            let inner = e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
            let roots = self.roots.as_ref().map(|reader| reader.name()).unwrap_or_default();
            let hint = match inner {
                Some(error) => tls_hint(error, &roots, &tls.name),
                None if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                    "; the server closed during the handshake: is this its TLS port?".to_owned()
                }
                None => String::new(),
            };
            let error =
                target.error(Some(peer), Phase::Tls, inner.map_or_else(|| e.to_string(), tls_reason), hint);
            of_kind(error, inner.map_or(Kind::TlsFailed, tls_kind))
        })?;
        if io.get_ref().1.alpn_protocol() != Some(b"h2") {
            let hint = "; the server must negotiate HTTP/2 (ALPN h2)";
            return Err(target.error(
                Some(peer),
                Phase::Tls,
                "no application protocol chosen".to_owned(),
                hint,
            ));
        }
        Ok(Stream::Tls(Box::new(io)))
    }
}

/// The same error, known more closely.
fn of_kind(mut error: Error, known: Kind) -> Error {
    if let Error::Dial { kind, .. } = &mut error {
        *kind = known;
    }
    error
}

/// In the resolver's order, or in one of our own, so that not every agent of a mesh goes to the first.
fn order(mut found: Vec<SocketAddr>, shuffle: bool) -> Vec<SocketAddr> {
    if shuffle {
        found.shuffle(&mut rand::rng());
    }
    found
}

/// Small writes leave at once; a peer that vanished is noticed even on an idle connection, and while bytes wait for
/// its acknowledgement. Failures to set any only cost that.
fn tune(io: &TcpStream, user_timeout: Option<Duration>) {
    if user_timeout.is_some() {
        let _ = SockRef::from(io).set_tcp_user_timeout(user_timeout);
    }
    let _ = io.set_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    let _ = SockRef::from(io).set_tcp_keepalive(&keepalive);
}

/// Families in turn, beginning with the resolver's first choice, duplicates dropped.
fn interleave(found: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut all = Vec::new();
    for address in found {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    let Some(first_v4) = all.first().map(SocketAddr::is_ipv4) else { return all };
    let (first, second): (Vec<_>, Vec<_>) = all.into_iter().partition(|a| a.is_ipv4() == first_v4);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut out = Vec::new();
    loop {
        match (first.next(), second.next()) {
            (None, None) => return out,
            (a, b) => out.extend(a.into_iter().chain(b)),
        }
    }
}

#[cfg(test)]
mod tests;
