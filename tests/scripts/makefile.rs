//! The Makefile: what each target would do, as `make -n` tells it.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::copied::{ROOT, text};

/// The commands of a target, where cargo builds into another folder.
fn commands(target: &str) -> String {
    let output = Command::new("make")
        .args(["-n", "--no-print-directory", target, "CARGO_TARGET_DIR=/elsewhere"])
        .current_dir(ROOT)
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make can be started");
    assert!(output.status.success(), "{target}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn targets() -> Vec<String> {
    let makefile = std::fs::read_to_string(format!("{ROOT}/Makefile")).unwrap();
    let named = makefile.lines().find_map(|line| line.strip_prefix(".PHONY: ")).expect("all are phony");
    let named: Vec<String> = named.split_whitespace().map(str::to_owned).collect();
    // None is forgotten there.
    for line in makefile.lines().filter(|line| line.contains(":  ##")) {
        let target = line.split(':').next().unwrap();
        assert!(named.iter().any(|name| name == target), "{target} is not .PHONY");
    }
    named
}

#[test]
fn targets_that_share_a_folder_have_their_turn() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    for folder in ["scripts", "dist"] {
        std::fs::create_dir(at(folder)).unwrap();
    }
    std::fs::copy(format!("{ROOT}/Makefile"), at("Makefile")).unwrap();
    for name in ["check-machine", "get-envoy", "dist", "packages", "image"] {
        let made = if name == "dist" { ": >dist/pilot-agent-0-linux-$(uname -m)" } else { "" };
        std::fs::write(at("scripts").join(name), format!("#!/bin/sh\necho {name} $1 >>ran\n{made}\n"))
            .unwrap();
        std::fs::set_permissions(at("scripts").join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    let output = Command::new("make")
        .args(["-j4", "packages", "image"])
        .current_dir(scratch.path())
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let ran = std::fs::read_to_string(at("ran")).unwrap();
    let turns = ["check-machine packages", "get-envoy pinned", "dist", "packages", "check-machine image"];
    let ran: Vec<&str> = ran.lines().map(str::trim).collect();
    assert_eq!(ran[..turns.len()], turns, "{ran:?}");
    assert_eq!(ran.iter().filter(|line| **line == "dist").count(), 1, "{ran:?}");
}

/// They build and fetch nothing.
const IDLE: &[&str] = &["help", "clean"];

/// And what is built, and the other agent of a comparison.
#[test]
fn a_clone_may_lie_in_a_folder_with_a_space() {
    let scratch = tempfile::tempdir().unwrap();
    let clone = scratch.path().join("a clone");
    std::fs::create_dir(&clone).unwrap();
    std::fs::copy(format!("{ROOT}/Makefile"), clone.join("Makefile")).unwrap();
    let mut named = 0;
    for target in targets() {
        let said = Command::new("make")
            .args(["-n", "--no-print-directory", &target])
            .current_dir(&clone)
            .env("CARGO_TARGET_DIR", clone.join("built"))
            .env("PEER_AGENT", clone.join("peer"))
            .env_remove("MAKEFLAGS")
            .env_remove("PA_TOOLS")
            .env_remove("PA_ENVOY")
            .output()
            .expect("make can be started");
        assert!(said.status.success(), "{target}: {}", text(&said.stderr));
        for line in text(&said.stdout).lines() {
            for (at, _) in line.match_indices("/a clone") {
                let quoted = line[..at].matches('"').count() % 2 == 1;
                assert!(quoted, "{target}: two words of one path: {line}");
                named += 1;
            }
        }
    }
    assert!(named > 0, "no target names its folder");
}

#[test]
fn help_lists_every_target() {
    let listed = Command::new("make")
        .args(["-s", "--no-print-directory", "help"])
        .current_dir(ROOT)
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make can be started");
    let listed = text(&listed.stdout);
    let listed: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    for target in targets().iter().filter(|target| *target != "check-lint") {
        assert!(listed.contains(&target.as_str()), "make help has no {target}");
    }
    // In Turkish i is none of the letters from a to z, and a good third of the targets has one.
    assert!(commands("help").contains("LC_ALL=C grep "), "{}", commands("help"));
}

#[test]
fn every_target_looks_at_the_machine_first() {
    for target in targets().iter().filter(|target| !IDLE.contains(&target.as_str())) {
        let said = commands(target);
        let asked = target.strip_prefix("check-").unwrap_or(target);
        let first = said.lines().next().unwrap_or_default();
        assert_eq!(first, format!("scripts/check-machine {asked}"), "{target}");
        // What it says of this machine may be anything, but not that there is no such target.
        let looked = Command::new(format!("{ROOT}/scripts/check-machine")).arg(asked).output().unwrap();
        assert!(!text(&looked.stderr).contains("there is no target"), "{}", text(&looked.stderr));
    }
}

#[test]
fn what_was_built_is_taken_from_where_cargo_puts_it() {
    for target in targets().iter().filter(|target| !IDLE.contains(&target.as_str())) {
        let said = commands(target);
        let here: Vec<&str> =
            said.split([' ', '"', '=', '\'']).filter(|word| word.starts_with("target")).collect();
        assert!(here.is_empty(), "{target}: {here:?}");
    }
    assert!(
        commands("demo").contains("\"/elsewhere/release/demo\" --agent \"/elsewhere/release/pilot-agent\"")
    );
}

#[test]
fn an_envoy_is_there_before_minutes_are_spent_on_a_build() {
    for (target, asked) in [
        ("demo", "get-envoy >"),
        ("bench", "get-envoy >"),
        ("numbers", "get-envoy >"),
        ("seccomp", "get-envoy >"),
        ("soak", "get-envoy >"),
        ("dist", "get-envoy pinned >"),
        ("packages", "get-envoy pinned >"),
        ("image", "get-envoy $(uname -m) >"),
    ] {
        let said = commands(target);
        let envoy = said.find(asked).unwrap_or_else(|| panic!("{target} asks for no Envoy: {said}"));
        let built = said.find("cargo build").or_else(|| said.find("scripts/dist")).expect("it builds");
        assert!(envoy < built, "{target}: {said}");
    }
}

/// A folder that somebody names, and shares, is not taken away.
#[test]
fn clean_takes_away_what_is_in_this_folder() {
    let scratch = tempfile::tempdir().unwrap();
    std::fs::copy(format!("{ROOT}/Makefile"), scratch.path().join("clone.mk")).unwrap();
    for folder in
        ["here/target", "here/fuzz/target", "here/.tools", "here/.envoy", "here/fuzz/seeds", "shared"]
    {
        std::fs::create_dir_all(scratch.path().join(folder)).unwrap();
    }
    let done = Command::new("make")
        .args(["-f", "../clone.mk", "clean"])
        .current_dir(scratch.path().join("here"))
        .env("PA_TOOLS", scratch.path().join("shared"))
        .env("PA_ENVOY", scratch.path().join("shared"))
        .env_remove("MAKEFLAGS")
        .status()
        .expect("make can be started");
    assert!(done.success() && scratch.path().join("shared").is_dir(), "what others use is gone");
    let left =
        std::fs::read_dir(scratch.path().join("here")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["fuzz"]);
    let left =
        std::fs::read_dir(scratch.path().join("here/fuzz")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["seeds"]);
}
