//! Addresses of collectors, and what the node's own addresses mean for those Envoy listens on.

use serde_json::{Value, json};

use super::Error;

/// A collector's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPort {
    /// A name or a literal without brackets.
    pub host: String,
    /// 0..=65535.
    pub port: u32,
}

impl HostPort {
    /// Splits `host:port` at the last colon; IPv6 literals need brackets. A host that is exactly
    /// `$(HOST_IP)` becomes `host_ip` unless that is empty.
    ///
    /// # Errors
    /// When there is no port, too many colons, or the port is not a number; `name` says whose address.
    pub(crate) fn parse(name: &'static str, address: &str, host_ip: &str) -> Result<Self, Error> {
        let (host, port) = Self::parts(name, address, host_ip)?;
        let port = port.parse::<u32>().ok().filter(|p| *p <= 65535).ok_or_else(|| Error::Address {
            name,
            address: address.to_owned(),
            reason: format!("port ({port}) is not a number from 0 to 65535"),
        })?;
        Ok(Self { host: host.to_owned(), port })
    }

    /// Host and port as they stand, whatever they are.
    ///
    /// # Errors
    /// When there is no port or there are too many colons; `name` says whose address.
    pub(crate) fn parts<'a>(
        name: &'static str,
        address: &'a str,
        host_ip: &'a str,
    ) -> Result<(&'a str, &'a str), Error> {
        let (host, port) = split(address).map_err(|reason| Error::Address {
            name,
            address: address.to_owned(),
            reason: format!("address {address}: {reason}"),
        })?;
        Ok((if host == "$(HOST_IP)" && !host_ip.is_empty() { host_ip } else { host }, port))
    }

    /// What Envoy calls a socket address.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        json!({"address": self.host, "port_value": self.port})
    }
}

// The rules of Go's net.SplitHostPort.
fn split(address: &str) -> Result<(&str, &str), &'static str> {
    let Some(colon) = address.rfind(':') else { return Err("missing port in address") };
    let (host, port) = (&address[..colon], &address[colon + 1..]);
    if let Some(rest) = address.strip_prefix('[') {
        let Some(end) = rest.find(']') else { return Err("missing ']' in address") };
        let after = &rest[end + 1..];
        if after.is_empty() {
            return Err("missing port in address");
        }
        if end + 2 != colon {
            return Err(if after.starts_with(':') {
                "too many colons in address"
            } else {
                "missing port in address"
            });
        }
        let inner = &rest[..end];
        if inner.contains('[') || port.contains(['[', ']']) {
            return Err("unexpected bracket in address");
        }
        return Ok((inner, port));
    }
    if host.contains(':') {
        return Err("too many colons in address");
    }
    if address.contains(['[', ']']) {
        return Err("unexpected bracket in address");
    }
    Ok((host, port))
}

/// Which IP families Envoy uses on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// IPv4, also when nothing is known.
    V4,
    /// IPv6 only.
    V6,
    /// Both, IPv4 first.
    DualV4,
    /// Both, IPv6 first.
    DualV6,
}

impl Family {
    /// What the node's addresses mean; both families only count with `dual_stack`.
    #[must_use]
    pub(crate) fn of(addresses: &[String], dual_stack: bool) -> Self {
        let v6 = |text: &str| parse(text).map(|ip| ip.is_ipv6());
        let kinds: Vec<bool> = addresses.iter().filter_map(|a| v6(a)).collect();
        let (any4, any6) = (kinds.contains(&false), kinds.contains(&true));
        match (any4, any6) {
            (_, false) => Self::V4,
            (false, true) => Self::V6,
            (true, true) if !dual_stack => Self::V4,
            (true, true) => {
                let first = addresses.first().and_then(|a| parse(a));
                let six = matches!(first, Some(std::net::IpAddr::V6(ip)) if !ip.is_unicast_link_local());
                if six { Self::DualV6 } else { Self::DualV4 }
            }
        }
    }

    fn six_first(self) -> bool {
        matches!(self, Self::V6 | Self::DualV6)
    }

    /// The loopback address.
    #[must_use]
    pub(crate) fn localhost(self) -> &'static str {
        if self.six_first() { "::1" } else { "127.0.0.1" }
    }

    /// The address that stands for all.
    #[must_use]
    pub(crate) fn wildcard(self) -> &'static str {
        if self.six_first() { "::" } else { "0.0.0.0" }
    }

    /// The other family's loopback and wildcard, when both are used.
    #[must_use]
    pub(crate) fn additional(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::DualV4 => Some(("::1", "::")),
            Self::DualV6 => Some(("127.0.0.1", "0.0.0.0")),
            Self::V4 | Self::V6 => None,
        }
    }

    /// Envoy's `dns_lookup_family`.
    #[must_use]
    pub(crate) fn lookup(self) -> &'static str {
        match self {
            Self::V4 => "V4_ONLY",
            Self::V6 => "V6_ONLY",
            Self::DualV4 | Self::DualV6 => "ALL",
        }
    }
}

// A zone (`fe80::9%eth0`) is no part of the address.
fn parse(text: &str) -> Option<std::net::IpAddr> {
    text.split('%').next().and_then(|t| t.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_as_go_does() {
        let of = |text: &str| HostPort::parse("zipkin", text, "192.0.2.1").map(|a| (a.host, a.port));
        assert_eq!(of("z.test:9411"), Ok(("z.test".to_owned(), 9411)));
        assert_eq!(of("[fd00::5]:1"), Ok(("fd00::5".to_owned(), 1)));
        assert_eq!(of("$(HOST_IP):1"), Ok(("192.0.2.1".to_owned(), 1)));
        for bad in
            ["", "x", "a:b:1", "[::1]", "[::1", "::1:80", "a]:1", "a:x", "a:-1", "a:70000", "[[::1]]:1"]
        {
            assert!(of(bad).is_err(), "{bad}");
        }
        let text = HostPort::parse("pilot_grpc_address", "istiod", "").unwrap_err().to_string();
        assert_eq!(
            text,
            "unable to parse pilot_grpc_address address \"istiod\": address istiod: missing port in address"
        );
    }

    #[test]
    fn families() {
        let of =
            |list: &[&str], dual| Family::of(&list.iter().map(ToString::to_string).collect::<Vec<_>>(), dual);
        assert_eq!(of(&[], true), Family::V4);
        assert_eq!(of(&["::1"], false), Family::V6);
        assert_eq!(of(&["::1", "10.0.0.1"], false), Family::V4);
        assert_eq!(of(&["fd00::1", "10.0.0.1"], true), Family::DualV6);
        assert_eq!(of(&["fe80::1", "10.0.0.1"], true), Family::DualV4);
        assert_eq!(of(&["10.0.0.1", "fd00::1"], true), Family::DualV4);
        assert_eq!(of(&["nonsense"], true), Family::V4);
    }
}
