//! Steps 13 to 18 and 20 to 23: what leaves, and whose it is.

use super::{
    Builder, GROUPS_A_NATIVE_RULE, GROUPS_A_RULE, IN_REDIRECT, OUTPUT, OUTPUT_OWNER, REDIRECT, dport, dst,
    family_of, lo_out, tcp, udp,
};
use crate::iptables::model::{Family, Match, Table, Target};
use crate::iptables::options::{Cidr, PASSTHROUGH_V4, PASSTHROUGH_V6, Wild};

impl Builder<'_> {
    // Steps 13 to 15.
    pub(super) fn outbound_head(&mut self) {
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
    pub(super) fn proxy_users(&mut self) {
        let o = self.o;
        let dns = o.dns.is_on();
        let loopback_included =
            o.outbound_include.as_ref().is_some_and(|list| list.iter().any(Cidr::is_loopback));
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
    pub(super) fn owner_groups(&mut self) {
        let o = self.o;
        let group = |not, id: &String| Match::Gid { not, id: id.clone() };
        let most = if o.native { GROUPS_A_NATIVE_RULE } else { GROUPS_A_RULE };
        match &o.owner_include {
            Wild::All => {
                for id in &o.owner_exclude {
                    self.rule(Table::Nat, OUTPUT, vec![group(false, id)], Target::Return);
                }
            }
            // "None of the groups" is one rule of negated matches.
            Wild::List(ids) if ids.len() <= most => {
                let matches = ids.iter().map(|id| group(true, id)).collect();
                self.rule(Table::Nat, OUTPUT, matches, Target::Return);
            }
            // A list too long for one rule: each group jumps to a chain that holds the rest of the
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

    // Steps 20 to 23.
    pub(super) fn outbound_tail(&mut self) {
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
}
