//! What earlier settings made goes, whatever the settings are now; what looks like it and is somebody else's stays.

use crate::SIDECAR;
use crate::world::{Backend, World};

const V4: &[&str] = &["10.77.20.2/24"];
const V6: &[&str] = &["fd00:77:20::2/64"];
const TPROXY: &str = "-u 1337 -m TPROXY -i * -b *";

#[test]
fn what_another_routing_table_held_goes() {
    for (backend, addresses, old) in [
        (Backend::Nft, V4, "-r 200"),
        (Backend::Legacy, V6, "-r 4000"),
        (Backend::Nft, V6, "-r 200 -t 7"),
        (Backend::Nft, V6, "-r 200 --native-nftables"),
    ] {
        let (Some(fresh), Some(changed)) = (World::new(backend, addresses), World::new(backend, addresses))
        else {
            return;
        };
        let empty = changed.everything();
        let native = if old.contains("native") { "--native-nftables" } else { "" };
        for new in [TPROXY, SIDECAR] {
            fresh.apply(&format!("{SIDECAR} {native} --cleanup-only --reconcile"), 0);
            fresh.apply(&format!("{new} {native}"), 0);
            changed.apply(&format!("{TPROXY} {old}"), 0);
            assert!(changed.everything().contains("local default"), "{old}");
            changed.apply(&format!("{new} {native} --reconcile"), 0);
            assert_eq!(changed.everything(), fresh.everything(), "{backend:?}, {old}, to {new}");
            changed.apply(&format!("{new} {native} --cleanup-only"), 0);
        }
        changed.apply(&format!("{TPROXY} {old}"), 0);
        let clean = changed.command_of(&["vm", "clean"]).output().unwrap();
        assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stdout));
        assert_eq!(changed.everything(), empty, "{backend:?}, {old}: vm clean");
        // A machine's start script cleans up and applies, both with the new settings.
        if !old.contains("-t") {
            changed.apply(&format!("{TPROXY} {old}"), 0);
            changed.apply(&format!("{TPROXY} {native} --cleanup-only"), 0);
            assert_eq!(changed.everything(), empty, "{backend:?}, {old}");
        }
    }
}

// Native tables are replaced by every run.
#[test]
fn what_stands_beside_native_tables_goes_with_them() {
    let (Some(fresh), Some(changed)) = (World::new(Backend::Nft, V6), World::new(Backend::Nft, V6)) else {
        return;
    };
    for (old, new) in [
        (format!("{TPROXY} --native-nftables"), format!("{SIDECAR} --native-nftables")),
        (format!("{TPROXY} -r 200 --native-nftables"), SIDECAR.to_owned()),
        (TPROXY.to_owned(), format!("{SIDECAR} --native-nftables")),
    ] {
        for world in [&fresh, &changed] {
            world.apply("--cleanup-only --reconcile", 0);
        }
        fresh.apply(&new, 0);
        changed.apply(&old, 0);
        changed.apply(&new, 0);
        assert_eq!(changed.everything(), fresh.everything(), "{old} to {new}");
    }
}

#[test]
fn policy_rules_of_others_stay() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    for (rule, route) in [
        // The same plan with another mark, with a mask, for some addresses only, with another route.
        ("fwmark 1 lookup 100", "local default dev lo"),
        ("fwmark 1337/0xfff lookup 101", "local default dev lo"),
        ("from 10.9.0.0/16 fwmark 1337 lookup 102", "local default dev lo"),
        ("fwmark 1337 lookup 103", "default dev eth0"),
        ("fwmark 1337 lookup 104", "local default dev lo"),
        ("from 10.9.0.0/16 lookup 104", "local 10.9.0.0/16 dev lo"),
    ] {
        let table = rule.rsplit(' ').next().unwrap();
        world.inside(&format!("ip rule add {rule}; ip route add {route} table {table}"));
    }
    let beside = |world: &World| {
        world.inside("ip rule; for t in 100 101 102 103 104; do ip route show table $t; done")
    };
    let before = beside(&world);
    for options in ["", "--reconcile", "-r 200 --reconcile", "--cleanup-only", "--cleanup-only --reconcile"] {
        world.apply(&format!("{TPROXY} {options}"), 0);
        let left: String = beside(&world)
            .lines()
            .filter(|l| !l.contains("133") && !l.contains("200"))
            .map(|l| format!("{l}\n"))
            .collect();
        assert_eq!(left, before, "{options}");
    }
    // One of theirs leads to our table, and is not taken for ours.
    world.inside("ip rule add from 10.9.0.0/16 fwmark 1337 lookup 133");
    world.apply(TPROXY, 0);
    assert!(world.inside("ip rule").contains("from all fwmark 0x539 lookup 133"));
    world.apply(&format!("{TPROXY} --cleanup-only"), 0);
    let left = world.inside("ip rule");
    assert!(
        left.contains("from 10.9.0.0/16 fwmark 0x539 lookup 133")
            && !left.contains("from all fwmark 0x539 lookup 133"),
        "{left}"
    );
}

#[test]
fn a_clean_up_of_everything_needs_no_flags() {
    for backend in [Backend::Nft, Backend::Legacy, Backend::Both] {
        for options in [
            "-u 1337 -i * -b * -k net1,net2 -c eth9",
            "-u 5 -i 10.0.0.0/8,fd00:88::/64 -b * -k net1 -c eth9 -m TPROXY -t 9 --dual-stack",
        ] {
            let Some(world) = World::new(backend, &["10.77.20.2/24", "fd00:77:20::2/64"]) else { return };
            // What a user has for interfaces.
            let program = if backend == Backend::Legacy { "iptables-legacy" } else { "iptables-nft" };
            world.inside(&format!("{program} -t nat -A PREROUTING -i eth5 -j RETURN; {program} -t nat -A OUTPUT -o eth6 -j RETURN"));
            let before = world.everything();
            world.apply(options, 0);
            for line in [SIDECAR, "", "-m TPROXY"] {
                world.apply(&format!("{line} --cleanup-only --reconcile"), 0);
                assert_eq!(world.everything(), before, "{backend:?}: {options}, then {line}");
                world.apply(options, 0);
            }
        }
    }
}

#[test]
fn a_reconcile_takes_the_rules_of_machines_inside_the_pod_away() {
    let (Some(fresh), Some(changed)) = (World::new(Backend::Nft, V4), World::new(Backend::Nft, V4)) else {
        return;
    };
    fresh.apply(&format!("{SIDECAR} -o 9999"), 0);
    changed.apply(&format!("{SIDECAR} -k net1,net2"), 0);
    changed.apply(&format!("{SIDECAR} -o 9999 --reconcile"), 0);
    assert_eq!(changed.everything(), fresh.everything());
}

#[test]
fn rules_about_marks_of_others_stay() {
    for (backend, program) in [(Backend::Nft, "iptables-nft"), (Backend::Legacy, "iptables-legacy")] {
        let Some(world) = World::new(backend, V4) else { return };
        for rule in [
            // As wg-quick makes it, and a machine with two uplinks.
            "PREROUTING -p udp -m comment --comment 'wg-quick(8) rule for wg0' -j CONNMARK --restore-mark",
            "PREROUTING -p tcp -m mark --mark 2 -j CONNMARK --save-mark",
            "OUTPUT -j CONNMARK --restore-mark",
            "OUTPUT -o lo -m mark --mark 2 -j RETURN",
        ] {
            world.inside(&format!("{program} -t mangle -A {rule}"));
        }
        let before = world.everything();
        for options in [SIDECAR, TPROXY] {
            world.apply(options, 0);
            world.apply(&format!("{options} -o 9999 --reconcile"), 0);
            world.apply(&format!("{options} -o 9999 --cleanup-only"), 0);
            assert_eq!(world.everything(), before, "{backend:?}: {options}");
            world.apply(options, 0);
            world.apply("--cleanup-only --reconcile", 0);
            assert_eq!(world.everything(), before, "{backend:?}: {options}, without flags");
        }
        let clean = world.command_of(&["vm", "clean"]).output().unwrap();
        assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stdout));
        assert_eq!(world.everything(), before, "{backend:?}: vm clean where nothing is");
    }
}

#[test]
fn a_table_that_iptables_cannot_read_is_told() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.inside(
        "nft add table ip nat; nft 'add chain ip nat OUTPUT { type nat hook output priority -100; }'",
    );
    world.inside("nft 'add rule ip nat OUTPUT fib daddr type local ct id 5 counter'");
    for (options, status) in [("", 0), ("", 1), ("--cleanup-only", 0)] {
        let said = world.apply(&format!("{SIDECAR} {options}"), status);
        assert!(
            said.contains("rules of an earlier run in that table are neither seen nor removed"),
            "{said}"
        );
    }
}
