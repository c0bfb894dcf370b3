//! gRPC on the wire: status codes, the 5-byte frame, trailers. By hand, because faults cut it in the middle.

use std::str::FromStr;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;

/// gRPC's status codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[expect(missing_docs, reason = "the names are gRPC's")]
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

const CODES: [(Code, &str); 17] = [
    (Code::Ok, "OK"),
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];

impl FromStr for Code {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = text.parse::<usize>().ok();
        CODES
            .iter()
            .enumerate()
            .find(|(n, (_, name))| number == Some(*n) || *name == text.to_ascii_uppercase())
            .map(|(_, (code, _))| *code)
            .ok_or(())
    }
}

/// How a call ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The code.
    pub code: Code,
    /// The text.
    pub message: String,
    /// `grpc-status-details-bin`, as it is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details_bin: Option<String>,
    /// `grpc-retry-pushback-ms`, as it is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pushback: Option<String>,
}

impl Status {
    /// A status of `code` with `message`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details_bin: None, pushback: None }
    }

    /// Success.
    #[must_use]
    pub fn ok() -> Self {
        Self::new(Code::Ok, "")
    }

    /// With details as they are, base64 or not.
    #[must_use]
    pub fn details_bin(self, text: &str) -> Self {
        Self { details_bin: Some(text.to_owned()), ..self }
    }

    /// With the time after which to come again, in milliseconds, as it is; below 0: not to come again.
    #[must_use]
    pub fn pushback(self, text: &str) -> Self {
        Self { pushback: Some(text.to_owned()), ..self }
    }

    pub(crate) fn trailers(&self) -> HeaderMap {
        let mut map = HeaderMap::new();
        map.insert("grpc-status", HeaderValue::from(self.code as u16));
        if !self.message.is_empty() {
            let text = percent_encoded(&self.message);
            map.insert("grpc-message", HeaderValue::from_str(&text).expect("percent-encoded text is ASCII"));
        }
        if let Some(details) = self.details_bin.as_deref().and_then(|d| HeaderValue::from_str(d).ok()) {
            map.insert("grpc-status-details-bin", details);
        }
        if let Some(time) = self.pushback.as_deref().and_then(|t| HeaderValue::from_str(t).ok()) {
            map.insert("grpc-retry-pushback-ms", time);
        }
        map
    }
}

fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        if (0x20..0x7f).contains(&byte) && byte != b'%' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
        out
    })
}

/// `message` with its 5-byte prefix.
#[must_use]
pub fn frame(message: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(5 + message.len());
    out.put_u8(0);
    out.put_u32(u32::try_from(message.len()).expect("a gRPC message is below 4 GiB"));
    out.put_slice(message);
    out.freeze()
}

/// Cuts a body back into messages.
#[derive(Debug, Default)]
pub struct Deframer {
    buffer: BytesMut,
}

impl Deframer {
    /// Adds a piece of the body.
    pub fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// The next whole message.
    ///
    /// # Errors
    /// If the frame says that it is compressed.
    pub fn take(&mut self) -> Result<Option<Bytes>, Status> {
        if self.buffer.len() < 5 {
            return Ok(None);
        }
        if self.buffer[0] != 0 {
            return Err(Status::new(Code::Unimplemented, "compressed messages are not understood here"));
        }
        let length =
            u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]) as usize;
        if self.buffer.len() < 5 + length {
            return Ok(None);
        }
        self.buffer.advance(5);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// Bytes of a message that has not ended.
    #[must_use]
    pub fn left_over(&self) -> usize {
        self.buffer.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_whatever_the_pieces() {
        let wire: Vec<u8> = [&b"one"[..], b"", b"three"].iter().flat_map(|m| frame(m).to_vec()).collect();
        for size in 1..wire.len() {
            let mut deframer = Deframer::default();
            let mut got = Vec::new();
            for piece in wire.chunks(size) {
                deframer.push(piece);
                while let Some(message) = deframer.take().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, [&b"one"[..], b"", b"three"], "pieces of {size}");
            assert_eq!(deframer.left_over(), 0);
        }
    }

    #[test]
    fn codes_have_names_and_numbers() {
        assert_eq!("14".parse(), Ok(Code::Unavailable));
        assert_eq!("resource_exhausted".parse(), Ok(Code::ResourceExhausted));
        assert_eq!("17".parse::<Code>(), Err(()));
    }

    #[test]
    fn a_message_survives_as_a_header() {
        let trailers = Status::new(Code::Internal, "50% of\n\u{e4}").trailers();
        assert_eq!(trailers["grpc-status"], "13");
        assert_eq!(trailers["grpc-message"], "50%25 of%0A%C3%A4");
    }
}
