use std::collections::BTreeMap;
use std::io;

use super::*;
use crate::iptables::run::Output;

/// Answers by command line; remembers what was run.
#[derive(Default)]
struct Fake {
    answers: BTreeMap<String, Output>,
    legacy_tables: bool,
    ran: Vec<String>,
}

impl Fake {
    fn with(mut self, command: &str, status: i32, stdout: &str) -> Self {
        let output = Output { status, stdout: stdout.to_owned(), stderr: String::new() };
        self.answers.insert(command.to_owned(), output);
        self
    }

    // A set that works; `saved` is what its save prints.
    fn set(self, name: &str, saved: &str) -> Self {
        let flavour = if name.ends_with("nft") { "nf_tables" } else { "legacy" };
        self.with(&format!("{name}-save"), 0, saved)
            .with(&format!("{name}-save --version"), 0, &format!("iptables-save v1.8.9 ({flavour})"))
            .with(&format!("{name} -t nat -S INPUT"), 0, "")
            .with(&format!("{name} -t nat -S INPUT --wait=30"), 0, "")
    }

    fn legacy_tables(mut self) -> Self {
        self.legacy_tables = true;
        self
    }
}

impl Runner for Fake {
    fn run(&mut self, program: &Program) -> io::Result<Output> {
        let line = std::iter::once(&program.name).chain(&program.args).cloned().collect::<Vec<_>>().join(" ");
        self.ran.push(line.clone());
        self.answers.get(&line).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn exists(&self, name: &str) -> bool {
        self.answers.contains_key(name)
    }

    fn no_legacy_tables(&self, _: Family) -> bool {
        !self.legacy_tables
    }

    fn inet_tables(&self) -> io::Result<Vec<String>> {
        Ok(Vec::new())
    }
}

const OURS: &str = "*nat\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\nCOMMIT\n";
const FOREIGN: &str = "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j ACCEPT\nCOMMIT\n";
const EMPTY: &str = "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n";

// The name chosen, the others, and what had to be run.
fn chosen(mut fake: Fake, force: Option<Force>) -> Result<(String, Vec<String>, Vec<String>), String> {
    let Choice { backend, others } = choose(&mut fake, Family::V4, force).map_err(|e| e.to_string())?;
    Ok((backend.name, others.into_iter().map(|b| b.name).collect(), fake.ran))
}

#[test]
fn rules_decide_between_both_sets() {
    for (legacy, nft, expected, others) in [
        (EMPTY, "", "iptables-nft", &[][..]),
        (FOREIGN, "", "iptables-legacy", &[]),
        (FOREIGN, FOREIGN, "iptables-legacy", &[]),
        (FOREIGN, OURS, "iptables-nft", &[]),
        (EMPTY, OURS, "iptables-nft", &[]),
        (OURS, OURS, "iptables-legacy", &["iptables-nft"]),
    ] {
        let fake = Fake::default().set("iptables-legacy", legacy).set("iptables-nft", nft).legacy_tables();
        let (name, rest, _) = chosen(fake, None).unwrap();
        assert_eq!((name.as_str(), rest), (expected, others.iter().map(|s| (*s).to_owned()).collect()));
    }
}

#[test]
fn nothing_is_run_that_is_not_needed() {
    let both = |nft| Fake::default().set("iptables-legacy", "").set("iptables-nft", nft);
    let (_, _, ran) = chosen(both(""), None).unwrap();
    assert_eq!(ran, ["iptables-nft-save", "iptables-nft -t nat -S INPUT"]);
    // What holds our rules has been written to before.
    let (_, _, ran) = chosen(both(OURS), None).unwrap();
    assert_eq!(ran, ["iptables-nft-save"]);
}

#[test]
fn a_set_without_kernel_support_is_passed_over() {
    let broken = |fake: Fake| fake.with("iptables-nft -t nat -S INPUT", 1, "");
    let fake = broken(Fake::default().set("iptables-nft", "").set("iptables", ""));
    assert_eq!(chosen(fake, None).unwrap().0, "iptables");
    let fake = broken(Fake::default().set("iptables-nft", "").set("iptables-legacy", ""));
    assert_eq!(chosen(fake, None).unwrap().0, "iptables-legacy");
    let reason = chosen(broken(Fake::default().set("iptables-nft", "")), None).unwrap_err();
    assert!(reason.contains("iptables-nft has no loaded kernel support"), "{reason}");
    assert!(reason.contains("iptables-save is not installed"), "{reason}");
}

#[test]
fn a_forced_set_is_used_or_nothing() {
    let both = || Fake::default().set("iptables-legacy", "").set("iptables-nft", OURS);
    assert_eq!(chosen(both(), Some(Force::Legacy)).unwrap().0, "iptables-legacy");
    assert_eq!(chosen(both(), Some(Force::Nft)).unwrap().0, "iptables-nft");
    assert!(chosen(Fake::default().set("iptables-nft", ""), Some(Force::Legacy)).is_err());
}

#[test]
fn only_legacy_programs_that_know_it_are_told_to_wait() {
    for (version, wait) in [
        ("iptables-save v1.8.4 (legacy)", Some("--wait=30")),
        ("iptables-save v1.6.2", Some("--wait=30")),
        ("iptables-save v1.6.1", None),
        ("iptables-save v1.8.9 (nf_tables)", None),
    ] {
        let fake = Fake::default().set("iptables", "").with("iptables-save --version", 0, version);
        let mut fake = fake;
        assert_eq!(choose(&mut fake, Family::V4, None).unwrap().backend.wait(), wait, "{version}");
    }
    let mut old = Fake::default().set("iptables", "").with("iptables-save --version", 2, "");
    assert_eq!(choose(&mut old, Family::V4, None).unwrap().backend.wait(), None);
}

#[test]
fn what_is_left_of_a_family_switched_off_is_found_in_either_set() {
    let mut clean = Fake::default().set("ip6tables-legacy", "").set("ip6tables-nft", "");
    assert!(leftovers(&mut clean, Family::V6, None).is_none());
    assert_eq!(clean.ran, ["ip6tables-nft-save"]);
    let mut used = Fake::default().set("ip6tables-legacy", OURS).set("ip6tables-nft", OURS).legacy_tables();
    let found = leftovers(&mut used, Family::V6, None).unwrap();
    assert_eq!(found.backend.name, "ip6tables-nft");
    assert_eq!(found.others[0].name, "ip6tables-legacy");
    assert!(leftovers(&mut Fake::default(), Family::V6, None).is_none());
}

#[test]
fn versions_are_found_in_headings_and_answers() {
    assert_eq!(version_in("# Generated by iptables-nft-save v1.8.9 (nf_tables) on"), Some((1, 8, 9)));
    assert_eq!(version_in("iptables-save v1.6 (legacy)"), Some((1, 6, 0)));
    assert_eq!(version_in("nothing very old"), None);
}
