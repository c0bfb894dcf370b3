//! Paths as Go writes them.

use std::path::{Path, PathBuf};

/// The shortest equal path, as Go's `path.Clean`: no `.`, no doubled slash, `..` resolved where it can be. By the
/// letters alone: symbolic links are not looked at.
#[must_use]
pub(crate) fn clean(path: &str) -> String {
    let rooted = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            ".." if rooted => {}
            other => parts.push(other),
        }
    }
    let joined = parts.join("/");
    match (rooted, joined.is_empty()) {
        (true, _) => format!("/{joined}"),
        (false, true) => ".".to_owned(),
        (false, false) => joined,
    }
}

/// As [`clean`], of a path; one that is no UTF-8 stays as it is.
#[must_use]
pub(crate) fn cleaned(path: &Path) -> PathBuf {
    path.to_str().map_or_else(|| path.to_owned(), |text| clean(text).into())
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn cleans_as_go_does() {
        for (from, to) in [
            ("./etc/istio/proxy/XDS", "etc/istio/proxy/XDS"),
            ("/a//b/../c/.", "/a/c"),
            ("", "."),
            ("/..", "/"),
            ("../../x", "../../x"),
            ("a/..", "."),
            ("./out/key.pem", "out/key.pem"),
        ] {
            assert_eq!(clean(from), to, "{from}");
        }
    }
}
