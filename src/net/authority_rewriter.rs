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

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};

mod block;

use super::io::writes_pass;
use block::Blocks;

/// What a client says first.
const PREFACE: usize = 24;
const HEADER: usize = 9;
/// Read at once while a header block is being gathered.
const CHUNK: usize = 4096;
/// Largest header block gathered; the server's own limit on header lists is about the same.
const LARGEST: usize = 384 * 1024;
/// A block in more frames is put together: the server takes many small ones for an attack.
const FEW: usize = 4;
/// Most frames of one block: a list of 4 kB, a byte at a time.
const MANY: usize = 4096;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// Wraps an accepted connection. Writes pass through.
#[derive(Debug)]
pub struct AuthorityRewriter<T> {
    inner: T,
    frames: Frames,
    // Told when what was good before it has been read.
    failed: Option<io::Error>,
}

impl<T> AuthorityRewriter<T> {
    /// Wraps a connection of which nothing has been read yet.
    pub fn new(inner: T) -> Self {
        Self { inner, frames: Frames::default(), failed: None }
    }
}

// Where in the stream of frames we are. Never inside a frame's header: one that is split is kept back.
#[derive(Debug)]
struct Frames {
    // Bytes that pass before the next frame begins.
    pass: u64,
    // Bytes kept back: a split frame header, or the frames of a header block.
    kept: BytesMut,
    // Bytes ready for the reader.
    ready: BytesMut,
    blocks: Blocks,
    // How far the header block that is kept was looked at.
    far: Option<Far>,
    // Nothing is looked at any more.
    blind: bool,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            pass: PREFACE as u64,
            kept: BytesMut::new(),
            ready: BytesMut::new(),
            blocks: Blocks::default(),
            far: None,
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
    // How many of the bytes, from their beginning, may be passed on as they are; the rest starts with
    // the header of a frame that must be looked at, or with a split one.
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
                Some(head) if head.kind != HEADERS => self.pass = (HEADER + head.length) as u64,
                _ => return at,
            }
        }
    }

    // Takes bytes that begin where a frame begins (after what is kept), and makes them ready.
    fn take(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.kept.extend_from_slice(bytes);
        loop {
            if self.blind {
                self.ready.unsplit(self.kept.split());
                return Ok(());
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
            match gather(&self.kept, &mut self.far) {
                Gathered::More => return Ok(()),
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
                Gathered::Broken(why) => self.give_up(&[], why)?,
            }
        }
    }

    fn give_up(&mut self, raw: &[u8], why: &'static str) -> io::Result<()> {
        if self.blocks.rewriting() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        self.ready.extend_from_slice(raw);
        self.blind = true;
        Ok(())
    }
}

enum Gathered {
    // The block is not complete.
    More,
    // Its frames end here; the fragments, joined.
    Block { length: usize, frames: usize, fragment: Vec<u8> },
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
                return Gathered::Broken("a header block is too large");
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
            return Gathered::Broken("a header block is too large");
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
        let frames = &mut this.frames;
        loop {
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
                this.failed = frames.take(chunk.filled()).err();
                continue;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
            let new = &buf.filled()[before..];
            if new.is_empty() || frames.blind {
                return Poll::Ready(Ok(()));
            }
            let passing = frames.passing(new);
            if passing < new.len() {
                let rest = new[passing..].to_vec();
                buf.set_filled(before + passing);
                this.failed = frames.take(&rest).err();
            }
            if passing > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

writes_pass!(AuthorityRewriter, inner);

#[cfg(test)]
mod tests;
