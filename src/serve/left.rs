//! Clients that have gone while their answer is being made.
//!
//! A client may close its side and wait for the answer (`half_close`); one that is gone looks the same until something is
//! sent to it. While there is nothing to send yet, because an application is slow, it would keep its connection and the
//! work for it. So it is remembered as a client that has closed its side: those make room first, and are not waited for
//! for long.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncWrite, Interest};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::net::progress::{Phase, Progress};

/// How long an answer of which nothing comes is made for a client that has closed its side: Prometheus' usual limit.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_secs(1);

/// A socket that can be looked at while it is served.
#[derive(Debug, Clone)]
pub(super) struct Io(Arc<TcpStream>);

impl Io {
    pub(super) fn new(io: TcpStream) -> Self {
        Self(Arc::new(io))
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await
    }

    pub(super) fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(into)
    }

    /// Waits until its client has closed its side and nothing was written to it for [`PATIENCE`]; `written` counts bytes.
    pub(super) async fn given_up(self, progress: Arc<Progress>, written: impl Fn() -> u64) {
        loop {
            match self.0.ready(Interest::READABLE).await {
                Ok(ready) if ready.is_read_closed() => break,
                // There is something to read, which whoever serves it does.
                Ok(_) => tokio::time::sleep(LOOK).await,
                Err(_) => return std::future::pending().await,
            }
        }
        progress.leaves();
        let (mut before, mut since) = (written(), Instant::now());
        while since.elapsed() < PATIENCE {
            tokio::time::sleep(LOOK).await;
            if before != written() || progress.phase() != Phase::Busy {
                (before, since) = (written(), Instant::now());
            }
        }
    }
}

impl Io {
    /// Reads what there is into `space`, which is not touched while there is nothing.
    pub(super) fn poll_read(&self, cx: &mut Context<'_>, space: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(space) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_with(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |io| io.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |io| io.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Write);
        Poll::Ready(shut.map_err(Into::into))
    }
}
