//! Dials: name to addresses, addresses side by side, TCP, proxy, TLS; one bound over all of it.

mod aim;
mod look;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustls_pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_rustls::TlsConnector;

use super::error::{broken_kind, tcp_kind, tls_hint, tls_kind, tls_reason};
use super::{Config, Error, Phase, RootFiles, Stream, Transport, name, roots};
use crate::base::both::both;
use crate::base::clock::{self, Clock};
use crate::net::proxy::Proxy;
use crate::tls::client::{self, Identity, Read, Seen};
use crate::trouble::Kind;

use aim::{Aim, PROXY_DOWN, invalid};
pub(crate) use look::{Look, Peer};

/// After this long without a TCP connection the next address is tried beside it (RFC 8305 recommends
/// 250 ms, Go waits 300 ms).
const NEXT_ADDRESS: Duration = Duration::from_millis(300);
/// After this long without a finished handshake the next address is tried beside it: a listener that
/// accepts and says nothing must not hold up one that would answer.
const NEXT_HANDSHAKE: Duration = Duration::from_secs(1);
/// A dial that takes longer is told of before it ends.
const SLOW: Duration = Duration::from_secs(5);
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

    /// As [`Connector::new`], with dates (of client certificates) from `clock`.
    ///
    /// # Errors
    /// As [`Connector::new`].
    pub(crate) fn with_clock(config: Config, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        Self::sharing(config, clock, &RootFiles::default())
    }

    /// As [`Connector::with_clock`], with roots that others trust as well.
    ///
    /// # Errors
    /// As [`Connector::new`].
    pub(crate) fn sharing(config: Config, clock: Arc<dyn Clock>, files: &RootFiles) -> Result<Self, Error> {
        let roots = match &config.transport {
            Transport::Plaintext => None,
            Transport::Tls(tls) => Some(files.reader(&tls.roots)),
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
            let aim = Aim::new(&inner.config)?;
            progress.enter(Phase::Resolve);
            let (tls, addresses) = both(inner.trust(&aim), aim.resolve()).await?;
            progress.enter(aim.first());
            inner.race(&Target { aim, tls, seen: None }, addresses, &progress).await
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
    aim: Aim<'a>,
    tls: Option<TargetTls>,
    /// Where the server's chain is kept, for a diagnosis.
    seen: Option<Arc<Seen>>,
}

impl Target<'_> {
    /// Why the client certificate could not be shown, if it could not.
    fn without(&self, peer: SocketAddr, identity: &Identity) -> Option<Error> {
        let error = self.aim.error(Some(peer), Phase::ClientCertificate, identity.failure()?, "");
        Some(of_kind(error, identity.unread().unwrap_or(Kind::CertificateFiles)))
    }
}

struct TargetTls {
    name: String,
    server: ServerName<'static>,
    roots: Arc<crate::tls::anchors::Anchors>,
}

impl Inner {
    /// Whom to trust there, and under which name; nobody in plain text.
    async fn trust(&self, aim: &Aim<'_>) -> Result<Option<TargetTls>, Error> {
        let (Transport::Tls(tls), Some(reader)) = (&self.config.transport, &self.roots) else {
            return Ok(None);
        };
        let name = name::server_name(aim.address, tls.server_name.as_deref());
        let server = ServerName::try_from(name.clone()).map_err(|e| {
            let reason = format!("{name:?} cannot be a server's name: {e}");
            invalid(aim.address, reason, "; set ISTIOD_SAN to a DNS name or an IP address")
        })?;
        Ok(Some(TargetTls { name, server, roots: reader.look().await? }))
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
                        progress.enter(target.aim.first());
                        progress.next_at(Instant::now() + NEXT_ADDRESS);
                        running.push(self.dial(target, peer, progress));
                    }
                    None if running.is_empty() => {
                        return Err(failed.unwrap_or_else(|| {
                            target.aim.error(None, Phase::Resolve, "no address".to_owned(), "")
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
        let fail = |phase, reason: String, hint: &str| target.aim.error(Some(peer), phase, reason, hint);
        let started = Instant::now();
        let mut io = TcpStream::connect(peer).await.map_err(|e| {
            let own = Kind::of_io(&e);
            if target.aim.proxy.is_some() && own.is_none() {
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
        if let Some(proxy) = &target.aim.proxy {
            progress.enter(Phase::Proxy);
            proxy.tunnel(&mut io, target.aim.address).await.map_err(|e| {
                fail(Phase::Proxy, e.to_string(), "; set NO_PROXY for istiod if it is reached directly")
            })?;
        }
        let Some(tls) = &target.tls else {
            let authority = target.aim.address.to_owned();
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
        let config = made.map_err(|e| target.aim.error(Some(peer), Phase::Tls, e.to_string(), ""))?;
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
            let error = target.aim.error(
                Some(peer),
                Phase::Tls,
                inner.map_or_else(|| e.to_string(), tls_reason),
                hint,
            );
            of_kind(error, inner.map_or_else(|| broken_kind(&e), tls_kind))
        })?;
        if io.get_ref().1.alpn_protocol() != Some(b"h2") {
            let hint = "; the server must negotiate HTTP/2 (ALPN h2)";
            return Err(target.aim.error(
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

#[cfg(test)]
mod tests;
