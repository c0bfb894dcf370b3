//! What would run, without running it: everything that can be refused is refused, Envoy judges the
//! bootstrap if it is there, and nothing is bound or written.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::process::Command;

use super::{bootstrap, said};
use crate::config::Config;
use crate::config::env::var;
use crate::config::parts::{self, Error, identity};
use crate::envoy::Bootstrap as _;
use crate::secrets::probe::{self, Mode};

/// Limit of Envoy's judgement; it answers within a second or two.
const VALIDATION: Duration = Duration::from_secs(30);

/// The bootstrap that Envoy would be given.
///
/// # Errors
/// What would have refused the start, and what Envoy says against the bootstrap.
pub async fn dry_run(config: Config) -> Result<Vec<u8>, Error> {
    let config = Arc::new(config);
    let plan = identity::plan(&config)?;
    let addresses = bootstrap::addresses(&config);
    parts::status::server(&config, bootstrap::all_ipv6(&addresses))?;
    parts::istiod::xds(&config, plan.file_mounted)?;
    if !plan.file_mounted {
        parts::istiod::ca(&config)?;
    }
    let mode = if config.settings.flag(var::DISABLE_ENVOY) {
        Mode::Own
    } else {
        probe::workload(&identity::workload_socket(&config)).await.map_err(said)?
    };
    let node = bootstrap::node(&config, &addresses, mode).await?;
    let root = rustix::process::getuid().is_root();
    parts::envoy::process(&config, &addresses, Path::new("/proc/self/exe"), root)?;
    let rendered = bootstrap::Bootstrap::new(config.clone(), node).render();
    let mut text = rendered.map_err(|e| Error::new(crate::base::error::chain(&*e)))?;
    judge(&config.mesh.proxy.binary_path, &text).await?;
    if !text.ends_with(b"\n") {
        text.push(b'\n');
    }
    Ok(text)
}

async fn judge(envoy: &str, bootstrap: &[u8]) -> Result<(), Error> {
    let mut command = Command::new(envoy);
    command.args(["--mode", "validate", "--log-level", "error", "--config-yaml"]);
    command.arg(String::from_utf8_lossy(bootstrap).as_ref()).kill_on_drop(true);
    // Standard output is for the bootstrap; what Envoy has to say goes where the log goes.
    let child = match command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn() {
        Ok(child) => child,
        Err(e) => {
            tracing::warn!("the bootstrap was not validated: {envoy} cannot be started: {e}");
            return Ok(());
        }
    };
    let mut child = child;
    match tokio::time::timeout(VALIDATION, child.wait()).await {
        Ok(Ok(status)) if status.success() => {
            tracing::info!("{envoy} accepts the bootstrap");
            Ok(())
        }
        Ok(Ok(status)) => {
            Err(Error::new(format!("{envoy} refuses the bootstrap ({status}); its reason stands above")))
        }
        Ok(Err(e)) => Err(Error::new(format!("{envoy} cannot be waited for: {e}"))),
        Err(_) => {
            tracing::warn!(
                "the bootstrap was not validated: {envoy} gave no answer within {} s",
                VALIDATION.as_secs()
            );
            Ok(())
        }
    }
}
