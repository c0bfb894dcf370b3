//! The sockets: one UDP and one TCP an address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use prometheus::IntCounterVec;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::itself::Itself;
use super::resolv::Search;
use super::upstream::{self, Transport, Upstream};
use super::wire::{self, Query, Rcode, Screened};
use super::{Config, Current, Error, resolv};
use crate::base::bounded;
use crate::base::handover;
use crate::base::lane::{self, Lane};
use crate::base::metrics::Metrics;
use crate::base::tasks::{Set, Stop, TaskResult};
use crate::net::accept::{self, Acceptor, Came};
use crate::net::datagram::{Asked, Socket};
use crate::net::listen;
use crate::net::places::{Bounds, Place, Places};
use crate::net::progress::{Heads, Phase, Progress};
use crate::trouble::Reporter;

/// Sockets to nameservers at once (an eighth of the descriptors where that is less): one for a query, or one for each
/// nameserver where all are asked in parallel. Queries beyond are answered SERVFAIL, so that dead nameservers cannot use
/// up the file descriptors the rest of the agent needs.
const FORWARDS: usize = 512;
/// Connections at once; above, the one that is worth least makes room (`net::places`), so whoever asks is answered
/// however many say nothing. None is kept idle longer than [`IDLE`].
const CONNECTIONS: usize = 128;
/// Connections that the kernel keeps until they are accepted: the runtime's own figure.
const BACKLOG: i32 = 1024;
/// Until the first query of a connection, and until a reply is taken.
const FIRST: Duration = Duration::from_secs(2);
/// Between two queries of a connection.
const IDLE: Duration = Duration::from_secs(8);
/// Queries a connection may carry.
const QUERIES: usize = 128;
/// How often resolv.conf is read again, where that is wanted.
const LOOK: Duration = Duration::from_secs(2);
/// How long nameservers are waited for when another program takes over, and how often that is looked at.
const QUIET: Duration = Duration::from_millis(200);
const GLANCE: Duration = Duration::from_millis(5);
static READS: Lane = Lane::new("resolv.conf", 1);
/// After a failed receive, so that a lasting fault does not spin.
const PAUSE: Duration = Duration::from_millis(100);

/// Sockets that are bound but not yet served.
pub(crate) struct Bound {
    sockets: Vec<(Socket, TcpListener)>,
    /// The content of resolv.conf by which they were bound.
    known: Vec<u8>,
    shared: Arc<Shared>,
}

struct Shared {
    table: Current,
    search: RwLock<Option<Search>>,
    /// Looked at again and again, where that is wanted.
    resolv_conf: Option<PathBuf>,
    before_sync: bool,
    upstream: Upstream,
    forwards: Semaphore,
    /// The permits of `forwards`.
    most: usize,
    requests: IntCounterVec,
}

/// Reads `resolv.conf` and binds the ports.
///
/// # Errors
/// When the file cannot be read, the address is none or a port is taken.
pub(crate) async fn bind(
    config: &Config,
    table: Current,
    metrics: &Metrics,
    trouble: Reporter,
) -> Result<Bound, Error> {
    let text = bounded::given(&config.resolv_conf)
        .map_err(|source| Error::ResolvConf { path: config.resolv_conf.clone(), source })?;
    let resolv = resolv::parse(&String::from_utf8_lossy(&text));
    let mut sockets: Vec<(Socket, TcpListener)> = Vec::new();
    for (host, port) in addresses(&config.address, &resolv.nameservers)? {
        let failed = |network, source| Error::Bind { network, address: config.address.clone(), source };
        let udp = udp_socket(&host, port).await.map_err(|e| failed("udp", e))?;
        let tcp = tcp_socket(&host, port).await.map_err(|e| failed("tcp", e))?;
        sockets.push((udp, tcp));
    }
    tracing::info!(target: "dns", "local DNS server listens on {}", config.address);
    let places = sockets.iter().filter_map(|(_, tcp)| tcp.local_addr().ok());
    let itself = Itself::at(places, upstream::PORT);
    let requests = metrics.counter("dns_requests_total", "DNS queries taken.", &[]);
    let most = accept::bound(FORWARDS);
    let shared = Shared {
        table,
        search: RwLock::new(resolv.search),
        resolv_conf: config.adaptive.then(|| config.resolv_conf.clone()),
        before_sync: config.before_sync,
        upstream: Upstream::new(resolv.nameservers, itself, config, metrics, trouble),
        forwards: Semaphore::new(most),
        most,
        requests,
    };
    Ok(Bound { sockets, known: text, shared: Arc::new(shared) })
}

// Of the addresses of a name the first of IPv4, else the first: what the DNS capture of IPv4 redirects to. An empty host
// is all addresses: of both families, or of IPv4 where the kernel has no other. So is `0.0.0.0`, as Go listens there.
async fn bound<S>(
    host: &str,
    port: u16,
    bind: impl Fn(SocketAddr) -> std::io::Result<S>,
) -> std::io::Result<S> {
    if !host.is_empty() && host.parse() != Ok(Ipv4Addr::UNSPECIFIED) {
        let all = lane::NAMES.look_up(host, port).await?;
        let first = all.iter().find(|at| at.is_ipv4()).or(all.first()).copied();
        return bind(first.ok_or(std::io::ErrorKind::NotFound)?);
    }
    listen::everywhere(port, bind)
}

async fn udp_socket(host: &str, port: u16) -> std::io::Result<Socket> {
    let key = key("udp", host, port);
    let socket = match handover::take(&key) {
        Some((_, fd)) => UdpSocket::from_std(unblocking(fd.into(), std::net::UdpSocket::set_nonblocking)?)?,
        None => bound(host, port, listen::udp).await?,
    };
    handover::offer(key, "", &socket);
    Socket::new(socket)
}

async fn tcp_socket(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let key = key("tcp", host, port);
    let socket = match handover::take(&key) {
        Some((_, fd)) => {
            TcpListener::from_std(unblocking(fd.into(), std::net::TcpListener::set_nonblocking)?)?
        }
        None => bound(host, port, |at| listen::tcp(at, BACKLOG)).await?,
    };
    handover::offer(key, "", &socket);
    Ok(socket)
}

// By what a socket is known to the program that takes over.
fn key(network: &str, host: &str, port: u16) -> String {
    format!("dns {network} {} {port}", if host.is_empty() { "::" } else { host })
}

fn unblocking<S>(socket: S, set: fn(&S, bool) -> std::io::Result<()>) -> std::io::Result<S> {
    set(&socket, true)?;
    Ok(socket)
}

/// Whether a server could listen there.
///
/// # Errors
/// When it is no `host:port`, or of an address that this machine does not have. Names are not looked up.
pub(crate) fn check(address: &str) -> Result<(), Error> {
    let hosts = addresses(address, &[])?.into_iter();
    for ip in hosts.filter_map(|(host, _)| host.parse::<IpAddr>().ok()) {
        // Any port: whether its own is free is another matter.
        if let Err(source) = std::net::UdpSocket::bind((ip, 0))
            && source.kind() == std::io::ErrorKind::AddrNotAvailable
        {
            return Err(Error::Bind { network: "udp", address: address.to_owned(), source });
        }
    }
    Ok(())
}

/// Whether the name in the address, where there is one, leads to an address of this machine's.
///
/// # Errors
/// When it does not.
pub(crate) async fn resolves(address: &str) -> Result<(), Error> {
    for (host, _) in addresses(address, &[])? {
        if host == "localhost" || host.parse::<IpAddr>().is_ok() {
            continue;
        }
        // Any port, as above.
        let any = |at: SocketAddr| match std::net::UdpSocket::bind((at.ip(), 0)) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => Err(error),
            _ => Ok(()),
        };
        if let Err(source) = bound(&host, 0, any).await {
            return Err(Error::Bind { network: "udp", address: address.to_owned(), source });
        }
    }
    Ok(())
}

// `localhost` is taken in the families that the nameservers have.
fn addresses(address: &str, nameservers: &[String]) -> Result<Vec<(String, u16)>, Error> {
    let bad = || Error::Address(address.to_owned());
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let port: u16 = port.parse().map_err(|_| bad())?;
    if bracketed.is_none() && host.contains([':', '[', ']']) {
        return Err(bad());
    }
    let host = bracketed.unwrap_or(host);
    let ips: Vec<IpAddr> = nameservers.iter().filter_map(|n| resolv::ip(n)).collect();
    if host != "localhost" || ips.is_empty() {
        return Ok(vec![(host.to_owned(), port)]);
    }
    let mut out = Vec::new();
    if ips.iter().any(IpAddr::is_ipv4) {
        out.push((Ipv4Addr::LOCALHOST.to_string(), port));
    }
    if ips.iter().any(IpAddr::is_ipv6) {
        out.push((Ipv6Addr::LOCALHOST.to_string(), port));
    }
    Ok(out)
}

impl Bound {
    /// Serves until `stop`.
    ///
    /// # Errors
    /// When a socket is served no more: names would not be answered there, and nobody would know.
    pub(crate) async fn serve(self, stop: Stop) -> TaskResult {
        let mut all = Set::new("dns socket");
        for (socket, listener) in self.sockets {
            all.spawn(udp(Arc::new(socket), self.shared.clone()));
            all.spawn(tcp(listener, self.shared.clone()));
        }
        if let Some(path) = self.shared.resolv_conf.clone() {
            all.spawn(follow(path, self.known, self.shared.clone()));
        }
        let ended = tokio::select! {
            () = stop.cancelled() => {
                if handover::passing() {
                    self.shared.quiet().await;
                }
                Ok(())
            }
            ended = all.next() => Err(ended.map_or_else(|e| e.to_string(), |()| "it ended".to_owned())),
        };
        all.stop().await;
        ended.map_err(|why| format!("a DNS socket is served no more: {why}").into())
    }
}

/// After a look-up that took longer, as of a host with thousands of addresses, all others have their turn before the next.
const TURN: Duration = Duration::from_micros(200);

/// What is known at once.
enum Next {
    Nothing,
    Reply(Vec<u8>),
    Forward(Query),
}

impl Shared {
    // Whose query is at a nameserver would not be answered by the next program.
    async fn quiet(&self) {
        let answered = async {
            while self.forwards.available_permits() < self.most {
                tokio::time::sleep(GLANCE).await;
            }
        };
        let _ = timeout(QUIET, answered).await;
    }

    // As `handle`, and then the others' turn if it took long.
    async fn turn(&self, message: &[u8], limit: impl Fn(&Query) -> usize) -> Next {
        let started = Instant::now();
        let next = self.handle(message, limit);
        if started.elapsed() > TURN {
            tokio::task::yield_now().await;
        }
        next
    }

    fn handle(&self, message: &[u8], limit: impl Fn(&Query) -> usize) -> Next {
        let query = match wire::screen(message) {
            Screened::Ignore => return Next::Nothing,
            Screened::Refuse(reply) => return Next::Reply(reply),
            Screened::Ask(query) => query,
        };
        self.requests.with_label_values::<&str>(&[]).inc();
        let table = self.table.borrow().clone();
        let Some(table) = table else {
            if self.before_sync {
                return Next::Forward(query);
            }
            return Next::Reply(query.reply(message, Rcode::ServFail, &[], limit(&query)));
        };
        if !matches!(query.qtype, wire::A | wire::AAAA) {
            return Next::Forward(query);
        }
        match table.answer(&query, self.search.read().unwrap_or_else(PoisonError::into_inner).as_ref()) {
            Some(records) => Next::Reply(query.reply(message, Rcode::NoError, &records, limit(&query))),
            None => Next::Forward(query),
        }
    }

    async fn forward(&self, message: &[u8], query: &Query, transport: Transport) -> Vec<u8> {
        let sockets = self.upstream.sockets().min(self.most);
        let reply = match self.forwards.try_acquire_many(u32::try_from(sockets).unwrap_or(u32::MAX)) {
            Ok(_permit) => self.upstream.forward(message, transport).await,
            Err(_) => {
                self.upstream.refused();
                None
            }
        };
        reply.unwrap_or_else(|| query.reply(message, Rcode::ServFail, &[], usize::MAX))
    }
}

// Takes over what resolv.conf says from now on. It is a mount of its own in a pod, whose folder tells nothing.
async fn follow(path: PathBuf, mut known: Vec<u8>, shared: Arc<Shared>) {
    let look = |path: PathBuf| READS.run(move || bounded::usual(&path));
    // Whether it was missing at the last look, and that this was told.
    let (mut gone, mut told) = (false, false);
    loop {
        tokio::time::sleep(LOOK).await;
        let now = match look(path.clone()).await {
            Ok(Ok(now)) => now,
            Ok(Err(error)) => {
                // Whoever replaces it may take it away first.
                if std::mem::replace(&mut gone, true) && !std::mem::replace(&mut told, true) {
                    tracing::warn!(target: "dns", "{} cannot be read any more: {error}; the last resolvers stay", path.display());
                }
                continue;
            }
            Err(_) => continue,
        };
        (gone, told) = (false, false);
        if known == now {
            continue;
        }
        let resolv = resolv::parse(&String::from_utf8_lossy(&now));
        known = now;
        if resolv.nameservers.is_empty() {
            tracing::warn!(target: "dns", "{} names no nameserver any more: the last ones stay", path.display());
            continue;
        }
        tracing::info!(target: "dns", "{} has changed: resolvers are {}", path.display(), resolv.nameservers.join(", "));
        shared.upstream.renew(resolv.nameservers);
        *shared.search.write().unwrap_or_else(PoisonError::into_inner) = resolv.search;
    }
}

async fn udp(socket: Arc<Socket>, shared: Arc<Shared>) {
    // Bounded by the permits: whoever gets none ends at once.
    let mut forwards = Set::new("dns query");
    let mut buffer = [0; wire::UDP_MIN];
    loop {
        let received = tokio::select! {
            received = socket.receive(&mut buffer) => received,
            () = forwards.ended() => continue,
        };
        let (length, asked) = match received {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(target: "dns", "receive: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let message = wire::mended(&buffer[..length]);
        match shared.turn(&message, Query::udp_limit).await {
            Next::Nothing => {}
            Next::Reply(reply) => send(&socket, &reply, asked).await,
            Next::Forward(query) => {
                let (message, socket, shared) = (message.into_owned(), socket.clone(), shared.clone());
                forwards.spawn(async move {
                    let reply = shared.forward(&message, &query, Transport::Udp(query.udp_limit())).await;
                    send(&socket, &reply, asked).await;
                });
            }
        }
    }
}

async fn send(socket: &Socket, reply: &[u8], asked: Asked) {
    let to = asked.from;
    match timeout(FIRST, socket.answer(reply, &asked)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(target: "dns", "reply to {to}: {error}"),
        Err(_) => tracing::debug!(target: "dns", "reply to {to}: the socket's buffer stayed full"),
    }
}

async fn tcp(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = Set::new("dns connection");
    let most = accept::bound(CONNECTIONS);
    let places = Places::new(Bounds { all: most, share: most, asking: most, spare_busy: false });
    // A message has 64 kB at most.
    let heads = Arc::new(Heads::new(u64::MAX));
    let mut acceptor = Acceptor::new("dns");
    loop {
        tokio::select! {
            came = acceptor.next(&listener) => match came {
                Ok(Came::In(stream, peer)) => {
                    let progress = Arc::new(Progress::new(heads.clone()));
                    if let Some(place) = places.take(peer.ip(), &progress) {
                        let work = connection(stream, shared.clone(), progress.clone(), place);
                        progress.served_by(connections.spawn(work));
                    }
                }
                Ok(Came::Last(_)) => {
                    places.evict();
                }
                Err(error) => {
                    tracing::error!(target: "dns", "the DNS listener failed: {error}");
                    return;
                }
            },
            () = connections.ended() => {}
        }
    }
}

async fn connection(
    mut stream: TcpStream,
    shared: Arc<Shared>,
    progress: Arc<Progress>,
    _place: Place<IpAddr>,
) {
    let mut wait = FIRST;
    for _ in 0..QUERIES {
        let Ok(Ok(message)) = timeout(wait, upstream::read(&mut stream)).await else { return };
        progress.enter(Phase::Busy);
        let message = wire::mended(&message);
        let reply = match shared.turn(&message, |_| usize::from(u16::MAX)).await {
            Next::Nothing => None,
            Next::Reply(reply) => Some(reply),
            Next::Forward(query) => Some(shared.forward(&message, &query, Transport::Tcp).await),
        };
        if let Some(reply) = reply
            && !matches!(timeout(FIRST, upstream::write(&mut stream, &reply)).await, Ok(Ok(())))
        {
            return;
        }
        progress.enter(Phase::Idle);
        wait = IDLE;
        // The next may be there already: without this a connection has forty of them in its turn.
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::eventually::eventually;
    use crate::dns::cache;
    use crate::trouble::Troubles;

    // As it is bound where this is in resolv.conf, without a table.
    async fn bound_by(resolv_conf: &std::path::Path, text: &str) -> Bound {
        std::fs::write(resolv_conf, text).unwrap();
        let config = Config {
            address: "127.0.0.1:0".to_owned(),
            resolv_conf: resolv_conf.to_owned(),
            before_sync: false,
            parallel: false,
            adaptive: true,
            cache: cache::Config::default(),
            timeout: Duration::from_secs(1),
        };
        let (_table, current) = tokio::sync::watch::channel(None);
        bind(&config, current, &Metrics::default(), Troubles::default().reporter("dns")).await.unwrap()
    }

    #[tokio::test]
    async fn between_queries_that_came_at_once_others_have_a_turn() {
        let dir = tempfile::tempdir().unwrap();
        let bound = bound_by(&dir.path().join("resolv.conf"), "nameserver 192.0.2.1\n").await;
        let query = b"\0\x15\0\x07\x01\0\0\x01\0\0\0\0\0\0\x01a\x01b\0\0\x01\0\x01";
        let mut client = std::net::TcpStream::connect(bound.sockets[0].1.local_addr().unwrap()).unwrap();
        std::io::Write::write_all(&mut client, &query.repeat(QUERIES)).unwrap();
        let (asked, stop) = (bound.shared.requests.clone(), Stop::new());
        let served = bound.serve(stop.clone());
        let others = async {
            let (mut before, mut most) = (0, 0);
            while before < QUERIES as u64 {
                tokio::task::yield_now().await;
                let now = asked.with_label_values::<&str>(&[]).get();
                most = most.max(now - before);
                before = now;
            }
            stop.cancel();
            assert_eq!(most, 1, "in one turn");
        };
        let both = futures_util::future::join(served, others);
        timeout(Duration::from_secs(30), both).await.expect("all are answered").0.unwrap();
    }

    #[tokio::test]
    async fn a_resolv_conf_that_changes_before_it_is_first_looked_at_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let resolv_conf = dir.path().join("resolv.conf");
        let bound = bound_by(&resolv_conf, "nameserver 192.0.2.1\nsearch old\n").await;
        std::fs::write(&resolv_conf, "nameserver 192.0.2.2\nsearch new\n").unwrap();
        let (shared, stop) = (bound.shared.clone(), Stop::new());
        let served = bound.serve(stop.clone());
        let changed = async {
            eventually("it is read again", async || {
                *shared.search.read().unwrap() == Some(Search::new("new"))
            })
            .await;
            stop.cancel();
        };
        let both = futures_util::future::join(served, changed);
        timeout(Duration::from_secs(30), both).await.expect("it is read again").0.unwrap();
    }

    #[tokio::test]
    async fn a_kernel_without_ipv6_has_all_addresses_of_ipv4() {
        // What each address is answered; the one that was taken.
        let taken = async |host: &str, errors: &[(&str, i32)]| {
            bound(host, 53, |to| match errors.iter().find(|(at, _)| *at == to.ip().to_string()) {
                Some((_, error)) => Err(std::io::Error::from_raw_os_error(*error)),
                None => Ok(to.to_string()),
            })
            .await
            .map_err(|e| e.raw_os_error().unwrap())
        };
        assert_eq!(taken("", &[]).await.unwrap(), "[::]:53");
        assert_eq!(taken("", &[("::", 97)]).await.unwrap(), "0.0.0.0:53");
        assert_eq!(taken("0.0.0.0", &[]).await.unwrap(), "[::]:53");
        assert_eq!(taken("0.0.0.0", &[("::", 97)]).await.unwrap(), "0.0.0.0:53");
        assert_eq!(taken("", &[("::", 98)]).await, Err(98), "somebody has it");
        assert_eq!(taken("::", &[("::", 97)]).await, Err(97), "asked for by its name");
        assert_eq!(addresses(":53", &[]).unwrap(), [(String::new(), 53)]);
    }

    #[test]
    fn zones_of_nameservers_do_not_hide_their_family() {
        let of = |all: &[&str]| {
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            let bound = addresses("localhost:53", &all).unwrap();
            bound.into_iter().map(|(host, _)| host).collect::<Vec<_>>()
        };
        assert_eq!(of(&["10.0.0.1", "fe80::1%eth0"]), ["127.0.0.1", "::1"]);
        assert_eq!(of(&["fe80::1%2"]), ["::1"]);
        assert_eq!(of(&["10.0.0.1%2", "fe80::1%", "dns"]), ["localhost"], "these are no addresses");
    }
}
