//! What scripts tell of tests and measurements.

use std::process::Command;

use crate::copied::{ROOT, Scripts, text};

#[test]
fn the_summary_is_one_line_and_counts_suites_that_were_killed() {
    let cargo = "echo '     Running unittests src/lib.rs (target/debug/deps/a-0123456789abcdef)'
        echo 'running 3 tests'; echo 'test x ... ok'; echo 'test y ... FAILED'; echo 'test z ... ignored'
        echo 'test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s'
        echo '     Running tests/b.rs (target/debug/deps/b-0123456789abcdef)'; echo 'running 9 tests'; exit 101";
    let output = Scripts::new().program("cargo", cargo).run("run-tests", &[]);
    assert_eq!(output.status.code(), Some(101));
    assert_eq!(text(&output.stdout).lines().last(), Some("1 passed, 2 failed"));
    assert!(text(&output.stdout).contains("test y ... FAILED"));

    let output = Scripts::new().program("cargo", "echo 'error: no'; exit 101").run("run-tests", &[]);
    assert_eq!(output.status.code(), Some(101));
    assert!(!text(&output.stdout).contains("passed"), "no test ran, so there is no summary");
}

#[test]
fn a_test_that_hangs_is_named_and_the_next_suite_has_its_turn() {
    let cargo = "sleep 7 # the build, in which there is no test that could hang
        echo '     Running unittests src/lib.rs (target/debug/deps/a-0123456789abcdef)'
        echo 'running 2 tests'; echo 'test x ... ok'; echo 'test y has been running for over 60 seconds'
        sleep 600
        echo '     Running tests/b.rs (target/debug/deps/b-0123456789abcdef)'; echo 'running 1 test'
        echo 'test z ... ok'
        echo 'test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s'; exit 101";
    let output = Scripts::new().program("cargo", cargo).env("RUN_TESTS_SILENCE", "3").run("run-tests", &[]);
    assert_eq!(output.status.code(), Some(101));
    let said = text(&output.stdout);
    assert!(said.contains("run-tests: nothing was said for 3 s; still running: y\n"), "{said}");
    assert_eq!(said.matches("nothing was said").count(), 1, "the build was killed: {said}");
    assert_eq!(said.lines().last(), Some("1 passed, 1 failed"));
}

#[test]
fn a_name_that_nothing_has_is_no_success() {
    let scripts = ["id", "ip", "openssl", "iptables-nft", "iptables-legacy", "nft"]
        .iter()
        .fold(Scripts::new(), |scripts, name| scripts.program(name, "echo 0"))
        .executable("conformance/python", "echo $PWD/play")
        .executable("conformance/play", "echo \"$2: ${CASES:-0} of ${CASES:-0} equal (none)\"");
    std::fs::copy(format!("{ROOT}/conformance/all"), scripts.path("conformance/all")).unwrap();
    let all = |scripts: &Scripts, words: &[&str]| {
        let output = scripts.run("../conformance/all", words);
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (held, _, said) = all(&scripts, &["/usr"]);
    assert!(!held && said.starts_with("conformance: /usr is not an executable file"), "{said}");
    // A path as it is seen from where the caller stands.
    let (held, _, said) = all(&scripts, &["scripts/foreign", "sts", "--", "--only", "nothing"]);
    assert!(!held && said.starts_with("conformance: no case of sts has that in its name"), "{said}");
    let scripts = scripts.env("CASES", "2");
    assert_eq!(all(&scripts, &["scripts/foreign", "sts"]).1.lines().last(), Some("2 of 2 equal"));
    let recorded = all(&scripts, &["scripts/foreign", "sts", "ads", "--", "--record"]).1;
    assert_eq!(recorded.lines().last(), Some("4 of 4 recorded"));
    // One suite that was stopped is the last.
    let scripts = scripts.executable("conformance/play", "echo \"$2 is stopped\"; exit 130");
    let stopped = scripts.run("../conformance/all", &["scripts/foreign", "sts", "ads"]);
    assert_eq!((stopped.status.code(), text(&stopped.stdout).as_str()), (Some(130), "sts is stopped\n"));

    // A day without faults comes first, which a real agent lives.
    let python = |program: &str| {
        let output = Command::new("python3")
            .args(["-c", program])
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(ROOT)
            .output()
            .expect("python3 can be started");
        (output.status.code(), text(&output.stderr))
    };
    let faults = r#"
import sys, tests.faults.__main__ as faults
faults.live = lambda *_: ("went on", [], ["start openat 1"], [], 20, "")
sys.argv[1:] = ["--agent=none", "--istiod=none", "--only=nothing"]
sys.exit(faults.main())"#;
    let (code, said) = python(faults);
    assert!(code == Some(2) && said.starts_with("no call of a day has 'nothing' in its name"), "{said}");
    // An istiod that does not run: its own word is told, and the other days are lived.
    let faults = r#"
import pathlib, sys, tempfile, tests.faults.__main__ as faults
with tempfile.TemporaryDirectory() as scratch:
    istiod = pathlib.Path(scratch, "istiod")
    istiod.write_text('#!/bin/sh\necho it is too hot >&2\nexit 3\n')
    istiod.chmod(0o755)
    faults.AGAIN = (0, 0)
    how, wrong, *_ = faults.one(("none", istiod, (), None, None))[1]
sys.exit(f"{how}: {wrong[0]}")"#;
    let (_, said) = python(faults);
    let told = "NO DAY: it could not begin 3 times: istiod has ended with status 3, and says: it is too hot";
    assert_eq!(said.trim(), told);

    let attacked = Command::new("python3")
        .args(["-m", "tests.attack", "--agent=none", "--istiod=none", "--only=nothing"])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(ROOT)
        .output()
        .expect("python3 can be started");
    let said = text(&attacked.stderr);
    assert!(
        attacked.status.code() == Some(2) && said.starts_with("no attack has 'nothing' in its name"),
        "{said}"
    );
}

/// A copy of what `conformance/run` needs, and a suite of a hundred cases, the second of which ends with somebody's Ctrl-C.
fn suite_that_is_stopped() -> Scripts {
    let scripts = Scripts::new();
    for folder in ["conformance/x", "docs"] {
        std::fs::create_dir_all(scripts.path(folder)).unwrap();
    }
    for name in ["conformance/run", "conformance/recordings.py"] {
        std::fs::copy(format!("{ROOT}/{name}"), scripts.path(name)).unwrap();
    }
    let suite = r#"
import os, signal, time
class Suite:
    def prepare(self, folder):
        pass
    def play(self, case, *_):
        if case["name"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        return [{"harness_error": "cut off"}]
SUITES = {"x": Suite()}"#;
    let case =
        |n| format!("{{\"case\":{{\"latent\":true,\"name\":\"{n}\",\"why\":\"\"}},\"recorded\":[{n}]}}\n");
    let cases: String = (0..100).map(case).collect();
    for (name, content) in [
        ("conformance/suites.py", suite),
        ("conformance/differences.json", "{}"),
        ("conformance/x/cases.jsonl", cases.replacen("\"latent\":true,", "", 1).as_str()),
        ("docs/COMPATIBILITY.md", ""),
    ] {
        std::fs::write(scripts.path(name), content).unwrap();
    }
    scripts
}

#[test]
fn a_replay_that_is_stopped_tries_nothing_again_and_keeps_nothing() {
    let scripts = suite_that_is_stopped();
    let kept = || std::fs::read_to_string(scripts.path("conformance/x/cases.jsonl")).unwrap();
    let before = kept();
    let run = |how: &[&str]| {
        // Its cases need root, these do not.
        let program = "import os, runpy, sys; os.geteuid = lambda: 0; runpy.run_path(sys.argv.pop(1), run_name='__main__')";
        let output = Command::new("python3")
            .args(["-c", program, "conformance/run", "x", "--agent", "/bin/sh", "-j", "1"])
            .args(how)
            .current_dir(scripts.path(""))
            .output()
            .expect("python3 can be started");
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    for how in [&[] as &[&str], &["--record"]] {
        let (code, said, told) = run(how);
        assert_eq!(code, Some(130), "{how:?}: {said}{told}");
        assert!(!said.contains("again ") && !said.contains("equal") && !said.contains("recorded,"), "{said}");
        assert_eq!(told, "conformance: stopping: the cases that run come to their end first\n");
        assert!(kept() == before, "{how:?}: recordings have changed");
    }
    // What went wrong in the harness is no recording, of a case that shows a defect neither.
    let (code, said, told) = run(&["--record", "--only", "2"]);
    assert_eq!(code, Some(1), "{told}");
    assert!(said.ends_with("x: 0 of 19 recorded, 0 changed\n"), "{said}");
    assert!(kept() == before, "recordings have changed");
}

#[test]
fn the_numbers_page_has_what_was_measured_and_nothing_without_it() {
    let measured = r#"{"day": "2026-01-02", "machine": {"processor": "P", "cores": 2, "memory": 8, "kernel": "6.1",
        "system": "S"}, "load": [0.1, 0.2], "runs": 3, "agent": "1.31.0-x", "peer": null,
        "sections": [{"title": "Size", "rows": [{"what": "binary as built (MB)", "ours": [12.5, 12, 13], "peer": null,
            "wire": null, "direct": null, "target": "–"}]},
            {"title": "Control groups with a memory limit, one around each agent (growth)", "rows": [
                {"what": "highest of a group, page cache included (MB)", "ours": [3, 2, 17.25], "peer": null, "wire": null,
                 "direct": null, "target": "–"}]},
            {"title": "Many agents on one node, 1 MB of configuration each", "rows": [
                {"what": "50 agents: wake-ups a second each, idle", "ours": [0.17, 0.17, 0.17], "peer": null, "wire": null,
                 "direct": null, "target": "–"}]}],
        "curves": [{"what": "a <curve>", "by": "hosts", "points": [1, 10], "measures": [
            {"what": "CPU (ms)", "ours": [2, 20], "peer": [], "exponent": 1.0, "peer_exponent": null},
            {"what": "peak (MB)", "ours": [0, 0.1], "peer": [], "exponent": null, "peer_exponent": null}]}]}"#;
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| folder.path().join(path);
    std::fs::write(at("measured"), measured).unwrap();
    let run = |from: &str, out: &str| {
        let script = format!("{ROOT}/scripts/numbers");
        let (from, out) = (at(from), at(out));
        Command::new(script).arg("--from").arg(from).arg("--out").arg(out).output().unwrap()
    };
    let output = run("measured", "docs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(at("docs/NUMBERS.md")).unwrap();
    for line in [
        "| size of the binary (MB) | 12.5 [12.0–13.0] | 27.5 |",
        "| one of 50 agents, idle: wake-ups a second | 0.17 | – |",
        "Each agent had a memory limit; the most that one took, page cache included, was 17.2 MB, and none was killed.",
        "| 10 | 20.0 | 0.10 |",
        "| exponent | 1.00 | flat |",
        "| binary as built (MB) | 12.5 [12.0–13.0] |",
    ] {
        assert!(page.lines().any(|l| l == line), "{line} is missing in\n{page}");
    }
    // Each picture of the page is there, and what a name has of markup is text in it.
    for picture in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let svg = std::fs::read_to_string(at("docs").join(picture)).unwrap();
        assert!(svg.starts_with("<svg") && !svg.contains("<curve>"), "{picture}: {svg}");
    }
    for (from, content) in [("half", &measured[..200]), ("none", "")] {
        if from == "half" {
            std::fs::write(at(from), content).unwrap();
        }
        let output = run(from, "not");
        let said = text(&output.stderr);
        assert!(
            !output.status.success() && said.starts_with("numbers: ") && said.lines().count() == 1,
            "{said}"
        );
        assert!(!at("not").exists());
    }
}
