//! `resolv.conf`: nameservers and the first search domain.

use std::net::{IpAddr, Ipv6Addr};

/// What the server uses of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Resolv {
    /// Addresses, or any other word that stands there.
    pub nameservers: Vec<String>,
    /// The first search domain, lower case, without dots around it.
    pub search: Option<String>,
}

/// Reads the text; lines it does not know are skipped. The last of `search` and `domain` counts.
pub fn parse(text: &str) -> Resolv {
    let mut out = Resolv::default();
    for line in text.lines() {
        // Any blank, as Go splits words.
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("nameserver"), Some(server)) => out.nameservers.push(server.to_owned()),
            // A bare `domain` says nothing, a bare `search` that there is none.
            (Some("domain"), None) => {}
            (Some("search" | "domain"), first) => {
                out.search =
                    first.map(|s| s.trim_matches('.').to_ascii_lowercase()).filter(|s| !s.is_empty());
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
        let search = Some("ns1.svc".to_owned());
        assert_eq!(parse(text), Resolv { nameservers: vec!["10.0.0.1".into(), "dns".into()], search });
        assert_eq!(parse("search a\nsearch").search, None);
        assert_eq!(parse("search a\ndomain").search.as_deref(), Some("a"));
        assert_eq!(parse("nameserver 10.0.0.1\u{b}x").nameservers, ["10.0.0.1"]);
    }
}
