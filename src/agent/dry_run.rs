//! What would run, without running it: everything that can be refused is refused, Envoy judges the
//! bootstrap if it is there, and nothing is bound or written.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::said;
use crate::base::clock::{Clock, System};
use crate::base::error::chain;
use crate::base::lane;
use crate::base::metrics::Metrics;
use crate::config::Config;
use crate::config::parts::Error;
use crate::config::parts::envoy::Bootstrap;
use crate::envoy::validate::{Verdict, validate};
use crate::istiod::auth::Mock;
use crate::istiod::{Connector, RootFiles};
use crate::secrets::probe::{self, Mode};
use crate::trouble::Kind;

/// Limit of Envoy's judgement; it answers within a second or two.
const VALIDATION: Duration = Duration::from_secs(30);

/// The bootstrap that Envoy would be given.
///
/// # Errors
/// What would have refused the start, and what Envoy says against the bootstrap.
pub(crate) async fn dry_run(config: &Config) -> Result<Vec<u8>, Error> {
    refusals(config).await?;
    let mode = if config.identity.owns_socket_already() {
        // It is our own, of the agent whose place is to be taken.
        Mode::Own
    } else {
        probe::look(&config.identity.socket).await.map_err(said)?
    };
    let socket = &config.identity.credential_socket;
    let mut text = bootstrap_text(&config.envoy.bootstrap, socket, mode).await?;
    judge(&config.envoy.process.binary, &text).await?;
    if !text.ends_with(b"\n") {
        text.push(b'\n');
    }
    Ok(text)
}

/// What would refuse the start, the first of it.
async fn refusals(config: &Config) -> Result<(), Error> {
    if let Some(signer) = config.ca.clone()? {
        let clock: Arc<dyn Clock> = Arc::new(System);
        super::ca::client(
            &signer,
            Arc::new(Mock),
            &Metrics::new(),
            &clock,
            &RootFiles::default(),
            &Arc::default(),
        )
        .await?;
    }
    Connector::new(config.istiod.connection.clone()).map_err(said).map(drop)
}

/// The bootstrap that Envoy would be given; unlike at a start nothing is written beside it.
///
/// # Errors
/// When it cannot be made.
pub(crate) async fn bootstrap_text(
    bootstrap: &Bootstrap,
    credential: &Path,
    mode: Mode,
) -> Result<Vec<u8>, Error> {
    let credential = probe::answers(credential).await;
    let node = bootstrap.node(mode == Mode::External, credential).await?;
    // A template may lie on a disk that does not answer.
    let bootstrap = bootstrap.clone();
    let made = lane::begin("bootstrap", move || bootstrap.render(node).map_err(|e| chain(&e)));
    let made = made.map_err(|e| Error::new(e.to_string()))?.await;
    made.map_err(|_| Error::new("the bootstrap was not made; the message stands in the log"))?
        .map_err(Error::new)
}

async fn judge(envoy: &str, bootstrap: &[u8]) -> Result<(), Error> {
    match validate(envoy, bootstrap, VALIDATION).await {
        Verdict::Accepted => tracing::info!("{envoy} accepts the bootstrap"),
        Verdict::Refused { status, reason } => {
            let text = format!("{envoy} refuses the bootstrap ({status}): {reason}");
            return Err(Error::new(text).of(Kind::BootstrapRejected));
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
