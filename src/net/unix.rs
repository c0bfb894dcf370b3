//! A connection on a unix socket that wakes only for what is waited for.
//!
//! The kernel tells of room in a unix socket each time its peer has read something, asked or not. A connection that is
//! registered for both directions, as the runtime's own is, is so woken once more for every message that it passes on:
//! a fifth of what a small push costs. Here room is waited for only while a write finds none.
//!
//! One task reads and writes, as HTTP/2 libraries do: when the registration changes, whoever writes is woken to read again.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// See the module.
#[derive(Debug)]
pub(crate) struct Stream {
    // `None` only after a registration was refused: the connection is lost then.
    io: Option<AsyncFd<UnixStream>>,
    /// Whether room is waited for, too.
    full: bool,
}

impl Stream {
    /// Takes over a connection.
    ///
    /// # Errors
    /// When the system does not take it on its list.
    pub(crate) fn new(io: tokio::net::UnixStream) -> io::Result<Self> {
        Ok(Self { io: Some(registered(io.into_std()?, Interest::READABLE)?), full: false })
    }

    fn io(&self) -> io::Result<&AsyncFd<UnixStream>> {
        self.io.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn wait_for_room(&mut self, full: bool, cx: &Context<'_>) -> io::Result<()> {
        let io = self.io.take().ok_or(io::ErrorKind::NotConnected)?.into_inner();
        let both = Interest::READABLE | Interest::WRITABLE;
        self.io = Some(registered(io, if full { both } else { Interest::READABLE })?);
        self.full = full;
        // What was waited for on the old registration is waited for anew.
        cx.waker().wake_by_ref();
        Ok(())
    }

    fn poll_with(
        &mut self,
        cx: &mut Context<'_>,
        length: usize,
        mut write: impl FnMut(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let written = loop {
            let io = self.io()?;
            let mut room = if self.full { Some(ready!(io.poll_write_ready(cx))?) } else { None };
            match (write(io.get_ref()), &mut room) {
                (Err(error), _) if error.kind() == io::ErrorKind::Interrupted => {}
                (Err(error), Some(room)) if error.kind() == io::ErrorKind::WouldBlock => room.clear_ready(),
                (Err(error), None) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_room(true, cx)?;
                }
                (written, _) => break written,
            }
        };
        if self.full && written.as_ref().is_ok_and(|written| *written == length) {
            self.wait_for_room(false, cx)?;
        }
        Poll::Ready(written)
    }
}

fn registered(io: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    #[expect(deprecated, reason = "its unsafe successor is for descriptors that somebody else may close")]
    AsyncFd::with_interest(io, interest)
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let io = self.io()?;
        loop {
            let mut ready = ready!(io.poll_read_ready(cx))?;
            let space = buf.initialize_unfilled();
            match ready.get_inner().read(space) {
                Ok(read) => {
                    // Less than there was place for: nothing is left, and more will be reported.
                    if 0 < read && read < space.len() {
                        ready.clear_ready();
                    }
                    buf.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_with(cx, buf.len(), |mut io| io.write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length = bufs.iter().map(|buf| buf.len()).sum();
        self.get_mut().poll_with(cx, length, |mut io| io.write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.io()?.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn pair() -> (Stream, tokio::net::UnixStream) {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        (Stream::new(ours).unwrap(), theirs)
    }

    #[tokio::test]
    async fn more_than_there_is_room_for_arrives_whole_and_then_all_is_as_before() {
        let (mut ours, mut theirs) = pair();
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        for _ in 0..2 {
            let mut got = vec![0; sent.len()];
            let (written, read) = tokio::join!(ours.write_all(&sent), theirs.read_exact(&mut got));
            written.unwrap();
            read.unwrap();
            assert!(got == sent);
            // A write that finds room ends the waiting for it.
            ours.write_all(b"one").await.unwrap();
            theirs.read_exact(&mut got[..3]).await.unwrap();
            assert!(!ours.full);
        }
    }

    #[tokio::test]
    async fn both_ways_at_once_through_one_task_lose_nothing() {
        let (mut ours, mut theirs) = pair();
        let length = 2_000_000;
        let echo = async {
            let (mut read, mut write) = theirs.split();
            tokio::io::copy(&mut read, &mut write).await.unwrap();
            write.shutdown().await.unwrap();
        };
        let (mut out, mut back) = (0, 0);
        let talk = async {
            let (piece, mut place) = (vec![7; 100_000], vec![0; 100_000]);
            std::future::poll_fn(|cx| {
                loop {
                    let mut moved = false;
                    if out < length {
                        let rest = &piece[..piece.len().min(length - out)];
                        if let Poll::Ready(n) = Pin::new(&mut ours).poll_write(cx, rest) {
                            out += n.unwrap();
                            moved = true;
                            if out == length {
                                ready!(Pin::new(&mut ours).poll_shutdown(cx)).unwrap();
                            }
                        }
                    }
                    let mut buf = ReadBuf::new(&mut place);
                    if let Poll::Ready(result) = Pin::new(&mut ours).poll_read(cx, &mut buf) {
                        result.unwrap();
                        if buf.filled().is_empty() {
                            return Poll::Ready(());
                        }
                        back += buf.filled().len();
                        moved = true;
                    }
                    if !moved {
                        return Poll::Pending;
                    }
                }
            })
            .await;
        };
        let both = async { tokio::join!(talk, echo) };
        tokio::time::timeout(Duration::from_secs(30), both).await.expect("it stands still");
        assert_eq!((out, back), (length, length));
    }

    #[tokio::test]
    async fn a_peer_that_leaves_is_noticed_in_both_directions() {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(b"last words").await.unwrap();
        drop(theirs);
        let mut all = Vec::new();
        ours.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"last words");
        assert_eq!(ours.write(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
