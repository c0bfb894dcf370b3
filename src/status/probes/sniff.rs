//! The type of a body, told from its first bytes, for answers that pass on a body without its type.
//!
//! The signatures are those of the WHATWG MIME Sniffing Standard, as Go's library has them; whatever is none of them is text,
//! or bytes.

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

/// What a body begins with, so many bytes that may be anything, what comes then, and what it is; the first that fits counts.
const SIGNATURES: &[(&[u8], usize, &[u8], &str)] = &[
    (b"%PDF-", 0, b"", "application/pdf"),
    (b"%!PS-Adobe-", 0, b"", "application/postscript"),
    (b"\xfe\xff", 2, b"", "text/plain; charset=utf-16be"),
    (b"\xff\xfe", 2, b"", "text/plain; charset=utf-16le"),
    (b"\xef\xbb\xbf", 1, b"", "text/plain; charset=utf-8"),
    (b"\0\0\x01\0", 0, b"", "image/x-icon"),
    (b"\0\0\x02\0", 0, b"", "image/x-icon"),
    (b"BM", 0, b"", "image/bmp"),
    (b"GIF87a", 0, b"", "image/gif"),
    (b"GIF89a", 0, b"", "image/gif"),
    (b"RIFF", 4, b"WEBPVP", "image/webp"),
    (b"\x89PNG\r\n\x1a\n", 0, b"", "image/png"),
    (b"\xff\xd8\xff", 0, b"", "image/jpeg"),
    (b"FORM", 4, b"AIFF", "audio/aiff"),
    (b"ID3", 0, b"", "audio/mpeg"),
    (b"OggS\0", 0, b"", "application/ogg"),
    (b"MThd\0\0\0\x06", 0, b"", "audio/midi"),
    (b"RIFF", 4, b"AVI ", "video/avi"),
    (b"RIFF", 4, b"WAVE", "audio/wave"),
    (b"\x1a\x45\xdf\xa3", 0, b"", "video/webm"),
    (b"", 34, b"LP", "application/vnd.ms-fontobject"),
    (b"\0\x01\0\0", 0, b"", "font/ttf"),
    (b"OTTO", 0, b"", "font/otf"),
    (b"ttcf", 0, b"", "font/collection"),
    (b"wOFF", 0, b"", "font/woff"),
    (b"wOF2", 0, b"", "font/woff2"),
    (b"\x1f\x8b\x08", 0, b"", "application/x-gzip"),
    (b"PK\x03\x04", 0, b"", "application/zip"),
    (b"Rar!\x1a\x07\0", 0, b"", "application/x-rar-compressed"),
    (b"Rar!\x1a\x07\x01\0", 0, b"", "application/x-rar-compressed"),
    (b"\0asm", 0, b"", "application/wasm"),
];

pub(super) fn kind_of(body: &[u8]) -> HeaderValue {
    let body = &body[..body.len().min(LOOK)];
    let text = body.trim_ascii_start();
    let signed = |(first, gap, then, _): &&(&[u8], usize, &[u8], &str)| {
        body.starts_with(first) && body.get(first.len() + gap..).is_some_and(|rest| rest.starts_with(then))
    };
    let kind = if MARKUP.iter().any(|tag| opens(text, tag)) {
        "text/html; charset=utf-8"
    } else if text.starts_with(b"<?xml") {
        "text/xml; charset=utf-8"
    } else if let Some((_, _, _, kind)) = SIGNATURES.iter().find(signed) {
        kind
    } else if is_mp4(body) {
        "video/mp4"
    } else if body.iter().any(|b| matches!(b, 0..=8 | 0x0b | 0x0e..=0x1a | 0x1c..=0x1f)) {
        "application/octet-stream"
    } else {
        "text/plain; charset=utf-8"
    };
    HeaderValue::from_static(kind)
}

/// A box of brands, one of which begins with `mp4`. The second word is a version.
fn is_mp4(body: &[u8]) -> bool {
    let (Some(size), Some(b"ftyp")) = (body.first_chunk(), body.get(4..8)) else { return false };
    let size = u32::from_be_bytes(*size) as usize;
    let brands = body.get(8..size).filter(|_| size.is_multiple_of(4));
    let brands = brands.unwrap_or_default().chunks(4).enumerate();
    body.len() >= 12 && brands.into_iter().any(|(n, brand)| n != 1 && brand.starts_with(b"mp4"))
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
            (b"BM, and more", "image/bmp"),
            (b"\xfe\xffa", "text/plain; charset=utf-8"),
            (b"\xfe\xffab", "text/plain; charset=utf-16be"),
            (b"RIFF1234WEBPVP", "image/webp"),
            (b"RIFF1234WAVE", "audio/wave"),
            (b"RIFF1234", "text/plain; charset=utf-8"),
            (b"\0\0\0\x14ftypisom\0\0\0\0mp42", "video/mp4"),
            (b"\0\0\0\x10ftypisommp42", "application/octet-stream"),
            (b"\0\0\0\x14ftypisom\0\0\0\0mp4", "application/octet-stream"),
            (&[[0_u8; 34].as_slice(), b"LP"].concat(), "application/vnd.ms-fontobject"),
            (b"\x1b[0m", "text/plain; charset=utf-8"),
        ] {
            assert_eq!(kind_of(body), kind, "{body:?}");
        }
    }
}
