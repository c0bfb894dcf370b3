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
                self.buffer.reserve(whole - self.buffer.len());
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
    put: fn(&Memory, u64, Protocol, Bytes),
}

impl<'a> Recorder<'a> {
    /// Of what Envoy says.
    pub(super) fn requests(memory: &'a Memory, id: u64, protocol: Protocol) -> Self {
        Self { memory, id, protocol, messages: Messages::new(u64::from(u32::MAX)), put: Memory::request }
    }

    /// Of what Envoy is told.
    pub(super) fn responses(memory: &'a Memory, id: u64, protocol: Protocol) -> Self {
        Self { put: Memory::response, ..Self::requests(memory, id, protocol) }
    }

    /// The next piece.
    pub(super) fn push(&mut self, piece: &[u8]) {
        for message in self.messages.push(piece).into_iter().flatten() {
            (self.put)(self.memory, self.id, self.protocol, message);
        }
    }
}
