//! Our rules beside those that the Go agent put into a kernel: the recordings of `conformance/iptables`, read as
//! `iptables-save` gave them. Needs no root, so it runs where the recordings cannot be replayed.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{FLAGS, settings};
use crate::base::recordings;
use crate::config::args;
use crate::config::env::Env;
use crate::iptables::model::Family;
use crate::iptables::rules::generate;
use crate::iptables::settings::{Host, resolve};
use crate::iptables::state::SavedTables;
use crate::iptables::verify::{Names, difference};

/// What `conformance/iptables/lib/world.py` gives the namespace of a case.
fn addresses(net: &str) -> Option<&'static [&'static str]> {
    Some(match net {
        "v4" => &["10.9.0.2"],
        "v6" => &["fd00:9::2"],
        "v4v6" => &["10.9.0.2", "fd00:9::2"],
        "v6-then-v4" => &["fd00:9::2", "10.8.0.2"],
        "linklocal4-v6" => &["169.254.9.2", "fd00:9::2"],
        _ => return None,
    })
}

fn saved(tables: &Value) -> SavedTables {
    let mut text = String::new();
    for (table, chains) in tables.as_object().unwrap() {
        text += &format!("*{table}\n");
        for (chain, rules) in chains.as_object().unwrap() {
            text += &format!(":{chain} -\n");
            for rule in rules.as_array().unwrap() {
                text += &format!("-A {chain} {}\n", rule.as_str().unwrap());
            }
        }
    }
    SavedTables::parse(&text)
}

#[test]
fn rules_equal_those_of_the_go_agent_in_a_kernel() {
    let none = Value::Object(serde_json::Map::new());
    let flags: Vec<_> = FLAGS.iter().chain(args::LOGGING).copied().collect();
    let named =
        |all: &[(&str, &str)]| all.iter().map(|(n, id)| ((*n).to_owned(), (*id).to_owned())).collect();
    let names = Names {
        users: named(&[("root", "0"), ("nobody", "65534"), ("app", "2000")]),
        groups: named(&[("root", "0"), ("nogroup", "65534"), ("java", "4040"), ("ftp", "4041")]),
        ..Names::default()
    };
    let mut compared = 0;
    let mut wrong = Vec::new();
    for recording in recordings::of("iptables").iter().filter(|r| r.case["kind"] == "kernel") {
        let case = &recording.case;
        let world = recording.input("world");
        let (first, recorded) = (&case["plan"][0], &recording.did["steps"][0]);
        let plain = world.get("shims").is_none()
            && world.get("passwd").is_none()
            && ["before", "latent", "user"].iter().all(|key| case.get(key).is_none())
            && first.get("user").is_none_or(Value::is_null)
            && first.get("env").is_none()
            && recorded["exit"] == 0;
        let Some(addresses) = addresses(world.get("net").and_then(Value::as_str).unwrap_or("v4")) else {
            continue;
        };
        if !plain {
            continue;
        }
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        let Some(words) = first["args"].as_array() else { continue };
        let words: Vec<String> = words.iter().map(text).collect();
        let parsed = args::parse(&words, &flags, false).unwrap();
        let env = recording.input("env");
        let env = Env::from_os(env.as_object().unwrap().iter().map(|(k, v)| (k.into(), text(v).into())));
        let resolv_conf = world.get("resolv").and_then(Value::as_str).unwrap_or("nameserver 10.96.0.10\n");
        let host = Host {
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            resolv_conf: Ok(resolv_conf.to_owned()),
            names: names.clone(),
        };
        let rules = generate(&resolve(&settings(&parsed, &env), &host).unwrap().options);
        let families = BTreeMap::from([
            ("ip4.nft", Family::V4),
            ("ip4.legacy", Family::V4),
            ("ip6.nft", Family::V6),
            ("ip6.legacy", Family::V6),
        ]);
        for (place, tables) in recorded["rules"].as_object().unwrap_or(none.as_object().unwrap()) {
            let Some(family) = families.get(place.as_str()) else { continue };
            compared += 1;
            if let Some(found) = difference(&rules, *family, &saved(tables), &names) {
                wrong.push(format!("{} {place}: {found}", recording.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared > 50, "only {compared} recordings were read");
}
