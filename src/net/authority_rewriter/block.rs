//! Header blocks: decoded to see the authority, written anew where it will not do.

use std::borrow::Cow;
use std::fmt;

use bytes::{BufMut, BytesMut};
use fluke_hpack::Decoder;
use httlib_huffman::DecoderSpeed;

use crate::net::frame::{CONTINUATION, END_HEADERS, HEADERS, PADDED, PRIORITIES, PRIORITY};

/// What stands in for an authority that the server would refuse.
const INSTEAD: &[u8] = b"localhost";
/// Size of the table that HTTP/2 peers begin with, and the most a client may use, since the servers
/// behind the shim do not announce another.
const TABLE: usize = 4096;
/// Largest frame that every HTTP/2 peer takes.
const FRAME: usize = 16 * 1024;

/// The header blocks of one connection, in order.
pub(super) struct Blocks {
    decoder: Decoder<'static>,
    rewriting: bool,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("rewriting", &self.rewriting).finish_non_exhaustive()
    }
}

impl Default for Blocks {
    fn default() -> Self {
        Self { decoder: Decoder::new(), rewriting: false }
    }
}

/// Lengths of what stands before and after the fragment in a HEADERS payload.
pub(super) fn surround(flags: u8, payload: &[u8]) -> Option<(usize, usize)> {
    let mut prefix = 0;
    let mut padding = 0;
    if flags & PADDED != 0 {
        padding = usize::from(*payload.first()?);
        prefix += 1;
    }
    if flags & PRIORITY != 0 {
        prefix += PRIORITIES;
    }
    (prefix + padding <= payload.len()).then_some((prefix, padding))
}

impl Blocks {
    /// Whether some block has been written anew.
    pub(super) fn rewriting(&self) -> bool {
        self.rewriting
    }

    /// Looks at a block: its frames as they came, and its joined fragments. Gives the frames to send in
    /// their place, if they cannot go on as they are.
    pub(super) fn rewrite(&mut self, raw: &[u8], fragment: &[u8]) -> Result<Option<BytesMut>, &'static str> {
        let fragment = plain(fragment)?;
        let mut fields: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        let mut size = 0;
        let mut overflow = false;
        self.decoder
            .decode_with_cb(&fragment, |name, value| {
                // A small block can name large table entries many times over.
                size += name.len() + value.len() + 32;
                overflow |= size > super::LARGEST;
                if !overflow {
                    fields.push((name.into_owned(), value.into_owned()));
                }
            })
            .map_err(|_| "a header block does not decode")?;
        if overflow {
            // The server ends its stream.
            return if self.rewriting { Err("a header list is too large") } else { Ok(None) };
        }
        for (name, value) in &mut fields {
            if name == b":authority" && http::uri::Authority::try_from(&**value).is_err() {
                INSTEAD.clone_into(value);
                self.rewriting = true;
            }
        }
        Ok(self.rewriting.then(|| frames(raw, &fields)))
    }
}

// The frames of a block, with the stream, flags and priority of the ones they replace.
fn frames(raw: &[u8], fields: &[(Vec<u8>, Vec<u8>)]) -> BytesMut {
    let mut fragment = Vec::new();
    for (name, value) in fields {
        // Literal without indexing, new name.
        fragment.push(0);
        for text in [name, value] {
            integer(text.len(), 7, &mut fragment);
            fragment.extend_from_slice(text);
        }
    }
    framed(raw, &fragment)
}

/// A fragment in as few frames as possible, with the stream, flags and priority of the ones it came in.
pub(super) fn framed(raw: &[u8], fragment: &[u8]) -> BytesMut {
    let flags = raw[4];
    let stream = &raw[5..9];
    let priority = usize::from(flags & PADDED != 0);
    let priority: &[u8] =
        if flags & PRIORITY != 0 { &raw[9 + priority..9 + priority + PRIORITIES] } else { &[] };
    let mut out = BytesMut::with_capacity(fragment.len() + 64);
    let first = FRAME - priority.len();
    let (head, mut rest) = fragment.split_at(first.min(fragment.len()));
    let end = |rest: &[u8]| if rest.is_empty() { END_HEADERS } else { 0 };
    let mut frame = |kind: u8, flags: u8, parts: [&[u8]; 2]| {
        let length = parts[0].len() + parts[1].len();
        out.put_uint(length as u64, 3);
        out.put_u8(kind);
        out.put_u8(flags);
        out.extend_from_slice(stream);
        parts.iter().for_each(|p| out.extend_from_slice(p));
    };
    frame(HEADERS, flags & !(PADDED | END_HEADERS) | end(rest), [priority, head]);
    while !rest.is_empty() {
        let (piece, more) = rest.split_at(FRAME.min(rest.len()));
        rest = more;
        frame(CONTINUATION, end(rest), [&[], piece]);
    }
    out
}

fn integer(value: usize, prefix: u8, into: &mut Vec<u8>) {
    let bytes = fluke_hpack::encoder::encode_integer(value, prefix);
    into.extend_from_slice(&bytes);
}

// A block with no text in the Huffman code, by its shape: complete integers and texts, table sizes within bounds. The
// decoder takes the shape for granted in places where it must not (a cut size update makes it panic, and any size is
// taken), and makes its table of the code anew for each text: 15 µs for a text of one byte, 2 s for a block of them.
pub(in crate::net) fn plain(block: &[u8]) -> Result<Cow<'_, [u8]>, &'static str> {
    const CUT: &str = "a header block is cut";
    let mut rest = block;
    // What was written anew of the first `done` bytes.
    let (mut new, mut done) = (Vec::new(), 0);
    while let Some(&first) = rest.first() {
        if first & 0x80 != 0 {
            take_integer(&mut rest, 7).ok_or(CUT)?;
            continue;
        }
        if first & 0xe0 == 0x20 {
            let size = take_integer(&mut rest, 5).ok_or(CUT)?;
            if size > TABLE {
                return Err("a header table is larger than agreed");
            }
            continue;
        }
        let prefix = if first & 0x40 != 0 { 6 } else { 4 };
        let named = take_integer(&mut rest, prefix).ok_or(CUT)? != 0;
        for _ in usize::from(named)..2 {
            let begin = block.len() - rest.len();
            let coded = rest.first().ok_or(CUT)? & 0x80 != 0;
            let length = take_integer(&mut rest, 7).ok_or(CUT)?;
            let (text, more) = rest.split_at_checked(length).ok_or(CUT)?;
            rest = more;
            if coded {
                let mut clear = Vec::with_capacity(length * 8 / 5);
                httlib_huffman::decode(text, &mut clear, DecoderSpeed::FourBits)
                    .map_err(|_| "a header block does not decode")?;
                new.extend_from_slice(&block[done..begin]);
                integer(clear.len(), 7, &mut new);
                new.extend_from_slice(&clear);
                done = block.len() - rest.len();
            }
        }
    }
    if done == 0 {
        return Ok(Cow::Borrowed(block));
    }
    new.extend_from_slice(&block[done..]);
    Ok(Cow::Owned(new))
}

fn take_integer(bytes: &mut &[u8], prefix: u32) -> Option<usize> {
    let (&first, mut rest) = bytes.split_first()?;
    let mask = (1u8 << prefix) - 1;
    let mut value = usize::from(first & mask);
    if first & mask == mask {
        let mut shift = 0;
        loop {
            let (&byte, more) = rest.split_first()?;
            rest = more;
            value += usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
            // Nothing in a header block is that large.
            if shift > 21 {
                return None;
            }
        }
    }
    *bytes = rest;
    Some(value)
}
