//! Runs that are cut short, at points spread over the whole of a run: each family has its old rules or its
//! new ones; where it has neither, nothing gets in or out; and the next run brings everything about.

use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::SIDECAR;
use crate::world::{Backend, World};

const OLD: &str = SIDECAR;
const NEW: &str = "-u 1337 -m TPROXY -i * -b * -o 9999 --redirect-dns --capture-all-dns --drop-invalid";
const ADDRESSES: &[&str] = &["fd00:77:12::2/64"];

/// Cuts of each kind.
const CUTS: u32 = 12;

/// The rules of a family, and whether the guardrails are up.
fn family(all: &str, programs: &str) -> (String, bool) {
    let lines: Vec<&str> = all.lines().filter(|line| line.starts_with(programs)).collect();
    let guards = ["INPUT", "FORWARD", "OUTPUT"].iter().all(|chain| {
        ["tcp", "udp"]
            .iter()
            .all(|p| lines.iter().any(|l| l.ends_with(&format!("-A {chain} -p {p} -j DROP"))))
    });
    // While the guardrails are up the filter table is theirs alone.
    let rules = lines.into_iter().filter(|l| !l.ends_with("*filter") && !l.ends_with(" -j DROP"));
    (rules.collect::<Vec<_>>().join("\n"), guards)
}

fn families(world: &World) -> [(String, bool); 2] {
    let all = world.all_rules();
    ["iptables-nft", "ip6tables-nft"].map(|programs| family(&all, programs))
}

/// What `options` make of a fresh pod, and how long that takes.
fn fresh(options: &str) -> Option<([String; 2], Duration)> {
    let world = World::new(Backend::Nft, ADDRESSES)?;
    let start = Instant::now();
    world.apply(options, 0);
    Some((families(&world).map(|(rules, _)| rules), start.elapsed()))
}

fn cut(mut agent: Child, signal: Signal, after: Duration) -> std::process::ExitStatus {
    sleep(after);
    let pid = Pid::from_raw(i32::try_from(agent.id()).expect("a process ID")).expect("a process ID");
    kill_process(pid, signal).expect("not waited for yet");
    agent.wait().expect("our child")
}

#[test]
fn a_reconcile_that_is_asked_to_end_is_whole() {
    let (Some((old, _)), Some((new, took))) = (fresh(OLD), fresh(NEW)) else { return };
    let mut seen = [0, 0];
    // At first the cut comes before anything is done; a machine that has become slower is given more time.
    for n in 0.. {
        if n >= CUTS && seen[1] > 0 {
            break;
        }
        assert!(n < 20 * CUTS, "no run came to its end: {seen:?}");
        let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
        world.apply(OLD, 0);
        let after = took * n * 2 / CUTS;
        cut(world.spawn(&format!("{NEW} --reconcile")), Signal::TERM, after);
        world.wait_quiet();
        for (i, (rules, guards)) in families(&world).into_iter().enumerate() {
            assert!(!guards, "SIGTERM after {after:?} left the guardrails up");
            let is_new = rules == new[i];
            assert!(is_new || rules == old[i], "SIGTERM after {after:?}: neither old nor new:\n{rules}");
            seen[usize::from(is_new)] += 1;
        }
    }
    assert!(seen[0] > 0, "no cut came soon enough: {seen:?}");
}

#[test]
fn a_reconcile_that_is_killed_lets_nothing_pass_and_the_next_one_ends_it() {
    let (Some((old, _)), Some((new, took))) = (fresh(OLD), fresh(NEW)) else { return };
    for n in 0..CUTS {
        let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
        world.apply(OLD, 0);
        let after = took * n * 2 / CUTS;
        cut(world.spawn(&format!("{NEW} --reconcile")), Signal::KILL, after);
        world.wait_quiet();
        for (i, (rules, guards)) in families(&world).into_iter().enumerate() {
            assert!(
                guards || rules == old[i] || rules == new[i],
                "SIGKILL after {after:?}: neither old nor new, and not blocked:\n{rules}"
            );
        }
        world.apply(&format!("{NEW} --reconcile"), 0);
        let ended = families(&world).map(|(rules, guards)| (rules, guards));
        assert_eq!(ended, new.clone().map(|rules| (rules, false)), "SIGKILL after {after:?}");
    }
}

// The worst moment: the old rules are gone, the new ones not yet there.
#[test]
fn guardrails_left_by_a_killed_run_are_lowered_by_whatever_run_comes_next() {
    let Some((new, _)) = fresh(NEW) else { return };
    for (next, rules) in [
        (NEW.to_owned(), new.clone()),
        (format!("{NEW} --reconcile"), new),
        (format!("{NEW} --cleanup-only"), Default::default()),
    ] {
        let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
        world.apply(OLD, 0);
        // Whoever comes to put the new rules in is killed with the agent.
        let script = "text=$(cat); case $text in *-N*) kill -9 $PPID; exit 1;; esac";
        for name in ["iptables-nft-restore", "ip6tables-nft-restore"] {
            world.shim(name, &format!("PATH=/usr/bin:/bin; {script}; echo \"$text\" | @REAL@ \"$@\""));
        }
        assert_eq!(world.status(&format!("{NEW} --reconcile")), None, "killed by a signal");
        world.wait_quiet();
        let [(v4, blocked), _] = families(&world);
        assert_eq!((v4.as_str(), blocked), ("", true));
        for name in ["iptables-nft-restore", "ip6tables-nft-restore"] {
            world.unshim(name);
        }
        // IPv6 still has its old rules, for which a plain run has no licence.
        let status = if next.contains("--") && (next.ends_with("reconcile") || next.ends_with("only")) {
            0
        } else {
            1
        };
        world.apply(&next, status);
        let [(v4, blocked), _] = families(&world);
        assert_eq!((v4.as_str(), blocked), (rules[0].as_str(), false), "{next}");
    }
}

/// What somebody's firewall puts on top of its chain at a bad moment.
const FOREIGN: &str = "iptables-nft -I INPUT 1 -p tcp --dport 22 -j ACCEPT";

/// The filter rules of IPv4.
fn filter(world: &World) -> Vec<String> {
    let all = world.inside("iptables-nft-save -t filter");
    all.lines().filter(|line| line.starts_with("-A")).map(str::to_owned).collect()
}

/// Has a restore that raises the guardrails be followed by a script.
fn when_guarded(world: &World, script: &str) {
    let raises = "case $text in *'-I INPUT 1 -p tcp -j DROP'*)";
    world.shim(
        "iptables-nft-restore",
        &format!(
            "PATH=/usr/sbin:/usr/bin:/bin; text=$(cat); echo \"$text\" | @REAL@ \"$@\"; status=$?; \
             {raises} {script};; esac; exit $status"
        ),
    );
}

#[test]
fn rules_that_others_insert_above_the_guardrails_stay_and_the_guardrails_go() {
    let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
    world.apply(OLD, 0);
    when_guarded(&world, FOREIGN);
    world.apply(&format!("{OLD} -o 9999 --reconcile"), 0);
    assert_eq!(filter(&world), ["-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT"]);
}

#[test]
fn guardrails_that_others_have_removed_or_flushed_fail_nothing() {
    for remove in ["iptables-nft -F INPUT", "iptables-nft -D OUTPUT -p udp -j DROP"] {
        let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
        world.apply(OLD, 0);
        when_guarded(&world, remove);
        world.apply(&format!("{OLD} -o 9999 --reconcile"), 0);
        assert!(world.all_rules().contains("--dport 9999"));
        assert!(filter(&world).is_empty(), "{remove}");
    }
}

#[test]
fn guardrails_of_a_killed_run_are_known_below_what_others_have_inserted() {
    for next in [OLD.to_owned(), format!("{OLD} --reconcile"), format!("{OLD} --cleanup-only")] {
        let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
        world.inside("iptables-nft -A OUTPUT -p udp -j DROP");
        world.apply(OLD, 0);
        when_guarded(&world, &format!("{FOREIGN}; kill -9 $PPID"));
        assert_eq!(world.status(&format!("{OLD} -o 9999 --reconcile")), None, "killed by a signal");
        world.wait_quiet();
        world.unshim("iptables-nft-restore");
        assert_eq!(filter(&world).len(), 8);
        world.apply(&next, 0);
        let left = ["-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT", "-A OUTPUT -p udp -j DROP"];
        assert_eq!(filter(&world), left, "{next}");
        assert_eq!(world.all_rules().contains("ISTIO_OUTPUT"), !next.ends_with("only"), "{next}");
    }
}

#[test]
fn a_native_run_that_leaves_traffic_blocked_is_an_error() {
    let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
    world.apply(OLD, 0);
    when_guarded(&world, "kill -9 $PPID");
    assert_eq!(world.status(&format!("{OLD} -o 9999 --reconcile")), None, "killed by a signal");
    world.wait_quiet();
    world.unshim("iptables-nft-restore");
    world.shim("iptables-nft-restore", "exit 1");
    world.apply(&format!("{OLD} --native-nftables"), 1);
    world.unshim("iptables-nft-restore");
    world.apply(&format!("{OLD} --native-nftables"), 0);
    assert!(filter(&world).is_empty());
}

#[test]
fn a_users_rules_like_guardrails_below_others_stay() {
    let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
    for chain in ["INPUT", "FORWARD", "OUTPUT"] {
        for rule in ["-i lo -j ACCEPT", "-p udp -j DROP", "-p tcp -j DROP"] {
            let rule = if chain == "OUTPUT" { rule.replace("-i lo", "-o lo") } else { rule.to_owned() };
            world.inside(&format!("iptables-nft -A {chain} {rule}"));
        }
    }
    let own = filter(&world);
    for options in ["", "", "-o 9999 --reconcile", "--cleanup-only"] {
        world.apply(&format!("{OLD} {options}"), 0);
        assert_eq!(filter(&world), own, "{options}");
    }
}

#[test]
fn guardrails_that_stay_up_are_an_error() {
    let Some(world) = World::new(Backend::Nft, &["10.77.12.2/24"]) else { return };
    world.apply(OLD, 0);
    // The second restore makes the new rules and lowers nothing.
    let script = "text=$(cat); case $text in *-N*) text=$(echo \"$text\" | grep -v -- '-D INPUT');; esac";
    world.shim(
        "iptables-nft-restore",
        &format!("PATH=/usr/bin:/bin; {script}; echo \"$text\" | @REAL@ \"$@\""),
    );
    let said = world.apply(&format!("{OLD} -o 9999 --reconcile"), 1);
    assert!(said.contains("TCP and UDP are still blocked"), "{said}");
    world.unshim("iptables-nft-restore");
    world.apply(&format!("{OLD} -o 9999"), 0);
    assert!(filter(&world).is_empty());
}

#[test]
fn where_nothing_can_be_put_back_traffic_may_stay_blocked_and_that_is_told() {
    for broken in ["iptables-nft-save", "iptables-nft-restore"] {
        let Some(world) = World::new(Backend::Nft, &["10.77.12.2/24"]) else { return };
        world.apply(OLD, 0);
        // The second restore fails; from then on so does one program.
        let fails = world.path("fails").display().to_string();
        let second = format!(
            "PATH=/usr/bin:/bin; text=$(cat); [ {broken} = iptables-nft-save ] || [ ! -e {fails} ] || exit 1; \
             case $text in *-N*) >{fails}; exit 1;; esac; echo \"$text\" | @REAL@ \"$@\""
        );
        world.shim("iptables-nft-restore", &second);
        let look =
            format!("[ {broken} = iptables-nft-restore ] || [ ! -e {fails} ] || exit 1; exec @REAL@ \"$@\"");
        world.shim("iptables-nft-save", &look);
        let said = world.apply(&format!("{OLD} -o 9999 --reconcile"), 1);
        assert!(said.contains("TCP and UDP may stay blocked; run again"), "{broken}: {said}");
        world.unshim("iptables-nft-restore");
        world.unshim("iptables-nft-save");
        assert_eq!(filter(&world).len(), 6);
        world.apply(&format!("{OLD} -o 9999 --reconcile"), 0);
        assert!(filter(&world).is_empty());
    }
}

#[test]
fn a_first_apply_that_is_cut_is_made_up_for() {
    let Some((new, took)) = fresh(NEW) else { return };
    for signal in [Signal::TERM, Signal::KILL] {
        for n in 0..CUTS {
            let Some(world) = World::new(Backend::Nft, ADDRESSES) else { return };
            let after = took * n / CUTS;
            cut(world.spawn(NEW), signal, after);
            world.wait_quiet();
            for (i, (rules, _)) in families(&world).into_iter().enumerate() {
                assert!(rules.is_empty() || rules == new[i], "{signal:?} after {after:?}: a part:\n{rules}");
            }
            world.apply(NEW, 0);
            assert_eq!(families(&world).map(|(rules, _)| rules), new, "{signal:?} after {after:?}");
        }
    }
}
