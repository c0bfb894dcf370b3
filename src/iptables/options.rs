//! What the user asked for, after defaults and checks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::error;

/// The port of the agent's DNS proxy, where captured DNS goes.
pub(crate) const DNS_PORT: &str = "15053";
/// Mark of inbound traffic, unless `-t` says another (the Go agent's default).
pub(crate) const INBOUND_MARK: u32 = 1337;
/// Mark of outbound traffic that a TPROXY sidecar sends to itself (the Go agent's constant).
pub(crate) const OUTBOUND_MARK: &str = "1338";
/// Address from which Envoy's inbound pass-through cluster connects (IPv4).
pub(crate) const PASSTHROUGH_V4: &str = "127.0.0.6/32";
/// The same for IPv6.
pub(crate) const PASSTHROUGH_V6: &str = "::6/128";
/// IPv6 has one loopback address.
pub(crate) const LOOPBACK_V6: &str = "::1/128";

/// A comma list where `*` alone means everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wild {
    /// `*`
    All,
    /// The elements; empty elements were dropped, blanks are kept.
    List(Vec<String>),
}

impl Wild {
    /// Reads a comma list.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        if text == "*" { Self::All } else { Self::List(split(text)) }
    }
}

/// Splits a comma list, dropping empty elements (`6000,7000,` is two ports); blanks stay.
#[must_use]
pub(crate) fn split(text: &str) -> Vec<String> {
    text.split(',').filter(|e| !e.is_empty()).map(str::to_owned).collect()
}

/// How inbound traffic is redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// NAT redirect; also what every other word than `TPROXY` selects.
    Redirect,
    /// Transparent proxying, which keeps the source address.
    Tproxy,
}

/// A CIDR as given (not masked) with its family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cidr {
    /// The address as given.
    pub addr: IpAddr,
    /// Prefix length.
    pub len: u8,
}

impl Cidr {
    /// Reads `address/length`; an IPv4-mapped IPv6 address stays IPv6.
    ///
    /// # Errors
    /// One line that names the value and the reason, in the wording of Go's prefix parser.
    pub fn parse(text: &str) -> Result<Self, error::Cidr> {
        let bad = |why: String| error::Cidr { text: text.to_owned(), why };
        let (addr, len) = text.rsplit_once('/').ok_or_else(|| bad("no '/'".to_owned()))?;
        let addr: IpAddr =
            addr.parse().map_err(|_| bad(format!("ParseAddr({addr:?}): unable to parse IP")))?;
        let digits = !len.is_empty() && len.bytes().all(|b| b.is_ascii_digit());
        if !digits || (len.len() > 1 && len.starts_with('0')) {
            return Err(bad(format!("bad bits after slash: {len:?}")));
        }
        let max = if addr.is_ipv4() { 32 } else { 128 };
        match len.parse::<u8>() {
            Ok(len) if len <= max => Ok(Self { addr, len }),
            _ => Err(bad("prefix length out of range".to_owned())),
        }
    }

    /// IPv6 in notation (also when IPv4-mapped).
    #[must_use]
    pub(crate) fn is_v6(&self) -> bool {
        self.addr.is_ipv6()
    }

    /// The address lies in 127/8 or is `::1`.
    #[must_use]
    pub(crate) fn is_loopback(&self) -> bool {
        match self.addr {
            IpAddr::V4(a) => a.is_loopback(),
            IpAddr::V6(a) => a == Ipv6Addr::LOCALHOST,
        }
    }
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.addr, self.len)
    }
}

/// DNS capture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dns {
    /// Off.
    Off,
    /// Every destination on port 53.
    All,
    /// The resolvers of `/etc/resolv.conf`, by family.
    Servers {
        /// IPv4 resolvers, in file order, repeats kept.
        v4: Vec<Ipv4Addr>,
        /// IPv6 resolvers.
        v6: Vec<Ipv6Addr>,
    },
}

impl Dns {
    /// Whether anything is captured.
    #[must_use]
    pub(crate) fn is_on(&self) -> bool {
        *self != Self::Off
    }
}

/// Everything the rules depend on. Ports, interfaces, users and groups are passed to iptables as they
/// are given (ranges, service and group names work), but each must be one word.
#[derive(Debug, Clone)]
pub struct Options {
    /// `-p`: captured outbound TCP goes here.
    pub outbound_port: String,
    /// `-z`: captured inbound TCP goes here.
    pub inbound_port: String,
    /// `-e`: the HBONE port, never captured inbound.
    pub tunnel_port: String,
    /// `-u`: users whose traffic is the proxy's own.
    pub proxy_uids: Vec<String>,
    /// `-g`: groups whose traffic is the proxy's own.
    pub proxy_gids: Vec<String>,
    /// `-m`.
    pub mode: Mode,
    /// `-t`.
    pub tproxy_mark: String,
    /// `-r`.
    pub tproxy_table: String,
    /// `--native-nftables`.
    pub native: bool,
    /// `-b` is not empty, though it may list nothing (`,`).
    pub captures_inbound: bool,
    /// `-b`.
    pub inbound_include: Wild,
    /// `-d`.
    pub inbound_exclude: Vec<String>,
    /// `ISTIO_OUTBOUND_OWNER_GROUPS`.
    pub owner_include: Wild,
    /// `ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE`.
    pub owner_exclude: Vec<String>,
    /// `-i`, parsed: `None` for `*`.
    pub outbound_include: Option<Vec<Cidr>>,
    /// `-x`.
    pub outbound_exclude: Vec<Cidr>,
    /// `-q`.
    pub outbound_ports: Vec<String>,
    /// `-o`.
    pub outbound_ports_exclude: Vec<String>,
    /// `-k`.
    pub kube_virt: Vec<String>,
    /// `-c`.
    pub exclude_interfaces: Vec<String>,
    /// `--redirect-dns` and friends, resolved.
    pub dns: Dns,
    /// `--drop-invalid`.
    pub drop_invalid: bool,
    /// `ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR`.
    pub loopback_v4: Cidr,
    /// IPv6 rules are made as well.
    pub ipv6: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_as_go_reads_them() {
        for good in ["10.0.0.0/0", "10.1.2.3/32", "fd00::/8", "::ffff:10.0.0.0/128"] {
            assert!(Cidr::parse(good).is_ok(), "{good}");
        }
        for (bad, why) in [
            ("10.0.0.0", "no '/'"),
            ("a/8", "ParseAddr(\"a\"): unable to parse IP"),
            ("10.0.0.0/", "bad bits after slash: \"\""),
            ("10.0.0.0/08", "bad bits after slash: \"08\""),
            ("10.0.0.0/+8", "bad bits after slash: \"+8\""),
            ("10.0.0.0/33", "prefix length out of range"),
            ("fd00::/129", "prefix length out of range"),
            ("fd00::/300", "prefix length out of range"),
        ] {
            assert_eq!(Cidr::parse(bad).unwrap_err().why, why, "{bad}");
        }
    }
}
