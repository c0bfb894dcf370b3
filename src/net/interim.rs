//! A connection of which little is read in a turn while an answer's head is waited for.
//!
//! Interim answers (1xx) may come without end before the one that counts. The HTTP library passes over them within one
//! call, and reads on: what the runtime lets a task read before another has its turn is hundreds of thousands of them,
//! a second in which no probe is answered. In HTTP/2 they are held until whoever asked has a turn, with some 300 bytes each.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop::poll_proceed;

use super::framing::Heads;
use super::hop::Fields;

/// Bytes of a turn, and of one read: more than heads have, but for those that mean ill. It is some nine hundred of the shortest
/// interim answers.
const TURN: usize = 16 * 1024;
/// The units that the runtime gives a task for a turn. A read costs of them what it has of a turn's bytes: a usual head, one or
/// two.
const UNITS: usize = 128;

/// When so much was read of a body without a piece of it, no more is: the library takes any number of zeros for the
/// length of a chunk.
const BETWEEN: usize = 256 * 1024;

/// Whether a head is waited for on a connection, and what was read of a body since its last piece. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waiting(Arc<(AtomicBool, AtomicUsize)>);

impl Waiting {
    pub(crate) fn set(&self, waits: bool) {
        self.0.0.store(waits, Relaxed);
        self.piece();
    }

    /// A piece of the body has come.
    pub(crate) fn piece(&self) {
        self.0.1.store(0, Relaxed);
    }
}

/// What the heads on a connection are made of.
#[derive(Debug)]
enum Made {
    Lines(Heads),
    Frames(Fields),
}

/// A connection whose heads are read in turns, and put as the HTTP library takes them ([`super::framing`], [`super::hop`]).
pub(crate) struct Slowed<S> {
    inner: S,
    waiting: Waiting,
    /// Units for what was read.
    owes: usize,
    heads: Made,
    /// Bytes of a turn.
    turn: usize,
}

impl<S> Slowed<S> {
    pub(crate) fn new(inner: S) -> (Self, Waiting) {
        let waiting = Waiting::default();
        let heads = Made::Lines(Heads::default());
        (Self { inner, waiting: waiting.clone(), owes: 0, heads, turn: TURN }, waiting)
    }

    /// A connection of HTTP/2, of which a turn brings so many bytes: of bodies, too, their frames are mixed.
    pub(crate) fn of_frames(inner: S, turn: usize) -> Self {
        let waiting = Waiting::default();
        waiting.set(true);
        Self { inner, waiting, owes: 0, heads: Made::Frames(Fields::default()), turn }
    }

    // A request, whose answer is yet to come.
    fn asks(&mut self) {
        if let Made::Lines(heads) = &mut self.heads {
            *heads = Heads::default();
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Slowed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Waiting(state) = self.waiting.clone();
        if !state.0.load(Relaxed) {
            if state.1.load(Relaxed) > BETWEEN {
                let why = "a body of which no piece comes";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
            state.1.fetch_add(buf.filled().len() - before, Relaxed);
            return Poll::Ready(Ok(()));
        }
        while self.owes > 0 {
            ready!(poll_proceed(cx)).made_progress();
            self.owes -= 1;
        }
        let before = buf.filled().len();
        if buf.remaining() <= self.turn {
            ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        } else {
            let mut part = ReadBuf::new(buf.initialize_unfilled_to(self.turn));
            ready!(Pin::new(&mut self.inner).poll_read(cx, &mut part))?;
            let read = part.filled().len();
            buf.advance(read);
        }
        let part = &mut buf.filled_mut()[before..];
        let read = part.len();
        match &mut self.heads {
            Made::Lines(heads) => heads.pass(part),
            Made::Frames(fields) => fields.pass(part),
        }
        self.owes = (read * UNITS).div_ceil(self.turn);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Slowed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.asks();
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.asks();
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
