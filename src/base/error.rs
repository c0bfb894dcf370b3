//! An error is shown with everything that caused it, once.

use std::error::Error;
use std::path::PathBuf;

/// Any error, across a seam whose far side is not known.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// What the system says of a file or a folder.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub(crate) struct AtPath {
    path: PathBuf,
    source: std::io::Error,
}

impl AtPath {
    /// For `map_err`: a refusal of the system at `path`.
    pub(crate) fn at(path: impl Into<PathBuf>) -> impl Fn(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self { path: path.clone(), source }
    }
}

/// The text of `error` and of its sources, joined by `: `, without a source whose text its parent
/// already contains (many libraries repeat it).
#[must_use]
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

/// What the system says, as Go and the C library have it: "no such file or directory", without Rust's "(os error 2)".
pub(crate) fn in_words(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(at) => text[..at].to_lowercase(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("read token")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn sources_follow_and_are_not_repeated() {
        let e = Outer(std::io::Error::other("denied"));
        assert_eq!(chain(&e), "read token: denied");
    }
}
