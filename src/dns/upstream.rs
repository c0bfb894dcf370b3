//! Asking the nameservers: the client's bytes go out, a server's bytes come back.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use prometheus::{HistogramVec, IntCounterVec};
use rand::seq::SliceRandom;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};

use super::cache::Cache;
use super::itself::Itself;
use super::servers::Servers;
use super::{Config, wire};
use crate::base::lane;
use crate::base::metrics::Metrics;
use crate::trouble::{Kind, Report, Reporter};

pub(super) const PORT: u16 = 53;
/// So many queries in a row that no server answers are no lost packet.
const SILENT: u32 = 3;

/// How a query came, and so how it goes on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Transport {
    /// With the largest reply that is taken, in bytes.
    Udp(usize),
    /// One connection a query.
    Tcp,
}

/// A try with one nameserver takes this part of the limit at first, and twice as much in each round.
const FIRST_TRY: u32 = 8;
/// Between the beginnings of two rounds: nameservers that refuse at once are not asked without pause.
const ROUND: Duration = Duration::from_millis(100);

impl Transport {
    fn has_room(self, reply: &[u8]) -> bool {
        match self {
            Self::Udp(room) => reply.len() <= room,
            Self::Tcp => true,
        }
    }
}

/// The nameservers.
pub(super) struct Upstream {
    servers: Mutex<Servers>,
    itself: Itself,
    /// `DNS_FORWARD_ADAPTIVE`.
    adaptive: bool,
    cache: Option<Mutex<Cache>>,
    kept: IntCounterVec,
    parallel: bool,
    limit: Duration,
    requests: IntCounterVec,
    failures: IntCounterVec,
    duration: HistogramVec,
    /// Queries since the last that somebody answered.
    unanswered: AtomicU32,
    trouble: Reporter,
}

impl Upstream {
    /// Knows the servers; connects to nobody yet.
    pub(super) fn new(
        servers: Vec<String>,
        itself: Itself,
        config: &Config,
        metrics: &Metrics,
        trouble: Reporter,
    ) -> Self {
        Self {
            unanswered: AtomicU32::new(0),
            trouble,
            servers: Mutex::new(Servers::new(itself.without(servers))),
            itself,
            adaptive: config.adaptive,
            cache: Cache::new(config.cache).map(Mutex::new),
            kept: metrics.counter(
                "dns_kept_answers_total",
                "DNS queries answered with what a resolver of resolv.conf said before: fresh, or stale when none answers.",
                &["kind"],
            ),
            parallel: config.parallel,
            limit: config.timeout,
            requests: metrics.counter(
                "dns_upstream_requests_total",
                "DNS queries handed on to a resolver of resolv.conf.",
                &[],
            ),
            failures: metrics.counter(
                "dns_upstream_failures_total",
                "DNS queries that no resolver of resolv.conf answered.",
                &[],
            ),
            duration: metrics.histogram(
                "dns_upstream_request_duration_seconds",
                "Time until a resolver of resolv.conf answered or all had failed, in seconds.",
                &[],
                &[0.001, 0.005, 0.01, 0.1, 1.0, 5.0],
            ),
        }
    }

    /// Others from now on.
    pub(super) fn renew(&self, servers: Vec<String>) {
        let servers = self.itself.without(servers);
        self.known().renew(servers);
    }

    fn known(&self) -> MutexGuard<'_, Servers> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // What was kept, by this look at it.
    fn kept(&self, kind: &str, look: impl Fn(&Cache, Instant) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        let cache = self.cache.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = look(&cache, Instant::now())?;
        self.kept.with_label_values(&[kind]).inc();
        Some(reply)
    }

    // A larger one came over TCP, and is for those who ask that way.
    fn fresh(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        self.kept("fresh", |cache, now| cache.fresh(message, now).filter(|reply| transport.has_room(reply)))
    }

    // Whoever has no room for it is told to ask over TCP.
    fn stale(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        self.kept("stale", |cache, now| {
            let reply = cache.stale(message, now)?;
            if transport.has_room(&reply) { Some(reply) } else { wire::cut(&reply) }
        })
    }

    // Until somebody answers or the time is over.
    async fn patiently(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let until = Instant::now() + self.limit;
        let mut one = self.limit / FIRST_TRY;
        loop {
            let (round, order) = (Instant::now(), self.known().order(Instant::now()));
            if order.is_empty() {
                return None;
            }
            for server in order {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return None;
                }
                let asked = timeout(one.min(left), exchange(&server, message, transport, left)).await;
                match asked.unwrap_or_else(|late| Err(late.into())) {
                    Ok(reply) => {
                        self.known().answered(&server);
                        return Some(self.whole(&server, message, transport, reply, until).await);
                    }
                    Err(error) => {
                        tracing::debug!(target: "dns", "resolver {server} did not answer: {error}");
                        self.known().failed(&server, Instant::now());
                    }
                }
            }
            // More than the limit it never has.
            one = one.saturating_mul(2);
            tokio::time::sleep_until((round + ROUND).min(until)).await;
        }
    }

    // An answer that was cut, as it is over TCP, if the client has room for that.
    async fn whole(
        &self,
        server: &str,
        message: &[u8],
        transport: Transport,
        reply: Vec<u8>,
        until: Instant,
    ) -> Vec<u8> {
        let Transport::Udp(room) = transport else { return reply };
        if !wire::is_cut(&reply) {
            return reply;
        }
        let left = until.saturating_duration_since(Instant::now());
        match timeout(left, exchange(server, message, Transport::Tcp, left)).await {
            Ok(Ok(whole)) if whole.len() <= room => whole,
            _ => reply,
        }
    }

    /// How many sockets a query may hold at a time.
    pub(super) fn sockets(&self) -> usize {
        if self.parallel { self.known().all().len().max(1) } else { 1 }
    }

    /// Counts a query that could not be handed on because too many are under way.
    pub(super) fn refused(&self) {
        self.requests.with_label_values::<&str>(&[]).inc();
        self.failures.with_label_values::<&str>(&[]).inc();
    }

    /// The first well-formed reply, whatever it says; `None` when nobody gave one.
    pub(super) async fn forward(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        self.requests.with_label_values::<&str>(&[]).inc();
        let started = Instant::now();
        if let Some(reply) = self.fresh(message, transport) {
            return Some(reply);
        }
        let answered = if self.adaptive && !self.parallel {
            self.patiently(message, transport).await
        } else {
            self.first(message, transport).await
        };
        // What is kept helps the client, and says nothing of the nameservers.
        if answered.is_none() {
            self.missed();
        } else if self.unanswered.swap(0, Relaxed) >= SILENT {
            self.trouble.end();
        }
        let reply = match (&self.cache, answered) {
            (Some(cache), Some(reply)) => {
                let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
                cache.answered(message, &reply, Instant::now());
                Some(reply)
            }
            (Some(_), None) => self.stale(message, transport),
            (None, answered) => answered,
        };
        self.duration.with_label_values::<&str>(&[]).observe(started.elapsed().as_secs_f64());
        if reply.is_none() {
            self.failures.with_label_values::<&str>(&[]).inc();
        }
        reply
    }

    fn missed(&self) {
        if self.unanswered.fetch_add(1, Relaxed).saturating_add(1) < SILENT {
            return;
        }
        let servers = self.known().all().join(", ");
        let detail = if servers.is_empty() && self.itself.found() {
            "resolv.conf names no nameserver but this agent itself: the machine's own belong into /var/lib/istio/resolv.conf"
                .to_owned()
        } else if servers.is_empty() {
            "resolv.conf names no nameserver that names outside the mesh could be asked of".to_owned()
        } else {
            format!("no nameserver of resolv.conf answers ({servers})")
        };
        self.trouble.report(Report::new(Kind::DnsUpstreamFailed, detail));
    }

    async fn first(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let mut order = self.known().all().to_vec();
        let ask = async |server: &str| match exchange(server, message, transport, self.limit).await {
            Ok(reply) => Some(reply),
            Err(error) => {
                tracing::debug!(target: "dns", "resolver {server} did not answer: {error}");
                None
            }
        };
        if self.parallel {
            let mut all: FuturesUnordered<_> = order.iter().map(|server| ask(server)).collect();
            while let Some(reply) = all.next().await {
                if reply.is_some() {
                    return reply;
                }
            }
            return None;
        }
        order.shuffle(&mut rand::rng());
        for server in &order {
            if let Some(reply) = ask(server).await {
                return Some(reply);
            }
        }
        None
    }
}

async fn exchange(
    server: &str,
    message: &[u8],
    transport: Transport,
    limit: Duration,
) -> io::Result<Vec<u8>> {
    match transport {
        Transport::Udp(size) => {
            let socket = timeout(limit, udp(server)).await??;
            let until = Instant::now() + limit;
            timeout_at(until, socket.send(message)).await??;
            receive(&socket, message, size, until).await
        }
        Transport::Tcp => {
            // A resolver given by name is looked up within the same limit.
            let connected = async { TcpStream::connect(address(server).await?).await };
            let mut stream = timeout(limit, connected).await??;
            let until = Instant::now() + limit;
            timeout_at(until, write(&mut stream, message)).await??;
            let reply = timeout_at(until, read(&mut stream)).await??;
            let reply = wire::mended_reply(&reply);
            if wire::well_formed(&reply) && wire::is_reply(&reply, message) {
                Ok(reply.into_owned())
            } else {
                Err(malformed())
            }
        }
    }
}

// The reply to this message, of so many bytes at most. Neither the limit nor others wait where datagrams that are not ours
// come without a pause.
async fn receive(socket: &UdpSocket, message: &[u8], size: usize, until: Instant) -> io::Result<Vec<u8>> {
    loop {
        let ready = async {
            tokio::task::consume_budget().await;
            something(socket).await
        };
        timeout_at(until, ready).await??;
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Not before there is something: hundreds of queries wait, and each may be answered with 64 kB.
        let mut reply = vec![0; size];
        let length = match socket.try_recv(&mut reply) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            received => received?,
        };
        let got = wire::mended_reply(&reply[..length]);
        if !wire::well_formed(&got) {
            return Err(malformed());
        }
        // Any other belongs to an earlier question, or to nobody's.
        if wire::is_reply(&got, message) {
            return Ok(got.into_owned());
        }
    }
}

// Until there is a datagram. That nobody listens there is an error of the socket, which does not make it readable.
async fn something(socket: &UdpSocket) -> io::Result<()> {
    loop {
        let ready = socket.ready(Interest::READABLE | Interest::ERROR).await?;
        if ready.is_error() {
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
            // Told already: it is not to wake anybody again.
            let _told =
                socket.try_io(Interest::ERROR, || io::Result::<()>::Err(io::ErrorKind::WouldBlock.into()));
        }
        if ready.is_readable() || ready.is_read_closed() {
            return Ok(());
        }
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the reply is cut off or not for this query")
}

async fn address(server: &str) -> io::Result<SocketAddr> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "the resolver's name has no address");
    lane::NAMES.look_up(server, PORT).await?.into_iter().next().ok_or_else(none)
}

async fn udp(server: &str) -> io::Result<UdpSocket> {
    let to = address(server).await?;
    let any: SocketAddr =
        if to.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(to).await?;
    Ok(socket)
}

/// Writes a message with its length before it.
pub(super) async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| malformed())?;
    let mut framed = Vec::with_capacity(message.len() + 2);
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(message);
    stream.write_all(&framed).await
}

/// Reads a message with its length before it.
pub(super) async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::beside::turns_of_others;
    use crate::dns::cache;
    use crate::trouble::Troubles;

    // Nobody who could be asked, and everything kept.
    fn upstream(change: impl Fn(&mut Config)) -> (Upstream, Troubles) {
        let kept = cache::Config { fresh: Duration::from_secs(60), stale: Duration::from_secs(60) };
        let mut config = Config {
            address: String::new(),
            resolv_conf: "resolv.conf".into(),
            before_sync: false,
            parallel: false,
            adaptive: false,
            cache: kept,
            timeout: Duration::from_millis(10),
        };
        change(&mut config);
        let troubles = Troubles::default();
        (
            Upstream::new(
                Vec::new(),
                Itself::default(),
                &config,
                &Metrics::default(),
                troubles.reporter("dns"),
            ),
            troubles,
        )
    }

    fn query() -> Vec<u8> {
        b"\0\x09\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01".to_vec()
    }

    // So many addresses, as they come over TCP.
    fn reply(records: u8) -> Vec<u8> {
        let mut out = query();
        (out[2], out[3], out[7]) = (0x81, 0x80, records);
        for last in 0..records {
            out.extend_from_slice(b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0");
            out.push(last);
        }
        out
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_over_tcp_is_told_over_udp_only_where_there_is_room() {
        let (upstream, _troubles) = upstream(|_| ());
        let large = reply(40);
        let kept = || upstream.cache.as_ref().unwrap().lock().unwrap();
        kept().answered(&query(), &large, Instant::now());
        assert_eq!(upstream.forward(&query(), Transport::Tcp).await.as_ref(), Some(&large));
        assert_eq!(upstream.forward(&query(), Transport::Udp(1232)).await.as_ref(), Some(&large));
        let cut = upstream.forward(&query(), Transport::Udp(512)).await.unwrap();
        assert!(wire::is_cut(&cut) && wire::well_formed(&cut), "{cut:?}");
        assert_eq!(cut.len(), query().len(), "its question and nothing else");
        // That an answer was cut says nothing of what is there.
        kept().answered(&query(), &cut, Instant::now());
        assert_eq!(upstream.forward(&query(), Transport::Tcp).await, Some(large));
    }

    #[tokio::test(start_paused = true)]
    async fn nameservers_that_refuse_at_once_are_asked_for_as_long_as_the_limit_says() {
        let limit = Duration::from_secs(600);
        let (upstream, _troubles) = upstream(|config| (config.adaptive, config.timeout) = (true, limit));
        // A socket refuses to be connected there at once.
        upstream.renew(vec!["255.255.255.255".to_owned()]);
        let began = Instant::now();
        assert_eq!(upstream.forward(&query(), Transport::Udp(512)).await, None);
        assert!(began.elapsed() >= limit, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_flood_of_other_replies_holds_up_neither_others_nor_the_limit() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(server.local_addr().unwrap()).await.unwrap();
        server.connect(client.local_addr().unwrap()).await.unwrap();
        let (message, mut other) = (query(), query());
        other[0] = 1;
        // More than a turn brings, and less than the socket holds; ours is the last.
        for _ in 0..200 {
            server.send(&other).await.unwrap();
        }
        server.send(&message).await.unwrap();
        client.readable().await.unwrap();
        let replied = receive(&client, &message, 512, Instant::now() + Duration::from_secs(60));
        let (reply, turns) = turns_of_others(replied).await;
        assert_eq!(reply.unwrap(), message);
        assert!(turns > 0);
        // What comes without a pause comes after the limit, too.
        server.send(&message).await.unwrap();
        client.readable().await.unwrap();
        let late = receive(&client, &message, 512, Instant::now()).await;
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_nameserver_that_nobody_runs_is_known_at_once() {
        let gone = UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(gone).await.unwrap();
        client.send(&query()).await.unwrap();
        let refused = receive(&client, &query(), 512, Instant::now() + Duration::from_secs(60)).await;
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        // The error is told once: whoever waits again waits for a datagram.
        let late = receive(&client, &query(), 512, Instant::now() + Duration::from_millis(20)).await;
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn a_kept_answer_says_nothing_of_the_nameservers() {
        let (upstream, troubles) = upstream(|_| ());
        let cache = upstream.cache.as_ref().unwrap();
        cache.lock().unwrap().answered(&query(), &reply(1), Instant::now());
        tokio::time::advance(Duration::from_secs(61)).await;
        for _ in 0..=SILENT {
            assert!(upstream.forward(&query(), Transport::Udp(512)).await.is_some(), "it is kept");
        }
        assert_eq!(troubles.verdict().map(|trouble| trouble.kind), Some(Kind::DnsUpstreamFailed));
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_do_not_answer_are_named_as_resolv_conf_has_them_now() {
        for parallel in [false, true] {
            let (upstream, troubles) =
                upstream(|config| (config.adaptive, config.parallel) = (true, parallel));
            upstream.renew(vec!["192.0.2.9".to_owned()]);
            for _ in 0..SILENT {
                upstream.missed();
            }
            let verdict = troubles.verdict().unwrap();
            assert!(verdict.detail.contains("(192.0.2.9)"), "{verdict:?}");
        }
    }
}
