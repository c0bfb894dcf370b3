//! docs/COMPATIBILITY.md is proved: a row names the test or the recorded case that shows it, in backticks
//! anywhere in the row, and neither can go without this test failing. docs/FIPS.md names tests as well.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn files(dir: &Path, kind: &str, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, kind, into);
        } else if path.extension().is_some_and(|e| e == kind) {
            into.push(path);
        }
    }
}

fn texts(dirs: &[&str], kind: &str) -> Vec<String> {
    let mut all = Vec::new();
    dirs.iter().for_each(|dir| files(&Path::new(ROOT).join(dir), kind, &mut all));
    all.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

/// Names of test functions: what follows an attribute that ends in `test]`.
fn tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for text in texts(&["src", "tests", "mock-istiod"], "rs") {
        let mut marked = false;
        for line in text.lines().map(str::trim) {
            // Properties have their attribute inside a macro, with arguments in the signature.
            if line.starts_with("#[") {
                marked |= line.starts_with("#[test]") || line.contains("::test");
            } else if let Some(name) = line.split_once("fn ").filter(|_| marked).map(|(_, rest)| rest) {
                found.insert(name.split(['(', '<']).next().unwrap_or_default().to_owned());
                marked = false;
            }
        }
    }
    found
}

/// Recorded cases, with and without the name of their group.
fn cases() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in texts(&["conformance"], "jsonl").iter().flat_map(|text| text.lines()) {
        let line: serde_json::Value = serde_json::from_str(line).expect("a case is JSON");
        let name = line["case"]["name"].as_str().expect("a case has a name");
        found.extend([name.to_owned(), name.rsplit('.').next().unwrap_or_default().to_owned()]);
    }
    found
}

/// Long names in lower case with underscores and nothing else are tests.
fn looks_like_a_test(word: &str) -> bool {
    word.matches('_').count() >= 3
        && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

#[test]
fn every_row_has_its_test() {
    let (tests, cases) = (tests(), cases());
    assert!(tests.contains("every_row_has_its_test") && cases.len() > 500, "the sources were read");
    let read = |name: &str| std::fs::read_to_string(Path::new(ROOT).join(name)).unwrap();
    let (text, fips) = (read("docs/COMPATIBILITY.md"), read("docs/FIPS.md"));
    let heads = text.lines().zip(text.lines().skip(1)).filter(|(_, next)| next.starts_with("|---"));
    let heads: Vec<&str> = heads.map(|(head, _)| head).collect();
    let rows = text.lines().filter(|l| l.starts_with("| ") && !heads.contains(l));
    let (mut unproved, mut gone) = (Vec::new(), Vec::<&str>::new());
    for row in rows {
        let words: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        gone.extend(
            words.iter().filter(|w| looks_like_a_test(w) && !tests.contains(**w) && !cases.contains(**w)),
        );
        if !words.iter().any(|w| cases.contains(*w) || (w.contains('_') && tests.contains(*w))) {
            unproved.push(row);
        }
    }
    let named = fips.split('`').skip(1).step_by(2);
    gone.extend(named.filter(|w| looks_like_a_test(w) && !tests.contains(*w) && !cases.contains(*w)));
    assert!(gone.is_empty(), "documents name tests that are gone: {gone:?}");
    let shown = unproved.join("\n");
    assert!(
        unproved.is_empty(),
        "{} rows of docs/COMPATIBILITY.md name neither a test nor a recorded case:\n{shown}",
        unproved.len()
    );
}
