//! Text from outside: how it is shown; and Go's string literals, which stand in templates and in files that the kubelet
//! writes.

use std::borrow::Cow;

/// Longest name from outside that is shown whole, in bytes; Kubernetes' own names have 253 at most.
const SHOWN: usize = 256;

/// A name or text from outside as it may stand in a log line or an error: a long one is cut, and says so; see [`plain`].
#[must_use]
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    cut(text, SHOWN)
}

/// What stands for a secret.
pub(crate) const REDACTED: &str = "<redacted>";

/// Without the users and passwords of the URLs in it.
#[must_use]
pub(crate) fn without_users(text: &str) -> String {
    let mut parts = text.split("://");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for rest in parts {
        let end = rest.find(|c: char| "/?#,;\"'".contains(c) || c.is_whitespace()).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        out.push_str("://");
        match authority.rsplit_once('@') {
            Some((_, host)) => out.extend([REDACTED, "@", host, path]),
            None => out.push_str(rest),
        }
    }
    out
}

/// The text with its control characters escaped, but for some: a terminal would do as they say, and a line could be made
/// up.
#[must_use]
pub(crate) fn plain<'a>(text: impl Into<Cow<'a, str>>, but: &[char]) -> Cow<'a, str> {
    let text = text.into();
    let bad = |c: char| c.is_control() && !but.contains(&c);
    if !text.contains(bad) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if bad(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// A text from outside, cut to `most` bytes if it is longer; see [`plain`].
#[must_use]
pub(crate) fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return plain(text, &[]);
    }
    let end = text.floor_char_boundary(most);
    Cow::Owned(format!("{}... ({} bytes)", plain(&text[..end], &[]), text.len()))
}

/// Go's `strconv.Unquote`: double quotes with escapes, back quotes as they are, or one character in single
/// quotes, which Go also takes with nothing in them. Bytes that are no UTF-8 become the replacement character.
#[must_use]
pub(crate) fn unquote(text: &str) -> Option<String> {
    let quote = text.chars().next()?;
    if !matches!(quote, '"' | '\'' | '`') || text.len() < 2 || !text.ends_with(quote) {
        return None;
    }
    let inner = &text[1..text.len() - 1];
    match quote {
        '`' if inner.contains('`') => None,
        '`' => Some(inner.replace('\r', "")),
        '"' | '\'' => {
            let bytes = unescape(inner, quote)?;
            let plain = String::from_utf8_lossy(&bytes).into_owned();
            if quote == '\'' && plain.chars().count() > 1 { None } else { Some(plain) }
        }
        _ => None,
    }
}

fn unescape(text: &str, quote: char) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            '\n' => return None,
            c if c == quote => return None,
            '\\' => escape(&mut rest, quote, &mut out)?,
            c => push(&mut out, c),
        }
    }
    Some(out)
}

fn push(out: &mut Vec<u8>, c: char) {
    out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
}

fn escape(rest: &mut std::str::Chars<'_>, quote: char, out: &mut Vec<u8>) -> Option<()> {
    match rest.next()? {
        'a' => out.push(7),
        'b' => out.push(8),
        'f' => out.push(12),
        'n' => out.push(b'\n'),
        'r' => out.push(b'\r'),
        't' => out.push(b'\t'),
        'v' => out.push(11),
        '\\' => out.push(b'\\'),
        c if c == quote => push(out, c),
        'x' => out.push(u8::try_from(number(rest, 0, 2, 16)?).ok()?),
        'u' => push(out, char::from_u32(number(rest, 0, 4, 16)?)?),
        'U' => push(out, char::from_u32(number(rest, 0, 8, 16)?)?),
        c @ '0'..='7' => out.push(u8::try_from(number(rest, c.to_digit(8)?, 2, 8)?).ok()?),
        _ => return None,
    }
    Some(())
}

// `count` more digits behind a value already read.
fn number(rest: &mut std::str::Chars<'_>, first: u32, count: usize, radix: u32) -> Option<u32> {
    (0..count)
        .try_fold(first, |value, _| value.checked_mul(radix)?.checked_add(rest.next()?.to_digit(radix)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(shown("name"), "name");
        assert_eq!(super::cut("four", 4), "four");
        assert_eq!(super::cut("four", 3), "fou... (4 bytes)");
        assert_eq!(shown("a\nb\u{1b}c"), "a\\nb\\u{1b}c");
        let cut = shown(&"é".repeat(1000)).into_owned();
        assert!(cut.ends_with("... (2000 bytes)") && cut.len() < 300, "{cut}");
    }

    #[test]
    fn no_text_makes_a_line_of_its_own_or_moves_a_terminal() {
        assert_eq!(shown("a\n2026 error\u{1b}[2J\u{9b}é"), "a\\n2026 error\\u{1b}[2J\\u{9b}é");
        assert_eq!(super::cut("\r\n", 1), "\\r... (2 bytes)");
    }

    #[test]
    fn unquotes_as_go_does() {
        for (quoted, plain) in [
            (r#""a""#, "a"),
            (r#""""#, ""),
            (r#""tab\there""#, "tab\there"),
            (r#""\u00e9\x41\101""#, "\u{e9}AA"),
            (r#""\"x\\""#, "\"x\\"),
            ("`a\\b`", "a\\b"),
            ("'x'", "x"),
            ("''", ""),
            (r#""\U0001F600""#, "\u{1F600}"),
            (r#""\xc3\xa9""#, "\u{e9}"),
        ] {
            assert_eq!(unquote(quoted).as_deref(), Some(plain), "{quoted}");
        }
        for bad in [
            "",
            "\"",
            "web",
            "\"a",
            r#""a"b""#,
            r#""\q""#,
            r#""\x4""#,
            r#""\400""#,
            "'ab'",
            r#""\ud800""#,
            "\"a\nb\"",
        ] {
            assert_eq!(unquote(bad), None, "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn reads_json_strings_and_never_panics(text in "\\PC*", junk in "\\PC*") {
            let quoted = serde_json::to_string(&text).unwrap();
            proptest::prop_assert_eq!(unquote(&quoted), Some(text));
            let _ = unquote(&junk);
            let _ = unquote(&format!("\"{junk}\""));
        }
    }
}
