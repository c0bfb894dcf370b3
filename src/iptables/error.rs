//! Why rules, addresses or routes are not as they were asked for. Each shows as one line that holds its cause.

use std::io;
use std::net::IpAddr;
use std::num::ParseIntError;

/// Why a run has not done what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// An invalid setting; nothing was changed.
    #[error(transparent)]
    Setting(#[from] Setting),
    /// A program could not be started.
    #[error("{what}: {source}")]
    Start {
        /// The program, and what was wanted of it.
        what: String,
        /// The system's word.
        source: io::Error,
    },
    /// A program has refused.
    #[error("{what}: {complaint}")]
    Refused {
        /// The program, and what was wanted of it.
        what: String,
        /// What it printed.
        complaint: String,
    },
    /// A program is missing.
    #[error("{0} is not installed")]
    NotInstalled(String),
    /// A program does not say which it is.
    #[error("{0} --version names no version")]
    NoVersion(String),
    /// No set of programs works here.
    #[error("no usable {program}: {}{}", lines(reasons), advice(reasons))]
    NoneUsable {
        /// The family's plain name.
        program: &'static str,
        /// Why each was passed over.
        reasons: Vec<Error>,
    },
    /// Native rules are wanted, and there is no program for them.
    #[error("nativeNftables is enabled, but the nft binary is missing {0}")]
    NoNft(&'static str),
    /// Rules of other settings are in place, and nobody said to replace them.
    #[error(
        "{name}: rules of an earlier run with other settings are in place ({difference}); nothing was changed. \
         Run with --reconcile to replace them or with --cleanup-only to remove them"
    )]
    OtherRules {
        /// The program.
        name: String,
        /// The first difference.
        difference: String,
    },
    /// What blocks traffic while rules change is still there.
    #[error(
        "{0}: TCP and UDP are still blocked: a rule that drops them while rules change is left. Run again to \
         remove it"
    )]
    StillBlocked(String),
    /// An address, a policy rule or a route.
    #[error("failed to configure routes: {step}: {source}")]
    Routes {
        /// The step.
        step: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
    /// Signals cannot be held back while rules change.
    #[error("signals cannot be held back: {0}")]
    Signals(#[source] io::Error),
    /// A signal came in time.
    #[error("asked to end before anything was changed")]
    AskedToEnd,
    /// A signal came while connections were tried.
    #[error("the validation was ended by signal {0}")]
    Ended(i32),
}

fn lines(reasons: &[Error]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn advice(reasons: &[Error]) -> &'static str {
    let missing = |reason: &Error| matches!(reason, Error::NotInstalled(_));
    if reasons.iter().all(missing) {
        "; install the package iptables, or use nft (NATIVE_NFTABLES=true)"
    } else {
        ""
    }
}

/// An invalid setting.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Setting {
    /// More groups than a rule may have.
    #[error(
        "number of owner groups whose outgoing traffic should be redirected to Envoy cannot exceed \
         {most}, got {}: {groups:?}",
        groups.len()
    )]
    OwnerGroups {
        /// The bound.
        most: usize,
        /// What was given.
        groups: Vec<String>,
    },
    /// `FORCE_IPTABLES_BINARY`.
    #[error("invalid FORCE_IPTABLES_BINARY value {0:?}: it is legacy or nft")]
    Binary(String),
    /// Every destination is to be left alone.
    #[error("invalid value for OUTBOUND_IP_RANGES_EXCLUDE: \"*\" would exclude everything; list ranges")]
    ExcludesAll,
    /// A range.
    #[error(transparent)]
    Cidr(#[from] Cidr),
    /// The loopback range is no range.
    #[error("failed to parse CIDR {text:?}: {source}")]
    LoopbackCidr {
        /// As given.
        text: String,
        /// Why.
        source: Cidr,
    },
    /// The loopback range is elsewhere.
    #[error("expected valid IPv4 loopback address in CIDR {text}; found {found}")]
    Loopback {
        /// As given.
        text: String,
        /// Its address.
        found: IpAddr,
    },
    /// The loopback range is too large.
    #[error("expected CIDR {text} to have mask in range [8, 32]; found {found}")]
    LoopbackMask {
        /// As given.
        text: String,
        /// Its length.
        found: u8,
    },
    /// An element with blanks or operators would change the rule.
    #[error("invalid value {value:?} in {name}: an element is one word; separate elements by commas")]
    Word {
        /// The setting.
        name: &'static str,
        /// The element.
        value: String,
    },
    /// No address of the pod.
    #[error(
        "no valid local IP address found: every address is loopback or link-local; is the network of this pod or machine up?"
    )]
    NoAddress,
    /// DNS is to be captured, and nobody knows the servers.
    #[error("failed to load /etc/resolv.conf: {0}")]
    ResolvConf(String),
    /// A number for routes.
    #[error("failed to configure routes: failed to parse {what}: {text:?}: {source}")]
    Number {
        /// Which.
        what: &'static str,
        /// As given.
        text: String,
        /// Why.
        source: ParseIntError,
    },
}

/// A text that is no range, in the words of Go's `netip`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("netip.ParsePrefix({text:?}): {why}")]
pub struct Cidr {
    pub(super) text: String,
    pub(super) why: String,
}
