//! What a module's URL means. Pure.

use super::oci::{BadReference, Reference};
use crate::fetch::url::{check, shown};
use crate::net::percent;

/// Longest URL, in bytes. Those that are signed have two kB; what a URL has brought is kept by it.
const LONGEST: usize = 16 << 10;

/// A URL that names no module.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadUrl {
    /// The URL is shown without user and query.
    #[error("fail to parse Wasm module fetch url: {url:?}: {wrong}")]
    Url { url: String, wrong: &'static str },
    #[error("a Wasm module fetch url of {0} bytes is longer than {LONGEST}")]
    Long(usize),
    #[error("unsupported Wasm module downloading URL scheme: {0}")]
    Scheme(String),
    #[error("could not parse url in image reference: {0}")]
    Image(#[from] BadReference),
}

/// A module, or an image that holds one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// To be fetched over HTTP from this URL.
    Module(String),
    /// To be pulled from a registry.
    Image(Reference),
}

impl Source {
    pub(super) fn parse(url: &str) -> Result<Self, BadUrl> {
        if url.len() > LONGEST {
            return Err(BadUrl::Long(url.len()));
        }
        let bad = |wrong| BadUrl::Url { url: shown(url), wrong };
        check(url).map_err(bad)?;
        let Some((scheme, rest)) = url.split_once(':') else {
            return Err(BadUrl::Scheme(String::new()));
        };
        match scheme.to_ascii_lowercase().as_str() {
            "http" | "https" => Ok(Self::Module(url.to_owned())),
            "oci" => {
                let rest = rest.strip_prefix("//").ok_or_else(|| bad("no registry"))?;
                // Neither query nor fragment belongs to a reference.
                let rest = rest.split(['?', '#']).next().unwrap_or_default();
                let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                // Nor does a user; credentials come from a pull secret. Without a path it may be a digest that follows.
                let digest = |host: &str| path.is_empty() && host.starts_with("sha256:");
                let user = authority.rsplit_once('@').filter(|(_, host)| !digest(host));
                let host = user.map_or(authority, |(_, host)| host);
                let path = percent::decode_text(path).ok_or_else(|| bad("a broken escape"))?;
                Ok(Self::Image(Reference::parse(&format!("{host}{path}"))?))
            }
            other => Err(BadUrl::Scheme(other.to_owned())),
        }
    }

    /// The name by which its modules are stored.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Module(url) => url.clone(),
            Self::Image(reference) => format!("oci://{}", reference.name()),
        }
    }

    /// The digest that the URL itself names, in hex.
    pub(super) fn digest(&self) -> Option<&str> {
        match self {
            Self::Image(reference) => reference.digest(),
            Self::Module(_) => None,
        }
    }

    /// Whether the URL can only ever mean one image.
    pub(super) fn is_pinned(&self) -> bool {
        self.digest().is_some()
    }

    /// Whether the URL says that it moves.
    pub(super) fn is_latest(&self) -> bool {
        matches!(self, Self::Image(reference) if reference.written_tag() == Some("latest"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_what_they_mean() {
        let name = |url: &str| Source::parse(url).map(|s| s.name());
        assert_eq!(name("http://a/b?c").unwrap(), "http://a/b?c");
        assert_eq!(name("oci://localhost:8088/team/plug:v1").unwrap(), "oci://localhost:8088/team/plug");
        assert_eq!(name("oci://docker.io/xy").unwrap(), "oci://index.docker.io/library/xy");
        assert_eq!(name("OCI://docker.io/xy").unwrap(), "oci://index.docker.io/library/xy");
        assert_eq!(name("oci://user:word@r.io/team/plug%3Av1").unwrap(), "oci://r.io/team/plug");
        assert_eq!(name("oci://user:word@plug").unwrap(), "oci://index.docker.io/library/plug");
        for bad in [
            "oci://user:hunter2@",
            "oci://user:hunter2@r.io/",
            "oci://user:hunter2@r.io/A",
            "oci://user:hunter2@r.io/%",
        ] {
            let error = name(bad).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let by_digest = format!("oci://plug@sha256:{}", "0".repeat(64));
        assert!(Source::parse(&by_digest).unwrap().is_pinned());
        let pinned = format!("oci://r.io/ab@sha256:{}", "0".repeat(64));
        assert_eq!(name(&pinned).unwrap(), "oci://r.io/ab");
        assert!(Source::parse(&pinned).unwrap().is_pinned());
        assert!(Source::parse("oci://r.io/ab:latest").unwrap().is_latest());
        assert!(!Source::parse("oci://r.io/ab").unwrap().is_latest(), "the word must stand there");
        for (bad, said) in [
            ("ftp://a/b", "unsupported Wasm module downloading URL scheme: ftp"),
            ("no scheme", "unsupported"),
            ("http://a/\n", "fail to parse Wasm module fetch url"),
            ("http://a/%zz", "fail to parse Wasm module fetch url"),
            ("http://a b/", "fail to parse Wasm module fetch url"),
            ("oci://r.io:port/ab", "fail to parse Wasm module fetch url"),
            ("127.0.0.1:80/ab", "fail to parse Wasm module fetch url"),
            ("", "unsupported"),
            ("mailto:a", "unsupported"),
            ("oci:a", "fail to parse"),
            ("oci://R.io/UPPER", "could not parse url in image reference"),
            (&format!("http://a/{}", "b".repeat(LONGEST)), "of 16393 bytes is longer than 16384"),
        ] {
            let error = name(bad).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
