//! README and docs are true: each command, flag, make target, path and variable in them exists.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

const DOCUMENTS: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/INSTALL.md",
    "docs/UPGRADE.md",
    "deploy/README.md",
    "examples/README.md",
];

/// Read by scripts, tests, istiod or Istio's start script, and not by the agent.
const OTHERS: &[&str] = &[
    "CA_TIMEOUT",
    "CARGO_HOME",
    "ENABLE_NATIVE_SIDECARS",
    "ENVOY_BIN",
    "HELM_BIN",
    "ISTIO_CLUSTER_CONFIG",
    "ISTIO_LOG_DIR",
    "ISTIO_SIDECAR_CONFIG",
    "MOCK_ISTIOD",
    "PEER_AGENT",
    "PROMTOOL",
    "PROXY_GID",
];

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .unwrap_or_else(|e| panic!("{path}: {e}"))
}

// Everything that is set as code: between backticks, and indented or fenced lines.
fn code(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced || line.starts_with("    ") {
            out.push(line.split(" # ").next().unwrap_or_default().trim().to_owned());
        } else {
            out.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    out
}

fn help(words: &[&str]) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_pilot-agent")).args(words).arg("--help").output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

#[test]
fn commands_and_their_flags_exist() {
    let config = read("docs/CONFIG.md");
    let commands = help(&[]).unwrap();
    let mut wrong = Vec::new();
    let mut seen = 0;
    for document in DOCUMENTS {
        for line in code(&read(document)) {
            let Some(rest) = line.strip_prefix("pilot-agent ") else { continue };
            let words: Vec<&str> = rest.split_whitespace().collect();
            seen += 1;
            let command = words[0];
            if command.starts_with('-') {
                continue;
            }
            for name in command.split('|') {
                if !commands.contains(&format!("\n  {name} ")) {
                    wrong.push(format!("{document}: {line}: no command {name}"));
                }
            }
            // What stands behind -- belongs to another program.
            for flag in words.iter().take_while(|w| **w != "--").filter_map(|w| w.strip_prefix("--")) {
                let flag = flag.split('=').next().unwrap();
                let known = help(&[command]).is_some_and(|h| h.contains(&format!("--{flag}")));
                if !known && !config.contains(&format!("| `--{flag}`")) {
                    wrong.push(format!("{document}: {line}: no flag --{flag}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 20, "only {seen} commands were found: is the reader of documents broken?");
}

#[test]
fn commands_that_need_nothing_run() {
    let mut ran = 0;
    for line in code(&read("README.md")) {
        let Some(rest) = line.strip_prefix("pilot-agent ") else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        if !matches!(words[0], "version" | "--version" | "completion" | "help") {
            continue;
        }
        let output = Command::new(env!("CARGO_BIN_EXE_pilot-agent")).args(&words).output().unwrap();
        assert!(output.status.success() && !output.stdout.is_empty(), "{line}");
        ran += 1;
    }
    assert!(ran > 0, "README.md names no command that can be run as it stands");
}

#[test]
fn make_targets_exist() {
    let makefile = read("Makefile");
    for document in DOCUMENTS {
        for line in code(&read(document)) {
            let Some(rest) = line.strip_prefix("make ") else { continue };
            let target = rest.split_whitespace().next().unwrap();
            assert!(makefile.contains(&format!("\n{target}:")), "{document}: make {target}");
        }
    }
    let workflow = read(".github/workflows/ci.yml");
    for target in workflow.split("make ").skip(1).filter_map(|rest| rest.split_whitespace().next()) {
        let known = makefile.contains(&format!("\n{target}:"));
        assert!(known || target == "targets" || target == "python3", "ci.yml: make {target}");
    }
}

#[test]
fn paths_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let homes = [
        "docs/",
        "deploy/",
        "examples/",
        "scripts/",
        "benches/",
        "mock-istiod/",
        "src/",
        "tests/",
        "fuzz/",
        "proto/",
        "packaging/",
    ];
    let mut wrong = Vec::new();
    for document in DOCUMENTS {
        let beside = Path::new(document).parent().unwrap();
        for line in code(&read(document)) {
            for word in line.split_whitespace().map(|w| w.trim_matches(|c| "\"',;:()".contains(c))) {
                let ours = homes.iter().any(|home| word.starts_with(home))
                    || (word.ends_with(".md") && !word.contains("://"));
                if ours && !root.join(word).exists() && !root.join(beside).join(word).exists() {
                    wrong.push(format!("{document}: {word}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "no such path:\n{}", wrong.join("\n"));
}

#[test]
fn variables_are_in_the_table() {
    let config = read("docs/CONFIG.md");
    let mut wrong = BTreeSet::new();
    for document in DOCUMENTS {
        for line in code(&read(document)) {
            let names = line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            for name in names
                .filter(|n| n.len() > 4 && n.contains('_') && n.starts_with(|c: char| c.is_ascii_uppercase()))
            {
                let upper = name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
                if upper && !config.contains(&format!("`{name}`")) && !OTHERS.contains(&name) {
                    wrong.insert(format!("{document}: {name}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "not in docs/CONFIG.md:\n{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
}
