//! Prints rules for `iptables-restore`, one document a family.

use super::model::{BUILT_IN, Family, Match, Rule, Table, Target};

/// The words of a rule without table, chain and position.
#[must_use]
pub fn words(rule: &Rule) -> Vec<String> {
    let mut out = Vec::new();
    for m in &rule.matches {
        match_words(m, &mut out);
    }
    out.push("-j".to_owned());
    target_words(&rule.target, &mut out);
    out
}

fn push(out: &mut Vec<String>, words: &[&str]) {
    out.extend(words.iter().map(|w| (*w).to_owned()));
}

fn match_words(m: &Match, out: &mut Vec<String>) {
    let not = |not: bool, out: &mut Vec<String>| {
        if not {
            out.push("!".to_owned());
        }
    };
    match m {
        Match::In(name) => push(out, &["-i", name]),
        Match::Out(name) => push(out, &["-o", name]),
        Match::Src(cidr) => push(out, &["-s", cidr]),
        Match::Dst { not: n, cidr } => {
            not(*n, out);
            push(out, &["-d", cidr]);
        }
        Match::Proto(p) => push(out, &["-p", p.name()]),
        Match::Dport { not: n, port } => {
            not(*n, out);
            push(out, &["--dport", port]);
        }
        Match::DportsNot(ports) => {
            let ports: Vec<_> = ports.iter().map(|port| port.trim()).collect();
            push(out, &["-m", "multiport", "!", "--dports", &ports.join(",")]);
        }
        Match::Sport(port) => push(out, &["--sport", port]),
        Match::Uid { not: n, id } => {
            push(out, &["-m", "owner"]);
            not(*n, out);
            push(out, &["--uid-owner", id]);
        }
        Match::Gid { not: n, id } => {
            push(out, &["-m", "owner"]);
            not(*n, out);
            push(out, &["--gid-owner", id]);
        }
        Match::CtState(state) => push(out, &["-m", "conntrack", "--ctstate", state]),
        Match::Mark { not: n, mark } => {
            push(out, &["-m", "mark"]);
            not(*n, out);
            push(out, &["--mark", mark]);
        }
        Match::ConnMark(mark) => push(out, &["-m", "connmark", "--mark", mark]),
    }
}

fn target_words(target: &Target, out: &mut Vec<String>) {
    match target {
        Target::Return => push(out, &["RETURN"]),
        Target::Drop => push(out, &["DROP"]),
        Target::Accept => push(out, &["ACCEPT"]),
        Target::Jump(chain) => push(out, &[chain]),
        Target::Redirect { port, spelling } => push(out, &["REDIRECT", spelling, port]),
        Target::SetMark(mark) => push(out, &["MARK", "--set-mark", mark]),
        Target::Tproxy { mark, port } => {
            push(
                out,
                &["TPROXY", "--tproxy-mark", &format!("{}/0xffffffff", mark.trim()), "--on-port", port],
            );
        }
        Target::CtZone(zone) => push(out, &["CT", "--zone", &zone.to_string()]),
        Target::SaveMark => push(out, &["CONNMARK", "--save-mark"]),
        Target::RestoreMark => push(out, &["CONNMARK", "--restore-mark"]),
    }
}

/// `-A CHAIN …` or `-I CHAIN n …`.
#[must_use]
pub(crate) fn line(rule: &Rule) -> String {
    let head = match rule.insert {
        Some(at) => format!("-I {} {at}", rule.chain),
        None => format!("-A {}", rule.chain),
    };
    format!("{head} {}", words(rule).join(" "))
}

/// The rules of one family.
pub fn of_family(rules: &[Rule], family: Family) -> impl Iterator<Item = &Rule> {
    rules.iter().filter(move |r| r.family.is_none_or(|f| f == family))
}

/// Our chains of one table, first those that hold rules in order of first use over the whole list, then
/// those that are only jumped to.
#[must_use]
pub(crate) fn chains(rules: &[Rule], family: Family, table: Table) -> Vec<&'static str> {
    let mut found: Vec<&'static str> = Vec::new();
    let mut add = |chain: &'static str| {
        if !BUILT_IN.contains(&chain) && !found.contains(&chain) {
            found.push(chain);
        }
    };
    of_family(rules, family).filter(|r| r.table == table).for_each(|r| add(r.chain));
    for rule in of_family(rules, family).filter(|r| r.table == table) {
        if let Target::Jump(chain) = rule.target {
            add(chain);
        }
    }
    found
}

/// The document that creates chains and rules of one family; empty when there are none.
#[must_use]
pub fn document(rules: &[Rule], family: Family) -> String {
    let mut text = String::new();
    for table in Table::ALL {
        let lines: Vec<_> = of_family(rules, family).filter(|r| r.table == table).map(line).collect();
        if lines.is_empty() {
            continue;
        }
        text.push_str(&format!("* {}\n", table.name()));
        for chain in chains(rules, family, table) {
            text.push_str(&format!("-N {chain}\n"));
        }
        for line in lines {
            text.push_str(&line);
            text.push('\n');
        }
        text.push_str("COMMIT\n");
    }
    text
}
