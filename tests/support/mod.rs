//! What the conformance tests stand on: an agent in a scratch directory, a client that acts as Envoy, an Envoy.
//!
//! Everything here uses only the agent's public interfaces, so the same tests run against any pilot-agent
//! (`AGENT_BIN`). The istiod side is the crate `mock-istiod`.

#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

pub mod agent;
pub mod builder;
pub mod client;
pub mod clock;
pub mod commands;
pub mod disk;
pub mod google;
pub mod http;
pub mod mesh;
pub mod root;
pub mod web;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

pub use agent::{Envoy, TestAgent};
pub use client::EnvoyClient;
pub use disk::SmallDisk;
pub use mock_istiod::net::free_port;
pub use mock_istiod::{Code, Fault, MockIstiod, Resource, Set, Token};
pub use root::root_for;

/// How long a condition may take before a test fails. Generous: only a defect ever waits so long.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Looks until `check` gives something.
///
/// # Panics
/// With `what` after [`LIMIT`].
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, check: impl FnMut() -> F) -> T {
    eventually_within(LIMIT, what, check).await
}

/// As [`eventually`], for what may take longer.
///
/// # Panics
/// With `what` after `limit`.
pub async fn eventually_within<T, F: Future<Output = Option<T>>>(
    limit: Duration,
    what: &str,
    mut check: impl FnMut() -> F,
) -> T {
    let looked = async {
        loop {
            if let Some(found) = check().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(limit, looked).await.unwrap_or_else(|_| panic!("never came true: {what}"))
}

/// A setting of the run itself.
#[expect(clippy::disallowed_methods, reason = "what the tests run on is named by the environment")]
pub fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The agent under test: `AGENT_BIN`, or the one built with the tests.
pub fn agent_bin() -> PathBuf {
    let path = variable("AGENT_BIN").unwrap_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_pilot-agent")));
    std::path::absolute(&path).expect("the working directory is readable")
}

/// A real Vault or OpenBao: `VAULT_BIN`.
pub fn vault_bin() -> Option<PathBuf> {
    variable("VAULT_BIN")
}

/// A real Envoy: what `scripts/get-envoy` finds.
///
/// # Panics
/// When there is none: a test that needs it fails and is never skipped.
pub fn envoy_bin() -> PathBuf {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| fetched("get-envoy")).clone()
}

/// Prometheus' promtool: what `scripts/get-promtool` finds.
///
/// # Panics
/// When there is none, likewise.
pub fn promtool_bin() -> PathBuf {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| fetched("get-promtool")).clone()
}

fn fetched(script: &str) -> PathBuf {
    let script = format!("{}/scripts/{script}", env!("CARGO_MANIFEST_DIR"));
    let output = std::process::Command::new(&script).output().unwrap_or_else(|e| panic!("{script}: {e}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
}
