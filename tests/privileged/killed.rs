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
