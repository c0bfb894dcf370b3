//! The documents that remove rules, restore the old ones, and block traffic meanwhile. Pure.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::earlier::Earlier;
use super::model::{Family, Rule, Table};
use super::restore;
use super::state::{self, Saved, SavedTables, is_ours};
use super::verify::{self, Condition, Names};

/// While rules are rebuilt TCP and UDP are dropped, so that nothing passes by the proxy.
const GUARDS: [(&str, &str); 6] = [
    ("INPUT", "-p tcp -j DROP"),
    ("INPUT", "-p udp -j DROP"),
    ("FORWARD", "-p tcp -j DROP"),
    ("FORWARD", "-p udp -j DROP"),
    ("OUTPUT", "-p tcp -j DROP"),
    ("OUTPUT", "-p udp -j DROP"),
];

/// The packets that a guardrail of ours has counted when it is made: what no rule reaches by counting. A
/// comment would be plainer, but a recorded case wants these very rules (`reconcile-guardrails-during`).
const MARK: u64 = 1 << 62;

/// Which guardrails of ours stand in a filter table, wherever others have put rules since.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Guards([bool; 6]);

impl Guards {
    /// Every one of them.
    pub(crate) const ALL: Self = Self([true; 6]);

    /// Reads a save with counters. Without ours (another release's, counters that were set to zero) only
    /// all six on top are guardrails: an equal rule further down is a user's. Where some have the mark, both of a
    /// chain that are on top have lost theirs.
    #[must_use]
    pub fn read(saved: &str) -> Self {
        let mut out = [false; 6];
        let mut table = "";
        for line in saved.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name.trim();
            }
            let (packets, rest) = state::counted(line);
            if table != "filter" || packets.is_none_or(|n| n < MARK) {
                continue;
            }
            for (ours, (chain, rule)) in out.iter_mut().zip(GUARDS) {
                let wanted = rest.strip_prefix("-A ").and_then(|r| r.strip_prefix(chain)).map(str::trim);
                *ours |= wanted == Some(rule);
            }
        }
        let top = on_top(&SavedTables::parse(saved));
        if out.contains(&true) || top == [true; 3] {
            for (ours, top) in out.chunks_mut(2).zip(top) {
                ours.iter_mut().for_each(|ours| *ours |= top);
            }
        }
        Self(out)
    }

    /// Whether there is one.
    #[must_use]
    pub(crate) fn any(self) -> bool {
        self.0.contains(&true)
    }

    fn rules(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        GUARDS.into_iter().zip(self.0).filter_map(|(guard, there)| there.then_some(guard))
    }
}

/// The document that raises the guardrails in the place of those that stand, which may have no mark.
#[must_use]
pub(crate) fn raise_guardrails(there: Guards) -> String {
    let old = there.rules().map(|(chain, rule)| format!("-D {chain} {rule}\n"));
    let new = GUARDS.iter().map(|(chain, rule)| format!("-I {chain} 1 {rule} -c {MARK} 0\n"));
    format!("* filter\n{}COMMIT\n", old.chain(new).collect::<String>())
}

/// The document that lowers those that stand; empty when there are none. By what they are: on top may be
/// somebody else's by now. Where a user has an equal rule the first one goes, which is ours.
#[must_use]
pub(crate) fn lower_guardrails(there: Guards) -> String {
    if !there.any() {
        return String::new();
    }
    let lines = there.rules().map(|(chain, rule)| format!("-D {chain} {rule}\n"));
    format!("* filter\n{}COMMIT\n", lines.collect::<String>())
}

/// Which jumps into our chains are taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jumps {
    /// All of them, whoever made them: a rebuild starts from nothing.
    All,
    /// Those that some release of ours makes with any options, and the rules for excluded interfaces; a user's own
    /// jump stays and keeps its chain, emptied.
    Known,
}

/// The document that takes our rules out of `state`; empty when there are none.
#[must_use]
pub fn removal(state: &SavedTables, rules: &[Rule], family: Family, names: &Names, jumps: Jumps) -> String {
    let mut text = String::new();
    for table in Table::ALL {
        let name = table.name();
        let mut known = known_rules(rules, family, table, names);
        let earlier = Earlier::of(state, table, names);
        let mut once = BTreeSet::new();
        let mut goes = |chain: &str, rule: &Saved| {
            if let Some(at) = known.iter().position(|(c, k)| *c == chain && *k == canonical(rule, names)) {
                // A user's rule may be equal to one that leads to no chain of ours; each of ours takes one away.
                if !leads_to_ours(rule) {
                    known.swap_remove(at);
                    once.insert((chain.to_owned(), rule.text.clone()));
                }
                return true;
            }
            match jumps {
                _ if earlier.is_ours(chain, rule) => true,
                Jumps::All => leads_to_ours(rule),
                Jumps::Known => {
                    is_historic_jump(chain, rule)
                        || (earlier.is_excluded(chain, rule)
                            && once.insert((chain.to_owned(), rule.text.clone())))
                }
            }
        };
        let (go, stay): (Vec<_>, Vec<_>) =
            outside_rules(state, name).into_iter().partition(|(chain, rule)| goes(chain, rule));
        let chains = state.our_chains(name);
        if go.is_empty() && chains.is_empty() {
            continue;
        }
        let _ = writeln!(text, "* {name}");
        for (chain, rule) in go {
            let _ = writeln!(text, "-D {chain} {}", rule.text);
        }
        for chain in &chains {
            let _ = writeln!(text, "-F {chain}");
        }
        for chain in chains {
            if !stay.iter().any(|(_, rule)| rule.target() == Some(chain)) {
                let _ = writeln!(text, "-X {chain}");
            }
        }
        text.push_str("COMMIT\n");
    }
    text
}

fn canonical(rule: &Saved, names: &Names) -> Vec<Condition> {
    verify::canonical(&rule.words, names)
}

fn outside_rules<'a>(state: &'a SavedTables, table: &str) -> Vec<(&'a str, &'a Saved)> {
    let chains = state.tables.get(table).into_iter().flatten();
    chains
        .filter(|(chain, _)| !is_ours(chain))
        .flat_map(|(chain, rules)| rules.iter().map(move |r| (chain.as_str(), r)))
        .collect()
}

// What the current options put into built-in chains, jumps or not.
fn known_rules(
    rules: &[Rule],
    family: Family,
    table: Table,
    names: &Names,
) -> Vec<(&'static str, Vec<Condition>)> {
    restore::of_family(rules, family)
        .filter(|r| r.table == table && !is_ours(r.chain))
        .map(|r| (r.chain, verify::canonical(&restore::words(r), names)))
        .collect()
}

fn leads_to_ours(rule: &Saved) -> bool {
    rule.target().is_some_and(is_ours)
}

// Jumps of other options or releases: without conditions, or on the protocol or conntrack state alone.
// A condition on an interface or an address may be the user's.
fn is_historic_jump(chain: &str, rule: &Saved) -> bool {
    matches!(chain, "PREROUTING" | "OUTPUT")
        && leads_to_ours(rule)
        && !rule.words.iter().any(|w| matches!(w.as_str(), "-i" | "-o" | "-s" | "-d"))
}

/// Whether a rule is there that may be a guardrail; which, only the counters tell.
#[must_use]
pub(crate) fn may_be_guarded(state: &SavedTables) -> bool {
    GUARDS.iter().any(|(chain, rule)| state.rules("filter", chain).iter().any(|r| r.text == *rule))
}

fn on_top(state: &SavedTables) -> [bool; 3] {
    ["INPUT", "FORWARD", "OUTPUT"].map(|chain| {
        let top: Vec<_> = state.rules("filter", chain).iter().take(2).map(|r| r.text.as_str()).collect();
        top == ["-p udp -j DROP", "-p tcp -j DROP"]
    })
}

/// What puts the tables of `before` back after a change failed half-way: (document, needs a full flush
/// of its tables). Tables that held nothing then lose what is ours now.
#[must_use]
pub fn rollback(
    before: &str,
    now: &SavedTables,
    rules: &[Rule],
    family: Family,
    names: &Names,
) -> [String; 2] {
    let then = SavedTables::parse(before);
    let mut absent = now.clone();
    absent.tables.retain(|table, _| !then.tables.contains_key(table));
    let clear = removal(&absent, rules, family, names, Jumps::All);
    let mut text = String::new();
    let mut keep = false;
    for line in before.lines() {
        if let Some(name) = line.strip_prefix('*') {
            keep = Table::ALL.iter().any(|t| t.name() == name.trim());
        }
        if keep && !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    [clear, text]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(mark: u64, input: &[&str], output: &[&str]) -> String {
        let rule = |chain: &str, text: &str| {
            let packets = if text.ends_with("-j DROP") { mark } else { 7 };
            format!("[{packets}:0] -A {chain} {text}\n")
        };
        let forward = ["-p udp -j DROP", "-p tcp -j DROP"];
        let chains = [("INPUT", input), ("FORWARD", &forward[..]), ("OUTPUT", output)];
        let lines = chains.map(|(chain, rules)| rules.iter().map(|r| rule(chain, r)).collect::<String>());
        format!("*filter\n:INPUT ACCEPT [0:0]\n{}COMMIT\n", lines.concat())
    }

    #[test]
    fn a_guardrail_is_known_by_its_mark_or_by_its_place() {
        let both = ["-p udp -j DROP", "-p tcp -j DROP"];
        let below = ["-p tcp -m tcp --dport 22 -j ACCEPT", both[0], both[1]];
        assert_eq!(Guards::read(&saved(MARK + 5, &below, &both)), Guards::ALL);
        assert_eq!(Guards::read(&saved(0, &both, &both)), Guards::ALL);
        assert!(!Guards::read(&saved(0, &below, &both)).any(), "a user's own");
        let zeroed = saved(MARK, &both, &both).replacen(&MARK.to_string(), "0", 2);
        assert_eq!(Guards::read(&zeroed), Guards::ALL, "iptables -Z INPUT");
        let most = Guards::read(&saved(MARK, &below, &both[..1]));
        assert_eq!(most, Guards([true, true, true, true, false, true]));
        assert_eq!(lower_guardrails(most).matches("-D ").count(), 5);
        assert_eq!(lower_guardrails(Guards::default()), "");
    }
}
