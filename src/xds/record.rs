//! Gathers whole messages from the bytes that are relayed, for the memory of the last good configuration.

use bytes::{Buf, Bytes, BytesMut};

use super::frames::HEADER;
use super::memory::Memory;
use super::protocol::Protocol;

/// Whole messages out of the pieces of a stream.
#[derive(Debug)]
pub(super) struct Messages {
    buffer: BytesMut,
    most: u64,
}

impl Messages {
    /// Of at most so many bytes each.
    pub(super) fn new(most: u64) -> Self {
        Self { buffer: BytesMut::new(), most }
    }

    /// The messages that end in this piece, without their headers. `Err`: one is larger than accepted.
    pub(super) fn push(&mut self, piece: &[u8]) -> Result<Vec<Bytes>, u64> {
        self.buffer.extend_from_slice(piece);
        let mut out = Vec::new();
        while let Some((head, _)) = self.buffer.split_first_chunk::<HEADER>() {
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            if u64::from(length) > self.most {
                return Err(u64::from(length));
            }
            let whole = HEADER + length as usize;
            if self.buffer.len() < whole {
                // What is announced costs nothing yet.
                let missing = whole - self.buffer.len();
                self.buffer.reserve(missing.min(self.buffer.len()));
                break;
            }
            let mut message = self.buffer.split_to(whole).freeze();
            message.advance(HEADER);
            out.push(message);
        }
        if self.buffer.is_empty() {
            // What is left of it would keep the memory of the messages.
            self.buffer = BytesMut::new();
        }
        Ok(out)
    }

    /// Throws away what is here of a message that [`Self::push`] has refused; gives how much of it is still to come.
    fn skip(&mut self, length: u64) -> u64 {
        let whole = HEADER as u64 + length;
        let here = usize::try_from(whole).unwrap_or(usize::MAX).min(self.buffer.len());
        self.buffer.advance(here);
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
        }
        whole - here as u64
    }

    /// The piece of a message that has not ended.
    pub(super) fn rest(self) -> Bytes {
        self.buffer.freeze()
    }

    /// Whether it stands between two messages.
    pub(super) fn is_between(&self) -> bool {
        self.buffer.is_empty()
    }
}

/// Notes one direction of a stream for the store.
pub(super) struct Recorder<'a> {
    memory: &'a Memory,
    id: u64,
    protocol: Protocol,
    messages: Messages,
    // Of a message that is too large to be noted: what is still to come.
    skip: u64,
    put: fn(&Memory, u64, Protocol, Bytes),
}

impl<'a> Recorder<'a> {
    /// Of what Envoy says.
    pub(super) fn requests(memory: &'a Memory, id: u64, protocol: Protocol) -> Self {
        let messages = Messages::new(memory.largest());
        Self { memory, id, protocol, messages, skip: 0, put: Memory::request }
    }

    /// Of what Envoy is told.
    pub(super) fn responses(memory: &'a Memory, id: u64, protocol: Protocol) -> Self {
        Self { put: Memory::response, ..Self::requests(memory, id, protocol) }
    }

    /// The next piece. A message that is too large to be noted is passed over.
    pub(super) fn push(&mut self, mut piece: &[u8]) {
        loop {
            let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(piece.len());
            self.skip -= skipped as u64;
            if self.skip > 0 {
                return;
            }
            match self.messages.push(&piece[skipped..]) {
                Ok(messages) => {
                    for message in messages {
                        (self.put)(self.memory, self.id, self.protocol, message);
                    }
                    return;
                }
                // What came before it in this piece is lost with it.
                Err(length) => {
                    self.memory.too_large(self.id, length);
                    self.skip = self.messages.skip(length);
                    piece = &[];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_announced_costs_nothing_and_what_is_too_large_is_passed_over() {
        let mut messages = Messages::new(u64::from(u32::MAX));
        assert_eq!(messages.push(b"\0\xff\xff\xff\xffabc"), Ok(vec![]));
        assert!(messages.buffer.capacity() < 1024, "{}", messages.buffer.capacity());
        for size in 1..20 {
            let (mut messages, mut skip, mut out) = (Messages::new(3), 0, Vec::new());
            for piece in b"\0\0\0\0\x02ab\0\0\0\0\x09ABCDEFGHI\0\0\0\0\x01c".chunks(size) {
                let skipped = usize::try_from(skip).unwrap().min(piece.len());
                skip -= skipped as u64;
                let mut pushed = messages.push(&piece[skipped..]);
                while let Err(length) = pushed {
                    assert_eq!(length, 9);
                    skip = messages.skip(length);
                    pushed = messages.push(&[]);
                }
                out.extend(pushed.unwrap());
            }
            assert_eq!((out.last().unwrap(), skip), (&Bytes::from_static(b"c"), 0), "in pieces of {size}");
        }
    }
}
