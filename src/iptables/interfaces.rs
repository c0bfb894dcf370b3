//! Which interfaces the rules of an earlier run treat apart, when nobody can say any more: a clean-up of everything
//! needs the settings for them, since such rules lead to no chain of ours, or carry a condition. Pure but for the look.
//!
//! Interfaces of VMs in the pod (`-k`) have jumps into our chains from `PREROUTING`; nobody else makes such. Excluded ones
//! (`-c`) return in `PREROUTING` and in `OUTPUT`, side by side; where chains of ours are, such a pair is taken for ours.

use std::collections::BTreeSet;

use super::detect;
use super::model::{Family, Table};
use super::run::Runner;
use super::state::{Saved, SavedTables, is_ours};

/// What the settings must have been.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Apart {
    /// `-k`
    pub kube_virt: BTreeSet<String>,
    /// `-i`, as far as rules of the former name addresses.
    pub ranges: BTreeSet<String>,
    /// `-c`
    pub excluded: BTreeSet<String>,
}

/// Looks at all sets of both families; empty where nothing of ours is.
pub(crate) fn look(runner: &mut dyn Runner) -> Apart {
    let mut out = Apart::default();
    for family in [Family::V4, Family::V6] {
        let Some(choice) = detect::leftovers(runner, family, None) else { continue };
        for backend in std::iter::once(&choice.backend).chain(&choice.others) {
            out.add(&backend.state);
        }
    }
    out
}

impl Apart {
    fn add(&mut self, state: &SavedTables) {
        if !state.has_ours() {
            return;
        }
        let nat = Table::Nat.name();
        for rule in state.rules(nat, "PREROUTING") {
            if let (Some(name), true) = (after(rule, "-i"), rule.target().is_some_and(is_ours)) {
                self.kube_virt.insert(name.to_owned());
                self.ranges.extend(after(rule, "-d").map(str::to_owned));
            }
        }
        for table in [nat, Table::Mangle.name()] {
            let out: BTreeSet<&str> =
                state.rules(table, "OUTPUT").iter().filter_map(|rule| returned(rule, "-o")).collect();
            let both = state.rules(table, "PREROUTING").iter().filter_map(|rule| returned(rule, "-i"));
            self.excluded.extend(both.filter(|name| out.contains(name)).map(str::to_owned));
        }
    }
}

fn after<'a>(rule: &'a Saved, option: &str) -> Option<&'a str> {
    let at = rule.words.iter().position(|word| word == option)?;
    // A condition that is turned round is none of ours.
    if at > 0 && rule.words[at - 1] == "!" {
        return None;
    }
    rule.words.get(at + 1).map(String::as_str)
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

    fn found(saved: &str) -> [String; 3] {
        let mut out = Apart::default();
        out.add(&SavedTables::parse(saved));
        [out.kube_virt, out.ranges, out.excluded].map(|set| set.into_iter().collect::<Vec<_>>().join(","))
    }

    #[test]
    fn only_what_is_ours_is_taken_for_ours() {
        let rules = "-A PREROUTING -i net1 -j RETURN\n-A PREROUTING -d 10.0.0.0/8 -i net1 -j ISTIO_REDIRECT\n\
                     -A PREROUTING ! -i net2 -j ISTIO_REDIRECT\n-A PREROUTING -i eth9 -j RETURN\n\
                     -A PREROUTING -i eth8 -j RETURN\n-A PREROUTING -i eth7 -p udp -j RETURN\n\
                     -A OUTPUT -o eth9 -j RETURN\n-A OUTPUT -o eth7 -j RETURN\nCOMMIT\n";
        let ours =
            format!("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:ISTIO_REDIRECT - [0:0]\n{rules}");
        assert_eq!(found(&ours), ["net1", "10.0.0.0/8", "eth9"]);
        assert_eq!(
            found("*nat\n-A PREROUTING -i eth9 -j RETURN\n-A OUTPUT -o eth9 -j RETURN\nCOMMIT\n"),
            ["", "", ""]
        );
    }
}
