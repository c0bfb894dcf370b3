//! README and docs are true: each command, flag, make target, path and variable in them exists.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

const DOCUMENTS: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/FIPS.md",
    "docs/IDENTITY.md",
    "docs/INSTALL.md",
    "docs/TESTING.md",
    "docs/UPGRADE.md",
    "deploy/README.md",
    "examples/README.md",
    "mock-istiod/README.md",
    "packaging/README.md",
];

/// Read by scripts, tests, istiod or Istio's start script, and not by the agent.
const OTHERS: &[&str] = &[
    "AGENT_BIN",
    "ATTACK_NET",
    "CARGO_HOME",
    "CA_TIMEOUT",
    "ENABLE_NATIVE_SIDECARS",
    "ENVOY_BIN",
    "ENVOY_BIN_AARCH64",
    "ENVOY_BIN_X86_64",
    "ENVOY_IMAGE",
    "GRPC_SSL_CIPHER_SUITES",
    "HELM_BIN",
    "ISTIO_BIN_BASE",
    "ISTIO_CFG",
    "ISTIO_CLUSTER_CONFIG",
    "ISTIO_LOG_DIR",
    "ISTIO_META_ISTIO_PROXY_SHA",
    "ISTIO_SIDECAR_CONFIG",
    "MOCK_ISTIOD",
    "PEER_AGENT",
    "PILOT_MAX_REQUESTS_PER_SECOND",
    "PROMTOOL",
    "PROPTEST_RNG_SEED",
    "PROXY_GID",
    "PROXY_SHA",
    "RELEASE_WITHOUT",
    "VAULT_BIN",
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
}

#[test]
fn workflows_are_read_and_call_what_there_is() {
    let makefile = read("Makefile");
    let mut called = BTreeSet::new();
    for name in ["ci", "release"] {
        let file = format!(".github/workflows/{name}.yml");
        let document: serde_yaml_ng::Value =
            serde_yaml_ng::from_str(&read(&file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(document["on"].is_mapping() && document["permissions"].is_mapping(), "{file}");
        for (job, content) in document["jobs"].as_mapping().unwrap() {
            let job = format!("{file}: {}", job.as_str().unwrap());
            assert!(content["runs-on"].is_string() && content["timeout-minutes"].is_u64(), "{job}");
            let steps = content["steps"].as_sequence().unwrap_or_else(|| panic!("{job} has no steps"));
            for step in steps {
                let used = step["uses"].as_str();
                assert!(used.is_none_or(|name| name.contains('@')), "{job}: {used:?} names no version");
                let Some(script) = step["run"].as_str() else {
                    assert!(used.is_some(), "{job}: a step that does nothing");
                    continue;
                };
                let checked = Command::new("bash").args(["-n", "-c", script]).output().unwrap();
                assert!(
                    checked.status.success(),
                    "{job}: {script}: {}",
                    String::from_utf8_lossy(&checked.stderr)
                );
                let words: Vec<&str> = script.split_whitespace().collect();
                for pair in words.windows(2).filter(|pair| pair[0] == "make" && pair[1] != "python3") {
                    assert!(makefile.contains(&format!("\n{}:", pair[1])), "{job}: make {}", pair[1]);
                    called.insert(pair[1].to_owned());
                }
            }
        }
    }
    for target in ["lint", "test", "demo", "bare-machine", "release"] {
        assert!(called.contains(target), "no workflow runs make {target}: {called:?}");
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
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map(str::to_owned).collect()
    };
    let known = words(&read("docs/CONFIG.md"));
    let mut wrong = BTreeSet::new();
    let set =
        DOCUMENTS.iter().flat_map(|document| code(&read(document)).into_iter().map(move |l| (*document, l)));
    // What is to be done about a trouble is not set as code.
    let operations = read("docs/OPERATIONS.md");
    let hints = operations.lines().filter(|line| line.starts_with("| `"));
    for (document, line) in set.chain(hints.map(|line| ("docs/OPERATIONS.md", line.to_owned()))) {
        for name in words(&line) {
            let upper = name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
            let variable = upper
                && name.len() > 4
                && name.contains('_')
                && name.starts_with(|c: char| c.is_ascii_uppercase());
            if variable && !known.contains(&name) && !OTHERS.contains(&name.as_str()) {
                wrong.insert(format!("{document}: {name}"));
            }
        }
    }
    assert!(wrong.is_empty(), "not in docs/CONFIG.md:\n{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
}

/// Who has a package or a release, and no repository, finds what help, man pages and messages speak of.
#[test]
fn packages_and_releases_have_the_documents_that_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let man = ["completion", "man", dir.path().to_str().unwrap(), "2026-01-01"];
    let made = Command::new(env!("CARGO_BIN_EXE_pilot-agent")).args(man).status().unwrap();
    assert!(made.success());
    let mut named =
        BTreeSet::from(["docs/INSTALL.md", "docs/OPERATIONS.md", "docs/UPGRADE.md"].map(str::to_owned));
    named.insert("deploy/prometheus-rules.yaml".to_owned());
    for page in std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()) {
        let text = std::fs::read_to_string(page).unwrap();
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "/._".contains(c)));
        let words = words.map(|word| word.trim_end_matches('.'));
        named.extend(words.filter(|word| word.starts_with("docs/")).map(str::to_owned));
    }
    assert!(named.contains("docs/CONFIG.md"), "{named:?}: is the reader of man pages broken?");
    let (packages, dist) = (read("Cargo.toml"), read("scripts/dist"));
    for document in named {
        let name = document.rsplit('/').next().unwrap();
        for asset in [
            format!("[\"{document}\", \"usr/share/doc/pilot-agent/{name}\", "),
            format!("source = \"{document}\", dest = \"/usr/share/doc/pilot-agent/{name}\","),
        ] {
            assert!(packages.contains(&asset), "Cargo.toml lacks {asset}");
        }
        assert!(dist.contains(&document), "scripts/dist leaves {document} out");
    }
}

#[test]
fn families_of_our_own_stand_in_the_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = read("src/status/own.rs");
    let gos: Vec<&str> =
        own.split("const GO: ").nth(1).and_then(|rest| rest.split("];").next()).unwrap().split('"').collect();
    let table = read("docs/OPERATIONS.md");
    let mut made = BTreeSet::new();
    let mut folders = vec![root.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = entry.file_name().unwrap().to_string_lossy().into_owned();
            if entry.is_dir() {
                folders.extend((name != "tests").then_some(entry));
            } else if name.ends_with(".rs") && name != "tests.rs" {
                made.extend(families(&std::fs::read_to_string(entry).unwrap()));
            }
        }
    }
    assert!(made.len() > 50, "only {} families were found: is the reader of sources broken?", made.len());
    let missing: Vec<_> = made
        .iter()
        .filter(|name| !gos.contains(&name.as_str()) && !table.contains(&format!("| `istio_agent_{name}` |")))
        .collect();
    assert!(missing.is_empty(), "not in docs/OPERATIONS.md (src/trouble/operations.rs): {missing:?}");
}

// The names that families are made with.
fn families(source: &str) -> Vec<String> {
    ["counter(", "gauge(", "histogram(", "Opts::new("]
        .iter()
        .flat_map(|call| source.split(call).skip(1))
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split_once('"'))
        .filter(|(_, rest)| rest.starts_with(','))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[test]
fn metrics_have_the_names_of_the_code() {
    // Where the agent's metrics are made.
    let code = Command::new("grep")
        .args(["-rhE", "--include=*.rs", "--exclude-dir=tests", "\"[a-z_]+\"", "src"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let code = String::from_utf8(code.stdout).unwrap();
    let mut seen = 0;
    for document in DOCUMENTS.iter().copied().chain(["docs/OPERATIONS.md", "deploy/prometheus-rules.yaml"]) {
        for rest in read(document).split("istio_agent_").skip(1) {
            let name = rest.split(|c: char| !(c.is_ascii_lowercase() || c == '_')).next().unwrap();
            seen += 1;
            assert!(code.contains(&format!("\"{name}\"")), "{document}: no metric istio_agent_{name}");
        }
    }
    assert!(seen > 3, "only {seen} metrics were found: is the reader of documents broken?");
}
