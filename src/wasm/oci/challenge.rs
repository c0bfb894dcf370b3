//! What a registry asks of who wants to pull, and which token servers are safe to ask. Pure.
//!
//! A registry may send its caller anywhere for a token, with credentials in hand. So each refusal is
//! looked at before it is followed: addresses inside the node, the cluster or the cloud are never asked.

use std::net::{IpAddr, Ipv6Addr};

use crate::fetch::url::Url;

/// One `WWW-Authenticate` value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User and password.
    Basic,
    /// A token from `realm`.
    Bearer {
        /// Address of the token server.
        realm: String,
        /// Whom the token is for.
        service: String,
        /// What it has to be good for, where that is said.
        scope: String,
    },
}

impl Challenge {
    /// The challenge of a header's value; `None` for schemes that are not known.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let (scheme, parameters) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let realm = parameter(parameters, "realm").filter(|realm| !realm.is_empty())?;
        let [service, scope] =
            ["service", "scope"].map(|name| parameter(parameters, name).unwrap_or_default());
        Some(Self::Bearer { realm, service, scope })
    }
}

// `name="value"` or `name=value`, separated by commas.
fn parameter(mut text: &str, wanted: &str) -> Option<String> {
    while let Some((name, rest)) = text.split_once('=') {
        let (value, after) = match rest.strip_prefix('"') {
            Some(quoted) => unquoted(quoted),
            None => {
                let (value, after) = rest.split_once(',').unwrap_or((rest, ""));
                (value.trim_end().to_owned(), after)
            }
        };
        let name = name.trim().trim_start_matches(',').trim();
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        text = after;
    }
    None
}

// What stands before the closing quote, without the backslashes that keep a quote or a backslash, and what follows it.
fn unquoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, c)| c)),
            c => value.push(c),
        }
    }
    (value, "")
}

/// A token server that must not be asked; shown is the beginning of its address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("rejected unsafe bearer realm: {0:?}")]
pub(in crate::wasm) struct UnsafeRealm(String);

impl UnsafeRealm {
    pub(super) fn of(realm: &str) -> Self {
        Self(realm.chars().take(200).collect())
    }
}

/// Looks at every quoted realm of a header's value, and at the one that would be followed, however it is written.
///
/// # Errors
/// When one of them must not be asked.
pub(super) fn refuse_unsafe(header: &str) -> Result<(), UnsafeRealm> {
    let lower = header.to_ascii_lowercase();
    // A realm of Basic authentication is a name, and nobody follows it.
    if lower.trim_start().starts_with("basic") && !lower.contains("bearer") {
        return Ok(());
    }
    let quoted = lower.match_indices("realm=\"").filter_map(|(at, found)| {
        header[at + found.len()..].split_once('"').map(|(realm, _)| realm.to_owned())
    });
    let followed = match Challenge::parse(header) {
        Some(Challenge::Bearer { realm, .. }) => Some(realm),
        _ => None,
    };
    match quoted.chain(followed).find(|realm| !is_safe(realm)) {
        Some(realm) => Err(UnsafeRealm::of(&realm)),
        None => Ok(()),
    }
}

fn is_safe(realm: &str) -> bool {
    Url::parse(realm).is_ok_and(|url| !is_inside(&url.host))
}

/// Whether two hosts are the same, however they are written.
pub(super) fn is_same_host(one: &Url, other: &Url) -> bool {
    bare(&one.host) == bare(&other.host)
}

fn bare(host: &str) -> String {
    host.trim_end_matches('.').to_ascii_lowercase()
}

/// Whether a token may be asked for there, by who speaks to `registry` (as written, with its port) in TLS or not: the user
/// and password go along.
pub(super) fn may_give_tokens(url: &Url, registry: &str, secure: bool) -> bool {
    (url.https || !secure) && (url.authority() == registry || !is_inside(&url.host))
}

/// Whether a host is an address of the machine, the cluster or the cloud, or a name of one; other names may lead anywhere.
pub(super) fn is_inside(host: &str) -> bool {
    let host = bare(host);
    if matches!(host.as_str(), "localhost" | "metadata.google.internal") || host.ends_with(".localhost") {
        return true;
    }
    let Ok(ip) = host.split('%').next().unwrap_or_default().parse::<IpAddr>() else { return false };
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let nearby = ip.octets()[..3] == [224, 0, 0];
            ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_unspecified() || nearby
        }
        IpAddr::V6(ip) => {
            let nearby = ip.octets()[0] == 0xff && ip.octets()[1] & 0x0f == 2;
            is_unique_local(ip)
                || ip.is_loopback()
                || ip.is_unicast_link_local()
                || ip.is_unspecified()
                || nearby
        }
    }
}

fn is_unique_local(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xfe00 == 0xfc00
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges() {
        assert_eq!(Challenge::parse("Basic realm=\"r\""), Some(Challenge::Basic));
        let bearer = |realm: &str, service: &str, scope: &str| {
            let [realm, service, scope] = [realm, service, scope].map(str::to_owned);
            Some(Challenge::Bearer { realm, service, scope })
        };
        assert_eq!(
            Challenge::parse("Bearer realm=\"https://a/t\",service=\"r.io, x\",scope=\"s\""),
            bearer("https://a/t", "r.io, x", "s")
        );
        assert_eq!(Challenge::parse("bearer service=s, realm=http://a"), bearer("http://a", "s", ""));
        assert_eq!(
            Challenge::parse(r#"Bearer service="a \"b\\",realm="https://a/t?x=\"y\"""#),
            bearer("https://a/t?x=\"y\"", "a \"b\\", "")
        );
        for none in ["", "Bearer", "Bearer service=\"x\"", "Negotiate x", "Bearer realm=\"\""] {
            assert_eq!(Challenge::parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn tokens_are_asked_for_in_tls_where_the_registry_speaks_it() {
        let may = |url: &str, secure| may_give_tokens(&Url::parse(url).unwrap(), "10.0.0.1:5000", secure);
        for (url, in_tls, plain) in [
            ("https://auth.io/t", true, true),
            ("http://auth.io/t", false, true),
            ("https://10.0.0.1:5000/t", true, true),
            ("https://10.0.0.1/t", false, false),
            ("http://10.0.0.1:5000/t", false, true),
        ] {
            assert_eq!((may(url, true), may(url, false)), (in_tls, plain), "{url}");
        }
    }

    #[test]
    fn token_servers_inside_are_not_asked() {
        for realm in [
            "http://169.254.169.254/latest",
            "http://metadata.google.internal/x",
            "https://localhost/t",
            "http://127.0.0.1:8080/",
            "http://[::1]/",
            "http://10.0.0.1/",
            "http://192.168.1.1",
            "http://172.20.0.1",
            "http://[fd00::1]/",
            "http://[fe80::1]/",
            "http://[::ffff:10.0.0.1]/",
            "http://0.0.0.0/",
            "http://[::]/",
            "http://[ff02::1]/",
            "http://a.localhost./",
            "file:///etc/passwd",
            "ftp://a.io/",
            "https://",
            "nonsense",
        ] {
            let header = format!("Bearer realm=\"https://good.io\", Bearer Realm=\"{realm}\"");
            let error = refuse_unsafe(&header).unwrap_err().to_string();
            assert!(error.starts_with("rejected unsafe bearer realm: "), "{error}");
        }
        // None of them is followed for want of quotes.
        for unquoted in [
            "Bearer realm=http://10.0.0.1/",
            "Bearer realm = \"http://10.0.0.1/\"",
            "Bearer realm=\"http://10.0.0.1/",
        ] {
            assert!(refuse_unsafe(unquoted).is_err(), "{unquoted}");
        }
        for fine in [
            "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\"",
            "Bearer realm=\"http://8.8.8.8/\"",
            "Basic realm=\"The registry\"",
            "Bearer realm=http://8.8.8.8/",
        ] {
            assert_eq!(refuse_unsafe(fine), Ok(()), "{fine}");
        }
    }
}
