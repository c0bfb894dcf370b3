//! Trust anchors: the CA's root and the mesh's trust bundle as one set.

use std::collections::BTreeSet;

const END: &str = "-----END CERTIFICATE-----";

/// The certificates of all `texts`, each once, sorted by text, one newline between two and none at the
/// end. Text before a block stays with it; what follows the last block is dropped.
///
/// The form is the Go agent's: file consumers compare it byte by byte.
#[must_use]
pub fn merge<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let set: BTreeSet<&str> = texts.into_iter().flat_map(blocks).collect();
    set.into_iter().collect::<Vec<_>>().join("\n")
}

/// Each certificate block's text with the rest of its last line, one newline stripped on either side.
fn blocks(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = rest.find(END)? + END.len();
        // No further than blanks go: of ends without a line between them each would look through all that follow.
        let blank = rest[end..].trim_start_matches([' ', '\t', '\r']);
        let line = blank.starts_with('\n').then(|| rest.len() - blank.len() + 1);
        let (block, after) = rest.split_at(line.unwrap_or(end));
        rest = after;
        let block = block.strip_suffix('\n').unwrap_or(block);
        Some(block.strip_prefix('\n').unwrap_or(block))
    })
}

/// Keeps the entries of a trust bundle that are certificates, and says how many are not: one bad entry
/// would make Envoy refuse the whole of `ROOTCA`.
#[must_use]
pub(crate) fn readable(entries: Vec<String>) -> (Vec<String>, usize) {
    let all = entries.len();
    let whole = |entry: &String| {
        let read = crate::tls::cert::readable_certs(entry.as_bytes());
        read.dropped == 0 && !read.pem.is_empty()
    };
    let good: Vec<String> = entries.into_iter().filter(whole).collect();
    let dropped = all - good.len();
    (good, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{name}\n{END}")
    }

    #[test]
    fn a_sorted_set_without_a_newline_at_the_end() {
        let (a, b, c) = (block("a"), block("b"), block("c"));
        assert_eq!(merge([format!("{a}\n").as_str()]), a);
        assert_eq!(merge([format!("{b}\n{a}\n").as_str(), c.as_str(), a.as_str()]), format!("{a}\n{b}\n{c}"));
        assert_eq!(merge([""]), "");
        assert_eq!(merge(["no block"]), "");
    }

    #[test]
    fn text_before_a_block_stays_with_it() {
        let text = format!("# one\n{}\n# two\n{}\ntail", block("a"), block("b"));
        assert_eq!(merge([text.as_str()]), format!("# one\n{}\n# two\n{}", block("a"), block("b")));
    }

    /// As Go's reader of PEM takes them apart.
    #[test]
    fn what_ends_a_blocks_last_line_belongs_to_it() {
        let (a, b) = (block("a"), block("b"));
        assert_eq!(merge([format!("{b}\r\n{a}\r\n").as_str()]), format!("{a}\r\n{b}\r"));
        assert_eq!(merge([format!("{b}  \n{a} \t\n").as_str()]), format!("{a} \t\n{b}  "));
        assert_eq!(merge([format!("{a}\n\n\n{b}\n\n").as_str()]), format!("\n{b}\n{a}"));
        assert_eq!(merge([format!("{b} text\n{a}\n").as_str()]), format!(" text\n{a}\n{b}"));
        assert_eq!(merge([format!("{b}{a} ").as_str()]), format!("{a}\n{b}"));
    }

    #[test]
    fn junk_is_dropped_from_a_bundle() {
        let (good, dropped) = readable(vec!["x".to_owned(), block("!"), String::new()]);
        assert!(good.is_empty());
        assert_eq!(dropped, 3);
    }

    #[test]
    fn what_was_joined_without_a_line_break_is_no_junk() {
        let one = || {
            let key = rcgen::KeyPair::generate().unwrap();
            rcgen::CertificateParams::default().self_signed(&key).unwrap().pem()
        };
        let joined = format!("{}{}", one().trim_end(), one());
        let (good, dropped) = readable(vec![joined.clone()]);
        assert_eq!((good.as_slice(), dropped), ([joined.clone()].as_slice(), 0));
        assert_eq!(merge([joined.as_str()]).matches(END).count(), 2);
        assert!(!merge([joined.as_str()]).contains("----------"));
    }
}
