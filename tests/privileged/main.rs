//! `istio-iptables` against the kernel, in network namespaces made and removed here; and the relay where packets
//! are dropped.
//!
//! Needs root, iproute2, iptables (both back ends) and nftables; `scripts/get-netfilter` installs them where
//! it can. Where it cannot, every test says so in a line that nobody can overlook, and `PRIVILEGED=required`
//! makes that a failure.
//!
//! | file | is about |
//! |---|---|
//! | this one | a matrix of options: applied, applied again, compared, taken away |
//! | `random` | the same for random options |
//! | `better` | what the Go agent does wrong |
//! | `earlier` | what earlier settings made, and what only looks like it |
//! | `killed` | runs that are cut short |
//! | `surface` | exit statuses, dry run, locks, the validation |
//! | `together` | several runs at once |
//! | `traffic` | real connections through a real Envoy |
//! | `vm` | a virtual machine: owners of the rules, whom the agent becomes, clean-up without files |
//! | `half_open` | an istiod that vanishes without a word |
//! | `dropped` | an istiod that no packet reaches: what every witness says |

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

#[path = "../support/mod.rs"]
mod support;

mod better;
mod dropped;
mod earlier;
mod half_open;
mod killed;
mod random;
mod surface;
mod together;
mod traffic;
mod vm;
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
