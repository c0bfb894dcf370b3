//! The rules, in order, from the options. Pure.
//!
//! The order is a contract: rules of one chain are read from top to bottom by the kernel, and every step
//! here only makes sense after the ones before it. Steps are numbered over all files of this folder.

mod dns;
mod inbound;
mod outbound;
mod tproxy;

use super::model::{Family, Match, Proto, Rule, Table, Target};
use super::options::{Cidr, LOOPBACK_V6, Mode, Options};

const INBOUND: &str = "ISTIO_INBOUND";
const OUTPUT: &str = "ISTIO_OUTPUT";
const REDIRECT: &str = "ISTIO_REDIRECT";
const IN_REDIRECT: &str = "ISTIO_IN_REDIRECT";
const OUTPUT_DNS: &str = "ISTIO_OUTPUT_DNS";
const DIVERT: &str = "ISTIO_DIVERT";
const TPROXY: &str = "ISTIO_TPROXY";
const DROP: &str = "ISTIO_DROP";
const OUTPUT_OWNER: &str = "ISTIO_OUTPUT_OWNER";

/// iptables-restore 1.8.9 takes at most 255 words a line and a group costs five, so 49 fit.
const GROUPS_A_RULE: usize = 49;
/// Natively a rule has 128 expressions in the kernel: two a group, one that counts, and the verdict.
const GROUPS_A_NATIVE_RULE: usize = 63;

/// Conntrack zone between the agent and the upstream resolver.
const ZONE_UPSTREAM: u8 = 1;
/// Conntrack zone between the application and the agent.
const ZONE_APPLICATION: u8 = 2;

/// All rules for `options`.
#[must_use]
pub fn generate(options: &Options) -> Vec<Rule> {
    let mut b = Builder { o: options, rules: Vec::new(), tail: OUTPUT };
    b.interfaces();
    b.redirects();
    b.inbound();
    b.outbound_head();
    b.proxy_users();
    b.owner_groups();
    b.dns();
    b.outbound_tail();
    if options.mode == Mode::Tproxy {
        b.tproxy();
    }
    b.rules
}

struct Builder<'a> {
    o: &'a Options,
    rules: Vec<Rule>,
    // The chain that takes the steps after the owner groups.
    tail: &'static str,
}

fn tcp() -> Match {
    Match::Proto(Proto::Tcp)
}

fn udp() -> Match {
    Match::Proto(Proto::Udp)
}

fn dport(port: &str) -> Match {
    Match::Dport { not: false, port: port.to_owned() }
}

fn lo_out() -> Match {
    Match::Out("lo".to_owned())
}

fn dst(cidr: impl ToString) -> Match {
    Match::Dst { not: false, cidr: cidr.to_string() }
}

fn redirect(port: &str) -> Target {
    Target::Redirect { port: port.to_owned(), spelling: "--to-ports" }
}

impl Builder<'_> {
    fn rule(&mut self, table: Table, chain: &'static str, matches: Vec<Match>, target: Target) {
        self.rules.push(Rule { table, chain, insert: None, family: None, matches, target });
    }

    fn only(
        &mut self,
        family: Family,
        table: Table,
        chain: &'static str,
        matches: Vec<Match>,
        target: Target,
    ) {
        self.rules.push(Rule { table, chain, insert: None, family: Some(family), matches, target });
    }

    fn insert(
        &mut self,
        at: u32,
        family: Option<Family>,
        table: Table,
        chain: &'static str,
        matches: Vec<Match>,
        target: Target,
    ) {
        self.rules.push(Rule { table, chain, insert: Some(at), family, matches, target });
    }

    // One variant a family, for matches that name an address.
    fn each(
        &mut self,
        table: Table,
        chain: &'static str,
        matches: impl Fn(Family) -> Vec<Match>,
        target: &Target,
    ) {
        for family in [Family::V4, Family::V6] {
            self.only(family, table, chain, matches(family), target.clone());
        }
    }

    fn loopback(&self, family: Family) -> String {
        match family {
            Family::V4 => self.o.loopback_v4.to_string(),
            Family::V6 => LOOPBACK_V6.to_owned(),
        }
    }

    fn not_loopback(&self, family: Family) -> Match {
        Match::Dst { not: true, cidr: self.loopback(family) }
    }
}

fn family_of(cidr: &Cidr) -> Family {
    if cidr.is_v6() { Family::V6 } else { Family::V4 }
}
