//! The composition root: the only place that makes parts and connects them. Read [`run`] from top to bottom
//! and you know the order of the start; `shutdown` knows the order of the end.
//!
//! [`run`] promises: everything that can be refused is refused before anything is bound; everything is
//! bound before Envoy is started, so Envoy never finds a socket missing; the task that fails or panics is named
//! in the last line of the log.
//!
//! | file | is about |
//! |---|---|
//! | `common` | what every step needs: configuration, clock, metrics, troubles, groups of tasks |
//! | `upstream` | who signs, with whose token, and the way to istiod |
//! | `bind` | every socket and port, and the certificate on its way |
//! | `serve` | the tasks, and what they are joined by |
//! | `upgrade` | a new version takes over |
//! | `shutdown` | waiting for a reason to end, and the orderly end |
//! | the others | one part each: what of it is made here |

mod bind;
mod ca;
mod callers;
mod common;
mod dns;
mod document;
mod dry_run;
mod health;
mod refusals;
mod render;
mod serve;
mod shutdown;
mod signals;
mod stages;
mod sts;
mod systemd;
mod tokens;
pub(crate) mod upgrade;
mod upstream;
mod wasm;
mod wiring;

pub(crate) use ca::client as ca_client;
pub(crate) use dry_run::{bootstrap_text, dry_run, judged};
pub(crate) use tokens::AUDIENCE;

use std::sync::Arc;
use std::time::Duration;

use common::Common;

use crate::base::handover;
use crate::config::Config;
use crate::config::parts::Error;
use crate::config::parts::envoy::Presence;
use crate::envoy::{Handle, Supervisor};
use crate::secrets::probe::{self, Mode};
use crate::trouble::Kind;
use crate::xds;
pub(crate) use signals::Early;
use upgrade::{Door, Heir, Upgrades};

/// Runs the agent to its end; gives the process's exit status. `heir`: it takes the place of another in this process;
/// `early`: what ends it until its own handlers are there.
///
/// # Errors
/// When the start is refused: nothing was told yet.
pub(crate) async fn run(config: Arc<Config>, heir: Option<Heir>, early: Early) -> Result<u8, Error> {
    let limit = heir.as_ref().and(config.upgrade.as_ref()).map(|upgrade| upgrade.limit);
    // On the heap: what the start needs is given back once it serves. On the stack it would stay in memory for good,
    // three times over, once for each frame that such a future passes through.
    let begin = Box::pin(begin(config, limit.and(heir.as_ref()), &early));
    let begun = match limit {
        // Somebody else can serve if this does not.
        Some(limit) => tokio::time::timeout(limit, begin).await.unwrap_or_else(|_| {
            let text = format!("it did not come to serve within {limit:?} (AGENT_UPGRADE_TIMEOUT)");
            Err(Error::new(text).of(Kind::PartFailed))
        }),
        None => begin.await,
    };
    let Start::Serves(begun) = begun? else { return Ok(0) };
    let Begun { common, supervisor, envoy, signals, upgrades } = *begun;
    if let Some(heir) = heir {
        // There is no way back from here.
        handover::unblock_signals();
        if let Some(stop) = heir.stop() {
            shutdown::begin(&common.tasks, &envoy, signals::Signals::named(stop));
        }
        heir.settle();
    }
    let end = shutdown::supervise(supervisor, &envoy, signals, upgrades, common.tasks, &common.troubles);
    Ok(Box::pin(end).await)
}

/// An agent that serves, and whose Envoy is to be started.
struct Begun {
    common: Common,
    supervisor: Supervisor,
    envoy: Handle,
    signals: signals::Signals,
    upgrades: Option<Upgrades>,
}

/// What a start has come to.
enum Start {
    Serves(Box<Begun>),
    /// Somebody has ended it before anything was bound.
    GivenUp,
}

async fn begin(config: Arc<Config>, heir: Option<&Heir>, early: &Early) -> Result<Start, Error> {
    let common = Common::new(config)?;
    let signals = signals::Signals::install(early);
    let mut signals = signals.map_err(|e| Error::new(format!("signals: {e}")).of(Kind::PartFailed))?;
    // Another server on the workload's socket may be waited for.
    let mut upstream = tokio::select! {
        biased;
        prepared = upstream::prepare(&common, heir) => prepared?,
        // Who takes the place of another ends what that one has begun, and so has to serve first.
        reason = signals.next(), if heir.is_none() => {
            tracing::info!("{reason}: the start is given up");
            return Ok(Start::GivenUp);
        }
    };
    let bound = bind::bind(&common, &mut upstream, heir).await?;
    let (supervisor, envoy) = supervisor(&common, upstream.mode, &bound.xds.0, heir).await?;
    let_others_run().await;
    let upgrades = upgrades(&common, &bound, &envoy, &mut signals, heir)?;
    serve::serve(&common, upstream, bound, &envoy);
    // Starting Envoy holds this thread for a millisecond or two; the CA is greeted before, and answers meanwhile:
    // one turn to find the connection open, one to speak on it.
    let_others_run().await;
    let_others_run().await;
    Ok(Start::Serves(Box::new(Begun { common, supervisor, envoy, signals, upgrades })))
}

/// How this program is replaced by another, where that is wanted.
fn upgrades(
    common: &Common,
    bound: &bind::Bound,
    envoy: &Handle,
    signals: &mut signals::Signals,
    heir: Option<&Heir>,
) -> Result<Option<Upgrades>, Error> {
    let (Some(settings), Some(signal)) =
        (&common.config.upgrade, common.config.upgrade.as_ref().and_then(|_| signals.take_upgrade()))
    else {
        return Ok(None);
    };
    let door = Door::bind(&settings.socket).map_err(|e| said(e).after("AGENT_UPGRADE"))?;
    Ok(Some(Upgrades::new(upgrade::Parts {
        envoy: envoy.clone(),
        secrets: bound.identity.clone(),
        xds: bound.xds.0.handle(),
        names: bound.wires.last_names.clone(),
        stages: common.tasks.clone(),
        notify: common.config.notify.clone(),
        limit: settings.limit,
        process: common.config.envoy.process.clone(),
        door,
        signal,
        counts: heir.map(Heir::counts).unwrap_or_default(),
        metrics: &common.metrics,
        watches: &common.watches,
    })))
}

/// What runs Envoy, and what it will be told.
async fn supervisor(
    common: &Common,
    mode: Mode,
    relay: &xds::Server,
    heir: Option<&Heir>,
) -> Result<(Supervisor, Handle), Error> {
    let config = &common.config;
    let credential = probe::credential(&config.identity.credential_socket)
        .await
        .map_err(|e| said(e).after("failed to generate bootstrap metadata"))?;
    let bootstrap = &config.envoy.bootstrap;
    let node = bootstrap.node(mode == Mode::External, credential).await?;
    let_others_run().await;
    match bootstrap.write_grpc(&node) {
        // The one that the program before has written is there, and a full disk must not take the place of both.
        Err(error) if heir.is_some() => tracing::warn!("{error}; the one from before stays"),
        written => written?,
    }
    if let Some(keeper) = relay.keeper(bootstrap.owner(&node), common.tasks.xds.token()) {
        common.tasks.xds.run("last good configuration", keeper);
    }
    common.tasks.xds.run("heap", relay.tidy(common.tasks.xds.token()));
    let make = match config.envoy.presence {
        Presence::None => return Ok(Supervisor::idle(&common.metrics)),
        Presence::External => Supervisor::external,
        Presence::Own => Supervisor::new,
    };
    let text = Box::new(render::OfNode::new(bootstrap.clone(), node));
    let process = config.envoy.process.clone();
    let made = match heir.and_then(Heir::envoys) {
        Some(kept) if config.envoy.presence == Presence::Own => {
            Supervisor::adopting(process, text, kept, &common.metrics)
        }
        _ => make(process, text, &common.metrics),
    };
    let (supervisor, handle) = made.map_err(said)?;
    let trouble = Arc::new(common.troubles.reporter("default"));
    let upstream = relay.handle();
    let supervisor = supervisor.with_trouble(trouble).with_watches(common.watches.clone());
    Ok((supervisor.with_upstream(move || upstream.is_away()), handle))
}

/// Lets every task that can go on do so once. The start never waits for the certificate, and so would hold the one
/// thread from its first line to its last: the steps of getting one (resolve, connect, shake hands) go on between
/// those of the start, and the certificate is there some milliseconds earlier.
async fn let_others_run() {
    tokio::task::yield_now().await;
}

fn said(error: impl std::error::Error + 'static) -> Error {
    Error::new(crate::base::error::chain(&error)).of(refusals::kind_of(&error))
}

/// How long a stage of the end may take before it is named and cut off.
pub(crate) const STAGE: Duration = Duration::from_secs(3);
