//! What would run, without running it: everything that can be refused is refused, Envoy judges the
//! bootstrap if it is there, and nothing is bound or written.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::said;
use crate::base::clock::{Clock, System};
use crate::base::error::{BoxError, chain};
use crate::base::metrics::Metrics;
use crate::base::{bounded, lane};
use crate::config::Config;
use crate::config::parts::Error;
use crate::config::parts::envoy::{Bootstrap, Presence};
use crate::envoy::ConfigFile;
use crate::envoy::validate::{self, Verdict, validate};
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
    dry_run_within(config, None).await
}

/// As [`dry_run`]; an Envoy that gives no answer within `limit` refuses it.
///
/// # Errors
/// As there.
pub(super) async fn dry_run_within(config: &Config, limit: Option<Duration>) -> Result<Vec<u8>, Error> {
    refusals(config).await?;
    let mode = if config.identity.owns_socket_already() {
        // It is our own, of the agent whose place is to be taken.
        Mode::Own
    } else {
        probe::look(&config.identity.socket).await.map_err(said)?
    };
    let socket = &config.identity.credential_socket;
    let mut text = match (&config.envoy.process.file, config.envoy.presence) {
        (ConfigFile::Custom(path), Presence::Own) => {
            // The start makes it all the same.
            config.envoy.bootstrap.has_node()?;
            let text = custom_text(path).await;
            judge(config, validate::Bootstrap::File(path), limit).await?;
            text
        }
        (ConfigFile::Generated(path), Presence::Own | Presence::External) => {
            let text = bootstrap_text(&config.envoy.bootstrap, socket, mode).await?;
            judge(config, validate::Bootstrap::named(path, &text), limit).await?;
            text
        }
        // The start makes none.
        (ConfigFile::Custom(_), Presence::External) | (_, Presence::None) => {
            config.envoy.bootstrap.has_node()?;
            let text = bootstrap_text(&config.envoy.bootstrap, socket, mode).await.unwrap_or_else(|e| {
                tracing::warn!("the bootstrap, which nobody is given, is not shown: {e}");
                Vec::new()
            });
            judge(config, validate::Bootstrap::Json(&text), limit).await?;
            text
        }
    };
    if !text.is_empty() && !text.ends_with(b"\n") {
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

/// What stands in the user's own, for people. It is for Envoy to refuse it.
async fn custom_text(path: &Path) -> Vec<u8> {
    let file = path.to_owned();
    let read = async {
        Ok::<_, BoxError>(lane::begin("customConfigFile", move || bounded::given_text(&file))?.await??)
    };
    read.await.map(String::into_bytes).unwrap_or_else(|e| {
        tracing::warn!("customConfigFile {} is not shown: {e}", path.display());
        Vec::new()
    })
}

/// As [`validate()`]; what is put over a text of YAML is put over the same in JSON.
pub(crate) async fn judged(
    envoy: &str,
    bootstrap: validate::Bootstrap<'_>,
    over: Option<&str>,
    limit: Duration,
) -> Verdict {
    let json = match (bootstrap, over) {
        (validate::Bootstrap::Yaml(text), Some(_)) => as_json(text),
        _ => None,
    };
    validate(envoy, json.as_deref().map_or(bootstrap, validate::Bootstrap::Json), over, limit).await
}

// What is no YAML is for Envoy to refuse.
fn as_json(text: &[u8]) -> Option<Vec<u8>> {
    let value = crate::config::yaml::to_json(std::str::from_utf8(text).ok()?).ok()?;
    Some(value.to_string().into_bytes())
}

// As it would be started. Another binary, which may be here, has no say in what somebody else starts.
async fn judge(
    config: &Config,
    bootstrap: validate::Bootstrap<'_>,
    limit: Option<Duration>,
) -> Result<(), Error> {
    let process = &config.envoy.process;
    let why = match config.envoy.presence {
        Presence::Own => None,
        Presence::External => Some("somebody else starts Envoy (ENVOY_EXTERNAL)"),
        Presence::None => Some("no Envoy is started (DISABLE_ENVOY)"),
    };
    if let Some(why) = why {
        tracing::info!("the bootstrap was not validated: {why}");
        return Ok(());
    }
    let (envoy, over) = (process.binary.as_str(), process.arguments.override_json.as_deref());
    match judged(envoy, bootstrap, over, limit.unwrap_or(VALIDATION)).await {
        Verdict::Accepted if over.is_some() => {
            tracing::info!("{envoy} accepts the bootstrap with what ISTIO_BOOTSTRAP_OVERRIDE puts over it");
        }
        Verdict::Accepted => tracing::info!("{envoy} accepts the bootstrap"),
        Verdict::Refused { status, reason } => {
            let text = format!("{envoy} refuses the bootstrap ({status}): {reason}");
            return Err(Error::new(text).of(Kind::BootstrapRejected));
        }
        Verdict::NotStarted(e) => {
            tracing::warn!("the bootstrap was not validated: {envoy} cannot be started: {e}");
        }
        Verdict::Late if let Some(limit) = limit => {
            let text = format!(
                "{envoy} has not judged the bootstrap within {limit:?}: is it an Envoy? On a slow machine raise AGENT_UPGRADE_TIMEOUT"
            );
            return Err(Error::new(text));
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
