//! Steps 1 to 12: interfaces left alone, invalid packets, and what arrives.

use super::{Builder, DIVERT, DROP, IN_REDIRECT, INBOUND, REDIRECT, TPROXY, dport, redirect, tcp};
use crate::iptables::model::{Family, Match, Table, Target};
use crate::iptables::options::{Mode, Wild};

impl Builder<'_> {
    // Steps 1 to 4.
    pub(super) fn interfaces(&mut self) {
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
    pub(super) fn redirects(&mut self) {
        let o = self.o;
        self.rule(Table::Nat, INBOUND, vec![tcp(), dport(&o.tunnel_port)], Target::Return);
        self.rule(Table::Nat, REDIRECT, vec![tcp()], redirect(&o.outbound_port));
        self.rule(Table::Nat, IN_REDIRECT, vec![tcp()], redirect(&o.inbound_port));
    }

    // Steps 8 to 12.
    pub(super) fn inbound(&mut self) {
        let o = self.o;
        if !o.captures_inbound {
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
}
