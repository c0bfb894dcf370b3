//! When a connection was last read from: what a keepalive needs to know below HTTP/2.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

/// When, and how often, something was read from a connection.
#[derive(Debug, Clone)]
pub(crate) struct Reads(Arc<ReadsInner>);

#[derive(Debug)]
struct ReadsInner {
    start: Instant,
    last: AtomicU64,
    count: AtomicU64,
}

impl Reads {
    fn new() -> Self {
        Self(Arc::new(ReadsInner {
            start: Instant::now(),
            last: AtomicU64::new(0),
            count: AtomicU64::new(0),
        }))
    }

    fn note(&self) {
        let now = u64::try_from(self.0.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.store(now, Ordering::Relaxed);
        self.0.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Time since the last read, or since the beginning.
    pub(crate) fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.0.last.load(Ordering::Relaxed));
        self.0.start.elapsed().saturating_sub(last)
    }
}

/// A connection that changes what is read leaves alone what is written.
macro_rules! writes_pass {
    ($connection:ident, $inner:ident) => {
        impl<T: tokio::io::AsyncWrite + Unpin> tokio::io::AsyncWrite for $connection<T> {
            fn poll_write(
                self: std::pin::Pin<&mut Self>,
                cx: &mut std::task::Context<'_>,
                buf: &[u8],
            ) -> std::task::Poll<std::io::Result<usize>> {
                std::pin::Pin::new(&mut self.get_mut().$inner).poll_write(cx, buf)
            }

            fn poll_write_vectored(
                self: std::pin::Pin<&mut Self>,
                cx: &mut std::task::Context<'_>,
                bufs: &[std::io::IoSlice<'_>],
            ) -> std::task::Poll<std::io::Result<usize>> {
                std::pin::Pin::new(&mut self.get_mut().$inner).poll_write_vectored(cx, bufs)
            }

            fn is_write_vectored(&self) -> bool {
                self.$inner.is_write_vectored()
            }

            fn poll_flush(
                self: std::pin::Pin<&mut Self>,
                cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<std::io::Result<()>> {
                std::pin::Pin::new(&mut self.get_mut().$inner).poll_flush(cx)
            }

            fn poll_shutdown(
                self: std::pin::Pin<&mut Self>,
                cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<std::io::Result<()>> {
                std::pin::Pin::new(&mut self.get_mut().$inner).poll_shutdown(cx)
            }
        }
    };
}

/// A connection that is watched.
#[derive(Debug)]
pub(crate) struct Tracked<T> {
    inner: T,
    reads: Reads,
}

impl<T> Tracked<T> {
    /// Watches `inner`.
    pub(crate) fn new(inner: T) -> (Self, Reads) {
        let reads = Reads::new();
        (Self { inner, reads: reads.clone() }, reads)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Tracked<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.reads.note();
        }
        Poll::Ready(Ok(()))
    }
}

writes_pass!(Tracked, inner);
