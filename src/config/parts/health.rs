//! Health checks of the application on a VM.

use super::Sources;
use crate::config::env::var;
use crate::health::{self, Refused};
use crate::status;

/// The checks; `None` without `readinessProbe`.
///
/// # Errors
/// When the probe is invalid; the agent goes on without checks then.
pub(crate) fn checks(config: &Sources, all_ipv6: bool) -> Result<Option<health::Config>, Refused> {
    let Some(probe) = &config.mesh.proxy.readiness_probe else { return Ok(None) };
    let legacy = config.settings.flag(var::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION);
    let host = config.addresses.first().map(String::as_str).filter(|_| !legacy).unwrap_or("localhost");
    health::Config::new(probe, host, status::probe_source(all_ipv6)).map(Some)
}
