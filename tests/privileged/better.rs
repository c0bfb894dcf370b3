//! Where the Go agent (1.30.3) was seen to fail. Each test fails for it; docs/COMPATIBILITY.md has the list.

use crate::world::{Backend, World};
use crate::{MATRIX, SIDECAR};

const V4: &[&str] = &["10.77.4.2/24"];
const V6: &[&str] = &["fd00:77:4::2/64"];

fn options(name: &str) -> &'static str {
    MATRIX.iter().find(|(n, _)| *n == name).expect("a row of the matrix").1
}

// From one row of the matrix to another: refused without --reconcile, and with it as if nothing had been.
fn changes(backend: Backend, addresses: &[&str], from: &str, to: &str) {
    let (Some(fresh), Some(changed)) = (World::new(backend, addresses), World::new(backend, addresses))
    else {
        return;
    };
    fresh.apply(options(to), 0);
    changed.apply(options(from), 0);
    let old = changed.everything();
    changed.apply(options(to), 1);
    assert_eq!(changed.everything(), old, "{from} to {to}: changed without --reconcile");
    changed.apply(&format!("{} --reconcile", options(to)), 0);
    assert_eq!(changed.everything(), fresh.everything(), "{from} to {to}");
}

#[test]
fn redirect_becomes_tproxy_and_back() {
    for backend in [Backend::Nft, Backend::Legacy] {
        for addresses in [V4, V6] {
            changes(backend, addresses, "sidecar", "tproxy");
            // Policy rule and route go as well.
            changes(backend, addresses, "tproxy", "sidecar");
        }
    }
}

#[test]
fn dns_capture_and_drop_invalid_are_switched_off() {
    for backend in [Backend::Nft, Backend::Legacy] {
        changes(backend, V6, "dns", "sidecar");
        changes(backend, V4, "drop invalid", "lists");
        changes(backend, V4, "all dns", "drop invalid");
    }
}

#[test]
fn ipv6_is_switched_off() {
    for backend in [Backend::Nft, Backend::Legacy, Backend::Both] {
        let (Some(fresh), Some(changed)) = (World::new(backend, V4), World::new(backend, V6)) else { return };
        fresh.apply(options("sidecar"), 0);
        changed.apply(options("tproxy"), 0);
        // From now on the pod has an IPv4 address, so that IPv6 is off.
        changed.inside("ip addr add 10.77.4.2/24 dev eth0");
        changed.apply(&format!("{} --reconcile", options("sidecar")), 0);
        assert_eq!(changed.everything(), fresh.everything(), "{backend:?}");
    }
}

#[test]
fn rules_of_a_1_6_agent_are_replaced() {
    for program in ["iptables-nft", "iptables-legacy"] {
        let backend = if program == "iptables-nft" { Backend::Nft } else { Backend::Legacy };
        let Some(world) = World::new(backend, V4) else { return };
        for rule in [
            "-N ISTIO_OUTPUT",
            "-N ISTIO_INBOUND",
            "-N ISTIO_REDIRECT",
            "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
            "-A OUTPUT -p tcp -j ISTIO_OUTPUT",
            "-A PREROUTING -p tcp -j ISTIO_INBOUND",
            "-A ISTIO_OUTPUT -j ISTIO_REDIRECT",
        ] {
            world.inside(&format!("{program} -t nat {rule}"));
        }
        world.apply(&format!("{SIDECAR} --reconcile"), 0);
        assert_eq!(world.rules(program, "nat"), include_str!("sidecar.rules"));
    }
}

#[test]
fn a_failed_reconcile_puts_the_old_rules_back() {
    for (what, script) in [
        // The kernel refuses the last table, when the others are in.
        ("refused", "text=$(echo \"$text\" | sed 's/--to-ports 15006/--to-ports 99999/')"),
        // The restore that puts the new rules in does not happen.
        ("died", "exit 4"),
    ] {
        let Some(world) = World::new(Backend::Nft, V4) else { return };
        world.apply(options("dns"), 0);
        let old = world.everything();
        // Only new rules come with `-N`.
        let script = format!("PATH=/usr/bin:/bin; text=$(cat); case $text in *-N*) {script};; esac");
        world.shim("iptables-nft-restore", &format!("{script}; echo \"$text\" | @REAL@ \"$@\""));
        world.apply(&format!("{} --reconcile", options("tproxy")), 1);
        assert_eq!(world.everything(), old, "{what}");
    }
}

#[test]
fn a_refused_rule_changes_nothing() {
    for (name, bad) in [
        ("a port out of range", "-u 1337 -b 70000 --drop-invalid"),
        ("a range without length", "-u 1337 -i 10.0.0.1"),
        ("an unknown back end", "-u 1337 --force-iptables-binary=other"),
        ("a long interface name", "-u 1337 -c sixteencharacters --drop-invalid"),
        ("a mark that is no decimal number", "-u 1337 -m TPROXY -b * -t 0x539"),
        ("a routing table that is no number", "-u 1337 -m TPROXY -b * -r main"),
    ] {
        let Some(world) = World::new(Backend::Nft, V4) else { return };
        let before = world.everything();
        world.apply(bad, 1);
        assert_eq!(world.everything(), before, "{name}");
        world.apply(SIDECAR, 0);
        let good = world.everything();
        world.apply(&format!("{bad} --reconcile"), 1);
        assert_eq!(world.everything(), good, "{name}: the rules in place were not kept");
    }
}

#[test]
fn words_inside_an_element_are_refused() {
    for (flag, value) in [
        ("-b", "80 -s 9.9.9.9"),
        ("-d", "80 -j ACCEPT"),
        ("-q", "80\t-s 9.9.9.9"),
        ("-o", "80,81 -s 9.9.9.9"),
        ("-u", "1337 -j ACCEPT"),
        ("-g", "1337 -j ACCEPT"),
        ("-c", "eth0 -s 9.9.9.9"),
        ("-k", "eth0\n-A OUTPUT -j ACCEPT"),
        ("-p", "15001 -s 9.9.9.9"),
        ("-t", "1337 -s 9.9.9.9"),
        ("-b", "80\n"),
        ("-d", "!=80"),
    ] {
        let Some(world) = World::new(Backend::Nft, V4) else { return };
        let before = world.everything();
        let words = ["-i", "*", "-b", "*", "-m", "TPROXY", flag, value].map(str::to_owned);
        let said = world.apply_words(&words, 1);
        assert!(said.contains("an element is one word"), "{flag} {value:?}: {said}");
        assert_eq!(world.everything(), before, "{flag} {value:?}");
    }
}

#[test]
fn marks_and_tables_that_are_no_numbers_are_refused_before_anything_changes() {
    for (flag, value) in [("-t", "abc"), ("-t", "0x539"), ("-r", "main"), ("-r", "-1")] {
        let Some(world) = World::new(Backend::Nft, V4) else { return };
        let before = world.everything();
        let words = ["-i", "*", "-b", "*", "-m", "TPROXY", flag, value].map(str::to_owned);
        let said = world.apply_words(&words, 1);
        assert!(said.contains(value), "{flag} {value}: {said}");
        assert_eq!(world.everything(), before, "{flag} {value}");
    }
}

#[test]
fn rules_of_an_interface_that_is_not_excluded_any_more_stay_as_a_users() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.apply(&format!("{SIDECAR} -c eth7"), 0);
    assert!(world.everything().contains("eth7"));
    world.apply(&format!("{SIDECAR} --reconcile"), 0);
    assert!(world.everything().contains("eth7"), "{}", world.everything());
    world.apply(&format!("{SIDECAR} --cleanup-only"), 0);
    assert!(world.everything().contains("eth7"), "a clean-up that does not name it");
    world.apply(&format!("{SIDECAR} -c eth7 --cleanup-only"), 0);
    assert!(!world.everything().contains("eth7"));
}

#[test]
fn a_users_rule_equal_to_one_of_ours_stays() {
    for (backend, program) in [(Backend::Nft, "iptables-nft"), (Backend::Legacy, "iptables-legacy")] {
        let Some(world) = World::new(backend, V4) else { return };
        for rule in ["PREROUTING -i eth7", "OUTPUT -o eth7"] {
            world.inside(&format!("{program} -t nat -A {rule} -j RETURN"));
        }
        let before = world.everything();
        let options = format!("{SIDECAR} -c eth7");
        world.apply(&options, 0);
        let once = world.everything();
        world.apply(&options, 0);
        assert_eq!(world.everything(), once);
        for more in ["-o 9999", "", "-m TPROXY"] {
            world.apply(&format!("{options} {more} --reconcile"), 0);
            world.apply(&format!("{options} {more} --cleanup-only"), 0);
            assert_eq!(world.everything(), before, "{backend:?}, {more}");
            world.apply(&options, 0);
        }
        world.apply("--cleanup-only --reconcile", 0);
        assert_eq!(world.everything(), before, "{backend:?}");
    }
}

// A run that was killed between the two, or a pod that has got IPv6.
#[test]
fn a_family_that_is_missing_beside_the_other_is_added() {
    for backend in [Backend::Nft, Backend::Legacy] {
        let both = [V4, V6].concat();
        let (Some(fresh), Some(grown)) = (World::new(backend, &both), World::new(backend, &both)) else {
            return;
        };
        let options = format!("{SIDECAR} --dual-stack");
        fresh.apply(&options, 0);
        grown.apply(SIDECAR, 0);
        assert_ne!(grown.everything(), fresh.everything());
        grown.apply(&options, 0);
        assert_eq!(grown.everything(), fresh.everything(), "{backend:?}");
    }
}

#[test]
fn with_both_back_ends_nothing_is_doubled_and_a_clean_up_finds_everything() {
    for addresses in [V4, V6] {
        let Some(world) = World::new(Backend::Both, addresses) else { return };
        let before = world.everything();
        world.apply(SIDECAR, 0);
        let once = world.everything();
        // Whoever looks at legacy makes its tables appear.
        world.inside("iptables-legacy -t nat -S >/dev/null; ip6tables-legacy -t nat -S >/dev/null");
        world.apply(SIDECAR, 0);
        assert_eq!(world.everything(), once);
        world.apply(&format!("{SIDECAR} --cleanup-only"), 0);
        assert_eq!(world.everything(), before);
    }
}

#[test]
fn rules_doubled_by_an_earlier_agent_are_removed_from_both_back_ends() {
    let Some(world) = World::new(Backend::Both, V4) else { return };
    let before = world.everything();
    world.apply(&format!("{SIDECAR} --force-iptables-binary nft"), 0);
    world.apply(&format!("{SIDECAR} --force-iptables-binary legacy"), 0);
    world.apply(&format!("{SIDECAR} --cleanup-only"), 0);
    assert_eq!(world.everything(), before);
}

#[test]
fn a_clean_up_takes_address_rules_and_routes_away() {
    // With the flags of the apply, or with any flags and licence for everything.
    for clean in [options("tproxy").to_owned(), format!("{SIDECAR} --reconcile"), "--reconcile".to_owned()] {
        let Some(world) = World::new(Backend::Nft, V6) else { return };
        let before = world.everything();
        world.apply(&format!("{} --cleanup-only", options("tproxy")), 0);
        assert_eq!(world.everything(), before, "a clean-up where nothing is adds something");
        world.apply(options("tproxy"), 0);
        world.apply(options("tproxy"), 0);
        // As a second run of the Go agent leaves it.
        world.inside("ip rule add fwmark 1337 lookup 133; ip -6 rule add fwmark 1337 lookup 133");
        world.apply(&format!("{clean} --cleanup-only"), 0);
        assert_eq!(world.everything(), before, "{clean}");
    }
}

// The start script of a VM cleans up and applies, both with the new settings.
#[test]
fn what_a_clean_up_with_other_flags_leaves_goes_with_the_next_apply() {
    for backend in [Backend::Nft, Backend::Legacy] {
        for old in ["tproxy", "dns", "drop invalid"] {
            let (Some(fresh), Some(changed)) = (World::new(backend, V6), World::new(backend, V6)) else {
                return;
            };
            fresh.apply(SIDECAR, 0);
            changed.apply(options(old), 0);
            let said = changed.apply(&format!("{SIDECAR} --cleanup-only"), 0);
            assert!(said.contains("other settings made stay"), "{old}: {said}");
            // TPROXY's rules still find their way.
            let beside = changed.inside("ip rule; ip route show table 133 2>/dev/null || true");
            assert_eq!(old == "tproxy", beside.contains("fwmark 0x539") && beside.contains("local"), "{old}");
            changed.apply(SIDECAR, 0);
            assert_eq!(changed.everything(), fresh.everything(), "{backend:?}, {old}");
            changed.apply(&format!("{SIDECAR} --cleanup-only"), 0);
            assert!(!changed.everything().contains("ISTIO"), "{backend:?}, {old}");
        }
    }
}

#[test]
fn native_rules_need_no_resolver_of_the_pods_family() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    let before = world.everything();
    world.resolvers(&["fd00::10"]);
    world.apply(&format!("{} --native-nftables", options("dns")), 0);
    assert!(world.everything().contains("istio-output-dns"));
    world.apply(&format!("{SIDECAR} --native-nftables"), 0);
    assert!(!world.everything().contains("dns"), "what DNS capture needed is left");
    world.apply(&format!("{SIDECAR} --native-nftables --cleanup-only"), 0);
    assert_eq!(world.everything(), before);
}

#[test]
fn native_rules_do_not_stand_beside_those_of_an_earlier_start() {
    for backend in [Backend::Nft, Backend::Legacy] {
        let (Some(fresh), Some(changed)) = (World::new(backend, V6), World::new(backend, V6)) else { return };
        fresh.apply(&format!("{SIDECAR} --native-nftables"), 0);
        changed.apply(options("dns"), 0);
        changed.apply(&format!("{SIDECAR} --native-nftables"), 0);
        assert_eq!(changed.everything(), fresh.everything(), "{backend:?}");
    }
}

#[test]
fn nor_do_rules_of_iptables_stand_beside_native_ones() {
    for backend in [Backend::Nft, Backend::Legacy] {
        let (Some(fresh), Some(changed)) = (World::new(backend, V6), World::new(backend, V6)) else { return };
        let before = fresh.everything();
        fresh.apply(SIDECAR, 0);
        changed.apply(&format!("{} --native-nftables", options("dns")), 0);
        changed.apply(SIDECAR, 0);
        assert_eq!(changed.everything(), fresh.everything(), "{backend:?}");
        changed.apply(&format!("{} --native-nftables", options("dns")), 0);
        changed.apply(&format!("{SIDECAR} --cleanup-only"), 0);
        assert_eq!(changed.everything(), before, "{backend:?}");
    }
}

#[test]
fn native_rules_take_any_interface_name() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.apply("-u 1337 -i * -b * -c ip,counter,eth+ -k tcp,net-1 --native-nftables", 0);
    let rules = world.everything();
    assert!(
        rules.contains("iifname \"eth*\" counter") && rules.contains("oifname \"eth*\" counter"),
        "{rules}"
    );
}

#[test]
fn a_users_comment_is_read_as_one_word() {
    for (program, backend) in [("iptables-nft", Backend::Nft), ("iptables-legacy", Backend::Legacy)] {
        let Some(world) = World::new(backend, V4) else { return };
        let rule = "-m comment --comment 'see -A ISTIO_FOO \"x\" -j ISTIO_BAR' -j ACCEPT";
        world.inside(&format!("{program} -t nat -A POSTROUTING {rule}; {program} -t nat -A OUTPUT {rule}"));
        let before = world.all_rules();
        world.apply(SIDECAR, 0);
        let once = world.all_rules();
        world.apply(SIDECAR, 0);
        world.apply(&format!("{SIDECAR} --reconcile"), 0);
        assert_eq!(world.all_rules(), once);
        world.apply(&format!("{SIDECAR} -o 9999 --reconcile"), 0);
        world.apply(&format!("{SIDECAR} --cleanup-only"), 0);
        assert_eq!(world.all_rules(), before);
    }
}

#[test]
fn long_owner_lists_load() {
    for (count, native) in
        [(49, ""), (50, ""), (64, ""), (63, "--native-nftables"), (64, "--native-nftables")]
    {
        let Some(world) = World::new(Backend::Nft, V4) else { return };
        let before = world.everything();
        let groups: Vec<String> = (3000..3000 + count).map(|n: u32| n.to_string()).collect();
        world.set("ISTIO_OUTBOUND_OWNER_GROUPS", &groups.join(","));
        world.apply(&format!("{SIDECAR} {native}"), 0);
        let once = world.everything();
        assert!(groups.iter().all(|group| once.contains(group)), "{count} groups");
        world.apply(&format!("{SIDECAR} {native}"), 0);
        assert_eq!(world.everything(), once, "{count} groups");
        world.apply(&format!("{SIDECAR} {native} --cleanup-only"), 0);
        assert_eq!(world.everything(), before, "{count} groups");
    }
}

#[test]
fn force_apply_over_right_rules_makes_them_anew() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.apply(SIDECAR, 0);
    let once = world.everything();
    let said = world.apply(&format!("{SIDECAR} --force-apply"), 0);
    assert!(said.contains("iptables-nft-restore"), "nothing was made: {said}");
    assert_eq!(world.everything(), once);
    // Over other rules it does not help, as ever.
    world.apply(&format!("{SIDECAR} -o 9999 --force-apply"), 1);
    assert_eq!(world.everything(), once);
}

#[test]
fn a_changed_order_is_noticed() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.apply(SIDECAR, 0);
    let right = world.all_rules();
    world.inside("iptables-nft -t nat -D ISTIO_INBOUND -p tcp --dport 15090 -j RETURN");
    world.inside("iptables-nft -t nat -A ISTIO_INBOUND -p tcp --dport 15090 -j RETURN");
    world.apply(SIDECAR, 1);
    world.apply(&format!("{SIDECAR} --reconcile"), 0);
    assert_eq!(world.all_rules(), right);
}

#[test]
fn a_users_rule_equal_to_a_guardrail_stays() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    world.inside("iptables-nft -A OUTPUT -p udp -j DROP");
    world.apply(SIDECAR, 0);
    world.apply(&format!("{SIDECAR} -o 9999 --reconcile"), 0);
    assert!(world.all_rules().contains("-A OUTPUT -p udp -j DROP"));
}

#[test]
fn looking_leaves_nothing_behind_and_takes_few_programs() {
    for (addresses, limits) in [(V4, [5, 5, 6]), (V6, [8, 5, 6])] {
        let Some(world) = World::new(Backend::Both, addresses) else { return };
        let log = world.path("programs");
        for family in ["iptables", "ip6tables"] {
            for name in ["-nft", "-legacy", ""]
                .iter()
                .flat_map(|kind| ["", "-save", "-restore"].map(|part| format!("{family}{kind}{part}")))
            {
                world.shim(&name, &format!("echo {name} $@ >>{}; exec @REAL@ \"$@\"", log.display()));
            }
        }
        for (options, limit) in ["", "", "--cleanup-only"].iter().zip(limits) {
            let _ = std::fs::remove_file(&log);
            world.apply(&format!("{SIDECAR} {options}"), 0);
            let ran = std::fs::read_to_string(&log).unwrap_or_default();
            assert!(ran.lines().count() <= limit, "{options}: more than {limit}:\n{ran}");
        }
        let leftover = world.inside("iptables-legacy-save; iptables-nft-save");
        assert!(!leftover.contains("-p 255"), "{leftover}");
    }
}
