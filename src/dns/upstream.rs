//! Asking the nameservers: the client's bytes go out, a server's bytes come back.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use prometheus::{HistogramVec, IntCounterVec};
use rand::seq::SliceRandom;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};

use super::wire;
use crate::base::lane;
use crate::base::metrics::Metrics;

const PORT: u16 = 53;

/// How a query came, and so how it goes on.
#[derive(Debug, Clone, Copy)]
pub enum Transport {
    /// With the largest reply that is taken, in bytes.
    Udp(usize),
    /// One connection a query.
    Tcp,
}

/// The nameservers.
pub struct Upstream {
    servers: Vec<String>,
    parallel: bool,
    limit: Duration,
    requests: IntCounterVec,
    failures: IntCounterVec,
    duration: HistogramVec,
}

impl Upstream {
    /// Knows the servers; connects to nobody yet.
    pub fn new(servers: Vec<String>, parallel: bool, limit: Duration, metrics: &Metrics) -> Self {
        Self {
            servers,
            parallel,
            limit,
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

    /// Counts a query that could not be handed on because too many are under way.
    pub fn refused(&self) {
        self.requests.with_label_values::<&str>(&[]).inc();
        self.failures.with_label_values::<&str>(&[]).inc();
    }

    /// The first well-formed reply, whatever it says; `None` when nobody gave one.
    pub async fn forward(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        self.requests.with_label_values::<&str>(&[]).inc();
        let started = Instant::now();
        let reply = self.first(message, transport).await;
        self.duration.with_label_values::<&str>(&[]).observe(started.elapsed().as_secs_f64());
        if reply.is_none() {
            self.failures.with_label_values::<&str>(&[]).inc();
        }
        reply
    }

    async fn first(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let mut order: Vec<&str> = self.servers.iter().map(String::as_str).collect();
        let ask = async |server: &str| match exchange(server, message, transport, self.limit).await {
            Ok(reply) => Some(reply),
            Err(error) => {
                tracing::debug!(target: "dns", "resolver {server} did not answer: {error}");
                None
            }
        };
        if self.parallel {
            let mut all: FuturesUnordered<_> = order.into_iter().map(ask).collect();
            while let Some(reply) = all.next().await {
                if reply.is_some() {
                    return reply;
                }
            }
            return None;
        }
        order.shuffle(&mut rand::rng());
        for server in order {
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
            let mut reply = vec![0; size];
            loop {
                let length = timeout_at(until, socket.recv(&mut reply)).await??;
                let got = &reply[..length];
                if !wire::well_formed(got) {
                    return Err(malformed());
                }
                // Another ID belongs to an earlier question.
                if wire::id(got) == wire::id(message) {
                    reply.truncate(length);
                    return Ok(reply);
                }
            }
        }
        Transport::Tcp => {
            // A resolver given by name is looked up within the same limit.
            let connected = async { TcpStream::connect(address(server).await?).await };
            let mut stream = timeout(limit, connected).await??;
            let until = Instant::now() + limit;
            timeout_at(until, write(&mut stream, message)).await??;
            let reply = timeout_at(until, read(&mut stream)).await??;
            if wire::well_formed(&reply) && wire::id(&reply) == wire::id(message) {
                Ok(reply)
            } else {
                Err(malformed())
            }
        }
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the reply is cut off or not for this query")
}

async fn address(server: &str) -> io::Result<SocketAddr> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "the resolver's name has no address");
    lane::look_up(server, PORT).await?.into_iter().next().ok_or_else(none)
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
pub async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| malformed())?;
    let mut framed = Vec::with_capacity(message.len() + 2);
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(message);
    stream.write_all(&framed).await
}

/// Reads a message with its length before it.
pub async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}
