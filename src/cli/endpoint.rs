//! Where the running agent answers: found as the agent itself finds it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::{self, Sources, go, pod};

/// Where the agent's status server is when nothing else is said.
pub(super) const DEFAULT: u16 = 15020;

/// The configuration as environment, files and annotations give it; none where they cannot be read: then the agent
/// does not run on them either. No name is looked up for it, and nothing waited for.
pub(super) fn config(env: &Env) -> Option<Arc<Sources>> {
    config_in(Path::new("."), env)
}

/// As [`config()`], for an agent whose working directory is `dir`.
pub(super) fn config_in(dir: &Path, env: &Env) -> Option<Arc<Sources>> {
    let annotations = pod::read(&dir.join(pod::ANNOTATIONS)).unwrap_or_default();
    // What the agent says of its configuration is in the agent's log.
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::new(), || {
        config::read_within(Parsed::default(), env, dir, |key| annotations.get(key).cloned(), Duration::ZERO)
            .ok()
    })
}

/// The status port of a configuration.
pub(super) fn port_of(config: &Arc<Sources>) -> Option<u16> {
    config.status_port().filter(|port| *port > 0)
}

/// `--port` is none.
#[derive(Debug, thiserror::Error)]
#[error("--port={0}: a port is within 1..65535")]
pub(super) struct NoPort(String);

/// The status port: `--port`, or the configuration's, or the default.
///
/// # Errors
/// When `--port` is no port.
pub(super) fn status_port(parsed: &Parsed, env: &Env) -> Result<u16, NoPort> {
    let found = given(parsed)?.or_else(|| config(env).as_ref().and_then(port_of));
    Ok(found.unwrap_or(DEFAULT))
}

/// `--port`, where it is given.
///
/// # Errors
/// When it is no port.
pub(super) fn given(parsed: &Parsed) -> Result<Option<u16>, NoPort> {
    let Some(text) = parsed.get("port") else { return Ok(None) };
    let port = go::integer(text, 32).ok().and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0);
    port.map(Some).ok_or_else(|| NoPort(text.to_owned()))
}

/// The status port as the agent finds it.
pub(super) fn of(env: &Env) -> u16 {
    config(env).as_ref().and_then(port_of).unwrap_or(DEFAULT)
}
