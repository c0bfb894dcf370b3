//! Are the rules in place? Compares what is wanted with what the kernel holds, in order. Pure.
//!
//! The kernel spells a rule differently from what it was given (marks in hexadecimal, masked networks,
//! numeric users), so both sides are brought to one form: a sorted list of (negated, option, value).
//! In our own chains the sequences must be equal; in built-in chains the wanted rules must be there in
//! their order, other people's rules between them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::model::{BUILT_IN, Family, Rule, Table};
use super::restore;
use super::state::SavedTables;

/// Names to numbers, as the kernel will print them.
#[derive(Debug, Clone, Default)]
pub struct Names {
    /// `/etc/passwd`
    pub users: BTreeMap<String, String>,
    /// `/etc/group`
    pub groups: BTreeMap<String, String>,
    /// `/etc/services`, by name; the protocol hardly ever matters.
    pub services: BTreeMap<String, String>,
}

/// Negated, option, value.
pub(crate) type Condition = (bool, String, String);

/// What is wanted of one family: (table, chain) → rules in final order, inserts carried out.
#[must_use]
pub fn wanted(rules: &[Rule], family: Family) -> BTreeMap<(Table, &'static str), Vec<&Rule>> {
    let mut out: BTreeMap<(Table, &'static str), Vec<&Rule>> = BTreeMap::new();
    for table in Table::ALL {
        for chain in restore::chains(rules, family, table) {
            out.entry((table, chain)).or_default();
        }
    }
    for rule in restore::of_family(rules, family) {
        let chain = out.entry((rule.table, rule.chain)).or_default();
        match rule.insert.and_then(|at| usize::try_from(at - 1).ok()) {
            Some(at) if at < chain.len() => chain.insert(at, rule),
            _ => chain.push(rule),
        }
    }
    out
}

/// The first difference between what is wanted and what is there, or `None` when all is in place.
#[must_use]
pub fn difference(rules: &[Rule], family: Family, state: &SavedTables, names: &Names) -> Option<String> {
    let wanted = wanted(rules, family);
    for table in Table::ALL {
        for chain in state.our_chains(table.name()) {
            if !wanted.keys().any(|(t, c)| *t == table && *c == chain) {
                return Some(format!("chain {chain} in table {} is not wanted", table.name()));
            }
        }
    }
    for ((table, chain), want) in &wanted {
        let there: Vec<_> =
            state.rules(table.name(), chain).iter().map(|r| canonical(&r.words, names)).collect();
        let want: Vec<_> = want.iter().map(|r| canonical(&restore::words(r), names)).collect();
        let place = || format!("chain {chain} in table {}", table.name());
        if BUILT_IN.contains(chain) {
            let mut rest = there.iter();
            if let Some(missing) = want.iter().find(|w| !rest.any(|t| t == *w)) {
                return Some(format!("{} lacks a rule, or its order differs: {}", place(), show(missing)));
            }
        } else if !state.tables.get(table.name()).is_some_and(|t| t.contains_key(*chain)) {
            return Some(format!("{} is missing", place()));
        } else if let Some(at) = (0..want.len().max(there.len())).find(|&i| want.get(i) != there.get(i)) {
            return Some(format!("{} differs at rule {}", place(), at + 1));
        }
    }
    None
}

fn show(rule: &[Condition]) -> String {
    let word = |(not, option, value): &Condition| format!("{}{option} {value}", if *not { "! " } else { "" });
    rule.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// A rule's conditions and verdict in one form, whatever its spelling and order.
#[must_use]
pub(crate) fn canonical(words: &[String], names: &Names) -> Vec<Condition> {
    let mut out = Vec::new();
    let mut not = false;
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        if word == "!" {
            not = true;
            continue;
        }
        let option = alias(word);
        let value = match words.peek() {
            Some(v) if !v.starts_with('-') && *v != "!" => words.next().unwrap_or_default().trim(),
            _ => "",
        };
        let negated = std::mem::take(&mut not);
        let value = canonical_value(option, value, names);
        if option != "-m" && !is_default(option, &value) {
            out.push((negated, option.to_owned(), value));
        }
    }
    out.sort();
    out
}

fn alias(option: &str) -> &str {
    match option {
        "--to-port" => "--to-ports",
        "--set-mark" => "--set-xmark",
        "--destination-port" => "--dport",
        "--source-port" => "--sport",
        "--destination-ports" => "--dports",
        other => other,
    }
}

// What the kernel adds by itself when it prints, and what it leaves out because it matches everything.
fn is_default(option: &str, value: &str) -> bool {
    match option {
        "--nfmask" | "--ctmask" => value == "0xffffffff",
        "--on-ip" => matches!(value, "0.0.0.0" | "::"),
        "-s" | "-d" => matches!(value, "0.0.0.0/0" | "::/0"),
        "--dport" | "--sport" => value == "0:65535",
        "-i" | "-o" => value == "+",
        _ => false,
    }
}

fn canonical_value(option: &str, value: &str, names: &Names) -> String {
    match option {
        "-s" | "-d" => network(value),
        "--mark" | "--set-xmark" | "--tproxy-mark" => {
            let (mark, mask) = value.split_once('/').unwrap_or((value, "0xffffffff"));
            format!("{}/{}", number(mark), number(mask))
        }
        "--uid-owner" => owner(value, &names.users),
        "--gid-owner" => owner(value, &names.groups),
        "--dport" | "--sport" | "--to-ports" | "--on-port" => ports(value, names),
        "--dports" => value.split(',').map(|p| ports(p, names)).collect::<Vec<_>>().join(","),
        _ => value.to_owned(),
    }
}

// Ranges may be given with either sign, and are printed with a dash.
fn owner(value: &str, names: &BTreeMap<String, String>) -> String {
    names.get(value).cloned().unwrap_or_else(|| range(&value.replace(':', "-"), '-', number))
}

fn ports(value: &str, names: &Names) -> String {
    range(value, ':', |port| {
        let port = port.trim();
        number(names.services.get(port).map_or(port, String::as_str))
    })
}

// `from:to`, where either may be left out; a range of one is that one.
fn range(value: &str, sign: char, one: impl Fn(&str) -> String) -> String {
    let Some((from, to)) = value.split_once(sign) else { return one(value) };
    let from = if from.is_empty() { "0".to_owned() } else { one(from) };
    let to = if to.is_empty() { "65535".to_owned() } else { one(to) };
    if from == to { from } else { format!("{from}{sign}{to}") }
}

// As the programs read numbers: C's prefixes for hexadecimal and octal.
fn number(text: &str) -> String {
    let digits = text.trim();
    let parsed = match (digits.strip_prefix("0x"), digits.strip_prefix('0')) {
        (Some(hex), _) => u64::from_str_radix(hex, 16),
        (None, Some(octal)) if !octal.is_empty() => u64::from_str_radix(octal, 8),
        _ => digits.parse(),
    };
    parsed.map_or_else(|_| text.to_owned(), |n| n.to_string())
}

// Masked, with its length.
fn network(text: &str) -> String {
    let (addr, len) = match text.split_once('/') {
        Some((addr, len)) => (addr, len.parse::<u32>().ok()),
        None => (text, None),
    };
    match addr.parse::<IpAddr>() {
        Ok(IpAddr::V4(a)) => {
            let len = len.unwrap_or(32).min(32);
            let mask = u32::MAX.checked_shl(32 - len).unwrap_or(0);
            format!("{}/{len}", std::net::Ipv4Addr::from(u32::from(a) & mask))
        }
        Ok(IpAddr::V6(a)) => {
            let len = len.unwrap_or(128).min(128);
            let mask = u128::MAX.checked_shl(128 - len).unwrap_or(0);
            format!("{}/{len}", std::net::Ipv6Addr::from(u128::from(a) & mask))
        }
        Err(_) => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::state::split_words;

    fn same(a: &str, b: &str) -> bool {
        let names = Names { users: [("root".to_owned(), "0".to_owned())].into(), ..Names::default() };
        canonical(&split_words(a), &names) == canonical(&split_words(b), &names)
    }

    #[test]
    fn a_blank_around_an_element_is_no_difference() {
        let names = Names::default();
        let rule = |option: &str, value: &str| canonical(&[option.to_owned(), value.to_owned()], &names);
        for option in ["--dport", "--uid-owner", "--gid-owner", "--to-ports", "-o", "--tproxy-mark"] {
            for given in ["80 ", " 80", "80\t"] {
                assert_eq!(rule(option, given), rule(option, "80"), "{option} {given:?}");
            }
        }
        assert_eq!(rule("--dports", "80 ,81 "), rule("--dports", "80,81"));
    }

    #[test]
    fn spellings_of_the_kernel_are_understood() {
        for (given, printed) in [
            (
                "-o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --uid-owner root -j X",
                "! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --uid-owner 0 -j X",
            ),
            ("-j MARK --set-mark 1337", "-j MARK --set-xmark 0x539/0xffffffff"),
            (
                "-p tcp -j TPROXY --tproxy-mark 1337/0xffffffff --on-port 15006",
                "-p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff",
            ),
            ("-d 192.168.7.9/24 -j Y", "-d 192.168.7.0/24 -j Y"),
            ("-d 0.0.0.0/0 -j Y", "-j Y"),
            ("-d 10.1.2.3/0 -j Y", "-j Y"),
            ("-d fd00::1/0 -j Y", "-j Y"),
            ("-p tcp --dport 80:80 -j Y", "-p tcp -m tcp --dport 80 -j Y"),
            ("-p tcp --dport :65535 -j Y", "-p tcp -m tcp -j Y"),
            ("-p tcp --dport 010 -j Y", "-p tcp -m tcp --dport 8 -j Y"),
            ("-m owner --uid-owner 010-0x10 -j Y", "-m owner --uid-owner 8-16 -j Y"),
            ("-m owner ! --gid-owner 1337:1340 -j Y", "-m owner ! --gid-owner 1337-1340 -j Y"),
            ("-i + -d 10.0.0.0/8 -j Y", "-d 10.0.0.0/8 -j Y"),
            ("-j REDIRECT --to-port 15053", "-j REDIRECT --to-ports 15053"),
            (
                "-m connmark --mark 1337 -j CONNMARK --restore-mark",
                "-m connmark --mark 0x539 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
            ),
        ] {
            assert!(same(given, printed), "{given}\n{printed}");
        }
        assert!(!same("-p tcp --dport 80 -j X", "-p tcp ! --dport 80 -j X"));
        assert!(!same("-p tcp --dport 80 -j X", "-p udp --dport 80 -j X"));
    }
}
