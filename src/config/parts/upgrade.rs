//! How the agent may be replaced while it runs.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::Sources;
use crate::config::env::var;

/// What is needed for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Upgrade {
    /// Where it is asked for: `UPGRADE` in `configPath`.
    pub socket: PathBuf,
    /// How long a new program may take to be tried, and as long again until it serves.
    pub limit: Duration,
}

/// The socket's place, whether there is one or not.
#[must_use]
pub(crate) fn socket(config: &Sources) -> PathBuf {
    config.config_path().join("UPGRADE")
}

/// `AGENT_UPGRADE`.
#[must_use]
pub(crate) fn upgrade(config: &Sources) -> Option<Upgrade> {
    let s = &config.settings;
    s.flag(var::AGENT_UPGRADE)
        .then(|| Upgrade { socket: socket(config), limit: s.duration(var::AGENT_UPGRADE_TIMEOUT) })
}
