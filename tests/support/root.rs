//! What only root can see: kernel rules, port 53, disks that are full, other users' files.

/// Whether this is root. Where it is not, a test that needs it says so, in a line that nobody can overlook, and
/// returns; `PRIVILEGED=required` makes that a failure.
///
/// # Panics
/// When it is required and cannot be.
pub fn root_for(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        say(&format!("{what} needs root"));
    }
    root
}

/// Says why a privileged test does not run.
///
/// # Panics
/// When it is required to.
pub fn say(reason: &str) {
    #[expect(clippy::disallowed_methods, reason = "a switch of the test run, not of the product")]
    let required = std::env::var_os("PRIVILEGED").is_some_and(|v| v == "required");
    assert!(!required, "the privileged tests cannot run: {reason}");
    eprintln!("\n*** THE PRIVILEGED TESTS DID NOT RUN: {reason} ***\n");
}
