//! `istio-iptables` against the kernel, in network namespaces made and removed here; and the relay where packets
//! are dropped.
//!
//! Needs root, iproute2, iptables (both back ends) and nftables; `scripts/get-netfilter` installs them where
//! it can. Where it cannot, every test says so in a line that nobody can overlook, and `PRIVILEGED=required`
//! makes that a failure.

mod half_open;
#[path = "../support/mod.rs"]
mod support;
mod world;

use world::{Backend, World};

const SIDECAR: &str = "-p 15001 -z 15006 -u 1337 -m REDIRECT -i * -b * -d 15090,15021,15020";

/// Options whose rules are applied, applied again, compared and taken away.
const MATRIX: &[(&str, &str)] = &[
    ("sidecar", SIDECAR),
    ("nothing", "-u 1337"),
    ("tproxy", "-u 1337 -m TPROXY -i * -b * -d 15090,15020"),
    ("tproxy without inbound", "-u 1337 -m TPROXY -i *"),
    ("lists", "-u 1337,0 -g 1338 -i 10.0.0.0/8,fd00::/8 -x 10.1.0.0/16 -q 27017 -o 9999 -b 80,8000:8010"),
    ("interfaces", "-u 1337 -i * -b * -c eth9,net7 -k net1,net2"),
    ("dns", "-u 1337 -i * -b * --redirect-dns"),
    ("all dns", "-u 1337 -i * -b * --redirect-dns --capture-all-dns"),
    ("drop invalid", "-u 1337 -i * -b * --drop-invalid"),
];

#[test]
fn what_is_applied_is_listed_as_the_reference_lists_it() {
    let Some(world) = World::new(Backend::Nft, &["10.77.1.2/24"]) else { return };
    world.apply(SIDECAR, 0);
    assert_eq!(world.rules("iptables-nft", "nat"), include_str!("sidecar.rules"));
}

#[test]
fn twice_is_once_and_a_clean_up_leaves_nothing() {
    for backend in [Backend::Nft, Backend::Legacy, Backend::Both] {
        for addresses in [&["10.77.2.2/24"][..], &["fd00:77::2/64"]] {
            for (name, options) in MATRIX {
                let Some(world) = World::new(backend, addresses) else { return };
                let before = world.everything();
                world.apply(options, 0);
                let once = world.everything();
                assert_ne!(once, before, "{name}: nothing was applied");
                world.apply(options, 0);
                assert_eq!(world.everything(), once, "{name}: a second apply changed something");
                world.apply(&format!("{options} --reconcile"), 0);
                assert_eq!(world.everything(), once, "{name}: reconcile over right rules changed something");
                world.apply(&format!("{options} --cleanup-only"), 0);
                assert_eq!(world.everything(), before, "{name}: something was left behind");
            }
        }
    }
}

#[test]
fn native_tables_come_and_go_whole() {
    for (name, options) in MATRIX.iter().filter(|(name, _)| *name != "lists") {
        let Some(world) = World::new(Backend::Nft, &["10.77.3.2/24"]) else { return };
        let before = world.everything();
        world.apply(&format!("{options} --native-nftables"), 0);
        let once = world.everything();
        assert!(once.contains("table inet istio-proxy-nat"), "{name}: {once}");
        world.apply(&format!("{options} --native-nftables"), 0);
        assert_eq!(world.everything(), once, "{name}");
        world.apply(&format!("{options} --native-nftables --cleanup-only"), 0);
        assert_eq!(world.everything(), before, "{name}");
    }
}

#[test]
fn reconcile_gets_from_any_options_to_any_others() {
    let pairs = [("sidecar", "tproxy"), ("tproxy", "sidecar"), ("dns", "sidecar"), ("drop invalid", "lists")];
    let options = |name: &str| MATRIX.iter().find(|(n, _)| *n == name).expect("a row of the matrix").1;
    for (from, to) in pairs {
        let (Some(fresh), Some(changed)) =
            (World::new(Backend::Nft, &["10.77.4.2/24"]), World::new(Backend::Nft, &["10.77.4.2/24"]))
        else {
            return;
        };
        fresh.apply(options(to), 0);
        changed.apply(options(from), 0);
        let old = changed.all_rules();
        changed.apply(options(to), 1);
        assert_eq!(changed.all_rules(), old, "{from} to {to}: changed without --reconcile");
        changed.apply(&format!("{} --reconcile", options(to)), 0);
        assert_eq!(changed.all_rules(), fresh.all_rules(), "{from} to {to}");
    }
}

#[test]
fn a_refused_rule_changes_nothing() {
    for (name, bad) in [
        ("a port out of range", "-u 1337 -b 70000 --drop-invalid"),
        ("words in an element", "-u 1337 -b 80/-s/9.9.9.9"),
        ("a range without length", "-u 1337 -i 10.0.0.1"),
        ("an unknown back end", "-u 1337 --force-iptables-binary=other"),
    ] {
        let Some(world) = World::new(Backend::Nft, &["10.77.5.2/24"]) else { return };
        let before = world.all_rules();
        world.apply_words(&bad.split(' ').map(|w| w.replace('/', " ")).collect::<Vec<_>>(), 1);
        assert_eq!(world.all_rules(), before, "{name}");
        world.apply(SIDECAR, 0);
        let good = world.all_rules();
        let words: Vec<String> =
            bad.split(' ').map(|w| w.replace('/', " ")).chain(["--reconcile".to_owned()]).collect();
        world.apply_words(&words, 1);
        assert_eq!(world.all_rules(), good, "{name}: the rules in place were not kept");
    }
}

#[test]
fn rules_of_a_1_6_agent_are_replaced() {
    let Some(world) = World::new(Backend::Nft, &["10.77.6.2/24"]) else { return };
    for rule in [
        "-N ISTIO_OUTPUT",
        "-N ISTIO_INBOUND",
        "-N ISTIO_REDIRECT",
        "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        "-A OUTPUT -p tcp -j ISTIO_OUTPUT",
        "-A PREROUTING -p tcp -j ISTIO_INBOUND",
        "-A ISTIO_OUTPUT -j ISTIO_REDIRECT",
    ] {
        world.inside(&format!("iptables-nft -t nat {rule}"));
    }
    world.apply(&format!("{SIDECAR} --reconcile"), 0);
    assert_eq!(world.rules("iptables-nft", "nat"), include_str!("sidecar.rules"));
}

#[test]
fn a_users_comment_is_read_as_one_word() {
    let Some(world) = World::new(Backend::Nft, &["10.77.7.2/24"]) else { return };
    world.inside("iptables-nft -t nat -A POSTROUTING -m comment --comment 'see -A ISTIO_FOO x' -j ACCEPT");
    world.apply(SIDECAR, 0);
    let once = world.all_rules();
    world.apply(SIDECAR, 0);
    assert_eq!(world.all_rules(), once);
}

#[test]
fn a_changed_order_is_noticed() {
    let Some(world) = World::new(Backend::Nft, &["10.77.8.2/24"]) else { return };
    world.apply(SIDECAR, 0);
    let right = world.all_rules();
    world.inside("iptables-nft -t nat -D ISTIO_INBOUND -p tcp --dport 15090 -j RETURN");
    world.inside("iptables-nft -t nat -A ISTIO_INBOUND -p tcp --dport 15090 -j RETURN");
    world.apply(SIDECAR, 1);
    world.apply(&format!("{SIDECAR} --reconcile"), 0);
    assert_eq!(world.all_rules(), right);
}

#[test]
fn long_owner_lists_load() {
    let Some(world) = World::new(Backend::Nft, &["10.77.9.2/24"]) else { return };
    let groups: Vec<String> = (3000..3064).map(|n: u32| n.to_string()).collect();
    world.set("ISTIO_OUTBOUND_OWNER_GROUPS", &groups.join(","));
    world.apply(SIDECAR, 0);
    let once = world.all_rules();
    world.apply(SIDECAR, 0);
    assert_eq!(world.all_rules(), once);
}

#[test]
fn traffic_is_captured_but_not_the_proxys_own() {
    for options in [SIDECAR.to_owned(), format!("{SIDECAR} --native-nftables")] {
        let Some(world) = World::new(Backend::Nft, &["10.77.10.2/24"]) else { return };
        world.apply(&format!("{options} -o 9999 -x 10.99.0.0/16"), 0);
        let captured = world.listen(15001);
        // An application's connection to anywhere comes out at the proxy, with its destination known.
        assert_eq!(world.connect(2000, "10.88.0.1", 80), "10.88.0.1:80", "{options}");
        // The proxy's own does not, nor do excluded ports and ranges: there is no such host.
        for (uid, address, port) in
            [(1337, "10.88.0.1", 80), (2000, "10.88.0.1", 9999), (2000, "10.99.0.1", 80)]
        {
            assert_eq!(
                world.connect(uid, address, port),
                "not captured",
                "{options}: {uid} {address}:{port}"
            );
        }
        drop(captured);
    }
}

#[test]
fn the_validation_tells_whether_rules_are_there() {
    let Some(world) = World::new(Backend::Nft, &["10.77.11.2/24"]) else { return };
    let check = "--skip-rule-apply --run-validation --probe-timeout 8s";
    assert_eq!(world.as_user(1337, &format!("{check} --probe-timeout 1500ms")), 126, "no rules yet");
    world.apply(SIDECAR, 0);
    assert_eq!(world.as_user(1337, check), 0);
}
