//! From the path in a request line to the path a handler is looked up by.
//!
//! The rules are those of Go's request multiplexer, since callers were written against it: a path is
//! cleaned first (a different clean form is a redirect), then each segment is percent-decoded by itself,
//! so that an encoded slash separates nothing.

pub(crate) use crate::net::percent::decode_text as decode;

/// The clean form: one slash at a time, no `.` or `..`, a trailing slash kept.
pub(crate) fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let mut out = String::with_capacity(path.len() + 1);
    for part in &parts {
        out.push('/');
        out.push_str(part);
    }
    if out.is_empty() || path.ends_with('/') {
        out.push('/');
    }
    out
}

/// The path as segments, each decoded by itself.
pub(crate) fn segments(path: &str) -> Vec<String> {
    path.split('/').skip(1).map(|s| decode(s).unwrap_or_else(|| s.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cleans_as_the_multiplexer_of_go_does() {
        for (from, to) in [
            ("/", "/"),
            ("", "/"),
            ("//", "/"),
            ("/a//b", "/a/b"),
            ("/a/../b", "/b"),
            ("/../..", "/"),
            ("/a/./", "/a/"),
            ("/a/..", "/"),
            ("/healthz/ready/", "/healthz/ready/"),
        ] {
            assert_eq!(clean(from), to, "{from}");
        }
    }

    #[test]
    fn decodes_and_refuses_broken_escapes() {
        assert_eq!(decode("/a%20b").as_deref(), Some("/a b"));
        assert_eq!(decode("/%C3%A9").as_deref(), Some("/é"));
        assert_eq!(decode("/%"), None);
        assert_eq!(decode("/%2"), None);
        assert_eq!(decode("/%zz"), None);
        assert_eq!(decode("/%ff"), None);
        assert_eq!(segments("/a%2Fb/c"), ["a/b", "c"]);
    }

    proptest! {
        #[test]
        fn what_is_clean_stays_so(path in "[/.a-c]{0,24}") {
            let once = clean(&path);
            prop_assert_eq!(clean(&once), once.clone());
            prop_assert!(once.starts_with('/') && !once.contains("//"));
        }
    }
}
