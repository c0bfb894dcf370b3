//! Between an accepted connection and the HTTP/2 server: makes every client's `:authority` one that the
//! server takes.
//!
//! A unix socket has no host name, so clients invent one: Envoy sends its cluster's name and Go
//! `localhost`, but gRPC's C core (C++, Python, Ruby, PHP) sends the percent-encoded path
//! (`.%2Fetc%2Fistio%2Fproxy%2FXDS`), and Java and Swift the path itself. Those are no authorities by
//! RFC 3986, and the HTTP/2 library resets the stream with PROTOCOL_ERROR before any handler sees it.
//!
//! [`AuthorityRewriter`] reads the frames that go by. HEADERS (and CONTINUATION) are decoded; a block whose authority
//! the server would take passes as it came, byte for byte, so Envoy's connections are not changed at all.
//! The first block with another authority is written anew, with `localhost` in its place and every field
//! as a literal without indexing, and so are all blocks after it (the server's table no longer knows what
//! they might refer to). All other frames pass untouched, without a copy: what is read goes straight into
//! the reader's buffer, and only header blocks are taken out of it.
//!
//! Header blocks are decoded by `fluke-hpack`, since `h2` keeps its own decoder private: 23 KB of binary, no measurable
//! memory. It is the old `hpack` crate, kept up by one person within an HTTP/2 project; its last release is of 2024, and
//! its successor `loona-hpack` would bring a second `thiserror`. So it sees at most `LARGEST` bytes of a block, and a
//! fuzz target (`authority`) feeds it any bytes. It reads the Huffman code so slowly that one block could hold up the
//! agent for seconds; that is read by `httlib-huffman` before, whose tables are made when it is compiled. That takes a
//! padding of zeros, too, which the server refuses.
//!
//! What is not understood (a block that does not decode, frames out of order) passes as it came as long
//! as nothing was written anew: the server has the better error. Afterwards it ends the connection.
//!
//! Header blocks also have no flow control, and each opens a stream whose answer is held until its client reads it, also
//! where it says no more than that there is nothing here. So a client is read from no further than the next block while
//! it takes nothing, and never more than a few blocks in a turn: in between those are answered. Blocks that are not
//! complete are few at a time.
//!
//! Other frames cost their sender nine bytes each, and some cost the server a look at each stream of the connection; a
//! socket holds thousands of them, and there may be hundreds of clients. So of those, too, a turn brings a bounded number.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::coop::poll_proceed;

pub(super) mod block;

use super::frame::{CONTINUATION, END_HEADERS, HEADER, HEADERS};
use block::Blocks;

/// What a client says first.
const PREFACE: usize = 24;
/// Read at once while a header block is being gathered.
const CHUNK: usize = 4096;
/// Largest header block gathered; the server's own limit on header lists is about the same.
const LARGEST: usize = 384 * 1024;
/// A block in more frames is put together: the server takes many small ones for an attack.
const FEW: usize = 4;
/// Most frames of one block: a list of 4 kB, a byte at a time.
const MANY: usize = 4096;

/// A block that holds no more while its end has not come needs no leave: calls bring a few kB, tokens and all.
const LITTLE: usize = 16 * 1024;
/// Larger ones at a time, of all connections: each holds up to a MB.
static LARGE: Semaphore = Semaphore::const_new(8);
/// What a block takes of the 128 units that the runtime gives a task for a turn: sixteen blocks are a turn.
const COST: usize = 8;
/// Frames of other kinds that are passed on before they are paid for, a unit each: 128 are a turn. Requests come in frames of
/// 16 kB, so a turn of those is 2 MB, which is more than their windows allow.
const FRAMES: usize = 32;
/// What a read costs whose frames are not looked at.
const UNSEEN: usize = 64;

/// Wraps an accepted connection. Writes pass through.
#[derive(Debug)]
pub struct AuthorityRewriter<T> {
    inner: T,
    frames: Frames,
    // Told when what was good before it has been read.
    failed: Option<io::Error>,
    // Units for what was passed on. There may be more behind it, which is looked for once they are paid.
    owes: usize,
    // They are for a header block.
    called: bool,
    // The last write found no room.
    blocked: bool,
    // Nothing is read until one finds some.
    paused: bool,
}

impl<T> AuthorityRewriter<T> {
    /// Wraps a connection of which nothing has been read yet.
    pub fn new(inner: T) -> Self {
        let frames = Frames::default();
        Self { inner, frames, failed: None, owes: 0, called: false, blocked: false, paused: false }
    }

    fn advance(&mut self) {
        self.called = false;
        if !self.frames.enough() {
            match self.frames.next() {
                Ok(passed) => self.called = passed,
                Err(error) => self.failed = Some(error),
            }
        }
        if self.called {
            self.owes += COST;
        }
        if self.frames.enough() {
            self.owes += std::mem::take(&mut self.frames.passed);
        }
    }

    // For what was passed on.
    fn poll_pay(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.called && self.blocked {
            self.paused = true;
            return Poll::Pending;
        }
        while self.owes > 0 {
            ready!(poll_proceed(cx)).made_progress();
            self.owes -= 1;
        }
        Poll::Ready(())
    }

    fn wrote<R>(&mut self, cx: &Context<'_>, result: Poll<R>) -> Poll<R> {
        self.blocked = result.is_pending();
        if !self.blocked && std::mem::take(&mut self.paused) {
            cx.waker().wake_by_ref();
        }
        result
    }
}

// Where in the stream of frames we are. Never inside a frame's header: one that is split is kept back.
#[derive(Debug)]
struct Frames {
    // Bytes that pass before the next frame begins.
    pass: u64,
    // Frames that were passed on and not paid for.
    passed: usize,
    // Bytes kept back: a split frame header, or the frames of a header block.
    kept: BytesMut,
    // Bytes ready for the reader.
    ready: BytesMut,
    blocks: Blocks,
    // How far the header block that is kept was looked at.
    far: Option<Far>,
    // For one that is large.
    leave: Option<SemaphorePermit<'static>>,
    leaves: &'static Semaphore,
    // Nothing is looked at any more.
    blind: bool,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            pass: PREFACE as u64,
            passed: 0,
            kept: BytesMut::new(),
            ready: BytesMut::new(),
            blocks: Blocks::default(),
            far: None,
            leave: None,
            leaves: &LARGE,
            blind: false,
        }
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy)]
struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Head {
    fn of(bytes: &[u8]) -> Option<Self> {
        let b = bytes.get(..HEADER)?;
        Some(Self {
            length: u32::from_be_bytes([0, b[0], b[1], b[2]]) as usize,
            kind: b[3],
            flags: b[4],
            stream: u32::from_be_bytes([b[5], b[6], b[7], b[8]]) & 0x7fff_ffff,
        })
    }
}

impl Frames {
    fn enough(&self) -> bool {
        self.passed >= FRAMES
    }

    // How many of the bytes, from their beginning, may be passed on as they are; the rest starts with
    // the header of a frame that must be looked at, or with a split one, or with one too many for now.
    fn passing(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        loop {
            let n = usize::try_from(self.pass).unwrap_or(usize::MAX).min(bytes.len() - at);
            at += n;
            self.pass -= n as u64;
            if at == bytes.len() {
                return at;
            }
            match Head::of(&bytes[at..]) {
                Some(head) if head.kind != HEADERS && !self.enough() => {
                    self.pass = (HEADER + head.length) as u64;
                    self.passed += 1;
                }
                _ => return at,
            }
        }
    }

    // Makes ready what is kept, which begins where a frame begins, to the end of its first header block; whether there is one.
    fn next(&mut self) -> io::Result<bool> {
        if self.blind {
            self.ready.unsplit(self.kept.split());
            return Ok(false);
        }
        let passing = {
            let kept = std::mem::take(&mut self.kept);
            let n = self.passing(&kept);
            self.kept = kept;
            n
        };
        if passing > 0 {
            self.ready.extend_from_slice(&self.kept[..passing]);
            self.kept.advance(passing);
        }
        // It may be the head of any frame.
        if self.enough() {
            return Ok(false);
        }
        match gather(&self.kept, &mut self.far) {
            Gathered::More => {
                self.hold()?;
                return Ok(false);
            }
            Gathered::Block { length, frames, fragment } => {
                let raw = self.kept.split_to(length);
                match self.blocks.rewrite(&raw, &fragment) {
                    Ok(None) if frames > FEW => {
                        self.ready.extend_from_slice(&block::framed(&raw, &fragment));
                    }
                    Ok(None) => self.ready.extend_from_slice(&raw),
                    Ok(Some(new)) => self.ready.extend_from_slice(&new),
                    Err(why) => self.give_up(&raw, why)?,
                }
            }
            Gathered::Large => return Err(invalid("a header block is too large")),
            Gathered::Broken(why) => self.give_up(&[], why)?,
        }
        self.leave = None;
        Ok(true)
    }

    // What is not complete.
    fn hold(&mut self) -> io::Result<()> {
        if self.kept.len() > LITTLE && self.leave.is_none() {
            let leave = self.leaves.try_acquire().map_err(|_| invalid("too many header blocks are large"))?;
            self.leave = Some(leave);
        }
        Ok(())
    }

    fn give_up(&mut self, raw: &[u8], why: &'static str) -> io::Result<()> {
        if self.blocks.rewriting() {
            return Err(invalid(why));
        }
        self.ready.extend_from_slice(raw);
        self.blind = true;
        Ok(())
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

enum Gathered {
    // The block is not complete.
    More,
    // Its frames end here; the fragments, joined.
    Block { length: usize, frames: usize, fragment: Vec<u8> },
    // It is longer than any that is taken.
    Large,
    // Not frames of a block.
    Broken(&'static str),
}

// Whole frames of a header block whose end has not come: a client may send thousands of them, a byte at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Far {
    length: usize,
    frames: usize,
    stream: u32,
    // Of the last one.
    flags: u8,
}

// A HEADERS frame and its CONTINUATIONs, from the beginning of `kept`. What was looked at is not looked at again.
fn gather(kept: &[u8], far: &mut Option<Far>) -> Gathered {
    let mut now = match far.take() {
        Some(far) => far,
        None => {
            let Some(first) = Head::of(kept) else { return Gathered::More };
            if first.length > LARGEST {
                return Gathered::Large;
            }
            let Some(payload) = kept.get(HEADER..HEADER + first.length) else { return Gathered::More };
            if block::surround(first.flags, payload).is_none() {
                return Gathered::Broken("a HEADERS frame is shorter than its padding");
            }
            Far { length: HEADER + first.length, frames: 1, stream: first.stream, flags: first.flags }
        }
    };
    while now.flags & END_HEADERS == 0 {
        if now.length > LARGEST || now.frames > MANY {
            return Gathered::Large;
        }
        let next = Head::of(&kept[now.length..]);
        if next.is_some_and(|next| {
            next.kind != CONTINUATION || next.stream != now.stream || next.length > LARGEST
        }) {
            return Gathered::Broken("a header block is not continued");
        }
        let Some(next) = next.filter(|next| kept.len() >= now.length + HEADER + next.length) else {
            *far = Some(now);
            return Gathered::More;
        };
        now.length += HEADER + next.length;
        now.frames += 1;
        now.flags = next.flags;
    }
    Gathered::Block { length: now.length, frames: now.frames, fragment: joined(&kept[..now.length]) }
}

// The fragments of whole frames.
fn joined(mut frames: &[u8]) -> Vec<u8> {
    let mut fragment = Vec::with_capacity(frames.len());
    while let Some(head) = Head::of(frames) {
        let (frame, rest) = frames.split_at(HEADER + head.length);
        let payload = &frame[HEADER..];
        let (prefix, padding) = match head.kind {
            HEADERS => block::surround(head.flags, payload).unwrap_or_default(),
            _ => (0, 0),
        };
        fragment.extend_from_slice(&payload[prefix..payload.len() - padding]);
        frames = rest;
    }
    fragment
}

impl<T: AsyncRead + Unpin> AsyncRead for AuthorityRewriter<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let frames = &mut this.frames;
            if !frames.ready.is_empty() {
                let n = frames.ready.len().min(buf.remaining());
                buf.put_slice(&frames.ready[..n]);
                frames.ready.advance(n);
                if frames.ready.is_empty() {
                    // Header blocks are rare: nothing is kept for the next one.
                    frames.ready = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = this.failed.take() {
                return Poll::Ready(Err(error));
            }
            if buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if this.owes > 0 {
                ready!(this.poll_pay(cx));
                this.advance();
                continue;
            }
            if !frames.kept.is_empty() && !frames.blind {
                let mut space = [0; CHUNK];
                let mut chunk = ReadBuf::new(&mut space);
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut chunk))?;
                if chunk.filled().is_empty() {
                    // The end: the rest goes on as it is.
                    frames.ready = frames.kept.split();
                    frames.blind = true;
                    if frames.ready.is_empty() {
                        return Poll::Ready(Ok(()));
                    }
                    continue;
                }
                frames.kept.extend_from_slice(chunk.filled());
                this.advance();
                continue;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
            let new = &buf.filled()[before..];
            if frames.blind {
                this.owes = UNSEEN;
                return Poll::Ready(Ok(()));
            }
            if new.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let passing = frames.passing(new);
            if passing < new.len() {
                frames.kept.extend_from_slice(&new[passing..]);
                buf.set_filled(before + passing);
                this.advance();
            }
            if passing > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for AuthorityRewriter<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.inner).poll_write(cx, buf);
        this.wrote(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        this.wrote(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
