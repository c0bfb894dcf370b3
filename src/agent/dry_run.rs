//! What would run, without running it: everything that can be refused is refused, Envoy judges the
//! bootstrap if it is there, and nothing is bound or written.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{bootstrap, said};
use crate::base::clock::{Clock, System};
use crate::base::metrics::Metrics;
use crate::config::env::var;
use crate::config::parts::{self, Error, identity};
use crate::config::{Config, bootstrap as from_config};
use crate::envoy::validate::{Verdict, validate};
use crate::istiod::Connector;
use crate::istiod::auth::Mock;
use crate::secrets::probe::{self, Mode};

/// Limit of Envoy's judgement; it answers within a second or two.
const VALIDATION: Duration = Duration::from_secs(30);

/// The bootstrap that Envoy would be given.
///
/// # Errors
/// What would have refused the start, and what Envoy says against the bootstrap.
pub async fn dry_run(config: Config) -> Result<Vec<u8>, Error> {
    refusals(&config).await?;
    let mode = if config.settings.flag(var::DISABLE_ENVOY) {
        Mode::Own
    } else {
        probe::look(&identity::workload_socket(&config)).await.map_err(said)?
    };
    let mut text = bootstrap_text(&config, mode).await?;
    judge(&config.mesh.proxy.binary_path, &text).await?;
    if !text.ends_with(b"\n") {
        text.push(b'\n');
    }
    Ok(text)
}

/// What would refuse the start, the first of it.
async fn refusals(config: &Config) -> Result<(), Error> {
    let plan = identity::plan(config)?;
    let addresses = bootstrap::addresses(config);
    parts::status::server(config, bootstrap::all_ipv6(&addresses))?;
    parts::gateway::secrets(config)?;
    parts::sts::service(config, bootstrap::all_ipv6(&addresses)).await?;
    Connector::new(parts::istiod::xds(config, plan.file_mounted)?).map_err(said)?;
    if !plan.file_mounted {
        let clock: Arc<dyn Clock> = Arc::new(System);
        super::ca::client(config, Arc::new(Mock), &Metrics::new(), &clock, &Arc::default()).await?;
    }
    let root = rustix::process::getuid().is_root();
    parts::envoy::process(config, &addresses, Path::new("/proc/self/exe"), root).map(drop)
}

/// The bootstrap that Envoy would be given; unlike at a start nothing is written beside it.
///
/// # Errors
/// When it cannot be made.
pub async fn bootstrap_text(config: &Config, mode: Mode) -> Result<Vec<u8>, Error> {
    let addresses = bootstrap::addresses(config);
    let credential = probe::answers(&config.path(identity::CREDENTIAL_SOCKET)).await;
    let node = bootstrap::node(config, &addresses, mode, credential).await?;
    let template = parts::envoy::template(config);
    let options = config.bootstrap_options(node);
    let rendered = from_config::render(&options, template.as_deref(), config.settings.env().map());
    rendered.map_err(|e| Error::new(crate::base::error::chain(&e)))
}

async fn judge(envoy: &str, bootstrap: &[u8]) -> Result<(), Error> {
    match validate(envoy, bootstrap, VALIDATION).await {
        Verdict::Accepted => tracing::info!("{envoy} accepts the bootstrap"),
        Verdict::Refused { status, reason } => {
            return Err(Error::new(format!("{envoy} refuses the bootstrap ({status}): {reason}")));
        }
        Verdict::NotStarted(e) => {
            tracing::warn!("the bootstrap was not validated: {envoy} cannot be started: {e}");
        }
        Verdict::Late => tracing::warn!(
            "the bootstrap was not validated: {envoy} gave no answer within {} s",
            VALIDATION.as_secs()
        ),
        Verdict::TooLong => {
            tracing::warn!("the bootstrap was not validated: it is too long for {envoy}'s command line");
        }
    }
    Ok(())
}
