//! The HTTP/1.1 server behind the token service: the listener, its connections, and what bounds them.
//!
//! One task accepts and watches; each connection is a task of its set. There is no timer for each
//! connection: a sweep every few seconds closes those whose request head does not come to an end, those
//! whose reader stands still, and those idle for longer than `Limits::idle`. At the limit of connections
//! the one that is idle longest makes place, so a flood of silent connections cannot lock the others out.
//!
//! What is answered is a `Site`'s business; what Go's server says by itself to requests that cannot be
//! meant is said here (`rules`, `refusal`). Knows nothing of Istio; uses `base`, and `fetch` for escapes.

pub(crate) mod path;
mod refusal;
pub(crate) mod respond;
mod rules;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderValue, Request, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use self::respond::Answer;
use crate::base::tasks::{Stop, TaskResult};

/// What a server may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Connections at a time.
    pub(crate) connections: usize,
    /// How long a connection may be kept without a request; `None`: as long as there is room.
    pub(crate) idle: Option<Duration>,
}

/// What is served.
pub(crate) trait Site: Send + Sync + 'static {
    /// Its name in log lines.
    const NAME: &'static str;

    /// The answer to a request that can be meant.
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        peer: SocketAddr,
        conn: Arc<ConnState>,
    ) -> impl Future<Output = Answer> + Send;
}

/// A request head, from its first byte to its last. Go has no limit; nginx and hyper take 30 to 60 s.
const HEAD: Duration = Duration::from_secs(30);
/// How long an answer may wait for its reader to take a byte.
const STALLED: Duration = Duration::from_secs(60);
/// Between two sweeps; a limit above is overrun by at most this.
const SWEEP: Duration = Duration::from_secs(5);
/// Go's limit of a request head (`DefaultMaxHeaderBytes`, 1 MiB, with the same slack of 4 kB).
const HEAD_BYTES: usize = (1 << 20) + 4096;
/// Header fields of a request; Go counts only bytes.
const HEAD_FIELDS: usize = 1000;
/// What answers under way get at the very end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Opens the port on the address, or, for the unspecified one of IPv6, on all addresses of both families.
pub(crate) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    match open(addr) {
        // A kernel without IPv6.
        Err(error)
            if addr.ip().is_unspecified()
                && matches!(error.raw_os_error(), Some(97 /* EAFNOSUPPORT */ | 99 /* EADDRNOTAVAIL */)) =>
        {
            open(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), addr.port()))
        }
        other => other,
    }
}

fn open(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    TcpListener::from_std(socket.into())
}

const IDLE: u8 = 0;
const HEADING: u8 = 1;
const BUSY: u8 = 2;

/// What the sweep needs to know of a connection.
#[derive(Debug)]
pub(crate) struct ConnState {
    epoch: Instant,
    phase: AtomicU8,
    /// Milliseconds since `epoch` at which the phase began.
    since: AtomicU64,
    /// Milliseconds since `epoch` at which the head of the latest request began.
    began: AtomicU64,
    /// Milliseconds since `epoch` at which a write first found no room, plus one; 0: none waits.
    blocked: AtomicU64,
    /// Bytes the kernel has taken.
    written: AtomicU64,
}

impl ConnState {
    fn new() -> Self {
        Self {
            epoch: Instant::now(),
            phase: AtomicU8::new(IDLE),
            since: AtomicU64::new(0),
            began: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn enter(&self, phase: u8) {
        self.phase.store(phase, Relaxed);
        self.since.store(self.now(), Relaxed);
    }

    /// A request has been read and is being answered.
    pub(crate) fn busy(&self) {
        self.enter(BUSY);
    }

    /// Its answer is done with.
    pub(crate) fn idle(&self) {
        self.enter(IDLE);
    }

    fn idle_for(&self) -> Option<u64> {
        (self.phase.load(Relaxed) == IDLE).then(|| self.now().saturating_sub(self.since.load(Relaxed)))
    }

    /// Since the first byte of the request that is being read or answered.
    pub(crate) fn request_age(&self) -> Duration {
        Duration::from_millis(self.now().saturating_sub(self.began.load(Relaxed)))
    }

    fn overdue(&self, idle: Option<Duration>) -> Option<&'static str> {
        let now = self.now();
        let over = |since: u64, limit: Duration| u128::from(now.saturating_sub(since)) > limit.as_millis();
        if self.phase.load(Relaxed) == HEADING && over(self.since.load(Relaxed), HEAD) {
            return Some("its request head did not come to an end");
        }
        let kept = self.phase.load(Relaxed) == IDLE;
        if kept && idle.is_some_and(|limit| over(self.since.load(Relaxed), limit)) {
            return Some("it was idle for too long");
        }
        match self.blocked.load(Relaxed) {
            0 => None,
            at if over(at - 1, STALLED) => Some("it stopped reading its answer"),
            _ => None,
        }
    }
}

/// A connection's bytes, seen going by.
struct Watched {
    io: TcpStream,
    state: Arc<ConnState>,
}

impl Watched {
    /// The text for a refusal of hyper's, which it makes while a request is still being read.
    fn refusal(&self, out: &[u8]) -> Option<&'static [u8]> {
        if self.state.phase.load(Relaxed) == BUSY { None } else { refusal::spelled_out(out) }
    }

    fn wrote(&self, result: &Poll<io::Result<usize>>) {
        match result {
            Poll::Ready(Ok(n)) => {
                self.state.written.fetch_add(*n as u64, Relaxed);
                self.state.blocked.store(0, Relaxed);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => {
                let now = self.state.now() + 1;
                let _ = self.state.blocked.compare_exchange(0, now, Relaxed, Relaxed);
            }
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        if buf.filled().len() > before && self.state.phase.load(Relaxed) == IDLE {
            if self.state.written.load(Relaxed) == 0 {
                refusal::readable_preface(&mut buf.filled_mut()[before..]);
            }
            self.state.enter(HEADING);
            self.state.began.store(self.state.now(), Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = match self.refusal(buf) {
            // Short, and the first to go into its socket's buffer, or nearly: it goes whole.
            Some(text) => Pin::new(&mut self.io).poll_write(cx, text).map_ok(|_| buf.len()),
            None => Pin::new(&mut self.io).poll_write(cx, buf),
        };
        self.wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = bufs {
            return self.poll_write(cx, only);
        }
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.wrote(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Serves until `stop`; takes no new connection from `closing` on.
pub(crate) async fn serve<S: Site>(
    mut listener: Option<TcpListener>,
    site: Arc<S>,
    limits: Limits,
    closing: Stop,
    stop: Stop,
) -> TaskResult {
    let mut tasks = JoinSet::new();
    let mut table: Vec<(Arc<ConnState>, AbortHandle)> = Vec::new();
    let mut sweep = tokio::time::interval(SWEEP);
    sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut pause = Duration::ZERO;
    loop {
        if tasks.len() >= limits.connections {
            evict(&table);
        }
        let room = tasks.len() < limits.connections;
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = closing.cancelled(), if listener.is_some() => listener = None,
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {
                table.retain(|(_, handle)| !handle.is_finished());
            }
            _ = sweep.tick(), if !table.is_empty() => close_overdue(&table, S::NAME, limits.idle),
            accepted = accept(listener.as_ref(), pause), if listener.is_some() && room => match accepted {
                Ok((io, peer)) => {
                    pause = Duration::ZERO;
                    let state = Arc::new(ConnState::new());
                    let task = connection(io, peer, state.clone(), site.clone(), stop.clone());
                    table.push((state, tasks.spawn(task)));
                }
                Err(error) if fatal(&error) => {
                    return Err(format!("the {}'s listener failed: {error}", S::NAME).into());
                }
                Err(error) => {
                    // Most likely out of descriptors; wait for some to come back.
                    pause = (pause * 2).clamp(Duration::from_millis(5), Duration::from_secs(1));
                    tracing::warn!("{} cannot accept a connection, next try in {pause:?}: {error}", S::NAME);
                }
            }
        }
    }
    drop(listener);
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_ANSWERS, all).await.is_err() {
        tracing::info!("{}: requests still under way at the end were dropped", S::NAME);
    }
    Ok(())
}

async fn accept(listener: Option<&TcpListener>, pause: Duration) -> io::Result<(TcpStream, SocketAddr)> {
    if !pause.is_zero() {
        tokio::time::sleep(pause).await;
    }
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// EBADF, EINVAL, ENOTSOCK: the socket itself is gone. All else passes.
fn fatal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(9 | 22 | 88))
}

fn evict(table: &[(Arc<ConnState>, AbortHandle)]) {
    // From the newest to the oldest: of several that came in one millisecond the last found is the oldest.
    let idle = table.iter().rev().filter(|(_, h)| !h.is_finished());
    let longest = idle.filter_map(|(s, h)| s.idle_for().map(|t| (t, h))).max_by_key(|(t, _)| *t);
    if let Some((_, handle)) = longest {
        handle.abort();
    }
}

fn close_overdue(table: &[(Arc<ConnState>, AbortHandle)], name: &str, idle: Option<Duration>) {
    for (state, handle) in table {
        if let Some(why) = state.overdue(idle) {
            tracing::debug!("{name} closes a connection: {why}");
            handle.abort();
        }
    }
}

async fn answer<S: Site>(
    site: Arc<S>,
    request: Request<Incoming>,
    peer: SocketAddr,
    conn: Arc<ConnState>,
) -> Result<Answer, Infallible> {
    conn.busy();
    let mut answer = match rules::malformed(&request) {
        Some(mut refused) => {
            refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            refused
        }
        None => site.answer(request, peer, conn.clone()).await,
    };
    answer.body_mut().conn = Some(conn);
    Ok(answer)
}

async fn connection<S: Site>(
    io: TcpStream,
    peer: SocketAddr,
    state: Arc<ConnState>,
    site: Arc<S>,
    stop: Stop,
) {
    let _ = io.set_nodelay(true);
    let io = TokioIo::new(Watched { io, state: state.clone() });
    let service = {
        let (state, site) = (state.clone(), site.clone());
        service_fn(move |request| answer(site.clone(), request, peer, state.clone()))
    };
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .half_close(true)
        .header_read_timeout(None)
        .max_headers(HEAD_FIELDS)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES + 4096);
    let mut conn = pin!(builder.serve_connection(io, service));
    let mut stopping = false;
    let mut stopped = pin!(stop.cancelled());
    std::future::poll_fn(|cx| {
        if !stopping && stopped.as_mut().poll(cx).is_ready() {
            stopping = true;
            conn.as_mut().graceful_shutdown();
        }
        conn.as_mut().poll(cx).map(drop)
    })
    .await;
}

#[cfg(test)]
mod tests;
