//! A rule as data, printed by [`super::restore`] and [`super::nft`].

/// A netfilter table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// `filter`
    Filter,
    /// `mangle`
    Mangle,
    /// `nat`
    Nat,
    /// `raw`
    Raw,
}

impl Table {
    /// The tables rules are made for, in the order in which they are written.
    pub(crate) const ALL: [Self; 4] = [Self::Filter, Self::Mangle, Self::Nat, Self::Raw];

    /// The kernel's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Mangle => "mangle",
            Self::Nat => "nat",
            Self::Raw => "raw",
        }
    }
}

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

/// Layer-4 protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proto {
    /// TCP
    Tcp,
    /// UDP
    Udp,
}

impl Proto {
    /// `tcp` or `udp`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// One condition; `not` negates it. The order in a rule is the order in which iptables gets them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    /// `-i`
    In(String),
    /// `-o`
    Out(String),
    /// `-s`
    Src(String),
    /// `-d`
    Dst {
        /// Negated.
        not: bool,
        /// Address and length.
        cidr: String,
    },
    /// `-p`
    Proto(Proto),
    /// `--dport`
    Dport {
        /// Negated.
        not: bool,
        /// Port, range or service name.
        port: String,
    },
    /// `-m multiport ! --dports`
    DportsNot(Vec<String>),
    /// `--sport`
    Sport(String),
    /// `-m owner --uid-owner`
    Uid {
        /// Negated.
        not: bool,
        /// Number or name.
        id: String,
    },
    /// `-m owner --gid-owner`
    Gid {
        /// Negated.
        not: bool,
        /// Number or name.
        id: String,
    },
    /// `-m conntrack --ctstate`
    CtState(&'static str),
    /// `-m mark --mark`
    Mark {
        /// Negated.
        not: bool,
        /// Decimal.
        mark: String,
    },
    /// `-m connmark --mark`
    ConnMark(String),
}

/// What happens to a packet that matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `-j RETURN`
    Return,
    /// `-j DROP`
    Drop,
    /// `-j ACCEPT`
    Accept,
    /// `-j <one of our chains>`
    Jump(&'static str),
    /// `-j REDIRECT --to-ports` (UDP rules spell it `--to-port`, as the Go agent does)
    Redirect {
        /// Where to.
        port: String,
        /// The option's spelling.
        spelling: &'static str,
    },
    /// `-j MARK --set-mark`
    SetMark(String),
    /// `-j TPROXY`
    Tproxy {
        /// Mark set on the packet.
        mark: String,
        /// Where to.
        port: String,
    },
    /// `-j CT --zone`
    CtZone(u8),
    /// `-j CONNMARK --save-mark`
    SaveMark,
    /// `-j CONNMARK --restore-mark`
    RestoreMark,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Its table.
    pub table: Table,
    /// Its chain, in iptables' spelling.
    pub chain: &'static str,
    /// Inserted at this position (from 1), or appended.
    pub insert: Option<u32>,
    /// Only for this family, or for both.
    pub family: Option<Family>,
    /// Conditions.
    pub matches: Vec<Match>,
    /// Verdict.
    pub target: Target,
}

/// Chains the kernel has by itself, and verdicts that are spelled like chains.
pub(crate) const BUILT_IN: &[&str] =
    &["INPUT", "OUTPUT", "FORWARD", "PREROUTING", "POSTROUTING", "ACCEPT", "RETURN", "DROP"];

/// The chains that rules of ours are made in, in the order in which nft lists them; the order has no
/// meaning for the kernel.
pub(crate) const OUR_CHAINS: &[&str] = &[
    "ISTIO_DIVERT",
    "ISTIO_TPROXY",
    "ISTIO_INBOUND",
    "ISTIO_REDIRECT",
    "ISTIO_IN_REDIRECT",
    "ISTIO_OUTPUT",
    "ISTIO_OUTPUT_DNS",
    "ISTIO_OUTPUT_OWNER",
    "ISTIO_DROP",
];
