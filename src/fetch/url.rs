//! Addresses of things to fetch: absolute `http` and `https` ones, and references relative to them.
//!
//! Why not the `url` crate: it brings the Unicode tables of internationalised names, 221 KB of binary and 0.2 MB of
//! resident memory, for addresses that are loopback ports and redirects of applications in the same pod.

use std::fmt;

use crate::net::percent;

/// An absolute address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) https: bool,
    /// Without brackets.
    pub(crate) host: String,
    /// As written; `None`: the scheme's own.
    pub(crate) explicit_port: Option<u16>,
    /// Path and query, as sent; begins with `/`.
    pub(crate) target: String,
    /// `user:password`, decoded.
    pub(crate) user: Option<String>,
    /// Where a `Location` led that is no address of a web server (`mailto:x`, `ftp://h/`): it can be
    /// compared, and not asked.
    pub(crate) foreign: bool,
}

/// An address that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no http address: {why}")]
pub(crate) struct Bad {
    text: String,
    why: &'static str,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self, Bad> {
        let bad = |why| Bad { text: shown(text).chars().take(200).collect(), why };
        if controls(text) {
            return Err(bad("it has control characters"));
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("no scheme"))?;
        let https = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(bad("neither http nor https")),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, rest)) => {
                (Some(percent::decode_text(user).ok_or_else(|| bad("a broken escape"))?), rest)
            }
            None => (None, authority),
        };
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(|| bad("a bracket is not closed"))?;
                // Of a zone the sign itself is escaped.
                if host.split_once('%').is_some_and(|(_, zone)| !zone.starts_with("25")) {
                    return Err(bad("a broken escape"));
                }
                (host, port)
            }
            None => match authority.find(':') {
                Some(at) => authority.split_at(at),
                None => (authority, ""),
            },
        };
        let explicit_port = match port.strip_prefix(':') {
            None if port.is_empty() => None,
            Some("") => None,
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
                Some(digits.parse().map_err(|_| bad("the port is above 65535"))?)
            }
            _ => return Err(bad("the port is no number")),
        };
        if host.is_empty() || host.bytes().any(|b| b <= b' ' || b == 0x7f || b"\"<>\\^`{|}[]".contains(&b)) {
            return Err(bad("no host"));
        }
        if !authority.starts_with('[') && !escapes_of_names(host) {
            return Err(bad("a broken escape"));
        }
        let host = if authority.starts_with('[') { host.replacen("%25", "%", 1) } else { host.to_owned() };
        Ok(Self {
            https,
            host,
            explicit_port,
            target: sent(target).ok_or_else(|| bad("a broken escape"))?,
            user,
            foreign: false,
        })
    }

    /// Whether the same server answers it as `other`, and no less safely.
    pub(crate) fn is_served_with(&self, other: &Self) -> bool {
        let same = self.host.eq_ignore_ascii_case(&other.host) && self.port() == other.port();
        same && (self.https || !other.https)
    }

    /// That it can be asked.
    pub(crate) fn asked(&self) -> Result<(), Bad> {
        let text = self.target.chars().take(200).collect();
        if self.foreign { Err(Bad { text, why: "neither http nor https" }) } else { Ok(()) }
    }

    // The address of something else: its host, which may be empty, and the rest as it is.
    fn foreign(reference: &str) -> Self {
        let authority = reference.split_once("://").map_or("", |(_, rest)| rest);
        let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host).trim_matches(['[', ']']);
        let target = reference.to_owned();
        Self { https: false, host: host.to_owned(), explicit_port: None, target, user: None, foreign: true }
    }

    /// Follows a reference (a `Location`) from here.
    pub(crate) fn join(&self, reference: &str) -> Result<Self, Bad> {
        let bad = |why| Bad { text: shown(reference).chars().take(200).collect(), why };
        if controls(reference) {
            return Err(bad("it has control characters"));
        }
        if reference.split_once('#').is_some_and(|(_, fragment)| !escapes(fragment)) {
            return Err(bad("a broken escape"));
        }
        if has_scheme(reference) {
            let web = |scheme: &str| {
                let start = reference.get(..scheme.len()).unwrap_or_default();
                start.eq_ignore_ascii_case(scheme) && !reference[scheme.len()..].starts_with(['/', '?', '#'])
            };
            let web = (web("http://") || web("https://")) && !reference.ends_with("://");
            if web {
                return Self::parse(reference);
            }
            // What no web server's address may have no other may either; a host is not needed there.
            let foreign = Self::foreign(reference);
            if !foreign.host.is_empty()
                && let Some((_, rest)) = reference.split_once("://")
            {
                Self::parse(&format!("http://{rest}"))?;
            }
            return Ok(foreign);
        }
        if reference.starts_with(':')
            || reference.split(['/', '?', '#']).next().is_some_and(|s| s.contains(':'))
        {
            return Err(bad("the first segment has a colon"));
        }
        // Three are a path without a host.
        if let Some(rest) = reference.strip_prefix("//").filter(|rest| !rest.starts_with('/')) {
            return Self::parse(&format!("{}://{rest}", self.scheme()));
        }
        let (path, query) =
            self.target.split_once('?').map_or((self.target.as_str(), None), |(p, q)| (p, Some(q)));
        let reference = reference.split('#').next().unwrap_or("");
        // Dots of a path go once anything follows from it.
        let target = if reference.is_empty() {
            let path = without_dots(path);
            query.map_or_else(|| path.clone(), |q| format!("{path}?{q}"))
        } else if reference.starts_with('?') {
            format!("{}{reference}", without_dots(path))
        } else {
            let (new, query) = reference.split_once('?').map_or((reference, None), |(p, q)| (p, Some(q)));
            let merged = if new.starts_with('/') {
                new.to_owned()
            } else {
                format!("{}{new}", &path[..=path.rfind('/').unwrap_or(0)])
            };
            let clean = without_dots(&merged);
            query.map_or_else(|| clean.clone(), |q| format!("{clean}?{q}"))
        };
        Ok(Self { target: sent(&target).ok_or_else(|| bad("a broken escape"))?, ..self.clone() })
    }

    pub(crate) fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    pub(crate) fn port(&self) -> u16 {
        self.explicit_port.unwrap_or(if self.https { 443 } else { 80 })
    }

    /// Host and port as they stand in the `Host` header, where nobody has an interface's name.
    pub(crate) fn authority(&self) -> String {
        let host = match self.host.split('%').next() {
            Some(address) if self.host.contains(':') => format!("[{address}]"),
            _ => self.host.clone(),
        };
        match self.explicit_port {
            Some(port) => format!("{host}:{port}"),
            None => host,
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.foreign {
            return f.write_str(&self.target);
        }
        write!(f, "{}://{}{}", self.scheme(), self.authority(), self.target)
    }
}

/// An address as it may be logged: without a user and a password, and without its query, which may hold a
/// signature that gives access.
pub(crate) fn shown(text: &str) -> String {
    let (address, query) = text.split_once('?').map_or((text, ""), |(address, _)| (address, "?..."));
    let Some((scheme, rest)) = address.split_once("://") else { return format!("{address}{query}") };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    // What stands where a port should may be the beginning of a password with a slash or a question mark in it, and the rest of
    // that what follows.
    let port = host.rsplit_once(']').map_or(host, |(_, behind)| behind).split_once(':').map(|(_, port)| port);
    if host == authority && port.is_some_and(|port| !port.bytes().all(|b| b.is_ascii_digit())) {
        return format!("{scheme}://...");
    }
    format!("{scheme}://{host}{path}{query}")
}

/// Path and query of a reference as they are sent, whatever scheme and host it may name. Unlike
/// [`Url::join`] it leaves dots alone.
///
/// # Errors
/// When it has control characters, a broken escape or a colon where none may be.
pub(crate) fn target_of(reference: &str) -> Result<String, Bad> {
    let bad = |why| Bad { text: shown(reference).chars().take(200).collect(), why };
    if controls(reference) {
        return Err(bad("it has control characters"));
    }
    let rest = match reference.split_once(':') {
        Some((_, rest)) if has_scheme(reference) => {
            if !rest.starts_with('/') {
                return Err(bad("it has a scheme and no path"));
            }
            rest
        }
        _ if reference.split(['/', '?', '#']).next().is_some_and(|s| s.contains(':')) => {
            return Err(bad("the first segment has a colon"));
        }
        _ => reference,
    };
    let path = match rest.strip_prefix("//") {
        Some(authority) => &authority[authority.find(['/', '?', '#']).unwrap_or(authority.len())..],
        None => rest,
    };
    sent(path).ok_or_else(|| bad("a broken escape"))
}

/// That a text can be an address of whatever scheme, or a reference to one, as Go reads them.
///
/// # Errors
/// Why it cannot.
pub(crate) fn check(text: &str) -> Result<(), &'static str> {
    let base = Url {
        https: false,
        host: "localhost".to_owned(),
        explicit_port: None,
        target: "/".to_owned(),
        user: None,
        foreign: false,
    };
    base.join(text).map(drop).map_err(|bad| bad.why)
}

fn controls(text: &str) -> bool {
    text.bytes().any(|b| b < b' ' || b == 0x7f)
}

/// Whether every `%` begins an escape.
fn escapes(text: &str) -> bool {
    let whole = |at: usize| text.as_bytes().get(at + 1..at + 3);
    text.match_indices('%').all(|(at, _)| whole(at).is_some_and(|e| e.iter().all(u8::is_ascii_hexdigit)))
}

/// As [`escapes`], in a host: what a name may hold is not escaped there (`%41`), only bytes beyond ASCII are.
fn escapes_of_names(host: &str) -> bool {
    escapes(host) && host.match_indices('%').all(|(at, _)| !matches!(host.as_bytes()[at + 1], b'0'..=b'7'))
}

/// Whether a reference is a whole address.
pub(crate) fn has_scheme(reference: &str) -> bool {
    reference.split_once(':').is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    })
}

fn without_dots(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let mut pieces = path.split('/').skip(1).peekable();
    while let Some(piece) = pieces.next() {
        let last = pieces.peek().is_none();
        match piece {
            "." | ".." => {
                if piece == ".." {
                    parts.pop();
                }
                if last {
                    parts.push("");
                }
            }
            piece => parts.push(piece),
        }
    }
    format!("/{}", parts.join("/"))
}

/// What goes on the wire: no fragment, a path at least `/`, bytes that may not stand in a request line
/// escaped. `None` when the path has a broken escape.
fn sent(target: &str) -> Option<String> {
    let target = target.split('#').next().unwrap_or("");
    let (path, query) = target.split_once('?').map_or((target, None), |(p, q)| (p, Some(q)));
    percent::decode_text(path).or_else(|| path.is_ascii().then_some(String::new()))?;
    if !escapes(path) {
        return None;
    }
    let mut out = String::with_capacity(target.len() + 1);
    if !path.starts_with('/') {
        out.push('/');
    }
    escape(&mut out, path, b"\"<>\\^`{|}");
    if let Some(query) = query {
        out.push('?');
        escape(&mut out, query, b"\"<>");
    }
    Some(out)
}

fn escape(out: &mut String, text: &str, also: &[u8]) {
    for byte in text.bytes() {
        if byte <= b' ' || byte >= 0x7f || also.contains(&byte) {
            out.push_str(&format!("%{byte:02X}"));
        } else {
            out.push(char::from(byte));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_that_cannot_be_read_are_told_from_other_hosts() {
        let base = Url::parse("http://10.0.0.1:8080/a").unwrap();
        for bad in [
            "http://%41:8080/",
            "http://%zz/",
            "http://[::1",
            "http://a:b/",
            "http://a b/",
            "%zz",
            "/%",
            "/a#%zz",
            ":a",
            "ftp://%zz/",
            "ftp://a:b/",
            "\u{1}",
        ] {
            assert!(base.join(bad).is_err(), "{bad}");
        }
        for good in ["http://%C3%A4/", "mailto:x", "ftp://h/", "http:///x", "/a b", "/a#%41", "?q=%zz"] {
            assert!(base.join(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn neither_user_nor_query_is_shown() {
        for (text, expected) in [
            ("http://a:80/b", "http://a:80/b"),
            ("https://u:s3cret@a/b@c?X-Sig=s3cret#d", "https://a/b@c?..."),
            ("oci://u:s3cret@r.io/x:v1", "oci://r.io/x:v1"),
            ("https://u:s3cret@", "https://"),
            ("nonsense", "nonsense"),
            ("https://u:s3cret/x@a/b", "https://..."),
            ("https://u:s3cret?x@a/b", "https://..."),
            ("http://[::1]:80/b", "http://[::1]:80/b"),
        ] {
            assert_eq!(shown(text), expected);
        }
        let error = Url::parse("https://u:s3cret@a:b/?s3cret").unwrap_err().to_string();
        assert!(!error.contains("s3cret"), "{error}");
    }

    #[test]
    fn absolute_addresses() {
        let url = Url::parse("http://localhost:15090/stats/prometheus?usedonly&filter=^a").unwrap();
        assert_eq!(
            (url.host.as_str(), url.port(), url.target.as_str()),
            ("localhost", 15090, "/stats/prometheus?usedonly&filter=^a")
        );
        assert_eq!(url.authority(), "localhost:15090");
        assert_eq!(Url::parse("https://[::1]/x#y").unwrap().to_string(), "https://[::1]/x");
        let zoned = Url::parse("http://[fe80::1%25eth0]:080/").unwrap();
        assert_eq!((zoned.host.as_str(), zoned.authority().as_str()), ("fe80::1%eth0", "[fe80::1]:80"));
        assert_eq!(Url::parse("http://a").unwrap().target, "/");
        assert_eq!(Url::parse("http://a?b").unwrap().target, "/?b");
        assert_eq!(Url::parse("http://a/é b").unwrap().target, "/%C3%A9%20b");
        // Go sends these as they are; the HTTP library takes none of them in a query.
        assert_eq!(Url::parse("http://a/?q=<\"é\">").unwrap().target, "/?q=%3C%22%C3%A9%22%3E");
        for bad in [
            "",
            "a",
            "ftp://a/",
            "http://",
            "http://a:b/",
            "http://a:99999/",
            "http://localhost:9090metrics",
            "http://[::1/",
            "http://[::1%lo]/",
            "http://a/%zz",
            "http://a b/",
            "http://a/\u{1}",
            "http://a/?\n",
        ] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn targets_of_references() {
        for (from, to) in [
            ("/a?b=c", "/a?b=c"),
            ("a/../b", "/a/../b"),
            ("", "/"),
            ("?x", "/?x"),
            ("/a#b", "/a"),
            ("http://h:1/p?q", "/p?q"),
            ("ftp://h", "/"),
            ("//h/p", "/p"),
            ("/a b", "/a%20b"),
            ("/a?b c\"\u{e4}", "/a?b%20c%22%C3%A4"),
        ] {
            assert_eq!(target_of(from).unwrap(), to, "{from}");
        }
        for bad in ["mailto:x", ":", "a:b", "/%zz", "/\n"] {
            assert!(target_of(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn references() {
        let base = Url::parse("http://h:1/a/b?q").unwrap();
        let to = |r: &str| base.join(r).map(|u| u.to_string()).unwrap_or_else(|_| "bad".into());
        assert_eq!(to("/c"), "http://h:1/c");
        assert_eq!(to("c"), "http://h:1/a/c");
        assert_eq!(to("../c?d#e"), "http://h:1/c?d");
        assert_eq!(to("./"), "http://h:1/a/");
        assert_eq!((to("."), to("..")), ("http://h:1/a/".to_owned(), "http://h:1/".to_owned()));
        assert_eq!(to("?z"), "http://h:1/a/b?z");
        assert_eq!(to("//g/x"), "http://g/x");
        assert_eq!(to("///g/x"), "http://h:1///g/x");
        assert_eq!(to("https://h:2"), "https://h:2/");
        assert_eq!(to("#f"), "http://h:1/a/b?q");
        let dots = Url::parse("http://h/a/../m/?q").unwrap();
        assert_eq!(dots.join("?z").unwrap().to_string(), "http://h/m/?z");
        assert_eq!(dots.join("#f").unwrap().to_string(), "http://h/m/?q");
        for bad in [":", "%zz", "http://a:x/", "a\u{7f}"] {
            assert_eq!(to(bad), "bad", "{bad:?}");
        }
        for (foreign, host) in [("mailto:x", ""), ("ftp://h:21/x", "h"), ("http:x", ""), ("http:///x", "")] {
            let url = base.join(foreign).unwrap();
            assert_eq!((url.host.as_str(), url.asked().is_err()), (host, true), "{foreign}");
        }
    }

    #[test]
    fn a_users_name_is_kept_apart() {
        let url = Url::parse("http://a%40b:c@h/x").unwrap();
        assert_eq!((url.user.as_deref(), url.to_string().as_str()), (Some("a@b:c"), "http://h/x"));
        assert_eq!(url.join("/y").unwrap().user, url.user);
        assert_eq!(url.join("http://h/y").unwrap().user, None);
    }
}
