//! Programs beside the agent's binary that a test needs built.

use std::path::{Path, PathBuf};
use std::process::Command;

/// mock-istiod. Tests of the workspace build it beside the agent; alone, a test builds it here.
pub(crate) fn mock_istiod() -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_pilot-agent")).with_file_name("mock-istiod");
    if !path.exists() {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--locked", "--offline", "-p", "mock-istiod", "--bin", "mock-istiod"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.unwrap().success() && path.exists(), "mock-istiod is not built");
    }
    path
}
