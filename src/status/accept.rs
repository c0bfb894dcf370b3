//! Content negotiation of a scrape: what the collector accepts, told to Envoy and to the application. Pure.
//!
//! Neither may answer in protobuf, because what they send is joined as text; and Envoy's part may not be
//! OpenMetrics, because only the last part may end the exposition. So the header is rewritten for each.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;

/// Sent where nothing acceptable is left.
const FALLBACK: &str = "text/plain;version=0.0.4";
const TEXT: &str = "text/plain";
const OPEN_METRICS: &str = "application/openmetrics-text";
/// Bytes of a header beyond which it is not read: Prometheus sends 300. One of a megabyte has half a million types, which
/// is half a second of the one thread there is.
const LONGEST: usize = 16 * 1024;

/// A media type and its parameters, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Media {
    name: String,
    params: Vec<(String, String)>,
}

impl Media {
    fn with_version(name: &str, version: &str) -> Self {
        Self { name: name.to_owned(), params: vec![("version".to_owned(), version.to_owned())] }
    }

    /// `None` for what Go's `mime.ParseMediaType` refuses.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (name, mut rest) = text.split_once(';').map_or((text, ""), |(n, r)| (n, r));
        let name = name.trim().to_ascii_lowercase();
        let (kind, sub) = name.split_once('/').map_or((name.as_str(), None), |(k, s)| (k, Some(s)));
        if !is_token(kind) || sub.is_some_and(|s| !is_token(s)) {
            return None;
        }
        // Any client may send thousands.
        let mut params: BTreeMap<String, String> = BTreeMap::new();
        loop {
            rest = rest.trim_start();
            if rest.is_empty() {
                break;
            }
            let end = rest.find(|c: char| !is_token_char(c)).unwrap_or(rest.len());
            let key = rest[..end].to_ascii_lowercase();
            rest = rest[end..].trim_start().strip_prefix('=')?.trim_start();
            let value;
            (value, rest) = value_of(rest)?;
            if key.is_empty() || params.get(&key).is_some_and(|known| *known != value) {
                return None;
            }
            params.insert(key, value);
            rest = rest.trim_start();
            if !rest.is_empty() {
                rest = rest.strip_prefix(';')?;
            }
        }
        Some(Self { name, params: params.into_iter().collect() })
    }

    pub(super) fn is_open_metrics(&self) -> bool {
        self.name == OPEN_METRICS
    }

    pub(super) fn param(&self, key: &str) -> Option<&str> {
        self.params.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    fn write(&self, out: &mut String) {
        out.push_str(&self.name);
        for (key, value) in &self.params {
            if !value.is_ascii() {
                let _ = write!(out, "; {key}*=utf-8''");
                for byte in value.bytes() {
                    match char::from(byte) {
                        plain if is_token_char(plain) && !"*'%".contains(plain) => out.push(plain),
                        _ => {
                            let _ = write!(out, "%{byte:02X}");
                        }
                    }
                }
            } else if is_token(value) {
                let _ = write!(out, "; {key}={value}");
            } else {
                let _ = write!(out, "; {key}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""));
            }
        }
    }
}

fn value_of(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|c: char| !is_token_char(c)).unwrap_or(text.len());
        return (end > 0).then(|| (text[..end].to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            // Before anything but a delimiter it stands for itself, as in the paths of Windows.
            '\\' if quoted[at + 1..].starts_with(is_delimiter) => value.extend(chars.next().map(|(_, c)| c)),
            '\r' | '\n' => return None,
            c => value.push(c),
        }
    }
    None
}

fn is_token_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`{|}~".contains(c)
}

/// `tspecials` of RFC 1521 and RFC 2045.
fn is_delimiter(c: char) -> bool {
    "()<>@,;:\\\"/[]?=".contains(c)
}

fn is_token(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_token_char)
}

/// The header for a part that may (the application) or may not (Envoy) be OpenMetrics.
pub(super) fn rewrite(accept: &str, open_metrics: bool) -> String {
    if accept.len() > LONGEST {
        return FALLBACK.to_owned();
    }
    let (mut kept, mut known) = (Vec::new(), HashSet::new());
    for item in accept.split(',') {
        let Some(mut media) = Media::parse(item) else { return FALLBACK.to_owned() };
        media.params.retain(|(key, _)| key != "q");
        let wildcard = match media.name.as_str() {
            "*" | "*/*" => Media::with_version(TEXT, "0.0.4"),
            "application/*" if open_metrics => Media::with_version(OPEN_METRICS, "0.0.1"),
            "text/plain" | "text/*" => {
                known.insert(media.clone());
                kept.push(media);
                continue;
            }
            OPEN_METRICS if open_metrics => {
                known.insert(media.clone());
                kept.push(media);
                continue;
            }
            _ => continue,
        };
        if known.insert(wildcard.clone()) {
            kept.push(wildcard);
        }
    }
    if kept.is_empty() {
        return FALLBACK.to_owned();
    }
    let mut out = String::new();
    for (nth, mut media) in (1..=kept.len()).rev().zip(kept) {
        media.params.push(("q".to_owned(), format!("0.{nth}")));
        media.params.sort();
        if !out.is_empty() {
            out.push(',');
        }
        media.write(&mut out);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_header_of_a_prometheus() {
        let header = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        assert_eq!(
            rewrite(header, true),
            "application/openmetrics-text; escaping=allow-utf-8; q=0.4; version=1.0.0,application/openmetrics-text; q=0.3; version=0.0.1,text/plain; escaping=allow-utf-8; q=0.2; version=1.0.0,text/plain; q=0.1; version=0.0.4"
        );
        assert_eq!(
            rewrite(header, false),
            "text/plain; escaping=allow-utf-8; q=0.2; version=1.0.0,text/plain; q=0.1; version=0.0.4"
        );
    }

    #[test]
    fn wildcards_and_leftovers() {
        // Nothing that one scraper names changes what another's question becomes.
        let _ = rewrite("*/*, application/*", true);
        for (header, app, envoy) in [
            ("", FALLBACK, FALLBACK),
            ("text/html", FALLBACK, FALLBACK),
            ("application/vnd.google.protobuf;proto=x;encoding=delimited", FALLBACK, FALLBACK),
            ("a/b/c", FALLBACK, FALLBACK),
            ("x/{y}, text/*", "text/*; q=0.1", "text/*; q=0.1"),
            ("text/plain, ;", FALLBACK, FALLBACK),
            ("*/*", "text/plain; q=0.1; version=0.0.4", "text/plain; q=0.1; version=0.0.4"),
            ("*", "text/plain; q=0.1; version=0.0.4", "text/plain; q=0.1; version=0.0.4"),
            ("text/*", "text/*; q=0.1", "text/*; q=0.1"),
            ("application/*", "application/openmetrics-text; q=0.1; version=0.0.1", FALLBACK),
            (
                "application/openmetrics-text; version=1.0.0",
                "application/openmetrics-text; q=0.1; version=1.0.0",
                FALLBACK,
            ),
            (
                "TEXT/Plain;Version=\"a b\"",
                "text/plain; q=0.1; version=\"a b\"",
                "text/plain; q=0.1; version=\"a b\"",
            ),
            (
                "text/plain;a=\"C:\\dev\\\"\"",
                "text/plain; a=\"C:\\\\dev\\\"\"; q=0.1",
                "text/plain; a=\"C:\\\\dev\\\"\"; q=0.1",
            ),
            (
                "text/plain;a=\"é *\"",
                "text/plain; a*=utf-8''%C3%A9%20%2A; q=0.1",
                "text/plain; a*=utf-8''%C3%A9%20%2A; q=0.1",
            ),
            (
                "*/*, text/plain;version=0.0.4, *",
                "text/plain; q=0.2; version=0.0.4,text/plain; q=0.1; version=0.0.4",
                "text/plain; q=0.2; version=0.0.4,text/plain; q=0.1; version=0.0.4",
            ),
        ] {
            assert_eq!(rewrite(header, true), app, "{header}");
            assert_eq!(rewrite(header, false), envoy, "{header}");
        }
        assert!(
            rewrite(&["text/plain"; 11].join(","), true)
                .starts_with("text/plain; q=0.11,text/plain; q=0.10,")
        );
    }

    #[test]
    fn a_value_in_pieces_or_in_a_charset_of_its_own_is_not_put_together() {
        for kind in ["version*=utf-8''1.0.0", "version*0=1.0; version*1=.0"] {
            let read = Media::parse(&format!("{OPEN_METRICS}; {kind}")).unwrap();
            assert_eq!((read.is_open_metrics(), read.param("version")), (true, None), "{kind}");
        }
    }

    // As long as a head may be: in the square of its length each would take minutes of the one thread there is. Its end is all
    // that a test can tell without a clock.
    #[test]
    fn a_header_of_a_megabyte_is_read_in_one_go() {
        let params: String = (0..90_000).map(|n| format!(";a{n:x}=1")).collect();
        let read = Media::parse(&format!("text/plain{params}")).unwrap();
        assert_eq!((read.params.len(), read.param("a15f8f")), (90_000, Some("1")));
        assert_eq!(Media::parse(&format!("text/plain{params};A1=2")), None);
        assert_eq!(Media::parse(&format!("text/plain;a=1;{}", " ".repeat(500_000))).unwrap().params.len(), 1);
    }

    #[test]
    fn of_a_very_long_header_nothing_is_read() {
        let list = |stars: usize| format!("application/openmetrics-text{}", ",*".repeat(stars));
        assert!(rewrite(&list(8_000), true).starts_with(OPEN_METRICS));
        assert_eq!(rewrite(&list(9_000), true), FALLBACK);
    }

    proptest! {
        #[test]
        fn what_is_sent_can_be_read_again(header in "[ -~]{0,60}") {
            for media in rewrite(&header, true).split(',').filter(|m| !m.contains('"')) {
                let media = Media::parse(media).unwrap();
                prop_assert!(media.name.starts_with("text/") || media.is_open_metrics());
            }
        }
    }
}
