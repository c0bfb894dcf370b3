//! `resolv.conf`: nameservers and the first search domain.

use std::net::{IpAddr, Ipv6Addr};

/// What the server uses of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Resolv {
    /// Addresses, or any other word that stands there.
    pub nameservers: Vec<String>,
    /// The first search domain.
    pub search: Option<Search>,
}

/// A search domain, which resolvers append to a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    written: String,
    /// In lower case, with a dot at its end.
    suffix: String,
}

impl Search {
    pub(super) fn new(written: &str) -> Self {
        let dot = if written.ends_with('.') { "" } else { "." };
        Self { written: written.to_owned(), suffix: format!("{}{dot}", written.to_lowercase()) }
    }

    /// What the domain was appended to. Names that end with the domain themselves, as it is written, have no form
    /// with it: with capitals, or a dot at its end, none does.
    #[must_use]
    pub fn inner<'a>(&self, name: &'a str) -> Option<&'a str> {
        let inner = name.strip_suffix(self.suffix.as_str())?;
        let host = inner.strip_suffix('.')?;
        (!host.ends_with(self.written.as_str())).then_some(inner)
    }
}

/// Reads the text; lines it does not know are skipped. The last of `search` and `domain` counts.
pub fn parse(text: &str) -> Resolv {
    let mut out = Resolv::default();
    for line in text.lines() {
        // Any blank, as Go splits words.
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("nameserver"), Some(server)) => out.nameservers.push(server.to_owned()),
            // Bare, either says that there is none.
            (Some("search" | "domain"), first) => {
                out.search = first.map(Search::new);
            }
            _ => {}
        }
    }
    out
}

/// An address, an IPv6 one also with a zone (`fe80::1%eth0`), which is left out.
pub(super) fn ip(text: &str) -> Option<IpAddr> {
    match text.split_once('%') {
        None => text.parse().ok(),
        Some((address, zone)) => {
            address.parse::<Ipv6Addr>().ok().filter(|_| !zone.is_empty()).map(IpAddr::from)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_search_line_counts_and_the_rest_is_skipped() {
        let text = "# c\nnameserver 10.0.0.1 x\ndomain a.b\nsearch Ns1.svc c.d\noptions ndots:5\nnameserver\nnameserver dns";
        let search = Some(Search::new("Ns1.svc"));
        assert_eq!(parse(text), Resolv { nameservers: vec!["10.0.0.1".into(), "dns".into()], search });
        assert_eq!(parse("search a\nsearch").search, None);
        assert_eq!(parse("search a\ndomain").search, None);
        assert_eq!(parse("search a b\nsearch c").search, Some(Search::new("c")));
        assert_eq!(parse("nameserver 10.0.0.1\u{b}x").nameservers, ["10.0.0.1"]);
    }

    #[test]
    fn a_search_domain_is_taken_from_the_end_once() {
        for (written, name, inner) in [
            ("b.com", "a.b.com.", Some("a.")),
            ("b.com", "x.b.com.b.com.", None),
            ("b.com", "a.com.", None),
            ("b.com", "b.com.", None),
            ("b.com", "ab.com.", None),
            ("B.com", "x.b.com.b.com.", Some("x.b.com.")),
            ("b.com.", "x.b.com.b.com.", Some("x.b.com.")),
            (".b.com", "a.b.com.", None),
            (".", "a.", None),
        ] {
            assert_eq!(Search::new(written).inner(name), inner, "{written} {name}");
        }
    }
}
