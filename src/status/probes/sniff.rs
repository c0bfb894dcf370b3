//! The type of a body, told from its first bytes, for answers that pass on a body without its type.
//!
//! The signatures are those of the WHATWG MIME Sniffing Standard that applications answer probes with;
//! whatever is none of them is text, or bytes.

use ::http::HeaderValue;

/// As much as is looked at.
const LOOK: usize = 512;

const MARKUP: &[&str] = &[
    "<!DOCTYPE HTML",
    "<HTML",
    "<HEAD",
    "<SCRIPT",
    "<IFRAME",
    "<H1",
    "<DIV",
    "<FONT",
    "<TABLE",
    "<A",
    "<STYLE",
    "<TITLE",
    "<B",
    "<BODY",
    "<BR",
    "<P",
    "<!--",
];

pub(super) fn kind_of(body: &[u8]) -> HeaderValue {
    let body = &body[..body.len().min(LOOK)];
    let text = body.trim_ascii_start();
    let kind = if MARKUP.iter().any(|tag| opens(text, tag)) {
        "text/html; charset=utf-8"
    } else if text.starts_with(b"<?xml") {
        "text/xml; charset=utf-8"
    } else if body.starts_with(b"%PDF-") {
        "application/pdf"
    } else if body.starts_with(b"%!PS-Adobe-") {
        "application/postscript"
    } else if body.starts_with(b"\xfe\xff") {
        "text/plain; charset=utf-16be"
    } else if body.starts_with(b"\xff\xfe") {
        "text/plain; charset=utf-16le"
    } else if body.starts_with(b"\xef\xbb\xbf") {
        "text/plain; charset=utf-8"
    } else if body.starts_with(b"\x1f\x8b\x08") {
        "application/x-gzip"
    } else if body.starts_with(b"PK\x03\x04") {
        "application/zip"
    } else if body.starts_with(b"\x89PNG\r\n\x1a\n") {
        "image/png"
    } else if body.starts_with(b"GIF87a") || body.starts_with(b"GIF89a") {
        "image/gif"
    } else if body.starts_with(b"\xff\xd8\xff") {
        "image/jpeg"
    } else if body.starts_with(b"\0asm") {
        "application/wasm"
    } else if body.iter().any(|b| matches!(b, 0..=8 | 0x0b | 0x0e..=0x1a | 0x1c..=0x1f)) {
        "application/octet-stream"
    } else {
        "text/plain; charset=utf-8"
    };
    HeaderValue::from_static(kind)
}

/// The tag, in any case, ended by a blank or a bracket.
fn opens(text: &[u8], tag: &str) -> bool {
    text.len() > tag.len()
        && text[..tag.len()].eq_ignore_ascii_case(tag.as_bytes())
        && matches!(text[tag.len()], b' ' | b'>')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_what_probes_answer() {
        for (body, kind) in [
            (&b"fine"[..], "text/plain; charset=utf-8"),
            (b"{\"status\":\"UP\"}", "text/plain; charset=utf-8"),
            (b"  <html><body>", "text/html; charset=utf-8"),
            (b"<!doctype html>", "text/html; charset=utf-8"),
            (b"<pre", "text/plain; charset=utf-8"),
            (b"<!-- x", "text/html; charset=utf-8"),
            (b"<!--x", "text/plain; charset=utf-8"),
            (b"<?xml version", "text/xml; charset=utf-8"),
            (b"\x1f\x8b\x08\0\0", "application/x-gzip"),
            (b"a\0b", "application/octet-stream"),
            (b"\x1b[0m", "text/plain; charset=utf-8"),
        ] {
            assert_eq!(kind_of(body), kind, "{body:?}");
        }
    }
}
