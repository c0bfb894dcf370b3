//! The documents that remove rules, restore the old ones, and block traffic meanwhile. Pure.

use std::fmt::Write;

use super::model::{Family, Rule, Table};
use super::restore;
use super::state::{Saved, SavedTables, is_ours};
use super::verify::{self, Names};

/// While rules are rebuilt TCP and UDP are dropped, so that nothing passes by the proxy.
const GUARDS: [(&str, &str); 6] = [
    ("INPUT", "-p tcp -j DROP"),
    ("INPUT", "-p udp -j DROP"),
    ("FORWARD", "-p tcp -j DROP"),
    ("FORWARD", "-p udp -j DROP"),
    ("OUTPUT", "-p tcp -j DROP"),
    ("OUTPUT", "-p udp -j DROP"),
];

/// The document that raises the guardrails.
#[must_use]
pub(crate) fn raise_guardrails() -> String {
    let lines = GUARDS.iter().map(|(chain, rule)| format!("-I {chain} 1 {rule}\n"));
    format!("* filter\n{}COMMIT\n", lines.collect::<String>())
}

/// The document that lowers them. Deleting by number takes away ours, which are on top, and never an
/// equal rule of the user's further down.
#[must_use]
pub(crate) fn lower_guardrails() -> String {
    let lines = GUARDS.iter().map(|(chain, _)| format!("-D {chain} 1\n"));
    format!("* filter\n{}COMMIT\n", lines.collect::<String>())
}

/// Which jumps into our chains are taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jumps {
    /// All of them, whoever made them: a rebuild starts from nothing.
    All,
    /// Those that some release of ours makes; a user's own jump stays and keeps its chain, emptied.
    Known,
}

/// The document that takes our rules out of `state`; empty when there are none.
#[must_use]
pub fn removal(state: &SavedTables, rules: &[Rule], family: Family, names: &Names, jumps: Jumps) -> String {
    let mut text = String::new();
    for table in Table::ALL {
        let name = table.name();
        let known = known_jumps(rules, family, table, names);
        let (go, stay): (Vec<_>, Vec<_>) = outside_rules(state, name)
            .into_iter()
            .filter(|(chain, rule)| {
                rule.target().is_some_and(is_ours)
                    || known.contains(&canonical(rule, names))
                    || is_mark_rule(table, chain, rule)
            })
            .partition(|(chain, rule)| {
                jumps == Jumps::All
                    || known.contains(&canonical(rule, names))
                    || is_mark_rule(table, chain, rule)
                    || is_historic_jump(chain, rule)
            });
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

fn canonical(rule: &Saved, names: &Names) -> Vec<(bool, String, String)> {
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
fn known_jumps(
    rules: &[Rule],
    family: Family,
    table: Table,
    names: &Names,
) -> Vec<Vec<(bool, String, String)>> {
    restore::of_family(rules, family)
        .filter(|r| r.table == table && !is_ours(r.chain))
        .map(|r| verify::canonical(&restore::words(r), names))
        .collect()
}

// Jumps of other options or releases: without conditions, or on the protocol or conntrack state alone.
// A condition on an interface or an address may be the user's.
fn is_historic_jump(chain: &str, rule: &Saved) -> bool {
    matches!(chain, "PREROUTING" | "OUTPUT")
        && !rule.words.iter().any(|w| matches!(w.as_str(), "-i" | "-o" | "-s" | "-d"))
}

// What TPROXY options put into the built-in chains of mangle beside jumps: saving, restoring and setting
// the mark, and the return of marked packets on the loopback device. Nobody else's rules look like these
// in a pod.
fn is_mark_rule(table: Table, chain: &str, rule: &Saved) -> bool {
    let has = |word: &str| rule.words.iter().any(|w| w == word);
    let marks = match rule.target() {
        Some("CONNMARK") => has("--save-mark") || has("--restore-mark"),
        Some("MARK") => has("0x53a/0xffffffff"),
        Some("RETURN") => has("--mark") && has("-o") && has("lo"),
        _ => false,
    };
    table == Table::Mangle && matches!(chain, "PREROUTING" | "OUTPUT") && marks
}

/// Whether the guardrails stand on top of the filter table.
#[must_use]
pub fn guarded(state: &SavedTables) -> bool {
    GUARDS.chunks(2).all(|pair| {
        let chain = pair[0].0;
        let top: Vec<_> = state.rules("filter", chain).iter().take(2).map(|r| r.text.as_str()).collect();
        top == [pair[1].1, pair[0].1]
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
