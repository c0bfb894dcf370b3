//! The rules, in order, from the options. Pure.
//!
//! The order is a contract: rules of one chain are read from top to bottom by the kernel, and every step
//! here only makes sense after the ones before it. Steps carry the reference's numbers.

use super::model::{Family, Match, Proto, Rule, Table, Target};
use super::options::{
    DNS_PORT, Dns, LOOPBACK_V6, Mode, OUTBOUND_MARK, Options, PASSTHROUGH_V4, PASSTHROUGH_V6, Wild,
};

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

    // Steps 1 to 4.
    fn interfaces(&mut self) {
        let o = self.o;
        let tables: &[Table] =
            if o.mode == Mode::Tproxy { &[Table::Nat, Table::Mangle] } else { &[Table::Nat] };
        for &table in tables {
            for name in &o.exclude_interfaces {
                self.rule(table, "PREROUTING", vec![Match::In(name.clone())], Target::Return);
                self.rule(table, "OUTPUT", vec![Match::Out(name.clone())], Target::Return);
            }
        }
        for name in &o.kube_virt {
            self.insert(1, None, Table::Nat, "PREROUTING", vec![Match::In(name.clone())], Target::Return);
        }
        if o.drop_invalid {
            let invalid = vec![Match::CtState("INVALID")];
            self.rule(Table::Mangle, "PREROUTING", invalid, Target::Jump(DROP));
            self.rule(Table::Mangle, DROP, vec![], Target::Drop);
        }
    }

    // Steps 5 to 7.
    fn redirects(&mut self) {
        let o = self.o;
        self.rule(Table::Nat, INBOUND, vec![tcp(), dport(&o.tunnel_port)], Target::Return);
        self.rule(Table::Nat, REDIRECT, vec![tcp()], redirect(&o.outbound_port));
        self.rule(Table::Nat, IN_REDIRECT, vec![tcp()], redirect(&o.inbound_port));
    }

    // Steps 8 to 12.
    fn inbound(&mut self) {
        let o = self.o;
        if o.inbound_include.is_empty() {
            return;
        }
        let tproxy = o.mode == Mode::Tproxy;
        if tproxy {
            self.rule(Table::Mangle, DIVERT, vec![], Target::SetMark(o.tproxy_mark.clone()));
            self.rule(Table::Mangle, DIVERT, vec![], Target::Accept);
            let target = Target::Tproxy { mark: o.tproxy_mark.clone(), port: o.inbound_port.clone() };
            for family in [Family::V4, Family::V6] {
                let matches = vec![self.not_loopback(family), tcp()];
                self.only(family, Table::Mangle, TPROXY, matches, target.clone());
            }
        }
        let table = if tproxy { Table::Mangle } else { Table::Nat };
        self.rule(table, "PREROUTING", vec![tcp()], Target::Jump(INBOUND));
        let mut capture = |matches: Vec<Match>| {
            if tproxy {
                let mut established = matches.clone();
                established.push(Match::CtState("RELATED,ESTABLISHED"));
                self.rule(table, INBOUND, established, Target::Jump(DIVERT));
                self.rule(table, INBOUND, matches, Target::Jump(TPROXY));
            } else {
                self.rule(table, INBOUND, matches, Target::Jump(IN_REDIRECT));
            }
        };
        match &o.inbound_include {
            Wild::List(ports) => {
                for port in ports {
                    capture(vec![tcp(), dport(port)]);
                }
            }
            Wild::All => {
                for port in &o.inbound_exclude {
                    self.rule(table, INBOUND, vec![tcp(), dport(port)], Target::Return);
                }
                let all = vec![tcp()];
                if tproxy {
                    let established = vec![tcp(), Match::CtState("RELATED,ESTABLISHED")];
                    self.rule(table, INBOUND, established, Target::Jump(DIVERT));
                    self.rule(table, INBOUND, all, Target::Jump(TPROXY));
                } else {
                    self.rule(table, INBOUND, all, Target::Jump(IN_REDIRECT));
                }
            }
        }
    }

    // Steps 13 to 15.
    fn outbound_head(&mut self) {
        self.rule(Table::Nat, "OUTPUT", vec![], Target::Jump(OUTPUT));
        for port in &self.o.outbound_ports_exclude {
            self.rule(Table::Nat, OUTPUT, vec![tcp(), dport(port)], Target::Return);
            self.rule(Table::Nat, OUTPUT, vec![udp(), dport(port)], Target::Return);
        }
        let pass = |family| {
            let from = if family == Family::V4 { PASSTHROUGH_V4 } else { PASSTHROUGH_V6 };
            vec![lo_out(), Match::Src(from.to_owned())]
        };
        self.each(Table::Nat, OUTPUT, pass, &Target::Return);
    }

    // Steps 16 and 17.
    fn proxy_users(&mut self) {
        let o = self.o;
        let dns = o.dns.is_on();
        let loopback_included = o
            .outbound_include
            .as_ref()
            .is_some_and(|list| list.iter().any(super::options::Cidr::is_loopback));
        let users = o.proxy_uids.iter().map(|id| (true, id));
        let groups = o.proxy_gids.iter().map(|id| (false, id));
        for (user, id) in users.chain(groups) {
            let owner = |not| {
                let id = id.clone();
                if user { Match::Uid { not, id } } else { Match::Gid { not, id } }
            };
            let port = if dns && user {
                Match::DportsNot(vec!["53".to_owned(), o.tunnel_port.clone()])
            } else {
                Match::Dport { not: true, port: o.tunnel_port.clone() }
            };
            for family in [Family::V4, Family::V6] {
                let matches = vec![lo_out(), self.not_loopback(family), tcp(), port.clone(), owner(false)];
                self.only(family, Table::Nat, OUTPUT, matches, Target::Jump(IN_REDIRECT));
            }
            if !loopback_included {
                let mut matches = vec![lo_out()];
                if dns {
                    matches.extend([tcp(), Match::Dport { not: true, port: "53".to_owned() }]);
                }
                matches.push(owner(true));
                self.rule(Table::Nat, OUTPUT, matches, Target::Return);
            }
            self.rule(Table::Nat, OUTPUT, vec![owner(false)], Target::Return);
        }
    }

    // Step 18.
    fn owner_groups(&mut self) {
        let o = self.o;
        let group = |not, id: &String| Match::Gid { not, id: id.clone() };
        match &o.owner_include {
            Wild::All => {
                for id in &o.owner_exclude {
                    self.rule(Table::Nat, OUTPUT, vec![group(false, id)], Target::Return);
                }
            }
            // "None of the groups" is one rule of negated matches.
            Wild::List(ids) if ids.len() <= GROUPS_A_RULE => {
                let matches = ids.iter().map(|id| group(true, id)).collect();
                self.rule(Table::Nat, OUTPUT, matches, Target::Return);
            }
            // A list too long for one line: each group jumps to a chain that holds the rest of the
            // steps, everybody else returns. The Go agent fails in the kernel here.
            Wild::List(ids) => {
                for id in ids {
                    self.rule(Table::Nat, OUTPUT, vec![group(false, id)], Target::Jump(OUTPUT_OWNER));
                }
                self.rule(Table::Nat, OUTPUT, vec![], Target::Return);
                self.tail = OUTPUT_OWNER;
            }
        }
    }

    // Step 19, block 8.1.
    fn dns(&mut self) {
        let o = self.o;
        let none = (Vec::new(), Vec::new());
        let (all, (v4, v6)) = match &o.dns {
            Dns::Off => return,
            Dns::All => (true, none),
            Dns::Servers { v4, v6 } => (
                false,
                (
                    v4.iter().map(|s| format!("{s}/32")).collect::<Vec<_>>(),
                    v6.iter().map(|s| format!("{s}/128")).collect::<Vec<_>>(),
                ),
            ),
        };
        let servers = [(Family::V4, v4), (Family::V6, v6)];
        self.rule(Table::Raw, "OUTPUT", vec![], Target::Jump(OUTPUT_DNS));
        for (family, list) in &servers {
            if all || !list.is_empty() {
                self.only(*family, Table::Nat, self.tail, vec![], Target::Jump(OUTPUT_DNS));
            }
        }
        for (proto, spelling) in [(tcp(), "--to-ports"), (udp(), "--to-port")] {
            let target = Target::Redirect { port: DNS_PORT.to_owned(), spelling };
            if all {
                self.rule(Table::Nat, OUTPUT_DNS, vec![proto, dport("53")], target);
                continue;
            }
            for (family, list) in &servers {
                for server in list {
                    let matches = vec![proto.clone(), dport("53"), dst(server)];
                    self.only(*family, Table::Nat, OUTPUT_DNS, matches, target.clone());
                }
            }
        }
        self.dns_owner_zones();
        self.dns_zones(all, &servers);
    }

    fn dns_owner_zones(&mut self) {
        let o = self.o;
        let users = o.proxy_uids.iter().map(|id| Match::Uid { not: false, id: id.clone() });
        let groups = o.proxy_gids.iter().map(|id| Match::Gid { not: false, id: id.clone() });
        for owner in users.chain(groups) {
            let asked = vec![udp(), dport("53"), owner.clone()];
            self.rule(Table::Raw, OUTPUT_DNS, asked, Target::CtZone(ZONE_UPSTREAM));
            let answered = vec![udp(), Match::Sport(DNS_PORT.to_owned()), owner];
            self.rule(Table::Raw, OUTPUT_DNS, answered, Target::CtZone(ZONE_APPLICATION));
        }
    }

    fn dns_zones(&mut self, all: bool, servers: &[(Family, Vec<String>); 2]) {
        let asked = || vec![udp(), dport("53")];
        let answered = || vec![udp(), Match::Sport("53".to_owned())];
        if all {
            self.rule(Table::Raw, "PREROUTING", vec![], Target::Jump(INBOUND));
            self.rule(Table::Raw, OUTPUT_DNS, asked(), Target::CtZone(ZONE_APPLICATION));
            self.rule(Table::Raw, INBOUND, answered(), Target::CtZone(ZONE_UPSTREAM));
            return;
        }
        for (family, list) in servers.iter().filter(|(_, list)| !list.is_empty()) {
            self.only(*family, Table::Raw, "PREROUTING", vec![], Target::Jump(INBOUND));
            for server in list {
                let mut to = asked();
                to.push(dst(server));
                self.only(*family, Table::Raw, OUTPUT_DNS, to, Target::CtZone(ZONE_APPLICATION));
                let mut from = answered();
                from.push(Match::Src(server.clone()));
                self.only(*family, Table::Raw, INBOUND, from, Target::CtZone(ZONE_UPSTREAM));
            }
        }
    }

    // Steps 20 to 23.
    fn outbound_tail(&mut self) {
        let o = self.o;
        for family in [Family::V4, Family::V6] {
            let matches = vec![dst(self.loopback(family))];
            self.only(family, Table::Nat, self.tail, matches, Target::Return);
        }
        for cidr in &o.outbound_exclude {
            self.only(family_of(cidr), Table::Nat, self.tail, vec![dst(cidr)], Target::Return);
        }
        for port in &o.outbound_ports {
            self.rule(Table::Nat, self.tail, vec![tcp(), dport(port)], Target::Jump(REDIRECT));
        }
        match &o.outbound_include {
            None => {
                self.rule(Table::Nat, self.tail, vec![], Target::Jump(REDIRECT));
                for name in &o.kube_virt {
                    let matches = vec![Match::In(name.clone())];
                    self.insert(1, None, Table::Nat, "PREROUTING", matches, Target::Jump(REDIRECT));
                }
            }
            Some(list) => {
                for cidr in list {
                    let family = family_of(cidr);
                    for name in &o.kube_virt {
                        let matches = vec![Match::In(name.clone()), dst(cidr)];
                        let target = Target::Jump(REDIRECT);
                        self.insert(1, Some(family), Table::Nat, "PREROUTING", matches, target);
                    }
                    self.only(family, Table::Nat, self.tail, vec![dst(cidr)], Target::Jump(REDIRECT));
                }
            }
        }
    }

    // Step 24, block 8.2; made even when nothing inbound is captured, as the Go agent does.
    fn tproxy(&mut self) {
        let o = self.o;
        let mark = || Match::Mark { not: false, mark: o.tproxy_mark.clone() };
        let t = Table::Mangle;
        self.rule(t, "PREROUTING", vec![tcp(), mark()], Target::SaveMark);
        self.rule(t, "OUTPUT", vec![tcp(), lo_out(), mark()], Target::Return);
        let users = o.proxy_uids.iter().map(|id| Match::Uid { not: false, id: id.clone() });
        let groups = o.proxy_gids.iter().map(|id| Match::Gid { not: false, id: id.clone() });
        for owner in users.chain(groups) {
            for family in [Family::V4, Family::V6] {
                let matches = vec![self.not_loopback(family), tcp(), lo_out(), owner.clone()];
                self.only(family, t, "OUTPUT", matches, Target::SetMark(OUTBOUND_MARK.to_owned()));
            }
        }
        self.rule(t, "OUTPUT", vec![tcp(), Match::ConnMark(o.tproxy_mark.clone())], Target::RestoreMark);
        self.insert(1, None, t, INBOUND, vec![tcp(), mark()], Target::Return);
        for (family, from) in [(Family::V4, PASSTHROUGH_V4), (Family::V6, PASSTHROUGH_V6)] {
            let matches = vec![tcp(), Match::Src(from.to_owned()), Match::In("lo".to_owned())];
            self.insert(2, Some(family), t, INBOUND, matches, Target::Return);
        }
        let own = Match::Mark { not: true, mark: OUTBOUND_MARK.to_owned() };
        let matches = vec![tcp(), Match::In("lo".to_owned()), own];
        self.insert(3, None, t, INBOUND, matches, Target::Return);
    }
}

fn family_of(cidr: &super::options::Cidr) -> Family {
    if cidr.is_v6() { Family::V6 } else { Family::V4 }
}
