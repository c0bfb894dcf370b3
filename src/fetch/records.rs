//! TLS connections that are closed without TLS's own last word.
//!
//! Many servers close the socket and say nothing before. As in Go's library that is the end where a record has just ended,
//! and a cut within one: an answer of HTTP/1.0, which need not tell its length, has no other end.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::InspectReader;

/// Where a stream of records stands: bytes of a record's head so far, its length, and what is left of it.
#[derive(Debug, Default)]
struct Place {
    head: u8,
    length: usize,
    left: usize,
}

impl Place {
    fn pass(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.left > 0 {
                let n = self.left.min(bytes.len());
                self.left -= n;
                bytes = &bytes[n..];
                continue;
            }
            bytes = rest;
            self.length = ((self.length << 8) & 0xff00) | usize::from(byte);
            self.head = (self.head + 1) % 5;
            if self.head == 0 {
                self.left = self.length;
            }
        }
    }

    fn is_between(&self) -> bool {
        self.head == 0 && self.left == 0
    }
}

/// What is below TLS.
pub(super) type Watched<S> = InspectReader<S, Box<dyn FnMut(&[u8]) + Send>>;

/// Watches `inner`, and whether it stands between two records.
pub(super) fn watched<S: AsyncRead>(inner: S) -> (Watched<S>, Arc<AtomicBool>) {
    let between = Arc::new(AtomicBool::new(true));
    let (told, mut place) = (Arc::clone(&between), Place::default());
    let note = move |new: &[u8]| {
        place.pass(new);
        told.store(place.is_between(), Ordering::Relaxed);
    };
    (InspectReader::new(inner, Box::new(note)), between)
}

/// TLS over what is [`watched`].
pub(super) struct Ending<T> {
    inner: T,
    between: Arc<AtomicBool>,
}

impl<T> Ending<T> {
    pub(super) fn new(inner: T, between: Arc<AtomicBool>) -> Self {
        Self { inner, between }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Ending<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.inner).poll_read(cx, buf) {
            Poll::Ready(Err(error))
                if error.kind() == io::ErrorKind::UnexpectedEof && self.between.load(Ordering::Relaxed) =>
            {
                Poll::Ready(Ok(()))
            }
            other => other,
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Ending<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_end_where_their_heads_say() {
        let records =
            [&[22, 3, 3, 0, 3][..], b"abc", &[23, 3, 3, 1, 4], &[7; 260], &[21, 3, 3, 0, 0]].concat();
        let ends = [0, 8, 273, 278];
        for step in [1, 2, 7, 300] {
            let (mut place, mut at) = (Place::default(), 0);
            for piece in records.chunks(step) {
                place.pass(piece);
                at += piece.len();
                assert_eq!(place.is_between(), ends.contains(&at), "{at} by {step}");
            }
        }
    }
}
