//! What only root can see: kernel rules, port 53, disks that are full, other users' files.

use std::process::Command;
use std::sync::OnceLock;

/// Why the privileged part cannot run here, if it cannot.
pub fn obstacle() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&str>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        if !rustix::process::geteuid().is_root() {
            return Some("not root");
        }
        let made = Command::new("unshare").args(["--mount", "true"]).output();
        (!made.is_ok_and(|made| made.status.success())).then_some(
            "there are no mount namespaces; a chroot has them where its root is a mount point (mount --bind it onto itself)",
        )
    })
}

/// Whether the privileged part can run. Where it cannot, a test that needs it says so, in a line that nobody can
/// overlook, and returns; `PRIVILEGED=required` makes that a failure.
///
/// # Panics
/// When it is required and cannot be.
pub fn root_for(what: &str) -> bool {
    let obstacle = obstacle();
    if let Some(reason) = obstacle {
        say(&format!("{what} needs root: {reason}"));
    }
    obstacle.is_none()
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
