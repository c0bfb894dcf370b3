//! Paths as the Go agent writes them.

/// The shortest equal path, as Go's `path.Clean`: no `.`, no doubled slash, `..` resolved where it can be.
#[must_use]
pub fn clean(path: &str) -> String {
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
