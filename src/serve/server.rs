//! The listener, its connections, and what bounds them.
//!
//! One task accepts and watches; each connection is a task of its set. There is no timer for each
//! connection: a sweep every four seconds (`base::slack`) closes those whose request head does not come to an end, those
//! whose reader stands still, and those idle for longer than the site allows; at the bound the one
//! that is worth least makes room (`net::places` has the order), so a flood of any kind cannot lock the kubelet
//! out. This pod's own clients have places of their own, and so has everybody else.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::respond::{Answer, error};
use super::watched::{ConnState, Watched, overdue};
use super::{Limits, Site, rules};
use crate::base::handover;
use crate::base::pressure::Short;
use crate::base::slack;
use crate::base::tasks::{Panicked, Set, Stop, TaskResult, caught};
use crate::net::accept::{Acceptor, Came};
use crate::net::fair::Caller;
use crate::net::listen;
use crate::net::places::{Bounds, Place, Places, relieve};
use crate::net::progress::{Heads, Phase};

/// Bytes of all heads together, unfinished ones and those whose buffers are kept: three of the largest. A usual one has
/// half a kB. Buffers are up to twice as large as what is in them.
pub(super) const HEADS: u64 = 3 << 20;
/// Clients that the kernel keeps until they are accepted.
const BACKLOG: i32 = 4096;
/// Go's limit of a request head (`DefaultMaxHeaderBytes`, 1 MiB, with the same slack of 4 kB).
const HEAD_BYTES: usize = (1 << 20) + 4096;
/// Header fields of a request; Go counts only bytes.
const HEAD_FIELDS: usize = 1000;
/// What answers under way get at the very end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// A client that is still sending when its connection is closed would be told of a reset in place of its
/// answer: what it sends is taken for so long (Go's figure), and so much of it.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_BYTES: u64 = 1 << 20;
/// How long the end waits for the request of a connection that was taken before it.
const LAST: Duration = Duration::from_millis(100);
/// What is read of a body that nobody wants, as Go's server does; the connection of a longer one is closed.
const UNREAD_BYTES: usize = 256 * 1024;
/// For how long it is waited for. Go has no limit.
const UNREAD: Duration = Duration::from_secs(5);
/// What a client is told for whom there is no descriptor.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n503 the agent has no file descriptor left";

/// Opens the port on the address, or, for the unspecified one of IPv6, on all addresses of both families.
pub(crate) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let key = format!("tcp {addr}");
    let listener = match handover::take(&key) {
        Some((_, fd)) => {
            let listener = std::net::TcpListener::from(fd);
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)?
        }
        None => bind(addr)?,
    };
    handover::offer(key, "", &listener);
    Ok(listener)
}

fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let open = |addr| listen::tcp(addr, BACKLOG);
    if addr.ip() == Ipv6Addr::UNSPECIFIED { listen::everywhere(addr.port(), open) } else { open(addr) }
}

/// Serves until `stop`; takes no new connection from `closing` on.
pub(crate) async fn serve<S: Site>(
    mut listener: Option<TcpListener>,
    site: Arc<S>,
    limits: Limits,
    closing: Stop,
    stop: Stop,
) -> TaskResult {
    let mut tasks = Set::new(S::NAMES.connection);
    let most = limits.connections;
    // One origin elsewhere has half; here it makes no difference who it is.
    let bounds = Bounds { all: most, share: most, asking: limits.asking.min(most), spare_busy: false };
    let places = [Places::new(bounds), Places::new(Bounds { share: most / 2, ..bounds })];
    let heads = Arc::new(Heads::new(HEADS));
    let (mut acceptor, mut short) = (Acceptor::new(S::NAMES.listener), Short::new());
    let mut sweep = pin!(sleep_until(next_sweep()));
    let mut unread = 0;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = closing.cancelled(), if listener.is_some() => listener = None,
            () = tasks.ended() => {}
            () = &mut sweep, if !tasks.is_empty() => {
                places.iter().for_each(|p| close_overdue::<S>(p, limits.idle));
                sweep.set(sleep_until(next_sweep()));
            }
            () = short.told() => {
                places.iter().for_each(|side| _ = side.shed());
            }
            came = next(&mut acceptor, listener.as_ref()) => match came {
                Ok(Came::In(io, peer)) => {
                    let caller = Caller { here: is_here(&io, peer.ip()), origin: origin(peer.ip()) };
                    let state = Arc::new(ConnState::new(heads.clone(), caller));
                    let side = &places[usize::from(!caller.here)];
                    if let Some(place) = side.take(caller.origin, &state.progress) {
                        let work = connection(io, peer, state.clone(), place, site.clone(), stop.clone());
                        state.progress.served_by(tasks.spawn(work));
                    }
                    relieve(&heads, &places);
                    site.connections(places.iter().map(Places::len).sum());
                    // What they have sent is read before so many others come that they have to make room unread.
                    unread += 1;
                    if unread >= most / 4 {
                        unread = 0;
                        tokio::task::yield_now().await;
                    }
                }
                Ok(Came::Last(io)) => {
                    let _ = io.try_write(FULL);
                    drop(io);
                    // From the fuller side; descriptors come back as its task ends.
                    let [here, elsewhere] = &places;
                    if here.len() >= elsewhere.len() { here.evict() } else { elsewhere.evict() };
                }
                Err(error) => return Err(format!("the {}'s listener failed: {error}", S::NAMES.server).into()),
            },
            () = heads.too_much() => relieve(&heads, &places),
        }
    }
    drop(listener);
    if tokio::time::timeout(LAST_ANSWERS, tasks.all_ended()).await.is_err() {
        tracing::info!("{}: unfinished requests were dropped at the end", S::NAMES.server);
    }
    Ok(())
}

/// A limit above is overrun by at most the time to the next sweep.
fn next_sweep() -> Instant {
    slack::point(Instant::now() + Duration::from_millis(1))
}

async fn next(
    acceptor: &mut Acceptor,
    listener: Option<&TcpListener>,
) -> io::Result<Came<TcpStream, SocketAddr>> {
    match listener {
        Some(listener) => acceptor.next(listener).await,
        None => std::future::pending().await,
    }
}

/// Whether a client is of this pod: on loopback, or on the address that it asks, which only the machine that has
/// it can send from.
fn is_here(io: &TcpStream, peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback() || io.local_addr().is_ok_and(|own| own.ip() == peer)
}

/// Who shares: an IPv4 address; of IPv6 the 64 bits that one host has.
fn origin(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

fn close_overdue<S: Site>(places: &Places<IpAddr>, idle: Option<Duration>) {
    for progress in places.each() {
        if let Some(why) = overdue(&progress, idle) {
            tracing::debug!("{} closes a connection: {why}", S::NAMES.server);
            progress.cut();
        }
    }
}

async fn connection<S: Site>(
    io: TcpStream,
    peer: SocketAddr,
    state: Arc<ConnState>,
    place: Place<IpAddr>,
    site: Arc<S>,
    stop: Stop,
) {
    let _ = io.set_nodelay(true);
    let mut io = Watched::new(io, state.clone());
    // Until there is a request to answer, nothing is spent on a connection but what it has sent.
    tokio::select! {
        there = io.request() => if !there { return },
        // Who has connected has mostly asked by now, and would be answered by a reset.
        () = stop.cancelled() => match tokio::time::timeout(LAST, io.request()).await {
            Ok(true) => {}
            _ => return,
        },
    }
    // Of thousands that ask in one moment each would hold what an answer needs before one that made room is gone.
    if place.asks() {
        tokio::task::yield_now().await;
    }
    // Its place outlives this, and is given up with what became of it.
    Box::pin(answered(io, peer, state.clone(), site, stop)).await;
}

/// What takes a moment of the one thread is done one at a time over all connections, and between two of these everybody
/// else has a turn: of four hundred connections it would be a second. Each connection waits with one, so there are no
/// more than connections; nobody has a turn for longer than one round of the runtime, so the wait needs no limit, and it
/// ends with its connection.
static TURN: Semaphore = Semaphore::const_new(1);

/// Waits for its turn: what is done until the next wait.
pub(crate) async fn turn(conn: &ConnState) {
    conn.progress.enter(Phase::Waiting);
    // It is never closed.
    let _turn = TURN.acquire().await;
    tokio::task::yield_now().await;
    conn.busy();
}

async fn answer<S: Site>(
    site: Arc<S>,
    request: Request<Incoming>,
    peer: SocketAddr,
    conn: Arc<ConnState>,
) -> Result<Answer, Infallible> {
    conn.busy();
    // One that was there before another was answered (pipelined): the library would answer all of a read in one go, and
    // sixteen reads.
    if conn.follows() {
        turn(&conn).await;
    }
    let (mut head, mut body) = request.into_parts();
    if !body.is_end_stream() {
        let_go(&mut head);
    }
    let request = Request::from_parts(head, ());
    if let Some(mut refused) = rules::malformed(&request) {
        if !body.is_end_stream() {
            conn.leaves_unread();
        }
        refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        refused.body_mut().conn = Some(conn);
        return Ok(refused);
    }
    let mut answer = match rules::asterisk(&request, S::VARIES) {
        Some(answer) => answer,
        None => match caught(S::NAMES.request, site.answer(&request, &mut body, peer, &conn)).await {
            Ok(answer) => answer,
            Err(Panicked) => error(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error"),
        },
    };
    // One that waits for a word to send its body has not begun.
    let waits = request.headers().contains_key(header::EXPECT);
    let closes = answer.headers().contains_key(header::CONNECTION);
    if !body.is_end_stream() && (waits || closes || !read_off(&mut body, &conn, UNREAD).await) {
        conn.leaves_unread();
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer.body_mut().conn = Some(conn);
    Ok(answer)
}

// What a head says is a part of the buffer that it was read into, 8 kB or more. Its body is read into the same one, if
// nobody else holds a part of it; otherwise into another of that size.
fn let_go(head: &mut Parts) {
    for value in head.headers.values_mut() {
        let mut own = HeaderValue::from_bytes(value.as_bytes()).expect("it was one");
        own.set_sensitive(value.is_sensitive());
        *value = own;
    }
    // Whatever cannot be spelled again stays.
    if let Ok(own) = Uri::try_from(head.uri.to_string()) {
        head.uri = own;
    }
}

/// Takes what is left of a body that nobody wants, so that the next request can be read; `false` when it is too
/// long or too slow for that.
pub(crate) async fn read_off(body: &mut Incoming, conn: &ConnState, within: Duration) -> bool {
    conn.progress.enter(Phase::Body);
    conn.piece();
    let rest = async {
        let mut left = UNREAD_BYTES;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            conn.piece();
            left = match left.checked_sub(frame.data_ref().map_or(0, |d| d.len())) {
                Some(left) => left,
                None => return false,
            };
        }
        true
    };
    let whole = tokio::time::timeout(within, rest).await.unwrap_or(false);
    conn.busy();
    whole
}

async fn answered<S: Site>(io: Watched, peer: SocketAddr, state: Arc<ConnState>, site: Arc<S>, stop: Stop) {
    let seen = state.clone();
    let mut given_up = pin!(io.io().given_up(state.progress.clone(), move || seen.written()));
    let io = TokioIo::new(io);
    let service = {
        let (state, site) = (state.clone(), site.clone());
        service_fn(move |request| Box::pin(answer(site.clone(), request, peer, state.clone())))
    };
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .half_close(true)
        .header_read_timeout(None)
        // As Go spells them: scripts look for lines of an answer.
        .title_case_headers(true)
        .max_headers(HEAD_FIELDS)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES + 4096);
    let mut conn = Some(builder.serve_connection(io, service));
    let mut quit = false;
    let mut stopping = false;
    let mut stopped = pin!(stop.cancelled());
    std::future::poll_fn(|cx| {
        if given_up.as_mut().poll(cx).is_ready() {
            conn = None;
        }
        let Some(conn) = &mut conn else { return std::task::Poll::Ready(()) };
        // First, so that a request which is there already is read: hyper closes a connection that has read none.
        let mut result = conn.poll_without_shutdown(cx);
        if !stopping && result.is_pending() && stopped.as_mut().poll(cx).is_ready() {
            stopping = true;
            std::pin::Pin::new(&mut *conn).graceful_shutdown();
            result = conn.poll_without_shutdown(cx);
        }
        // Once the kernel has the answer it is delivered even if this process ends; a caller that is
        // gone does not keep the agent from quitting.
        if !quit && (state.quit_answered() || (result.is_ready() && state.quit_asked())) {
            quit = true;
            site.quit();
        }
        result.map(drop)
    })
    .await;
    let Some(conn) = conn.take() else { return };
    let mut io = conn.into_parts().io.into_inner();
    let _ = io.shutdown().await;
    if state.unread() {
        // None of it is held.
        state.progress.enter(Phase::Body);
        let mut rest = tokio::io::AsyncReadExt::take(&mut io, LINGER_BYTES);
        // On the heap: a connection has no room for it while nothing is taken.
        let mut sink = vec![0; 4096];
        let taken = async { while rest.read(&mut sink).await.is_ok_and(|n| n > 0) {} };
        let _ = tokio::time::timeout(LINGER, taken).await;
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use bytes::{Bytes, BytesMut};

    use super::*;
    use crate::base::eventually::eventually;
    use crate::serve::Names;
    use crate::serve::respond::status;

    #[test]
    fn a_host_is_an_address_or_the_64_bits_that_it_has() {
        let of = |text: &str| origin(text.parse().unwrap()).to_string();
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(of("2001:db8:1:2::"), "2001:db8:1:2::");
        assert_eq!(of("2001:db8:1:3::"), "2001:db8:1:3::");
        assert_eq!((of("10.0.0.1"), of("::ffff:10.0.0.1")), ("10.0.0.1".to_owned(), "10.0.0.1".to_owned()));
    }

    /// Notes in which turn each request is answered.
    #[derive(Default)]
    struct Noting {
        turn: AtomicUsize,
        answered: Mutex<Vec<usize>>,
    }

    impl Site for Noting {
        const NAMES: Names = Names { server: "", listener: "", connection: "", request: "" };

        async fn answer(
            self: &Arc<Self>,
            _: &Request<()>,
            _: &mut Incoming,
            _: SocketAddr,
            _: &Arc<ConnState>,
        ) -> Answer {
            self.answered.lock().unwrap().push(self.turn.load(Relaxed));
            status(StatusCode::OK)
        }
    }

    /// A client that has sent this before anybody looks.
    async fn sent(bytes: &[u8], heads: &Arc<Heads>) -> (TcpStream, Watched, SocketAddr, Arc<ConnState>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (io, peer) = listener.accept().await.unwrap();
        client.write_all(bytes).await.unwrap();
        let caller = Caller { here: true, origin: Ipv4Addr::LOCALHOST.into() };
        let state = Arc::new(ConnState::new(heads.clone(), caller));
        let mut io = Watched::new(io, state.clone());
        assert!(io.request().await);
        (client, io, peer, state)
    }

    #[tokio::test]
    async fn between_requests_that_came_at_once_others_have_a_turn() {
        // Of the long ones each is a read.
        for (pad, count) in [(0, 50), (4096 - 34, 10)] {
            let request = format!("GET / HTTP/1.1\r\nHost: a\r\nPad: {}\r\n\r\n", "a".repeat(pad));
            let all = request.repeat(count);
            let (_client, io, peer, state) = sent(all.as_bytes(), &Arc::new(Heads::new(HEADS))).await;
            let site = Arc::new(Noting::default());
            let others = async {
                while site.answered.lock().unwrap().len() < count {
                    site.turn.fetch_add(1, Relaxed);
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                biased;
                () = others => {}
                () = answered(io, peer, state, site.clone(), Stop::new()) => panic!("the client is there"),
            }
            let turns = site.answered.lock().unwrap().clone();
            assert!(turns.windows(2).all(|two| two[0] < two[1]), "{turns:?}");
        }
    }

    /// Never answers; notes how many requests it has at a time, and connections.
    #[derive(Default)]
    struct Holding {
        connections: AtomicUsize,
        now: AtomicUsize,
        most: AtomicUsize,
    }

    /// A request, until it is dropped.
    struct Held(Arc<Holding>);

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.now.fetch_sub(1, Relaxed);
        }
    }

    impl Site for Holding {
        const NAMES: Names = Names { server: "", listener: "", connection: "", request: "" };

        async fn answer(
            self: &Arc<Self>,
            _: &Request<()>,
            _: &mut Incoming,
            _: SocketAddr,
            _: &Arc<ConnState>,
        ) -> Answer {
            self.most.fetch_max(self.now.fetch_add(1, Relaxed) + 1, Relaxed);
            let _held = Held(self.clone());
            std::future::pending().await
        }

        fn connections(&self, now: usize) {
            self.connections.store(now, Relaxed);
        }
    }

    #[tokio::test]
    async fn those_that_ask_in_one_moment_are_not_all_there_at_a_time() {
        const ALL: usize = 200;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (site, stop) = (Arc::new(Holding::default()), Stop::new());
        let limits = Limits { connections: ALL, asking: 4, idle: None };
        let served = serve(Some(listener), site.clone(), limits, Stop::new(), stop.clone());
        let asked = async {
            let mut clients = Vec::new();
            for _ in 0..ALL {
                clients.push(TcpStream::connect(address).await.unwrap());
            }
            eventually("all are let in", async || site.connections.load(Relaxed) == ALL).await;
            for client in &clients {
                client.try_write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            }
            let waits = |client: &&TcpStream| {
                client.try_read(&mut [0; 1]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            };
            eventually("the others are gone", async || clients.iter().filter(waits).count() == 4).await;
            stop.cancel();
        };
        let (served, ()) = tokio::join!(served, asked);
        served.unwrap();
        assert!(site.most.load(Relaxed) <= 4, "{}", site.most.load(Relaxed));
    }

    #[tokio::test]
    async fn what_is_taken_at_the_end_is_no_head() {
        let body = vec![b'a'; 2 * UNREAD_BYTES];
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", body.len());
        let heads = Arc::new(Heads::new(64 * 1024));
        let (mut client, io, peer, state) = sent(head.as_bytes(), &heads).await;
        let mut served = pin!(answered(io, peer, state, Arc::new(Noting::default()), Stop::new()));
        let served = std::future::poll_fn(|cx| {
            let done = served.as_mut().poll(cx);
            assert!(!heads.is_too_much());
            done
        });
        let (sent, ()) = tokio::join!(client.write_all(&body), served);
        sent.unwrap();
    }

    #[tokio::test]
    async fn what_stands_between_the_pieces_of_a_body_is_bounded() {
        let trailers = format!("0\r\n{}\r\n", format!("X-T: {}\r\n", "t".repeat(1000)).repeat(60));
        let zeros = format!("{}1\r\na\r\n0\r\n\r\n", "0".repeat(60_000));
        let small = format!("{}0\r\n\r\n", "1\r\na\r\n".repeat(20_000));
        for (body, closes) in [(trailers, true), (zeros, true), (small, false)] {
            let head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
            let (mut client, io, peer, state) = sent(head, &Arc::new(Heads::new(HEADS))).await;
            let asked = async {
                client.write_all(body.as_bytes()).await.unwrap();
                let mut text = String::new();
                while !text.ends_with("\r\n\r\n") {
                    text.push(char::from(client.read_u8().await.unwrap()));
                }
                drop(client);
                text
            };
            let (text, ()) =
                tokio::join!(asked, answered(io, peer, state, Arc::new(Noting::default()), Stop::new()));
            assert!(text.starts_with("HTTP/1.1 200"), "{text}");
            assert_eq!(text.contains("Connection: close"), closes, "{text}");
        }
    }

    #[test]
    fn a_head_whose_body_is_waited_for_holds_no_buffer() {
        let mut buffer = BytesMut::with_capacity(8192);
        buffer.extend_from_slice(b"/token?a=%41 secret \xe4");
        let read = buffer.split().freeze();
        let mut secret = HeaderValue::from_maybe_shared(read.slice(13..19)).unwrap();
        secret.set_sensitive(true);
        let odd = HeaderValue::from_maybe_shared(read.slice(20..)).unwrap();
        let uri = Uri::from_maybe_shared(read.slice(..12)).unwrap();
        let whole = Request::post(uri).header("a", secret).header("b", odd).body(()).unwrap();
        drop(read);
        let (mut head, ()) = whole.into_parts();
        assert!(!buffer.try_reclaim(8192), "it is the buffer's");
        let before = (head.uri.clone().to_string(), format!("{:?}", head.headers));
        let_go(&mut head);
        assert_eq!((head.uri.to_string(), format!("{:?}", head.headers)), before);
        assert!(head.headers["a"].is_sensitive() && head.headers["b"] == Bytes::from_static(b"\xe4")[..]);
        assert!(buffer.try_reclaim(8192), "nobody else has a part of it");
        for odd in ["*", "http://a/b", "/", "a:80"] {
            let mut head = Request::post(odd).body(()).unwrap().into_parts().0;
            let_go(&mut head);
            assert_eq!(head.uri, odd);
        }
    }
}
