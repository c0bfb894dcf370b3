//! Where the running agent answers: found as the agent itself finds it.

use std::path::Path;

use crate::config::args::{Flag, Parsed};
use crate::config::env::Env;
use crate::config::{self, go, pod};

/// Where the agent's status server is when nothing else is said.
const DEFAULT: u16 = 15020;

/// The status port: `--port`, or what mesh file, `PROXY_CONFIG` and annotations say. Where these cannot be read the
/// agent is not running on them either, and the default is tried.
///
/// # Errors
/// When `--port` is no port.
pub(super) fn status_port(parsed: &Parsed, flags: &[Flag], env: &Env) -> Result<u16, String> {
    if let Some(text) = parsed.get("port") {
        let port = go::integer(text, 32).ok().and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0);
        return port.ok_or_else(|| format!("--port={text}: a port is within 1..65535"));
    }
    debug_assert!(flags.iter().any(|f| f.name == "port"));
    Ok(of(env))
}

/// The status port as the agent finds it.
pub(super) fn of(env: &Env) -> u16 {
    let annotations = pod::read(Path::new(pod::ANNOTATIONS)).unwrap_or_default();
    let loaded = config::load(Parsed::default(), env, Path::new("."), |key| annotations.get(key).cloned());
    let found = loaded.ok().and_then(|config| u16::try_from(config.mesh.proxy.status_port).ok());
    found.filter(|port| *port > 0).unwrap_or(DEFAULT)
}
