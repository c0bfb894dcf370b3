//! What `--cleanup-only` does: the rules that the current flags would make are deleted, their chains are
//! emptied and removed, one command after the other, each as far as it can be done. Rules of other
//! settings stay, as does a chain that somebody else's rule still jumps to.
//!
//! A dry run lists the commands; a real one plays them against what the kernel holds and puts those that
//! would succeed into one document. Pure.

use std::fmt::Write;

use super::model::{BUILT_IN, Family, Rule, Table, Target};
use super::restore;
use super::state::SavedTables;
use super::verify::{self, Names};

/// One command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step<'a> {
    /// `-D`: this rule, where it stands first.
    Delete(&'a Rule),
    /// `-F`: what is left in a chain of ours.
    Flush(Table, &'static str),
    /// `-X`: the chain.
    Remove(Table, &'static str),
}

impl Step<'_> {
    /// The table it works in.
    #[must_use]
    pub(crate) fn table(&self) -> Table {
        match self {
            Self::Delete(rule) => rule.table,
            Self::Flush(table, _) | Self::Remove(table, _) => *table,
        }
    }

    fn rank(&self) -> usize {
        match self {
            Self::Delete(_) => 0,
            Self::Flush(..) => 1,
            Self::Remove(..) => 2,
        }
    }
}

/// The commands that undo `rules`: in reverse order first every rule in a built-in chain and every jump
/// between chains of ours, then the chains, the one that was used last first.
#[must_use]
pub(crate) fn steps(rules: &[Rule], family: Family) -> Vec<Step<'_>> {
    let backwards: Vec<&Rule> =
        restore::of_family(rules, family).collect::<Vec<_>>().into_iter().rev().collect();
    let built_in = |rule: &Rule| BUILT_IN.contains(&rule.chain);
    let jumps = |rule: &Rule| matches!(rule.target, Target::Jump(_));
    let deleted = backwards.iter().filter(|r| built_in(r) || jumps(r));
    let mut steps: Vec<Step<'_>> = deleted.map(|r| Step::Delete(r)).collect();
    for rule in backwards.iter().filter(|r| !built_in(r)) {
        let flush = Step::Flush(rule.table, rule.chain);
        if !steps.contains(&flush) {
            steps.extend([flush, Step::Remove(rule.table, rule.chain)]);
        }
    }
    steps
}

/// The document that carries out whatever of the steps can be done to `state`, and what is left then.
#[must_use]
pub(crate) fn document(
    state: &SavedTables,
    rules: &[Rule],
    family: Family,
    names: &Names,
) -> (String, SavedTables) {
    let mut left = state.clone();
    let mut text = String::new();
    let steps = steps(rules, family);
    for table in Table::ALL {
        // In one transaction a chain cannot go before every chain that jumps to it is empty.
        let mut lines = [const { String::new() }; 3];
        for step in steps.iter().filter(|step| step.table() == table) {
            if let Some(line) = play(step, &mut left, names) {
                lines[step.rank()].push_str(&line);
            }
        }
        let lines = lines.concat();
        if !lines.is_empty() {
            let _ = write!(text, "* {}\n{lines}COMMIT\n", table.name());
        }
    }
    (text, left)
}

// The line of a step that succeeds; a rule of a chain that is emptied anyway needs none.
fn play(step: &Step<'_>, left: &mut SavedTables, names: &Names) -> Option<String> {
    let chains = left.tables.get_mut(step.table().name())?;
    match *step {
        Step::Delete(rule) => {
            let wanted = verify::canonical(&restore::words(rule), names);
            let there = chains.get_mut(rule.chain)?;
            let at = there.iter().position(|saved| verify::canonical(&saved.words, names) == wanted)?;
            let saved = there.remove(at);
            BUILT_IN.contains(&rule.chain).then(|| format!("-D {} {}\n", rule.chain, saved.text))
        }
        Step::Flush(_, chain) => {
            chains.get_mut(chain)?.clear();
            Some(format!("-F {chain}\n"))
        }
        Step::Remove(_, chain) => {
            let empty = chains.get(chain)?.is_empty();
            let jumped_to = chains.values().flatten().any(|saved| saved.target() == Some(chain));
            if !empty || jumped_to {
                return None;
            }
            chains.remove(chain);
            Some(format!("-X {chain}\n"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::model::Match;

    fn rule(chain: &'static str, matches: Vec<Match>, target: Target) -> Rule {
        Rule { table: Table::Nat, chain, insert: None, family: None, matches, target }
    }

    #[test]
    fn what_others_made_stays_and_keeps_its_chain() {
        let port = |port: &str| vec![Match::Dport { not: false, port: port.to_owned() }];
        let rules = [
            rule("ISTIO_REDIRECT", vec![], Target::Return),
            rule("OUTPUT", vec![], Target::Jump("ISTIO_OUTPUT")),
            rule("ISTIO_OUTPUT", port("80"), Target::Jump("ISTIO_REDIRECT")),
        ];
        let state = SavedTables::parse(
            "*nat\n:OUTPUT ACCEPT [0:0]\n:ISTIO_OUTPUT - [0:0]\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_X - [0:0]\n\
             -A OUTPUT -j ISTIO_OUTPUT\n-A OUTPUT -j ISTIO_OUTPUT\n-A OUTPUT -d 9.9.9.9/32 -j ACCEPT\n\
             -A ISTIO_OUTPUT -p tcp -m tcp --dport 443 -j ISTIO_REDIRECT\nCOMMIT\n",
        );
        let (text, left) = document(&state, &rules, Family::V4, &Names::default());
        let lines = "-D OUTPUT -j ISTIO_OUTPUT\n-F ISTIO_OUTPUT\n-F ISTIO_REDIRECT\n-X ISTIO_REDIRECT\n";
        assert_eq!(text, format!("* nat\n{lines}COMMIT\n"));
        assert_eq!(left.our_chains("nat"), ["ISTIO_OUTPUT", "ISTIO_X"]);
        assert_eq!(left.rules("nat", "OUTPUT").len(), 2);
        assert_eq!(document(&SavedTables::default(), &rules, Family::V4, &Names::default()).0, "");
    }
}
