//! A wall clock that a test can step, for one agent.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::TestAgent;
use super::builder::Builder;

/// Where the offset stands, below the working directory.
const OFFSET: &str = "clock-offset";

impl Builder {
    /// The agent's wall clock is this many seconds off from the start; [`TestAgent::step_clock`] changes that.
    /// Works with any agent that asks the C library for the time.
    pub fn clock_off_by(self, seconds: i64) -> Self {
        self.env("LD_PRELOAD", library().to_string_lossy())
            .env("CLOCK_OFFSET_FILE", OFFSET)
            .file(OFFSET, seconds.to_string())
    }
}

impl TestAgent {
    /// Sets how far the agent's wall clock is off.
    pub fn step_clock(&self, seconds: i64) {
        self.put(OFFSET, seconds.to_string());
    }
}

/// Compiles the library once; every machine that builds the agent has a C compiler.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/clock.c");
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("clock-{}.so", std::process::id()));
        let output =
            Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&built).arg(source).output();
        let output = output.expect("cc can be run: the crypto crate needs it too");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        built
    })
}
