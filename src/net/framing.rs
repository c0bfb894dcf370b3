//! How an answer's head is put, and says where its body ends, as Go's client takes it.
//!
//! The HTTP library refuses `Transfer-Encoding` in an answer of HTTP/1.0, which Go passes over: the body then ends with its
//! length or with the connection, and what chunks would be is part of it. So the field gets a name that nobody knows before
//! the library sees it. Of later versions it takes codings that it does not undo, and lengths in lists, which Go refuses.
//! Names of fields may have blanks in them for Go, and are then names that nobody knows; the library refuses them.

use http::{HeaderMap, header};
use hyper::client::conn::http1;

const VERSION: &[u8] = b"HTTP/1.0 ";
const CODING: &[u8] = b"transfer-encoding";
/// Header fields in an answer; Go counts only bytes.
const HEAD_FIELDS: usize = 1000;

/// The body's end is told in a way that Go refuses.
#[derive(Debug, thiserror::Error)]
#[error("the body is coded otherwise than in chunks, or has a list of lengths")]
pub(crate) struct Framing;

/// A client that takes heads as Go's does.
pub(crate) fn client() -> http1::Builder {
    let mut client = http1::Builder::new();
    client
        .max_headers(HEAD_FIELDS)
        // As Go spells them: some servers compare names byte by byte.
        .title_case_headers(true)
        .allow_obsolete_multiline_headers_in_responses(true)
        .allow_spaces_after_header_name_in_responses(true);
    client
}

/// Follows the heads of an answer, interim ones too, as their bytes come.
#[derive(Debug, Default)]
pub(super) struct Heads {
    /// The beginning of the line.
    line: [u8; CODING.len()],
    /// Bytes of the line so far, without its end.
    length: usize,
    /// In the name of a field.
    naming: bool,
    /// Of the head under way: its version line has come; it is of HTTP/1.0; another head follows.
    begun: bool,
    old: bool,
    interim: bool,
    /// The last head has ended.
    over: bool,
}

impl Heads {
    /// Bytes that come next.
    pub(super) fn pass(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            if self.over {
                return;
            }
            match *byte {
                b'\n' => self.end_of_line(),
                // Before the end of a line only.
                b'\r' => {}
                now => {
                    // A line that begins with a blank goes on with the value of the one before.
                    let folded = self.length == 0 && matches!(now, b' ' | b'\t');
                    self.naming &= now != b':' && !folded;
                    if self.naming && now == b' ' {
                        *byte = b'_';
                    }
                    if let Some(place) = self.line.get_mut(self.length) {
                        *place = now;
                    }
                    self.length += 1;
                    if self.old && self.length == CODING.len() && self.line.eq_ignore_ascii_case(CODING) {
                        *byte = b'_';
                    }
                }
            }
        }
    }

    fn end_of_line(&mut self) {
        let line = &self.line[..self.length.min(CODING.len())];
        if self.begun && line.is_empty() {
            *self = Self { over: !self.interim, ..Self::default() };
            return;
        }
        if !self.begun && !line.is_empty() {
            self.begun = true;
            self.old = line.starts_with(VERSION);
            self.interim = line.get(VERSION.len()) == Some(&b'1');
        }
        self.length = 0;
        self.naming = self.begun;
    }
}

/// That it is told where the body ends.
///
/// # Errors
/// When it is coded otherwise than in chunks, or its length is a list.
pub(crate) fn check(headers: &HeaderMap) -> Result<(), Framing> {
    let listed = headers.get_all(header::CONTENT_LENGTH).iter().any(|v| v.as_bytes().contains(&b','));
    if is_coded(headers) || listed { Err(Framing) } else { Ok(()) }
}

/// Whether a body is coded otherwise than in chunks. Where chunks are the last of its codings the library undoes them alone.
pub(crate) fn is_coded(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => false,
        (Some(coding), None) => !coding.as_bytes().eq_ignore_ascii_case(b"chunked"),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coding_of_an_old_answer_is_hidden_and_nothing_else() {
        let seen = |text: &str, cut: usize| {
            let (mut heads, mut bytes) = (Heads::default(), text.as_bytes().to_vec());
            bytes.chunks_mut(cut).for_each(|piece| heads.pass(piece));
            String::from_utf8(bytes).unwrap()
        };
        let body = "\r\n\r\n5\r\nHTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (head, hidden) in [
            (
                "HTTP/1.0 200 OK\r\ntransfer-ENCODING: chunked",
                "HTTP/1.0 200 OK\r\ntransfer-ENCODIN_: chunked",
            ),
            ("HTTP/1.0 200 OK\nA: b\nTransfer-Encoding : x", "HTTP/1.0 200 OK\nA: b\nTransfer-Encodin__: x"),
            ("HTTP/1.1 200 OK\r\nA b : c d\r\n e f: g", "HTTP/1.1 200 OK\r\nA_b_: c d\r\n e f: g"),
            ("HTTP/1.1 200 OK\r\nA: b\r\n\tc d: e", "HTTP/1.1 200 OK\r\nA: b\r\n\tc d: e"),
            (
                "\r\nHTTP/1.0 103 A\r\n\r\nHTTP/1.0 200 OK\r\nTransfer-Encoding: x",
                "\r\nHTTP/1.0 103 A\r\n\r\nHTTP/1.0 200 OK\r\nTransfer-Encodin_: x",
            ),
            (
                "HTTP/1.0 100 A\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: x",
                "HTTP/1.0 100 A\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: x",
            ),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: x", "HTTP/1.1 200 OK\r\nTransfer-Encoding: x"),
            ("HTTP/1.0 200 OK\r\nA: Transfer-Encoding: x", "HTTP/1.0 200 OK\r\nA: Transfer-Encoding: x"),
            ("HTTP/1.0 200 OK\r\nXTransfer-Encoding: x", "HTTP/1.0 200 OK\r\nXTransfer-Encoding: x"),
        ] {
            for cut in [1, 2, 7, 1000] {
                assert_eq!(seen(&format!("{head}{body}"), cut), format!("{hidden}{body}"), "{cut}");
            }
        }
    }
}
