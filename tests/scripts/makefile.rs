//! The Makefile: what each target would do, as `make -n` tells it.

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

/// They build and fetch nothing.
const IDLE: &[&str] = &["help", "clean"];

#[test]
fn every_target_looks_at_the_machine_first() {
    for target in targets().iter().filter(|target| !IDLE.contains(&target.as_str())) {
        let said = commands(target);
        let asked = target.strip_prefix("check-").unwrap_or(target);
        let first = said.lines().next().unwrap_or_default();
        assert_eq!(first, format!("scripts/check-machine {asked}"), "{target}");
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
    assert!(commands("demo").contains("/elsewhere/release/demo --agent /elsewhere/release/pilot-agent"));
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
