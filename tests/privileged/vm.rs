//! `vm`: the rules of a virtual machine and whom the agent becomes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
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

// What a command of `vm` says, and its status.
fn said(world: &World, words: &[&str]) -> (Option<i32>, String) {
    let root = world.path("vm");
    let mut all = vec!["vm"];
    all.extend(words);
    all.extend(["--root", root.to_str().unwrap()]);
    let out = world.command_of(&all).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.code(), text)
}

#[test]
fn whoever_ends_it_while_the_rules_are_made_gets_no_agent() {
    let Some(world) = World::new(Backend::Nft, &["10.77.14.2/24"]) else { return };
    machine(&world);
    world.shim("iptables-nft-restore", "PATH=/usr/bin:/bin; kill -TERM $PPID; exec @REAL@ \"$@\"");
    let (root, out) = (world.path("vm"), world.path("out"));
    let mut run = world.command_of(&["vm", "run", "--root", root.to_str().unwrap()]);
    let mut run = run.stdout(std::fs::File::create(&out).unwrap()).stderr(Stdio::null()).spawn().unwrap();
    let stat = format!("/proc/{}/stat", run.id());
    world.wait_for("it ends", || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z ")));
    let (status, text) = (run.wait().unwrap(), std::fs::read_to_string(&out).unwrap());
    assert!(status.success(), "{text}");
    assert!(text.contains("asked to end while the rules were made: the agent is not started"), "{text}");
    assert!(!text.contains("Effective config"), "{text}");
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_fault_leaves_the_rules_as_they_are() {
    let Some(world) = World::new(Backend::Nft, &["10.77.11.2/24"]) else { return };
    machine(&world);
    let before = world.everything();
    let at = |path: &str| world.path("vm").join(path);
    let refused = |part: &str| {
        let (status, text) = said(&world, &["run"]);
        assert_eq!(status, Some(255), "{part}: {text}");
        assert!(text.contains(part), "{part}: {text}");
        assert_eq!(world.everything(), before, "{part}: rules are left that nobody serves");
    };
    set_mode(&at("envoy"), 0o644);
    refused("istio-proxy may not execute it");
    std::fs::rename(at("envoy"), at("away")).unwrap();
    refused("binaryPath in the mesh file names another");
    std::fs::rename(at("away"), at("envoy")).unwrap();
    set_mode(&at("envoy"), 0o755);
    for (line, part) in [
        ("ISTIO_META_DNS_CAPTURE='maybe'", "metadata field DNS_CAPTURE"),
        ("ISTIO_INBOUND_PORTS='99999,abc'", "ISTIO_INBOUND_PORTS=99999,abc: \"99999\" cannot be used"),
        ("ISTIO_SERVICE_CIDR='foo'", "ISTIO_SERVICE_CIDR=foo: "),
        ("PROXY_UID='abc'", "PROXY_UID=abc: "),
        ("FORCE_IPTABLES_BINARY='bogus'", "FORCE_IPTABLES_BINARY"),
    ] {
        std::fs::write(at("var/lib/istio/envoy/cluster.env"), format!("{CLUSTER}{line}\n")).unwrap();
        let (_, text) = said(&world, &["check"]);
        let told = text.lines().any(|told| told.starts_with("FAIL  settings") && told.contains(part));
        assert!(told, "{line}: {text}");
        refused(part);
    }
    std::fs::write(at("var/lib/istio/envoy/cluster.env"), CLUSTER).unwrap();
    std::fs::remove_file(at("etc/certs/root-cert.pem")).unwrap();
    refused("root");
}

// The thread of a look-up that was given up has the rights of whoever began it. Where those were the agent's user's, the C
// library, which changes those of all threads, ended the process that was to become the agent, when the rules were made.
#[test]
fn a_collector_whose_name_nobody_tells_ends_no_start() {
    let Some(world) = World::new(Backend::Nft, &["10.77.17.2/24"]) else { return };
    machine(&world);
    let root = world.path("vm");
    let mesh = root.join("etc/istio/config/mesh");
    let text = std::fs::read_to_string(&mesh).unwrap();
    std::fs::write(&mesh, text + "  statsdUdpAddress: collector.test:8125\n").unwrap();
    // What is sent to them is lost.
    let silent = ["10.77.17.8", "10.77.17.9"];
    world.resolvers(&silent);
    for resolver in silent {
        world.inside(&format!("ip neigh add {resolver} lladdr 02:00:00:00:00:01 dev eth0"));
    }
    let mut agent = world.command_of(&["vm", "run", "--root", root.to_str().unwrap()]);
    let mut agent = agent.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = || std::fs::read_to_string(format!("/proc/{}/status", agent.id())).unwrap_or_default();
    world.wait_for("it becomes the agent or ends", || {
        let status = status();
        status.contains("Uid:\t997\t997\t997\t997") && status.contains("Name:\tpilot-agent")
            || status.contains("State:\tZ")
    });
    let ended = agent.try_wait().unwrap();
    agent.kill().unwrap();
    agent.wait().unwrap();
    world.wait_quiet();
    assert_eq!(ended, None, "it ended at exec");
}

#[test]
fn check_looks_with_the_rights_of_the_agents_user() {
    let Some(world) = World::new(Backend::Nft, &["10.77.14.2/24"]) else { return };
    machine(&world);
    let at = |path: &str| world.path("vm").join(path);
    let shut = world.path("shut");
    std::fs::create_dir(&shut).unwrap();
    std::fs::copy(at("envoy"), shut.join("envoy")).unwrap();
    for folder in ["var/run/secrets/tokens", "etc/istio/proxy"] {
        std::fs::create_dir_all(at(folder)).unwrap();
    }
    std::fs::write(at("var/run/secrets/tokens/istio-token"), "a.b.c").unwrap();
    set_mode(&shut, 0o700);
    std::fs::remove_file(at("envoy")).unwrap();
    std::os::unix::fs::symlink(shut.join("envoy"), at("envoy")).unwrap();
    for path in ["etc/istio/config/mesh", "etc/certs/root-cert.pem", "var/run/secrets/tokens/istio-token"] {
        set_mode(&at(path), 0o600);
    }
    let has = |text: &str, lines: &[(&str, &str)]| {
        for (begin, part) in lines {
            let found = text.lines().any(|line| line.starts_with(begin) && line.contains(part));
            assert!(found, "{begin} {part}: {text}");
        }
    };
    let (status, text) = said(&world, &["check"]);
    assert_eq!(status, Some(1), "{text}");
    has(
        &text,
        &[
            ("FAIL  settings", "make it readable for the agent's user"),
            ("warn  envoy", "not looked at"),
            ("warn  user", "not looked at"),
            ("warn  istiod", "not looked at"),
        ],
    );
    set_mode(&at("etc/istio/config/mesh"), 0o644);
    has(
        &said(&world, &["check"]).1,
        &[
            ("ok    mesh", ""),
            ("FAIL  envoy", "istio-proxy may not enter "),
            ("FAIL  root", "istio-proxy may not read it"),
            ("FAIL  token", "istio-proxy may not read it"),
            ("FAIL  folders", "istio-proxy may not write to it"),
        ],
    );
}

#[test]
fn clean_needs_neither_addresses_nor_name_servers() {
    let Some(world) = World::new(Backend::Both, &["10.77.15.2/24"]) else { return };
    let before = world.all_rules();
    world.apply("-u 1337 -i * -b * --redirect-dns", 0);
    assert_ne!(world.all_rules(), before);
    world.inside("ip addr flush dev eth0");
    let clean = world.command_of(&["vm", "clean"]).output().unwrap();
    assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stderr));
    assert_eq!(world.all_rules(), before, "something was left behind");
}

// As in every container: the file is a mount, and cannot be renamed over.
#[test]
fn install_writes_to_a_hosts_file_that_is_a_mount() {
    let Some(world) = World::new(Backend::Nft, &["10.77.16.2/24"]) else { return };
    let (root, from) = (world.path("root"), world.path("from"));
    std::fs::create_dir_all(root.join("etc")).unwrap();
    std::fs::create_dir(&from).unwrap();
    std::fs::write(root.join("etc/passwd"), PASSWD).unwrap();
    std::fs::write(root.join("etc/hosts"), "127.0.0.1 localhost\n").unwrap();
    let authority = mock_istiod::pki::Authority::new("cluster.local", 1);
    let root_pem: String = authority.root_pem().into();
    for (name, text) in [
        ("cluster.env", CLUSTER),
        ("mesh.yaml", "defaultConfig: {}\n"),
        ("root-cert.pem", root_pem.as_str()),
        ("istio-token", "a.b.c"),
        ("hosts", "192.0.2.9 istiod.istio-system.svc\n"),
    ] {
        std::fs::write(from.join(name), text).unwrap();
    }
    let hosts = root.join("etc/hosts");
    let script = format!(
        "mount --bind {hosts} {hosts} && exec {} vm install --root {} --dir {}",
        env!("CARGO_BIN_EXE_pilot-agent"),
        root.display(),
        from.display(),
        hosts = hosts.display(),
    );
    let mut command = std::process::Command::new("unshare");
    let out = command.args(["--mount", "/bin/sh", "-c", &script]).output().unwrap();
    let told = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{told}");
    let text = std::fs::read_to_string(&hosts).unwrap();
    assert_eq!(text, "127.0.0.1 localhost\n192.0.2.9 istiod.istio-system.svc\n");
    assert!(root.join("var/log/istio").is_dir() && root.join("etc/systemd/system/istio.service").is_file());
}
