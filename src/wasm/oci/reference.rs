//! Names of images: `[registry/]repository[:tag][@digest]`, by the rules Docker made customary. Pure.

use std::fmt;

/// Where an image is that names no registry.
pub(super) const DOCKER_HUB: &str = "index.docker.io";

/// A text that names no image.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?}: {wrong}")]
pub(crate) struct BadReference {
    text: String,
    wrong: &'static str,
}

/// The name of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    /// In hex, without `sha256:`.
    digest: Option<String>,
}

impl Reference {
    /// Reads a name.
    pub(crate) fn parse(text: &str) -> Result<Self, BadReference> {
        let bad = |wrong| BadReference { text: text.to_owned(), wrong };
        let (rest, digest) = match text.split_once('@') {
            None => (text, None),
            Some((rest, digest)) => {
                let hex = digest.strip_prefix("sha256:").filter(|hex| is_digest(hex));
                let hex = hex.ok_or_else(|| bad("the digest is not sha256: and 64 hex digits"))?;
                (rest, Some(hex.to_owned()))
            }
        };
        // A colon before a slash belongs to the registry's port.
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((rest, tag)) if !tag.contains('/') => (rest, Some(tag)),
            _ => (rest, None),
        };
        if let Some(tag) = tag
            && !(1..=127).contains(&tag.len())
        {
            return Err(bad("a tag has 1 to 127 characters"));
        }
        if !tag.unwrap_or_default().bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
            return Err(bad("a tag has letters, digits and -_. only"));
        }
        let (registry, repository) = match rest.split_once('/') {
            Some((registry, repository)) if registry.contains(['.', ':']) => (registry, repository),
            _ => (DOCKER_HUB, rest),
        };
        let registry = if registry == "docker.io" { DOCKER_HUB } else { registry };
        if registry.bytes().any(|b| !(b.is_ascii_alphanumeric() || b".-_:[]".contains(&b))) {
            return Err(bad("the registry is no host"));
        }
        if !(2..=255).contains(&repository.len())
            || !repository
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-./".contains(&b))
        {
            return Err(bad("a repository has 2 to 255 characters: lower-case letters, digits and _-./"));
        }
        let implied = registry == DOCKER_HUB && !repository.contains('/');
        let repository = if implied { format!("library/{repository}") } else { repository.to_owned() };
        Ok(Self { registry: registry.to_owned(), repository, tag: tag.map(ToOwned::to_owned), digest })
    }

    /// `host[:port]`.
    pub(super) fn registry(&self) -> &str {
        &self.registry
    }

    /// The path within the registry.
    pub(super) fn repository(&self) -> &str {
        &self.repository
    }

    /// Registry and repository.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// The tag, where one was written and nothing more exact stands beside it.
    pub(crate) fn written_tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|_| self.digest.is_none())
    }

    /// The digest in hex.
    pub(crate) fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// What the registry is asked for: the digest, the tag, or `latest`.
    pub(super) fn identifier(&self) -> String {
        match &self.digest {
            Some(hex) => format!("sha256:{hex}"),
            None => self.tag.clone().unwrap_or_else(|| "latest".to_owned()),
        }
    }

    /// Whether the registry may speak plain HTTP: it is on this machine or in a private network.
    pub(super) fn may_be_plain(&self) -> bool {
        let host = match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => &self.registry,
        };
        if let Ok(ip) = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>() {
            return match ip {
                std::net::IpAddr::V4(ip) => ip.is_private() || ip.is_loopback(),
                std::net::IpAddr::V6(ip) => ip.is_loopback(),
            };
        }
        self.registry.starts_with("localhost:") || host.ends_with(".local") || host.ends_with(".localhost")
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { registry, repository, tag, digest } = self;
        write!(f, "{registry}/{repository}")?;
        if let Some(tag) = tag {
            write!(f, ":{tag}")?;
        }
        if let Some(hex) = digest {
            write!(f, "@sha256:{hex}")?;
        }
        Ok(())
    }
}

/// Whether this is a SHA-256 digest in hex as registries write it.
pub(super) fn is_digest(hex: &str) -> bool {
    hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_name() {
        let hex = "a".repeat(64);
        for (text, name, identifier) in [
            ("plug", "index.docker.io/library/plug", "latest"),
            ("team/plug:v1", "index.docker.io/team/plug", "v1"),
            ("docker.io/plug", "index.docker.io/library/plug", "latest"),
            ("localhost:5000/a/b:v1", "localhost:5000/a/b", "v1"),
            ("localhost:5000/a/b", "localhost:5000/a/b", "latest"),
            ("localhost/ab", "index.docker.io/localhost/ab", "latest"),
            (&format!("r.io/a/b:v1@sha256:{hex}"), "r.io/a/b", &format!("sha256:{hex}")),
        ] {
            let read = Reference::parse(text).unwrap();
            assert_eq!((read.name().as_str(), read.identifier().as_str()), (name, identifier), "{text}");
        }
        for bad in
            ["", "a", "R.io/A", "r.io/a b", "r.io/ab:", "r.io/ab@sha256:00", "r.io/ab:v 1", "r.io/ab@x@y"]
        {
            assert!(Reference::parse(bad).is_err(), "{bad:?}");
        }
    }

    // As in the Go agent's library; a fuzz target found the text that it prints too long for itself.
    #[test]
    fn the_part_that_docker_hub_adds_is_not_counted() {
        let name = "a".repeat(255);
        let read = Reference::parse(&name).unwrap();
        assert_eq!(read.name(), format!("index.docker.io/library/{name}"));
        assert!(Reference::parse(&format!("{name}a")).is_err());
    }

    #[test]
    fn plain_http_is_for_neighbours() {
        let plain = |host: &str| Reference::parse(&format!("{host}/a/b")).unwrap().may_be_plain();
        for host in [
            "localhost:1",
            "127.0.0.1:1",
            "[::1]:5000",
            "10.1.2.3",
            "192.168.0.1:80",
            "172.31.0.1",
            "x.local",
            "x.local:1",
        ] {
            assert!(plain(host), "{host}");
        }
        for host in ["r.io", "8.8.8.8", "172.32.0.1", "local.io", "127.0.0.1.evil.io"] {
            assert!(!plain(host), "{host}");
        }
    }
}
