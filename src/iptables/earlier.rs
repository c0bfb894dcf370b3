//! Which rules in built-in chains are ours, when nobody can say any more with which settings they were made: they lead
//! to no chain of ours, or carry a condition that a user's own may have. Pure.
//!
//! | rules | made by | known by |
//! |---|---|---|
//! | of `mangle`, about marks | TPROXY | the mark, which rules in our chains have, and by being for the loopback device |
//! | `-i IF -j ISTIO_REDIRECT`, `-i IF -j RETURN` | `-k` | the first, which nobody else makes, beside the second |
//! | `-i IF -j RETURN`, `-o IF -j RETURN` | `-c` | both being there where chains of ours are, which a user's may |

use std::collections::BTreeSet;

use super::model::Table;
use super::options::INBOUND_MARK;
use super::state::{Saved, SavedTables};
use super::verify::{self, Names};

/// What one table tells of the settings of earlier runs.
#[derive(Debug)]
pub(crate) struct Earlier<'a> {
    table: Table,
    names: &'a Names,
    marks: BTreeSet<u32>,
    kube_virt: BTreeSet<&'a str>,
    excluded: BTreeSet<&'a str>,
}

/// The marks by which TPROXY's rules know packets: the usual one, and those in our chains.
#[must_use]
pub(crate) fn marks(state: &SavedTables, names: &Names) -> BTreeSet<u32> {
    let mut out = BTreeSet::from([INBOUND_MARK]);
    for chain in ["ISTIO_DIVERT", "ISTIO_INBOUND"] {
        out.extend(state.rules(Table::Mangle.name(), chain).iter().filter_map(|rule| mark(rule, names)));
    }
    out
}

impl<'a> Earlier<'a> {
    /// Looks at a table.
    #[must_use]
    pub(crate) fn of(state: &'a SavedTables, table: Table, names: &'a Names) -> Self {
        let (marks, mut kube_virt, mut excluded) = (marks(state, names), BTreeSet::new(), BTreeSet::new());
        if state.has_ours() {
            let arriving = state.rules(table.name(), "PREROUTING");
            let leaving = state.rules(table.name(), "OUTPUT").iter();
            let leaving: BTreeSet<&str> = leaving.filter_map(|rule| returned(rule, "-o")).collect();
            excluded.extend(arriving.iter().filter_map(|rule| returned(rule, "-i")));
            excluded.retain(|name| leaving.contains(name));
            kube_virt.extend(arriving.iter().filter_map(kube_virt_jump));
        }
        Self { table, names, marks, kube_virt, excluded }
    }

    /// No user makes such a rule.
    #[must_use]
    pub(crate) fn is_ours(&self, chain: &str, rule: &Saved) -> bool {
        let kube_virt = kube_virt_jump(rule).or_else(|| returned(rule, "-i"));
        self.is_about_marks(chain, rule)
            || (chain == "PREROUTING" && kube_virt.is_some_and(|name| self.kube_virt.contains(name)))
    }

    /// A user may have made such a rule, but hardly both of them.
    #[must_use]
    pub(crate) fn is_excluded(&self, chain: &str, rule: &Saved) -> bool {
        let name = match chain {
            "PREROUTING" => returned(rule, "-i"),
            "OUTPUT" => returned(rule, "-o"),
            _ => None,
        };
        name.is_some_and(|name| self.excluded.contains(name))
    }

    // Saving, restoring and setting the mark, and the return of marked packets on the loopback device.
    fn is_about_marks(&self, chain: &str, rule: &Saved) -> bool {
        let has = |word: &str| rule.words.iter().any(|w| w == word);
        let marked = || mark(rule, self.names).is_some_and(|mark| self.marks.contains(&mark));
        let about = match rule.target() {
            Some("CONNMARK") => (has("--save-mark") || has("--restore-mark")) && marked(),
            Some("MARK") => has("0x53a/0xffffffff") && has("owner") && has("lo"),
            Some("RETURN") => has("-o") && has("lo") && marked(),
            _ => false,
        };
        self.table == Table::Mangle && matches!(chain, "PREROUTING" | "OUTPUT") && about
    }
}

// The mark that a rule looks for, or sets.
fn mark(rule: &Saved, names: &Names) -> Option<u32> {
    let conditions = verify::canonical(&rule.words, names);
    let is_mark = |option: &str| matches!(option, "--mark" | "--set-xmark");
    let (.., value) = conditions.into_iter().find(|(not, option, _)| !not && is_mark(option))?;
    value.split('/').next()?.parse().ok()
}

// `-i net1 -j ISTIO_REDIRECT`, perhaps with a range of addresses.
fn kube_virt_jump(rule: &Saved) -> Option<&str> {
    match rule.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["-d", _, "-i", name, "-j", "ISTIO_REDIRECT"] | ["-i", name, "-j", "ISTIO_REDIRECT"] => Some(name),
        _ => None,
    }
}

// `-i eth9 -j RETURN` and not a word more.
fn returned<'a>(rule: &'a Saved, option: &str) -> Option<&'a str> {
    match rule.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [way, name, "-j", "RETURN"] if way == option => Some(name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What is taken for ours in a table: of any run, and by one that takes everything away.
    fn found(table: Table, rules: &str) -> [Vec<String>; 2] {
        let names = Names::default();
        let state = SavedTables::parse(rules);
        let earlier = Earlier::of(&state, table, &names);
        let mut out = [Vec::new(), Vec::new()];
        for chain in ["PREROUTING", "OUTPUT"] {
            for rule in state.rules(table.name(), chain) {
                let line = || format!("{chain} {}", rule.text);
                out[0].extend(earlier.is_ours(chain, rule).then(line));
                out[1].extend(earlier.is_excluded(chain, rule).then(line));
            }
        }
        out
    }

    #[test]
    fn rules_for_interfaces_are_known_by_what_stands_beside_them() {
        let rules = "-A PREROUTING -i net1 -j RETURN\n-A PREROUTING -d 10.0.0.0/8 -i net1 -j ISTIO_REDIRECT\n\
                     -A PREROUTING ! -i net2 -j ISTIO_REDIRECT\n-A PREROUTING -i net2 -j RETURN\n\
                     -A PREROUTING -i net3 -p tcp -j ISTIO_REDIRECT\n-A PREROUTING -i net3 -j RETURN\n\
                     -A PREROUTING -i eth9 -j RETURN\n-A PREROUTING -i eth8 -j RETURN\n\
                     -A PREROUTING -i eth7 -p udp -j RETURN\n-A OUTPUT -o eth9 -j RETURN\n\
                     -A OUTPUT -o eth7 -j RETURN\nCOMMIT\n";
        let ours =
            format!("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:ISTIO_REDIRECT - [0:0]\n{rules}");
        assert_eq!(
            found(Table::Nat, &ours),
            [
                ["PREROUTING -i net1 -j RETURN", "PREROUTING -d 10.0.0.0/8 -i net1 -j ISTIO_REDIRECT"],
                ["PREROUTING -i eth9 -j RETURN", "OUTPUT -o eth9 -j RETURN"],
            ]
        );
        let without = "*nat\n-A PREROUTING -i eth9 -j RETURN\n-A OUTPUT -o eth9 -j RETURN\nCOMMIT\n";
        assert_eq!(found(Table::Nat, without), [[""; 0]; 2]);
    }

    #[test]
    fn rules_about_marks_are_known_by_our_marks() {
        let ours = "-A PREROUTING -p tcp -m mark --mark 0x7 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff\n\
                    -A OUTPUT -o lo -p tcp -m mark --mark 0x7 -j RETURN\n\
                    -A OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m owner --uid-owner 5 -j MARK --set-xmark 0x53a/0xffffffff\n\
                    -A OUTPUT -p tcp -m connmark --mark 0x7 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff\n";
        let others = "-A PREROUTING -p udp -m comment --comment \"wg-quick(8) rule for wg0\" -j CONNMARK --restore-mark\n\
                      -A PREROUTING -p tcp -m mark --mark 0x8 -j CONNMARK --save-mark\n-A OUTPUT -o lo -m mark --mark 0x8 -j RETURN\n\
                      -A OUTPUT -j CONNMARK --restore-mark\n-A OUTPUT -d 10.0.0.1/32 -j MARK --set-xmark 0x53a/0xffffffff\n";
        let chains = ":ISTIO_INBOUND - [0:0]\n-A ISTIO_INBOUND -p tcp -m mark --mark 0x7 -j RETURN\n\
                      -A ISTIO_INBOUND -i lo -p tcp -m mark ! --mark 0x8 -j RETURN\n";
        let all: Vec<&str> = ours.lines().map(|line| &line[3..]).collect();
        assert_eq!(found(Table::Mangle, &format!("*mangle\n{chains}{others}{ours}COMMIT\n"))[0], all);
        let without = format!("*mangle\n{others}{}COMMIT\n", ours.replace("0x7 ", "0x539 "));
        assert_eq!(found(Table::Mangle, &without)[0].len(), 4);
    }
}
