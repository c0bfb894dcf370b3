//! `vm`: the rules of a virtual machine and whom the agent becomes.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use super::world::{Backend, World};

const CLUSTER: &str = "ISTIO_INBOUND_PORTS='*'\nISTIO_LOCAL_EXCLUDE_PORTS='22,15090,15021,15020'\n\
                       ISTIO_META_DNS_CAPTURE='true'\nISTIO_NAMESPACE='ns'\nISTIO_SERVICE='shop.ns'\n\
                       ISTIO_SERVICE_CIDR='*'\nISTIO_SVC_IP='10.77.9.2'\n";

// A machine on which the user's number and the group's are different.
const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nistio-proxy:x:997:998::/var/lib/istio:/bin/false\n";

// Files of a VM below a directory that everybody may read; there is something in Envoy's place.
fn machine(world: &World) {
    let at = |path: &str| world.path("vm").join(path);
    for dir in ["etc/certs", "etc/istio/config", "var/lib/istio/envoy"] {
        std::fs::create_dir_all(at(dir)).unwrap();
    }
    world.inside(&format!("chmod 755 {}", world.path("vm").display()));
    std::fs::write(world.path("passwd"), PASSWD).unwrap();
    std::fs::write(world.path("group"), "istio-proxy:x:998:\n").unwrap();
    std::fs::write(at("var/lib/istio/envoy/cluster.env"), CLUSTER).unwrap();
    std::fs::write(at("var/lib/istio/envoy/sidecar.env"), "ISTIO_LOG_DIR=./log\n").unwrap();
    std::fs::write(
        at("etc/istio/config/mesh"),
        format!("defaultConfig:\n  discoveryAddress: 127.0.0.1:1\n  binaryPath: {}\n", at("envoy").display()),
    )
    .unwrap();
    // It is not asked for anything here: it only has to be there.
    std::fs::write(at("envoy"), "#!/bin/sh\nexec /bin/sleep 600\n").unwrap();
    std::fs::set_permissions(at("envoy"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let authority = mock_istiod::pki::Authority::new("cluster.local", 1);
    std::fs::write(at("etc/certs/root-cert.pem"), authority.root_pem()).unwrap();
}

#[test]
fn rules_have_the_right_owners_and_go_without_the_files_that_made_them() {
    let Some(world) = World::new(Backend::Both, &["10.77.9.2/24"]) else { return };
    let before = world.everything();
    machine(&world);
    let root = world.path("vm");
    let words = ["vm", "run", "--root", root.to_str().unwrap()];
    let mut agent = world.command_of(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = || std::fs::read_to_string(format!("/proc/{}/status", agent.id())).unwrap_or_default();
    world.wait_for("the agent has become its user", || status().contains("Uid:\t997\t997\t997\t997"));
    let status = status();
    assert!(status.contains("Gid:\t998\t998\t998\t998"), "{status}");
    assert!(status.lines().any(|l| l.trim_end() == "Groups:"), "supplementary groups are left: {status}");
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    let rules = world.all_rules();
    assert!(rules.contains("--uid-owner 997") && rules.contains("--gid-owner 998"), "{rules}");
    assert!(!rules.contains("--gid-owner 997"), "the user's number stands for the group's: {rules}");
    assert!(rules.contains("--dport 53"), "{rules}");
    let log = root.join("log/istio.log");
    world.wait_for("the agent's log", || {
        std::fs::read_to_string(&log).is_ok_and(|t| t.contains("Effective config"))
    });
    agent.kill().unwrap();
    agent.wait().unwrap();
    world.wait_quiet();
    assert_eq!(world.all_rules(), rules, "the end of the agent changed the rules");

    // Everything that said how they were made is gone.
    std::fs::remove_dir_all(&root).unwrap();
    let clean = world.command_of(&["vm", "clean"]).output().unwrap();
    assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stdout));
    assert_eq!(world.everything(), before, "something was left behind");
}

#[test]
fn clean_takes_away_what_any_settings_made() {
    for options in [
        "-u 1337 -m TPROXY -i * -b * --redirect-dns",
        "-u 5 -i 10.0.0.0/8 --redirect-dns --capture-all-dns",
        "-u 1337 -i * -b * --redirect-dns --native-nftables",
        "-u 1337 -i * -b * -k net1,net2 -c eth9",
        "-u 1337 -i 10.0.0.0/8,fd00:88::/64 -b * -k net1 -c eth9 -m TPROXY --dual-stack",
    ] {
        let Some(world) = World::new(Backend::Both, &["10.77.10.2/24", "fd00:77::a/64"]) else { return };
        let before = world.everything();
        world.apply(options, 0);
        assert_ne!(world.everything(), before, "{options}");
        let clean = world.command_of(&["vm", "clean"]).output().unwrap();
        assert!(clean.status.success(), "{options}: {}", String::from_utf8_lossy(&clean.stdout));
        assert_eq!(world.everything(), before, "{options}: something was left behind");
    }
}

#[test]
fn where_only_nft_is_it_is_told_and_its_rules_go() {
    let Some(world) = World::new(Backend::Nft, &["10.77.12.2/24"]) else { return };
    machine(&world);
    for entry in std::fs::read_dir(world.path("bin")).unwrap().map(Result::unwrap) {
        if entry.file_name() != "nft" {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let before = world.everything();
    let root = world.path("vm");
    let vm = |action: &str| {
        let out = world.command_of(&["vm", action, "--root", root.to_str().unwrap()]).output().unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
    };
    let told = vm("check");
    assert!(
        told.contains("FAIL  rules       no iptables on the PATH: install the package iptables, or set"),
        "{told}"
    );
    let told = vm("run");
    assert!(told.contains("or use nft (NATIVE_NFTABLES=true)"), "{told}");
    assert_eq!(world.everything(), before);

    let settings = root.join("var/lib/istio/envoy/sidecar.env");
    std::fs::write(&settings, "ISTIO_LOG_DIR=\nNATIVE_NFTABLES=true\n").unwrap();
    assert!(vm("check").contains("ok    rules       nothing is redirected yet"));
    let mut agent = world.command_of(&["vm", "run", "--root", root.to_str().unwrap()]);
    let mut agent = agent.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = || std::fs::read_to_string(format!("/proc/{}/status", agent.id())).unwrap_or_default();
    world.wait_for("the agent has become its user", || status().contains("Uid:\t997\t997\t997\t997"));
    assert_ne!(world.everything(), before);
    assert!(vm("check").contains("ok    rules       traffic is redirected"));
    agent.kill().unwrap();
    agent.wait().unwrap();
    world.wait_quiet();
    let clean = world.command_of(&["vm", "clean"]).output().unwrap();
    assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stdout));
    assert_eq!(world.everything(), before, "something was left behind");
}

#[test]
fn a_log_that_cannot_be_written_stays_where_it_was() {
    let Some(world) = World::new(Backend::Nft, &["10.77.13.2/24"]) else { return };
    machine(&world);
    let root = world.path("vm");
    std::fs::write(root.join("log"), "a file").unwrap();
    let out = world.path("out");
    let mut agent = world.command_of(&["vm", "run", "--root", root.to_str().unwrap()]);
    let mut agent = agent.stdout(std::fs::File::create(&out).unwrap()).stderr(Stdio::null()).spawn().unwrap();
    world.wait_for("the agent goes on", || {
        std::fs::read_to_string(&out).is_ok_and(|text| {
            text.contains("the agent's log stays here (ISTIO_LOG_DIR") && text.contains("Effective config")
        })
    });
    agent.kill().unwrap();
    agent.wait().unwrap();
    world.wait_quiet();
}

#[test]
fn a_fault_leaves_the_rules_as_they_are() {
    let Some(world) = World::new(Backend::Nft, &["10.77.11.2/24"]) else { return };
    machine(&world);
    let before = world.everything();
    let root = world.path("vm");
    std::fs::remove_file(root.join("etc/certs/root-cert.pem")).unwrap();
    let run = world.command_of(&["vm", "run", "--root", root.to_str().unwrap()]).output().unwrap();
    assert_eq!(run.status.code(), Some(255));
    assert!(
        String::from_utf8_lossy(&run.stderr).contains("root"),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
    assert_eq!(world.everything(), before);
}
