//! What the kernel holds now, read from the text of `iptables-save`. Pure.

use std::collections::BTreeMap;

/// The tables of one back end and family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedTables {
    /// Table name → chain name → rules in order, each as its words.
    pub tables: BTreeMap<String, BTreeMap<String, Vec<Saved>>>,
    /// A chain of somebody's own, or a policy other than ACCEPT.
    arranged: bool,
}

/// One rule as saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// Everything after `-A CHAIN `, as printed (quotes included), to hand back to `-D`.
    pub text: String,
    /// The same split into words, quotes resolved.
    pub words: Vec<String>,
}

impl Saved {
    /// The chain or verdict it ends in.
    #[must_use]
    pub fn target(&self) -> Option<&str> {
        let at = self.words.iter().position(|w| w == "-j" || w == "-g")?;
        self.words.get(at + 1).map(String::as_str)
    }
}

/// Whether a chain is one of ours, by name.
#[must_use]
pub(crate) fn is_ours(chain: &str) -> bool {
    chain.starts_with("ISTIO")
}

impl SavedTables {
    /// Reads the text of a save command, with counters or without; lines it does not know are passed over.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut state = Self::default();
        let mut table = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                name.trim().clone_into(&mut table);
                state.tables.entry(table.clone()).or_default();
            } else if let Some(rest) = line.strip_prefix(':') {
                let mut words = rest.split_whitespace();
                let chain = words.next().unwrap_or_default().to_owned();
                state.arranged |= words.next() != Some("ACCEPT");
                state.tables.entry(table.clone()).or_default().entry(chain).or_default();
            } else if let Some(rest) = counted(line).1.strip_prefix("-A ") {
                let (chain, text) = rest.split_once(' ').unwrap_or((rest, ""));
                let saved = Saved { text: text.to_owned(), words: split_words(text) };
                let chains = state.tables.entry(table.clone()).or_default();
                chains.entry(chain.to_owned()).or_default().push(saved);
            }
        }
        state
    }

    /// Anything that somebody put there, ours or not. Tables as the kernel makes them do not count: looking
    /// at a legacy table makes one appear.
    #[must_use]
    pub(crate) fn in_use(&self) -> bool {
        self.arranged || self.tables.values().flat_map(BTreeMap::values).any(|rules| !rules.is_empty())
    }

    /// Any chain of ours; a jump to one cannot outlive it.
    #[must_use]
    pub(crate) fn has_ours(&self) -> bool {
        self.tables.iter().any(|(table, _)| !self.our_chains(table).is_empty())
    }

    /// Our chains in `table`.
    #[must_use]
    pub(crate) fn our_chains(&self, table: &str) -> Vec<&str> {
        let chains = self.tables.get(table).into_iter().flat_map(BTreeMap::keys);
        chains.map(String::as_str).filter(|c| is_ours(c)).collect()
    }

    /// The same for all tables, each as `chain (table)`.
    #[must_use]
    pub(crate) fn all_our_chains(&self) -> Vec<String> {
        let of_table = |table: &String| {
            self.our_chains(table).into_iter().map(|c| format!("{c} ({table})")).collect::<Vec<_>>()
        };
        self.tables.keys().flat_map(of_table).collect()
    }

    /// This without chains that are named like ours and not among `known`, and without jumps to them.
    #[must_use]
    pub(crate) fn with_chains(&self, known: &[&str]) -> Self {
        let strange = |chain: &str| is_ours(chain) && !known.contains(&chain);
        let mut out = self.clone();
        for chains in out.tables.values_mut() {
            chains.retain(|chain, _| !strange(chain));
            for rules in chains.values_mut() {
                rules.retain(|rule| !rule.target().is_some_and(strange));
            }
        }
        out
    }

    /// The rules of a chain, empty when it does not exist.
    #[must_use]
    pub fn rules(&self, table: &str, chain: &str) -> &[Saved] {
        self.tables.get(table).and_then(|t| t.get(chain)).map_or(&[], Vec::as_slice)
    }
}

/// The packets that a rule of a save with counters (`[packets:bytes] -A CHAIN ...`) has seen, and the rule.
#[must_use]
pub(crate) fn counted(line: &str) -> (Option<u64>, &str) {
    match line.strip_prefix('[').and_then(|l| l.split_once("] ")) {
        Some((counters, rest)) => (counters.split(':').next().and_then(|n| n.parse().ok()), rest),
        None => (None, line),
    }
}

/// Splits at blanks; `"…"` is one word, with `\"` and `\\` resolved, as iptables-save quotes comments.
#[must_use]
pub fn split_words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quoted = false;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' if quoted => word.get_or_insert_default().extend(chars.next()),
            c if c.is_whitespace() && !quoted => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_one_word_and_no_chain_of_ours() {
        let state = SavedTables::parse(
            "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -m comment --comment \"see -A ISTIO_FOO \\\"x\\\"\" -j ACCEPT\nCOMMIT\n",
        );
        assert!(!state.has_ours());
        assert!(state.in_use());
        let rule = &state.rules("nat", "OUTPUT")[0];
        assert_eq!(rule.words[3], "see -A ISTIO_FOO \"x\"");
        assert_eq!(rule.target(), Some("ACCEPT"));
    }

    #[test]
    fn an_empty_legacy_table_is_not_in_use() {
        let saved = "*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\nCOMMIT\n";
        assert!(!SavedTables::parse(saved).in_use());
        assert!(SavedTables::parse(&saved.replace("INPUT ACCEPT", "INPUT DROP")).in_use());
        assert!(SavedTables::parse(&saved.replace("INPUT ACCEPT", "MINE -")).in_use());
    }
}
