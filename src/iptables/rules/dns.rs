//! Step 19: DNS to the agent's own server, and conntrack zones that keep its two sides apart.

use super::{Builder, INBOUND, OUTPUT_DNS, ZONE_APPLICATION, ZONE_UPSTREAM, dport, dst, tcp, udp};
use crate::iptables::model::{Family, Match, Table, Target};
use crate::iptables::options::{DNS_PORT, Dns};

impl Builder<'_> {
    // Step 19, block 8.1.
    pub(super) fn dns(&mut self) {
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
}
