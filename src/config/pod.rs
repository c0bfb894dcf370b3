//! What the kubelet writes into the pod: labels and annotations, one `key="value"` per line, the value
//! quoted by Go's rules.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Labels file, relative to the working directory.
pub const LABELS: &str = "./etc/istio/pod/labels";
/// Annotations file, relative to the working directory.
pub const ANNOTATIONS: &str = "./etc/istio/pod/annotations";

/// Why a file gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A value is not quoted; the whole file is unusable.
    #[error("failed to unquote {value}: invalid syntax")]
    Unquote {
        /// The value as it stands, cut at 100 characters.
        value: String,
    },
}

/// Reads a file of this form. A missing one is ordinary off Kubernetes and only a debug line; any other
/// trouble is a warning. Either way the file then counts as absent.
#[must_use]
pub fn read(path: &Path) -> Option<BTreeMap<String, String>> {
    let read = std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source });
    match read.and_then(|bytes| parse(&String::from_utf8_lossy(&bytes))) {
        Ok(entries) => Some(entries),
        Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            tracing::debug!("no {}: not in a pod, or nothing mounted there", path.display());
            None
        }
        Err(error) => {
            let why = crate::base::error::chain(&error);
            tracing::warn!("{} is ignored: {why}", path.display());
            None
        }
    }
}

/// The entries of a file's text; later ones win, lines without `=` are skipped.
///
/// # Errors
/// When one value is not quoted by Go's rules.
pub fn parse(text: &str) -> Result<BTreeMap<String, String>, Error> {
    let mut entries = BTreeMap::new();
    for line in text.split('\n') {
        let Some((key, value)) = line.split_once('=') else { continue };
        let bad = || Error::Unquote { value: value.chars().take(100).collect() };
        entries.insert(key.to_owned(), unquote(value).ok_or_else(bad)?);
    }
    Ok(entries)
}

/// Go's `strconv.Unquote`: double quotes with escapes, back quotes as they are, or one character in single
/// quotes. Bytes that are no UTF-8 become the replacement character.
#[must_use]
pub fn unquote(text: &str) -> Option<String> {
    let quote = text.chars().next()?;
    if text.len() < 2 || !text.ends_with(quote) {
        return None;
    }
    let inner = &text[1..text.len() - 1];
    match quote {
        '`' if inner.contains('`') => None,
        '`' => Some(inner.replace('\r', "")),
        '"' | '\'' => {
            let bytes = unescape(inner, quote)?;
            let plain = String::from_utf8_lossy(&bytes).into_owned();
            if quote == '\'' && plain.chars().count() != 1 { None } else { Some(plain) }
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
    fn unquotes_as_go_does() {
        for (quoted, plain) in [
            (r#""a""#, "a"),
            (r#""""#, ""),
            (r#""tab\there""#, "tab\there"),
            (r#""\u00e9\x41\101""#, "\u{e9}AA"),
            (r#""\"x\\""#, "\"x\\"),
            ("`a\\b`", "a\\b"),
            ("'x'", "x"),
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

    #[test]
    fn one_bad_value_spoils_the_file() {
        let entries = parse("a=\"1\"\nnoequals\n\nb=\"x=y\"\na=\"2\"").unwrap();
        assert_eq!(
            entries.into_iter().collect::<Vec<_>>(),
            [("a".into(), "2".into()), ("b".into(), "x=y".into())]
        );
        let error = parse("a=\"1\"\nb=web").unwrap_err();
        assert_eq!(error.to_string(), "failed to unquote web: invalid syntax");
    }

    #[test]
    fn a_file_that_is_missing_bad_or_a_folder_counts_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("labels");
        assert_eq!(read(&path), None);
        std::fs::write(&path, "a=b").unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, "a=\"b\"").unwrap();
        assert_eq!(read(&path).unwrap()["a"], "b");
        assert_eq!(read(dir.path()), None);
    }

    proptest::proptest! {
        #[test]
        fn reads_whatever_go_quotes(text in "\\PC*", junk in "\\PC*") {
            let quoted = serde_json::to_string(&text).unwrap();
            proptest::prop_assert_eq!(unquote(&quoted), Some(text));
            let _ = parse(&junk);
        }
    }
}
