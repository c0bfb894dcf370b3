use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use prost::Message;

use super::message::NameTable;
use super::*;

fn info(ips: &[&str], registry: &str, shortname: &str, namespace: &str) -> NameInfo {
    NameInfo {
        ips: ips.iter().map(|s| (*s).to_owned()).collect(),
        registry: registry.to_owned(),
        shortname: shortname.to_owned(),
        namespace: namespace.to_owned(),
        alt_hosts: Vec::new(),
    }
}

fn table(entries: &[(&str, NameInfo)]) -> Table {
    let table = entries.iter().map(|(h, i)| ((*h).to_owned(), i.clone())).collect();
    let body = NameTable { table }.encode_to_vec().into();
    Table::decode(body, &Scope::new("ns1", "ns1.svc.cluster.local")).unwrap()
}

fn mesh() -> Table {
    table(&[
        ("productpage.ns1.svc.cluster.local", info(&["9.9.9.9"], KUBERNETES, "productpage", "ns1")),
        ("example.ns2.svc.cluster.local", info(&["10.10.10.10"], KUBERNETES, "example", "ns2")),
        ("far.ns1.svc.other.local", info(&["7.7.7.7"], KUBERNETES, "far", "ns1")),
        ("www.google.com", info(&["1.1.1.1", "x", "2001:db8::1"], "External", "", "")),
        ("*.wildcard", info(&["10.10.10.10"], "External", "", "")),
        ("*.b.wildcard", info(&["11.11.11.11"], "External", "", "")),
        ("cidr.example", info(&["10.0.0.0/8"], "External", "", "")),
        ("dotted.example.", info(&["3.3.3.3"], "External", "", "")),
    ])
}

fn ask(table: &Table, name: &str, qtype: u16) -> Option<Vec<String>> {
    let mut message = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message.extend(wire::encode(name).unwrap());
    message.extend([0, 0, u8::try_from(qtype).unwrap(), 0, 1]);
    let wire::Screened::Ask(query) = wire::screen(&message) else { panic!("{name}") };
    let text = |name: &[u8]| {
        let mut out = String::new();
        let mut at = 0;
        while at < name.len() {
            let end = at + 1 + usize::from(name[at]);
            out.push_str(std::str::from_utf8(&name[at + 1..end]).unwrap());
            out.push('.');
            at = end;
        }
        out
    };
    let shown = |r: Record| match r.data {
        Data::Address(ip) => format!("{} {ip}", text(&r.owner)),
        Data::Cname(to) => format!("{} -> {}", text(&r.owner), text(&to)),
    };
    table
        .answer(&query, Some(&Search::new("ns1.svc.cluster.local")))
        .map(|all| all.into_iter().map(shown).collect())
}

#[test]
fn short_forms_depend_on_where_they_are_seen_from() {
    let t = mesh();
    for name in
        ["productpage.ns1.svc.cluster.local.", "productpage.", "productpage.ns1.", "productpage.ns1.svc."]
    {
        assert_eq!(ask(&t, name, wire::A).unwrap(), [format!("{name} 9.9.9.9")]);
    }
    for name in ["example.ns2.svc.cluster.local.", "example.ns2.", "example.ns2.svc."] {
        assert_eq!(ask(&t, name, wire::A).unwrap(), [format!("{name} 10.10.10.10")]);
    }
    for name in ["example.", "example.ns2.svc.cluster.", "far.", "far.ns1.", "cidr.example.", "wildcard."] {
        assert_eq!(ask(&t, name, wire::A), None, "{name}");
    }
    assert_eq!(ask(&t, "dotted.example.", wire::A).unwrap().len(), 1);
    assert_eq!(ask(&t, "WWW.Google.com.", wire::A).unwrap(), ["www.google.com. 1.1.1.1"]);
}

#[test]
fn a_known_host_without_such_addresses_is_empty() {
    let t = mesh();
    assert_eq!(ask(&t, "www.google.com.", wire::AAAA).unwrap(), ["www.google.com. 2001:db8::1"]);
    for name in ["productpage.", "x.wildcard.", "productpage.ns1.ns1.svc.cluster.local."] {
        assert_eq!(ask(&t, name, wire::AAAA), Some(Vec::new()), "{name}");
    }
}

#[test]
fn an_address_with_a_zone_is_told_without_it() {
    let zoned = info(&["fe80::1%eth0", "fe80::2%", "10.0.0.1%2"], "External", "", "");
    let t = table(&[("vm.example", zoned)]);
    assert_eq!(ask(&t, "vm.example.", wire::AAAA).unwrap(), ["vm.example. fe80::1"]);
    assert_eq!(ask(&t, "vm.example.", wire::A), Some(Vec::new()));
}

#[test]
fn the_search_domain_is_seen_through() {
    let t = mesh();
    let s = "ns1.svc.cluster.local.";
    assert_eq!(
        ask(&t, &format!("www.google.com.{s}"), wire::A).unwrap(),
        [format!("www.google.com.{s} -> www.google.com."), "www.google.com. 1.1.1.1".to_owned()]
    );
    assert_eq!(
        ask(&t, &format!("productpage.ns1.{s}"), wire::A).unwrap(),
        [format!("productpage.ns1.{s} -> productpage.ns1."), "productpage.ns1. 9.9.9.9".to_owned()]
    );
    assert_eq!(ask(&t, &format!("productpage.ns1.svc.cluster.local.{s}"), wire::A), None);
    assert_eq!(
        ask(&t, &format!("a.wildcard.{s}"), wire::A).unwrap(),
        [format!("a.wildcard.{s} -> *.wildcard."), "*.wildcard. 10.10.10.10".to_owned()]
    );
}

#[test]
fn an_answer_has_no_more_addresses_than_a_message_holds() {
    let ips: Vec<String> = (0..9000).map(|n| format!("10.0.{}.{}", n / 250, n % 250)).collect();
    let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
    let table = table(&[("huge.example", info(&ips, "External", "", ""))]);
    let answered = ask(&table, "huge.example.", wire::A).unwrap();
    assert_eq!(answered.len(), 4096);
}

#[test]
fn the_longest_wildcard_counts_at_any_depth() {
    let t = mesh();
    assert_eq!(ask(&t, "a.b.wildcard.", wire::A).unwrap(), ["a.b.wildcard. 11.11.11.11"]);
    assert_eq!(ask(&t, "x.y.z.wildcard.", wire::A).unwrap(), ["x.y.z.wildcard. 10.10.10.10"]);
}

#[test]
fn a_hosts_own_name_beats_anothers_short_form() {
    let t = table(&[
        ("web.ns1.svc.cluster.local", info(&["9.9.9.9"], KUBERNETES, "web", "ns1")),
        ("web", info(&["8.8.8.8"], "External", "", "")),
    ]);
    assert_eq!(ask(&t, "web.", wire::A).unwrap(), ["web. 8.8.8.8"]);
}

// The debug page.
fn json(table: Table) -> String {
    let pieces: Vec<Bytes> = Page::of(Arc::new(table)).unwrap().collect();
    String::from_utf8(pieces.concat()).unwrap()
}

#[test]
fn the_debug_page_comes_in_pieces() {
    let hosts = (0..5000).map(|n| {
        let short = format!("service-{n:05}");
        (format!("{short}.ns1.svc.cluster.local"), info(&["10.0.0.1"], KUBERNETES, &short, "ns1"))
    });
    let body: Bytes = NameTable { table: hosts.collect() }.encode_to_vec().into();
    let table = Arc::new(Table::decode(body, &Scope::new("ns1", "ns1.svc.cluster.local")).unwrap());
    let pieces: Vec<Bytes> = Page::of(table).unwrap().collect();
    assert!(pieces.len() > 10 && pieces.iter().all(|piece| piece.len() < 64 * 1024));
    let whole: serde_json::Value = serde_json::from_slice(&pieces.concat()).unwrap();
    // Five names each: host, host and dot, and three that are shorter.
    assert_eq!(whole["table"].as_object().unwrap().len(), 25_000);
}

/// The page in the plainest form: all of it as a tree.
fn plain_json(table: &BTreeMap<String, NameInfo>, scope: &Scope) -> serde_json::Value {
    let mut out = serde_json::Map::new();
    for (host, info) in table {
        let mut value = serde_json::json!({ "registry": info.registry });
        for (key, list) in [("ips", &info.ips), ("altHosts", &info.alt_hosts)] {
            if !list.is_empty() {
                value[key] = serde_json::json!(list);
            }
        }
        for (key, text) in [("shortname", &info.shortname), ("namespace", &info.namespace)] {
            value[key] = serde_json::json!(text);
        }
        out.insert(host.clone(), value);
    }
    for (host, info) in table.iter().filter(|(_, info)| !info.addresses().is_empty()) {
        for name in scope.names(host, info) {
            let value = serde_json::json!({ "ips": info.addresses(), "registry": KUBERNETES });
            out.entry(name).or_insert(value);
        }
    }
    if out.is_empty() { serde_json::json!({}) } else { serde_json::json!({ "table": out }) }
}

#[test]
fn the_debug_page_adds_the_names_it_is_found_by() {
    let t = table(&[("a.example", info(&["::1", "1.1.1.1"], "External", "", ""))]);
    assert_eq!(
        json(t),
        r#"{"table":{"a.example":{"ips":["::1","1.1.1.1"],"registry":"External"},"a.example.":{"ips":["1.1.1.1","::1"],"registry":"Kubernetes"}}}"#
    );
    assert_eq!(json(table(&[])), "{}");
    assert!(Table::decode(Bytes::from_static(&[0xff, 0xff]), &Scope::default()).is_err());
}

/// The rules in the plainest form: all names as texts, hosts in order.
fn plain(table: &BTreeMap<String, NameInfo>, scope: &Scope) -> HashMap<String, Vec<IpAddr>> {
    let (mut own, mut short) = (HashMap::new(), HashMap::new());
    for (host, info) in table.iter().filter(|(_, info)| !info.addresses().is_empty()) {
        let mut names = scope.names(host, info).into_iter().map(|name| name.to_lowercase());
        own.extend(names.next().map(|name| (name, info.addresses())));
        for name in names {
            short.entry(name).or_insert(info.addresses());
        }
    }
    short.extend(own);
    short
}

fn entry() -> impl Strategy<Value = (String, NameInfo)> {
    let label = || "[aAb]";
    let host = (label(), label(), prop_oneof![Just(".svc.cluster.local"), Just(""), Just(".")])
        .prop_map(|(name, namespace, domain)| format!("{name}.{namespace}{domain}"));
    let ips = proptest::collection::vec(prop_oneof![Just("x".to_owned()), "1\\.1\\.1\\.[0-9]"], 0..3);
    let registry = prop_oneof![Just(KUBERNETES), Just("External")];
    (host, ips, registry, label(), label(), proptest::collection::vec("[ab]\\.[ab]", 0..4)).prop_map(
        |(host, ips, registry, shortname, namespace, alt_hosts)| {
            // Kubernetes announces none with a final dot, so it has no names at all.
            let registry = if host.ends_with('.') { "External" } else { registry };
            (host, NameInfo { ips, registry: registry.to_owned(), shortname, namespace, alt_hosts })
        },
    )
}

proptest! {
    #[test]
    fn the_index_finds_what_the_plain_rules_say(entries in proptest::collection::vec(entry(), 0..12)) {
        let scope = Scope::new("a", "a.svc.cluster.local");
        let mut body = Vec::new();
        // One after another: a host may stand in the message twice.
        for (host, info) in &entries {
            NameTable { table: [(host.clone(), info.clone())].into() }.encode_raw(&mut body);
        }
        let whole: BTreeMap<_, _> = entries.into_iter().collect();
        let table = Table::decode(body.into(), &scope).unwrap();
        let (plain, page) = (plain(&whole, &scope), plain_json(&whole, &scope));
        let names = whole.iter().flat_map(|(host, info)| scope.names(host, info));
        for name in names.map(|name| name.to_lowercase()) {
            let found = table.index.find(&table.source, &name);
            let found = found.map(|at| table.source.host_at(at).unwrap().info().addresses());
            prop_assert_eq!(found.as_ref(), plain.get(&name), "{}", name);
        }
        let shown: serde_json::Value = serde_json::from_str(&json(table)).unwrap();
        prop_assert_eq!(shown, page);
    }
}

proptest! {
    #[test]
    fn any_message_is_refused_or_shown(body in proptest::collection::vec(proptest::num::u8::ANY, 0..64)) {
        fuzz::names(&body);
        // As an entry, whose head makes sense.
        let host = [&b"\x0a\x01a\x12"[..], &[u8::try_from(body.len()).unwrap()], &body].concat();
        fuzz::names(&[&[0x0a, u8::try_from(host.len()).unwrap()], &host[..]].concat());
    }
}

/// docs/COMPATIBILITY.md: a table of 50,000 hosts holds 10 MB at most; the Go agent's 66.
#[test]
fn fifty_thousand_hosts_cost_little_more_than_their_message() {
    let hosts = (0..50_000).map(|n| {
        let (short, ip) = (format!("service-{n:05}"), format!("10.{}.{}.1", n / 256, n % 256));
        (format!("{short}.ns1.svc.cluster.local"), info(&[&ip], KUBERNETES, &short, "ns1"))
    });
    let body: Bytes = NameTable { table: hosts.collect() }.encode_to_vec().into();
    let message = body.len();
    let table = Table::decode(body, &Scope::new("ns1", "ns1.svc.cluster.local")).unwrap();
    let index = table.index.bytes();
    assert!((3_000_000..5_000_000).contains(&message), "{message}");
    assert!(message + index <= 10_000_000, "{message} + {index}");
    assert_eq!(ask(&table, "service-49999.ns1.", wire::A).unwrap(), ["service-49999.ns1. 10.195.79.1"]);
}

#[test]
fn a_host_has_so_many_addresses_and_names_and_no_more() {
    // A host "a", of which this is known.
    let table = |info: &[u8]| {
        let mut host = vec![0x0a, 1, b'a', 0x12];
        prost::encoding::encode_varint(info.len() as u64, &mut host);
        host.extend_from_slice(info);
        let mut body = vec![0x0a];
        prost::encoding::encode_varint(host.len() as u64, &mut body);
        body.extend_from_slice(&host);
        Table::decode(body.into(), &Scope::default())
    };
    for empty in [[0x0a, 0], [0x2a, 0]] {
        assert!(table(&empty.repeat(message::MOST)).is_ok());
        assert!(matches!(table(&empty.repeat(message::MOST + 1)), Err(BadTable::Host)));
    }
    // Nor in parts that would be put together.
    let parts = |count: u8| {
        let body = [&[0x0a, 3 + 2 * count, 0x0a, 1, b'a'][..], &[0x12, 0].repeat(count.into())].concat();
        Table::decode(body.into(), &Scope::default())
    };
    assert!(parts(2).is_ok());
    assert!(matches!(parts(3), Err(BadTable::Host)));
}

#[test]
fn the_namespace_is_taken_off_a_domain_once() {
    for (domain, rest) in
        [("ns.svc.local", "svc.local"), ("ns.ns.local", "ns.local"), ("ns", ""), ("a", "a"), ("a.ns", "a.ns")]
    {
        assert_eq!(Scope::new("ns", domain).domain, rest, "{domain}");
    }
}

#[test]
fn a_host_may_take_two_megabytes_and_no_more() {
    let of = |length: usize| {
        let host = info(&["9.9.9.9"], KUBERNETES, &"s".repeat(length), "ns1");
        let body = NameTable { table: [("a.ns1.svc.cluster.local".to_owned(), host)].into() }.encode_to_vec();
        Table::decode(body.into(), &Scope::new("ns1", "ns1.svc.cluster.local"))
    };
    assert!(of(2_000_000).is_ok());
    assert!(matches!(of(2_200_000).unwrap_err(), BadTable::Host));
}

#[test]
fn of_a_host_that_is_asked_for_only_the_addresses_are_read() {
    let ips: Vec<String> = (0..10_000).map(|n| format!("10.0.{}.{}", n / 256, n % 256)).collect();
    let ips: Vec<&str> = ips.iter().map(String::as_str).chain(["no address", "2001:db8::1"]).collect();
    let table = table(&[("web.ns1.svc.cluster.local", info(&ips, KUBERNETES, "web", "ns1"))]);
    let before = message::tests::READ.get();
    for name in ["web.ns1.svc.cluster.local.", "web.", "web.ns1.", "web.ns1.svc."] {
        assert_eq!(ask(&table, name, wire::A).unwrap().len(), MOST, "{name}");
        assert_eq!(ask(&table, name, wire::AAAA).unwrap().len(), 1, "{name}");
    }
    assert_eq!(message::tests::READ.get(), before);
}
