//! The text of a gRPC status in a header.

use http::{HeaderMap, HeaderValue};

/// Percent-encodes what the gRPC specification says must be: bytes below 0x20, above 0x7E, and `%`. Envoy
/// logs the text as it comes, so everything else stays readable.
#[must_use]
pub fn message(text: &str) -> HeaderValue {
    let mut out = Vec::with_capacity(text.len());
    for byte in text.bytes() {
        if (0x20..=0x7e).contains(&byte) && byte != b'%' {
            out.push(byte);
        } else {
            out.extend_from_slice(format!("%{byte:02X}").as_bytes());
        }
    }
    HeaderValue::from_maybe_shared(out).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Encodes the text of a status in `headers` anew.
pub fn readable(headers: &mut HeaderMap) {
    if let Some(value) = headers.get_mut("grpc-message") {
        *value = message(&decoded(value));
    }
}

/// What [`message`], or a library that encodes more, was made of.
#[must_use]
pub fn decoded(value: &HeaderValue) -> String {
    let bytes = value.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|h| std::str::from_utf8(h).ok());
        match hex.filter(|_| bytes[at] == b'%').and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_must_be_is_encoded() {
        let text = "no \"token\" for <istiod>: 100% sure\n\u{fc}~";
        let value = message(text);
        assert_eq!(value, "no \"token\" for <istiod>: 100%25 sure%0A%C3%BC~");
        assert_eq!(decoded(&value), text);
        assert_eq!(decoded(&HeaderValue::from_static("a%20b%2")), "a b%2");
    }
}
