//! Reads `src/` and fails on any `crate::` edge that is not in the list below, on circles inside a room, on errors that are
//! no types, and on long functions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Who may use whom; a module may always use itself, `base`, `net`, `proto` and `trouble`; the last
/// three use `base` only.
const EDGES: &[(&str, &str)] = &[
    ("main", ""),
    ("cli", "config agent envoy iptables vm doctor overview tls"),
    ("doctor", "config agent secrets ca xds istiod envoy iptables tls overview"),
    ("overview", "envoy fetch"),
    (
        "config",
        "sds secrets ca xds istiod bootstrap envoy status dns health iptables fetch tls wasm sts gateway",
    ),
    ("agent", "config sds secrets ca xds istiod bootstrap envoy status dns health wasm sts gateway"),
    ("sds", "secrets"),
    ("secrets", "ca tls"),
    ("ca", "istiod tls fetch"),
    ("xds", "istiod replay"),
    ("replay", ""),
    ("istiod", "tls"),
    ("bootstrap", ""),
    ("envoy", ""),
    ("status", "fetch serve"),
    ("gateway", "secrets fetch tls"),
    ("sts", "fetch serve istiod tls"),
    ("serve", ""),
    ("dns", ""),
    ("health", "fetch"),
    ("wasm", "fetch"),
    ("iptables", ""),
    ("vm", "istiod tls"),
    ("fetch", "tls"),
    ("tls", ""),
    ("trouble", ""),
    ("net", ""),
    ("base", ""),
    ("proto", ""),
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
    behind(&["crate::", "pilot_agent::"], text)
}

// The first words behind any of the prefixes.
fn behind(prefixes: &[&str], text: &str) -> Vec<String> {
    let code: String =
        text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for prefix in prefixes {
        for (at, _) in code.match_indices(prefix) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || "_:".contains(c)) {
                continue;
            }
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
    let (mut wrong, mut seen) = (Vec::new(), BTreeSet::new());
    for path in all {
        let module = module_of(&path, &src);
        if ["lib", "testing"].contains(&module.as_str()) {
            continue;
        }
        let Some(uses) = allowed.get(module.as_str()).map(|uses| uses.split_whitespace()) else {
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
            if bottom || known && !ours && !uses.clone().any(|used| used == target) {
                wrong.push(format!("{}: {module} uses {target}", path.display()));
            }
            seen.insert((module.clone(), target));
        }
    }
    let listed =
        EDGES.iter().flat_map(|(module, uses)| uses.split_whitespace().map(move |used| (*module, used)));
    for (module, used) in listed.filter(|(module, used)| !seen.contains(&((*module).into(), (*used).into())))
    {
        wrong.push(format!("{module} does not use {used}"));
    }
    assert!(wrong.is_empty(), "edges and the list differ:\n{}", wrong.join("\n"));
}

// Of each module of a room, which others of the room it uses. The room's own file and tests do not count.
fn inside(room: &Path, path: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut all = Vec::new();
    files(room, &mut all);
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in all {
        let below = file.strip_prefix(room).unwrap();
        let words: Vec<&str> = below.iter().map(|w| w.to_str().unwrap().trim_end_matches(".rs")).collect();
        let whole = words.len() == 1 && ["mod", "lib", "main"].contains(&words[0]);
        if whole || words.iter().any(|w| ["tests", "fake", "bin"].contains(w)) {
            continue;
        }
        let depth = words.iter().filter(|w| **w != "mod").count();
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let whole = if path.is_empty() { "crate::".to_owned() } else { format!("crate::{path}::") };
        let prefixes = ["super::".repeat(depth), whole];
        let found = behind(&prefixes.each_ref().map(String::as_str), code);
        uses.entry(words[0].to_owned()).or_default().extend(found);
    }
    let known: BTreeSet<String> = uses.keys().cloned().collect();
    for (module, used) in &mut uses {
        used.retain(|name| name != module && known.contains(name));
    }
    uses
}

// A way from `path`'s last back to its first.
fn circle(
    uses: &BTreeMap<String, BTreeSet<String>>,
    path: &mut Vec<String>,
    seen: &mut BTreeSet<String>,
) -> bool {
    let last = path.last().unwrap().clone();
    for next in &uses[&last] {
        if *next == path[0] {
            return true;
        }
        if seen.insert(next.clone()) {
            path.push(next.clone());
            if circle(uses, path, seen) {
                return true;
            }
            path.pop();
        }
    }
    false
}

fn first_circle(uses: &BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    uses.keys().find_map(|first| {
        let mut way = vec![first.clone()];
        circle(uses, &mut way, &mut BTreeSet::new()).then(|| format!("{} → {}", way.join(" → "), way[0]))
    })
}

// A folder and those in it that hold modules.
fn rooms(src: &Path) -> Vec<PathBuf> {
    let mut all = vec![src.to_owned()];
    let mut next = 0;
    while let Some(room) = all.get(next).cloned() {
        next += 1;
        for entry in std::fs::read_dir(room).unwrap().map(|e| e.unwrap().path()) {
            let name = entry.file_name().unwrap();
            if entry.is_dir() && name != "tests" && name != "bin" {
                all.push(entry);
            }
        }
    }
    all
}

#[test]
fn no_circles_inside_a_room() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for src in [root.join("src"), root.join("mock-istiod/src")] {
        for room in rooms(&src) {
            let below = room.strip_prefix(&src).unwrap();
            let path = below.iter().map(|w| w.to_str().unwrap()).collect::<Vec<_>>().join("::");
            // The agent's rooms themselves: see `EDGES`.
            if path.is_empty() && src == root.join("src") {
                continue;
            }
            if let Some(found) = first_circle(&inside(&room, &path)) {
                wrong.push(format!("{}: {found}", room.strip_prefix(root).unwrap().display()));
            }
        }
    }
    assert!(wrong.is_empty(), "modules that use each other:\n{}", wrong.join("\n"));
}

#[test]
fn the_list_of_edges_has_no_circle() {
    let of = |uses: &str| uses.split_whitespace().map(str::to_owned).collect();
    let edges = EDGES.iter().map(|(room, uses)| (room.to_string(), of(uses))).collect();
    assert_eq!(first_circle(&edges), None);
}

#[test]
fn the_check_sees_groups_and_paths() {
    assert_eq!(targets("use crate::{ca::Error, tls};\nlet x = crate::sds::y();"), ["ca", "tls", "sds"]);
    assert!(targets("// crate::sds").is_empty());
}

/// A `String` as an error is left where it is all that there is: why something is not ready, and the private step behind
/// a typed error (docs/ARCHITECTURE.md). A new one needs a reason; most want `thiserror`, or `base::error::BoxError`
/// where a seam hides who fails.
const STRINGS: usize = 7;

#[test]
fn errors_are_types() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&src, &mut all);
    let mut found = Vec::new();
    for path in all {
        if path.iter().any(|part| ["tests", "tests.rs", "fake.rs"].iter().any(|name| part == *name)) {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let lines = code.lines().enumerate().filter(|(_, line)| {
            let line = line.trim_start().replace("Map<String, String>", "Map");
            !line.starts_with("//") && line.contains("Result<") && line.contains(", String>")
        });
        let shown = path.strip_prefix(&src).unwrap().display();
        found.extend(lines.map(|(at, line)| format!("{shown}:{}: {}", at + 1, line.trim())));
    }
    assert!(
        found.len() <= STRINGS,
        "{} functions fail with a String, {STRINGS} may:\n{}",
        found.len(),
        found.join("\n")
    );
}

/// From a function's signature to its closing brace. What is longer holds more than one idea, which has a name.
const LONGEST: usize = 80;

// How many lines the function has that begins in the first line; `None` where none with a body of several lines does.
fn length(lines: &[&str]) -> Option<usize> {
    let first = lines[0].trim_start();
    let words =
        first.split_whitespace().find(|w| !w.starts_with("pub") && !["async", "const", "unsafe"].contains(w));
    if words != Some("fn") {
        return None;
    }
    // As rustfmt writes it: the body begins behind the signature, and its end stands below the beginning.
    let indent = lines[0].len() - first.len();
    let body = lines.iter().position(|l| l.ends_with('{') || l.ends_with(';') || l.ends_with('}'))?;
    if !lines[body].ends_with('{') {
        return None;
    }
    let end = lines.iter().position(|l| l.len() == indent + 1 && l.trim_start() == "}")?;
    Some(end + 1)
}

#[test]
fn functions_hold_one_idea() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    for dir in ["src", "mock-istiod/src", "benches"] {
        files(&root.join(dir), &mut all);
    }
    let (mut seen, mut long) = (0, Vec::new());
    for path in all {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for at in 0..lines.len() {
            let Some(length) = length(&lines[at..]) else { continue };
            seen += 1;
            if length > LONGEST {
                let shown = path.strip_prefix(root).unwrap().display();
                long.push(format!("{shown}:{}: {length} lines: {}", at + 1, lines[at].trim()));
            }
        }
    }
    assert!(seen > 1000, "the sources were read");
    assert!(long.is_empty(), "functions of more than {LONGEST} lines:\n{}", long.join("\n"));
}
