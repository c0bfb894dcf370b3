//! Percent-encoding (RFC 3986), by the crate `percent-encoding`; Go's strictness is added here.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode, utf8_percent_encode};

/// All but the unreserved characters, as Go's `url.QueryEscape` and RFC 3986 have it.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// What Go escapes in a path.
const NOT_IN_PATH: &AsciiSet = &RESERVED
    .remove(b'$')
    .remove(b'&')
    .remove(b'+')
    .remove(b',')
    .remove(b'/')
    .remove(b':')
    .remove(b';')
    .remove(b'=')
    .remove(b'@');

/// A percent sign without two hexadecimal digits behind it; shown with what stands there, as Go does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid URL escape {0:?}")]
pub(crate) struct Broken(String);

/// Decodes; a broken escape is refused, as Go's `url` package does (the crate would leave it as it is).
pub(crate) fn decode(text: &str) -> Result<Cow<'_, [u8]>, Broken> {
    let bytes = text.as_bytes();
    let hex = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_hexdigit);
    for (at, _) in text.match_indices('%') {
        if !(hex(at + 1) && hex(at + 2)) {
            return Err(Broken(text[at..].chars().take(3).collect()));
        }
    }
    Ok(percent_decode_str(text).into())
}

/// Decodes a text; `None` when an escape is broken or the result is not UTF-8.
pub(crate) fn decode_text(text: &str) -> Option<String> {
    String::from_utf8(decode(text).ok()?.into_owned()).ok()
}

/// Decodes what can be; a broken escape stays as it is.
pub(crate) fn decode_lossy(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}

/// Encodes a value of a query.
pub(crate) fn encode(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}

/// A query or a form of these pairs, whose names need no escapes; those without a value are left out.
pub(crate) fn pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str), IntoIter: Clone>) -> String {
    let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    // Room for all: a text that grows would leave copies of a token behind.
    let most = pairs.clone().map(|(name, value)| name.len() + 3 * value.len() + 2).sum();
    let mut out = String::with_capacity(most);
    for (name, value) in pairs {
        let joint = if out.is_empty() { "" } else { "&" };
        out.extend([joint, name, "="].into_iter().chain(utf8_percent_encode(value, RESERVED)));
    }
    out
}

/// Encodes a path.
pub(crate) fn encode_path(path: &[u8]) -> String {
    percent_encode(path, NOT_IN_PATH).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_escapes_are_refused_or_left() {
        assert_eq!(decode("a%2Fb%c3%a9").unwrap(), "a/b\u{e9}".as_bytes());
        for (text, shown) in
            [("%", "%"), ("x%2", "%2"), ("%zz1", "%zz"), ("%+1", "%+1"), ("%2\u{e9}", "%2\u{e9}")]
        {
            assert_eq!(decode(text), Err(Broken(shown.to_owned())), "{text}");
            assert_eq!(decode_lossy(text), text.as_bytes());
            assert_eq!(decode_text(text), None);
        }
        assert_eq!(decode_text("%ff"), None, "no UTF-8");
        assert_eq!(decode("%ff").unwrap(), [0xff].as_slice());
    }

    #[test]
    fn pairs_are_encoded_in_one_piece() {
        assert_eq!(pairs([("a", "x y&=ü"), ("b", ""), ("c", "-")]), "a=x%20y%26%3D%C3%BC&c=-");
        assert_eq!(pairs([]), "");
        let all = "&".repeat(1000);
        assert_eq!(pairs([("a", all.as_str())]).capacity(), 1 + 3000 + 2);
    }

    #[test]
    fn a_query_value_keeps_only_the_unreserved() {
        assert_eq!(encode("a/b c-_.~\u{e9}+"), "a%2Fb%20c-_.~%C3%A9%2B");
        assert_eq!(encode_path("/a b$&+,:;=@?*\u{e9}".as_bytes()), "/a%20b$&+,:;=@%3F%2A%C3%A9");
    }
}
