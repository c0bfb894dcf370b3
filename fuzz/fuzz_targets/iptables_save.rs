//! What `iptables-save` prints, users' comments included: reading it never panics; every document made
//! from it stays inside its tables, one line a rule; and rules read back from our own document are in place.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::iptables::change::{self, Guards, Jumps};
use pilot_agent::testing::iptables::model::{Family, Match, Proto, Rule, Table, Target};
use pilot_agent::testing::iptables::state::SavedTables;
use pilot_agent::testing::iptables::verify::{self, Names};

fn rules() -> Vec<Rule> {
    let rule = |chain, matches, target| Rule {
        table: Table::Nat,
        chain,
        insert: None,
        family: None,
        matches,
        target,
    };
    vec![
        rule("OUTPUT", vec![], Target::Jump("ISTIO_OUTPUT")),
        rule("ISTIO_OUTPUT", vec![Match::Proto(Proto::Tcp)], Target::Return),
    ]
}

fn well_formed(document: &str) {
    let mut inside = false;
    for line in document.lines() {
        match line {
            "COMMIT" => assert!(std::mem::replace(&mut inside, false), "COMMIT without a table"),
            table if table.starts_with("* ") => assert!(!std::mem::replace(&mut inside, true), "no COMMIT"),
            rule => assert!(inside && rule.starts_with('-'), "{rule:?}"),
        }
    }
    assert!(!inside, "no COMMIT at the end");
}

fuzz_target!(|text: &str| {
    let (rules, names) = (rules(), Names::default());
    let state = SavedTables::parse(text);
    for jumps in [Jumps::All, Jumps::Known] {
        well_formed(&change::removal(&state, &rules, Family::V4, &names, jumps));
    }
    let _ = verify::difference(&rules, Family::V4, &state, &names);
    let _ = Guards::read(text);
    let _ = change::rollback(text, &state, &rules, Family::V4, &names);

    // Other people's text before ours does not hide ours, unless it speaks of our chains itself.
    let ours =
        "*nat\n:ISTIO_OUTPUT - [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\n-A ISTIO_OUTPUT -p tcp -j RETURN\nCOMMIT\n";
    if !text.contains("ISTIO") {
        let both = SavedTables::parse(&format!("{text}\n{ours}"));
        assert_eq!(verify::difference(&rules, Family::V4, &both, &names), None);
    }
});
