//! Programs beside the test suites, in their short forms: faults inside the agent (`tests/faults`), attacks from outside
//! (`tests/attack`). Each drives the binary only, and prints a line for each thing it tried.

use std::process::Command;

#[path = "support/built.rs"]
mod built;

use built::mock_istiod;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[allow(
    clippy::disallowed_methods,
    reason = "which binary is tested is the caller's choice, as for tests/conformance"
)]
fn run(program: &str, more: &[&str]) {
    let agent = std::env::var_os("AGENT_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_pilot-agent").into());
    let output = Command::new("python3")
        .args(["-m", program, "--agent"])
        .arg(agent)
        .arg("--istiod")
        .arg(mock_istiod())
        .args(more)
        .current_dir(ROOT)
        .output()
        .expect("python3 can be run: other tests need it too");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_kind_of_call_fails_once_and_the_agent_goes_on_or_says_why() {
    run("tests.faults", &["--short", "--log", "-j", "4"]);
}
