//! A connection that breaks after so many bytes, wherever in a frame that is.
//!
//! The count is of what is handed to the transport below (TLS, where there is TLS), and all of it is flushed before
//! the break.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Breaks one connection. Clones break the same.
#[derive(Debug, Clone)]
pub(crate) struct Sever(Arc<AtomicUsize>);

impl Sever {
    const NEVER: usize = usize::MAX;

    /// Breaks it after `bytes` more.
    pub(crate) fn after(&self, bytes: usize) {
        self.0.store(bytes, Ordering::SeqCst);
    }
}

/// A connection under a [`Sever`].
#[derive(Debug)]
pub(crate) struct Severable<T> {
    io: T,
    left: Sever,
}

impl<T> Severable<T> {
    pub(crate) fn new(io: T) -> (Self, Sever) {
        let left = Sever(Arc::new(AtomicUsize::new(Sever::NEVER)));
        (Self { io, left: left.clone() }, left)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Severable<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Severable<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let left = self.left.0.load(Ordering::SeqCst);
        if left == Sever::NEVER {
            return Pin::new(&mut self.io).poll_write(cx, data);
        }
        if left == 0 {
            ready!(Pin::new(&mut self.io).poll_flush(cx))?;
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, "severed by the script")));
        }
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, &data[..data.len().min(left)]))?;
        self.left.after(left - written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
