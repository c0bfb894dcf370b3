//! Reads `src/` and fails on any `crate::` edge that is not in the list below.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Who may use whom; a module may always use itself, `base`, `net`, `proto` and `trouble`; the last
/// three use `base` only.
const EDGES: &[(&str, &[&str])] = &[
    ("main", &[]),
    ("cli", &["config", "agent", "envoy", "iptables", "vm", "doctor", "overview", "tls"]),
    (
        "doctor",
        &[
            "config", "agent", "secrets", "ca", "xds", "istiod", "envoy", "iptables", "fetch", "tls",
            "overview",
        ],
    ),
    ("overview", &["envoy", "fetch"]),
    (
        "config",
        &[
            "sds",
            "secrets",
            "ca",
            "xds",
            "istiod",
            "bootstrap",
            "envoy",
            "status",
            "dns",
            "health",
            "iptables",
            "fetch",
            "tls",
            "wasm",
            "sts",
            "gateway",
        ],
    ),
    (
        "agent",
        &[
            "config",
            "sds",
            "secrets",
            "ca",
            "xds",
            "istiod",
            "bootstrap",
            "envoy",
            "status",
            "dns",
            "health",
            "tls",
            "wasm",
            "sts",
            "gateway",
        ],
    ),
    ("sds", &["secrets"]),
    ("secrets", &["ca", "tls"]),
    ("ca", &["istiod", "tls", "fetch"]),
    ("xds", &["istiod", "replay"]),
    ("replay", &[]),
    ("istiod", &["tls"]),
    ("bootstrap", &[]),
    ("envoy", &[]),
    ("status", &["fetch", "serve"]),
    ("gateway", &["secrets", "fetch", "tls"]),
    ("sts", &["fetch", "serve", "istiod", "tls"]),
    ("serve", &["fetch"]),
    ("dns", &[]),
    ("health", &["fetch"]),
    ("wasm", &["fetch"]),
    ("iptables", &[]),
    ("vm", &["istiod", "tls"]),
    ("fetch", &["tls"]),
    ("tls", &[]),
    ("trouble", &[]),
    ("net", &[]),
    ("base", &[]),
    ("proto", &[]),
];

fn files(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

fn module_of(path: &Path, src: &Path) -> String {
    let first = path.strip_prefix(src).unwrap().components().next().unwrap();
    first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

// `crate::x::..` and, for main.rs, `pilot_agent::x::..`; also grouped `crate::{a::.., b::..}`.
fn targets(text: &str) -> Vec<String> {
    let code: String =
        text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for prefix in ["crate::", "pilot_agent::"] {
        for (at, _) in code.match_indices(prefix) {
            let rest = &code[at + prefix.len()..];
            if let Some(group) = rest.strip_prefix('{') {
                let mut depth = 0;
                let mut word = String::new();
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        _ => {}
                    }
                    if depth == 0 && c == ',' {
                        found.push(std::mem::take(&mut word));
                    } else if depth == 0 {
                        word.push(c);
                    }
                }
                found.push(word);
            } else {
                found.push(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
            }
        }
    }
    found
        .into_iter()
        .map(|w| w.trim().split("::").next().unwrap_or_default().trim().to_owned())
        .filter(|w| !w.is_empty())
        .collect()
}

#[test]
fn edges_run_one_way() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let allowed: BTreeMap<_, _> = EDGES.iter().copied().collect();
    let mut all = Vec::new();
    files(&src, &mut all);
    let mut wrong = Vec::new();
    for path in all {
        let module = module_of(&path, &src);
        if ["lib", "testing"].contains(&module.as_str()) {
            continue;
        }
        let Some(uses) = allowed.get(module.as_str()) else {
            wrong.push(format!("{}: module {module} is not in the list", path.display()));
            continue;
        };
        for target in targets(&std::fs::read_to_string(&path).unwrap()) {
            let known = allowed.contains_key(target.as_str());
            let ours = target == module || ["base", "net", "proto", "trouble"].contains(&target.as_str());
            let bottom = ["base", "proto"].contains(&module.as_str())
                && ["net", "trouble"].contains(&target.as_str())
                || module == "net" && target == "trouble"
                || module == "trouble" && target == "net";
            if bottom || known && !ours && !uses.contains(&target.as_str()) {
                wrong.push(format!("{}: {module} uses {target}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "edges that are not in the list:\n{}", wrong.join("\n"));
}

#[test]
fn the_check_sees_groups_and_paths() {
    assert_eq!(targets("use crate::{ca::Error, tls};\nlet x = crate::sds::y();"), ["ca", "tls", "sds"]);
    assert!(targets("// crate::sds").is_empty());
}
