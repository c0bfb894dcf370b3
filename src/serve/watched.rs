//! A connection's bytes, seen going by: they tell what it is doing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::left::Io;
use super::refusal;
use crate::net::fair::Caller;
use crate::net::progress::{Heads, Phase, Progress};

/// A request head, from its first byte to its last. Go has no limit; nginx and hyper take 30 to 60 s.
const HEAD: Duration = Duration::from_secs(30);
/// What may stand between two pieces of a body, and after the last: lengths of chunks and trailers, of which the library
/// holds as much as of a head (its own figure without that). With two reads, of which the pieces were not taken yet.
const BETWEEN: usize = 16 * 1024 + 2 * EARLY;
/// How long an answer may wait for its reader to take a byte.
const STALLED: Duration = Duration::from_secs(60);

/// What the sweep and the quit rule need to know of a connection.
#[derive(Debug)]
pub(crate) struct ConnState {
    pub(crate) progress: Arc<Progress>,
    /// Who asks.
    pub(crate) caller: Caller,
    /// Bytes the kernel has taken.
    written: AtomicU64,
    /// `written` at the moment `/quitquitquit` was answered, plus one; 0: it was not asked.
    quit: AtomicU64,
    /// Bytes of a request were left where they are.
    unread: AtomicBool,
    /// A request has begun, and its client was not waited for since.
    follows: AtomicBool,
    /// Bytes that were read of a body since the last piece of it.
    between: AtomicUsize,
}

impl ConnState {
    pub(crate) fn new(heads: Arc<Heads>, caller: Caller) -> Self {
        Self {
            progress: Arc::new(Progress::new(heads)),
            caller,
            written: AtomicU64::new(0),
            quit: AtomicU64::new(0),
            unread: AtomicBool::new(false),
            follows: AtomicBool::new(false),
            between: AtomicUsize::new(0),
        }
    }

    /// A request has been read and is being answered.
    pub(crate) fn busy(&self) {
        self.piece();
        self.progress.enter(Phase::Busy);
    }

    /// Whether the request that now begins was there when the one before it was done with (pipelined).
    pub(super) fn follows(&self) -> bool {
        self.follows.swap(true, Relaxed)
    }

    /// A body is read, or a piece of it has come.
    pub(crate) fn piece(&self) {
        self.between.store(0, Relaxed);
    }

    // So many bytes of a body were read; whether too many for what stands between two of its pieces. Those that are only
    // taken off the wire have no form.
    fn body_bytes(&self, n: usize) -> bool {
        let of_a_body = matches!(self.progress.phase(), Phase::Body | Phase::Busy | Phase::Waiting);
        of_a_body && !self.unread() && self.between.fetch_add(n, Relaxed) + n > BETWEEN
    }

    /// Its answer is done with.
    pub(crate) fn idle(&self) {
        self.progress.enter(Phase::Idle);
    }

    /// A request's body is not read to its end; its connection ends with the answer.
    pub(crate) fn leaves_unread(&self) {
        self.unread.store(true, Relaxed);
    }

    /// Whether the client may still be sending when its connection is closed.
    pub(super) fn unread(&self) -> bool {
        self.unread.load(Relaxed)
    }

    /// The agent is to quit once the answer now given is with the kernel.
    pub(crate) fn quit_after_answer(&self) {
        self.quit.store(self.written.load(Relaxed) + 1, Relaxed);
    }

    /// Bytes the kernel has taken so far.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Relaxed)
    }

    pub(super) fn quit_asked(&self) -> bool {
        self.quit.load(Relaxed) != 0
    }

    pub(super) fn quit_answered(&self) -> bool {
        self.quit_asked() && self.written.load(Relaxed) >= self.quit.load(Relaxed)
    }
}

/// Why a connection is closed without anybody wanting its place; `None`: it may stay.
pub(super) fn overdue(progress: &Progress, idle: Option<Duration>) -> Option<&'static str> {
    let here = progress.in_phase();
    match progress.phase() {
        Phase::Head if over(here, HEAD) => return Some("its request head did not come to an end"),
        // Go's server counts the time of the first head from the beginning.
        Phase::New if idle.is_some() && over(here, HEAD) => return Some("it has asked for nothing"),
        Phase::Idle if idle.is_some_and(|limit| over(here, limit)) => {
            return Some("it was idle for too long");
        }
        _ => {}
    }
    over(progress.blocked(), STALLED).then_some("it stopped reading its answer")
}

fn over(time: Duration, limit: Duration) -> bool {
    time > limit
}

/// A connection, watched.
pub(super) struct Watched {
    io: Io,
    state: Arc<ConnState>,
    /// Read by [`Watched::request`], and not given to the reader yet.
    early: Vec<u8>,
    /// Of a head there was a read in this turn. The library begins with a body before anybody is told of the request.
    turned: bool,
}

/// Of a longer head the rest is left to the HTTP library, in pieces of this size, and so is a body: it has twice its last
/// read ready for the next, up to a megabyte, and what many clients have sent is counted before much of it was read.
const EARLY: usize = 4096;

impl Watched {
    pub(super) fn new(io: TcpStream, state: Arc<ConnState>) -> Self {
        Self { io: Io::new(io), state, early: Vec::new(), turned: false }
    }

    /// The socket, to be looked at.
    pub(super) fn io(&self) -> Io {
        self.io.clone()
    }

    /// Waits for the first request's head; `false` when there will be none.
    pub(super) async fn request(&mut self) -> bool {
        loop {
            if self.io.readable().await.is_err() {
                return false;
            }
            let mut space = [0; EARLY];
            let n = match self.io.try_read(&mut space[..EARLY - self.early.len()]) {
                Ok(0) => return !self.early.is_empty(),
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => return false,
            };
            self.state.progress.enter(Phase::Head);
            self.state.progress.head_bytes(n);
            // As much as there is: a flood of short heads holds little.
            self.early.reserve_exact(n);
            self.early.extend_from_slice(&space[..n]);
            if self.early.len() == EARLY || ends(&self.early) {
                return true;
            }
        }
    }

    /// The text for a refusal of hyper's, which it makes while a request is still being read.
    fn refusal(&self, out: &[u8]) -> Option<&'static [u8]> {
        if self.state.progress.phase() != Phase::Head {
            return None;
        }
        let text = refusal::spelled_out(out)?;
        self.state.leaves_unread();
        Some(text)
    }

    pub(super) fn wrote(&self, result: &Poll<io::Result<usize>>) {
        match result {
            Poll::Ready(Ok(n)) => {
                self.state.written.fetch_add(*n as u64, Relaxed);
                self.state.progress.wrote(true);
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.state.progress.wrote(false),
        }
    }
}

/// Whether a head ends here, or cannot be one: the library has the word for it.
fn ends(head: &[u8]) -> bool {
    let blank = |end: &[u8]| memchr::memmem::find(head, end).is_some();
    blank(b"\n\r\n")
        || blank(b"\n\n")
        || !head.iter().all(|b| matches!(b, b'\t' | b'\r' | b'\n' | b' '..=0xff))
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if !self.early.is_empty() {
            let n = self.early.len().min(buf.remaining());
            buf.put_slice(&self.early[..n]);
            self.early.drain(..n);
            if self.early.is_empty() {
                self.early = Vec::new();
                self.turned = true;
            }
            if self.state.written.load(Relaxed) == 0 {
                refusal::readable_preface(&mut buf.filled_mut()[before..]);
            }
            return Poll::Ready(Ok(()));
        }
        let of_a_head = matches!(self.state.progress.phase(), Phase::New | Phase::Idle | Phase::Head);
        // First some others have to go; the server's loop is awake for that. Or they have their turn.
        if of_a_head && (std::mem::take(&mut self.turned) || self.state.progress.heads_are_too_much()) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        // By way of the stack: a buffer of the library's that only waits is not touched, so the kernel gives it no page.
        let mut space = [0; EARLY];
        let room = buf.remaining().min(EARLY);
        let Poll::Ready(read) = self.io.poll_read(cx, &mut space[..room]) else {
            self.state.follows.store(false, Relaxed);
            return Poll::Pending;
        };
        let read = read?;
        buf.put_slice(&space[..read]);
        if of_a_head && read > 0 {
            self.state.progress.enter(Phase::Head);
            self.state.progress.head_bytes(read);
        }
        self.turned = of_a_head && read > 0;
        if self.state.body_bytes(read) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "no piece of the body comes",
            )));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::server::HEADS;

    #[tokio::test(start_paused = true)]
    async fn what_stands_still_is_overdue() {
        let caller = Caller { here: true, origin: std::net::Ipv4Addr::LOCALHOST.into() };
        let state = Arc::new(ConnState::new(Arc::new(Heads::new(HEADS)), caller));
        let progress = state.progress.clone();
        assert_eq!(overdue(&progress, None), None);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(overdue(&progress, None), None, "an idle connection may stay");
        let ninety = Some(Duration::from_secs(90));
        assert!(overdue(&progress, ninety).unwrap().contains("nothing"), "where the site has no limit");
        progress.enter(Phase::Idle);
        tokio::time::advance(HEAD * 3).await;
        assert_eq!(overdue(&progress, ninety), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(overdue(&progress, ninety).unwrap().contains("idle"));
        let (fresh, caller) = (Arc::new(Heads::new(HEADS)), Caller { here: true, origin: caller.origin });
        let silent = ConnState::new(fresh, caller).progress;
        tokio::time::advance(HEAD).await;
        assert_eq!(overdue(&silent, ninety), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(overdue(&silent, ninety).is_some());
        progress.enter(Phase::Head);
        tokio::time::advance(HEAD).await;
        assert_eq!(overdue(&progress, None), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(overdue(&progress, None).unwrap().contains("head"));
        state.busy();
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(overdue(&progress, ninety), None, "an answer takes its time");
        let (a, _b) = pair().await;
        let watched = Watched::new(a, state);
        watched.wrote(&Poll::Pending);
        tokio::time::advance(STALLED).await;
        watched.wrote(&Poll::Pending);
        assert_eq!(overdue(&progress, None), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(overdue(&progress, None).unwrap().contains("reading"));
        watched.wrote(&Poll::Ready(Ok(1)));
        assert_eq!(overdue(&progress, None), None);
    }

    #[tokio::test]
    async fn a_buffer_that_only_waits_is_not_touched() {
        let (a, mut b) = pair().await;
        let caller = Caller { here: true, origin: std::net::Ipv4Addr::LOCALHOST.into() };
        let mut watched = Watched::new(a, Arc::new(ConnState::new(Arc::new(Heads::new(HEADS)), caller)));
        let mut space = [std::mem::MaybeUninit::uninit(); 2 * EARLY];
        let mut buf = ReadBuf::uninit(&mut space);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(Pin::new(&mut watched).poll_read(&mut cx, &mut buf).is_pending());
        assert_eq!(buf.initialized().len(), 0);
        tokio::io::AsyncWriteExt::write_all(&mut b, b"words").await.unwrap();
        std::future::poll_fn(|cx| Pin::new(&mut watched).poll_read(cx, &mut buf)).await.unwrap();
        assert_eq!((buf.filled(), buf.initialized().len()), (&b"words"[..], 5));
    }

    #[test]
    fn a_head_ends_with_an_empty_line_however_lines_end() {
        for whole in ["a\r\n\r\n", "a\n\n", "a\n\r\n", "a\r\n\n"] {
            assert!(ends(whole.as_bytes()), "{whole:?}");
            assert!(!ends(&whole.as_bytes()[..whole.len() - 1]), "{whole:?}");
        }
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (one, listener.accept().await.unwrap().0)
    }
}
