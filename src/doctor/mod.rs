//! `doctor`: finds out why a proxy does not work here, without a running agent or beside one.
//!
//! Goes through everything a start needs, in the order of a start, and says of each whether it is well, with cause
//! and what to do. What is found has the same names ([`Kind`]) as what a running agent reports, so the topmost of
//! both, by the order of causes, is the one verdict.
//!
//! Promises:
//! - It changes nothing: no file is written, no socket bound or removed, no rule touched, nothing registered at
//!   istiod. With `sign` a key is thrown away after the CA has signed for it, which the CA's log shows.
//! - It ends within [`LIMIT`]. Checks that do not depend on each other run at once, each with a limit of its own.
//! - No key, token, header value or password is in what it tells: names, dates and identities are.
//! - It needs no shell and no program beside Envoy; what it may not see as this user it says it could not see.
//!
//! The way is the agent's own: `config::read` and its parts, the dial of `istiod` with its roots and proxies, the
//! relay's way of opening a stream, the CA's client, the bootstrap of `agent`.

mod capture;
mod clock;
mod configuration;
mod envoy;
mod files;
mod limits;
mod ports;
mod report;
mod running;
mod sign;
mod token;
mod upstream;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, timeout_at};

use crate::base::error::BoxError;
use crate::base::lane;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::parts::capture::capture as captured;
use crate::config::parts::identity::{self, Fetcher, Plan};
use crate::config::{self, Sources, parts, pod};
use crate::trouble::Kind;

pub(crate) use report::{Check, Outcome, Report};

/// All of it takes no longer.
pub(crate) const LIMIT: Duration = Duration::from_secs(15);
/// A check that has not ended by then is reported as unfinished; the rest of the time is for the report.
const MARGIN: Duration = Duration::from_secs(1);

/// A start waits longer for names and addresses in the configuration; here they must leave time for the rest.
const PATIENCE: Duration = Duration::from_secs(3);

/// What to look at.
pub(crate) struct Inputs {
    /// The flags `proxy` would get.
    pub flags: Parsed,
    /// The environment.
    pub env: Env,
    /// What relative paths hang off.
    pub root: PathBuf,
    /// Have a throw-away key signed.
    pub sign: bool,
    /// The status port to ask a running agent on; none: the configuration's.
    pub port: Option<u16>,
}

/// What the checks share.
struct Scene {
    config: Arc<Sources>,
    plan: Option<Plan>,
    now: SystemTime,
    end: Instant,
}

impl Scene {
    /// Whether istiod knows this workload by its token, and not by a certificate.
    fn needs_token(&self) -> bool {
        let mounted = self.plan.as_ref().is_some_and(|p| p.file_mounted);
        !mounted && parts::files::provided(&self.config).is_none()
    }

    /// Where its token comes from; a type that is unknown is told among the configuration.
    fn fetcher(&self) -> Fetcher {
        identity::tokens(&self.config).map_or(Fetcher::File, |tokens| tokens.fetcher)
    }
}

/// Goes through everything.
pub(crate) async fn examine(inputs: Inputs) -> Report {
    let started = Instant::now();
    let end = started + LIMIT - MARGIN;
    let sign = inputs.sign;
    let port = inputs.port;
    let mut report = Report::new(SystemTime::now());
    let loaded = within(end, "configuration", load(inputs)).await;
    let (config, mut checks) = match loaded {
        Ok((config, checks)) => (config, checks),
        Err(late) => (None, vec![late]),
    };
    let Some(config) = config else {
        report.checks.append(&mut checks);
        let port = port.unwrap_or(15020);
        let (limits, running) = tokio::join!(blocking("limits", end, limits::checks), running::look(port));
        report.checks.extend(limits);
        report.add_running(running);
        for name in ["files", "token", "connect", "tls", "grpc", "ports", "envoy"] {
            report.checks.push(Check::skip(name, "the configuration comes first"));
        }
        report.finish(started.elapsed());
        return report;
    };
    let plan = identity::plan(&config).ok();
    let scene = Arc::new(Scene { config, plan, now: report.at, end });
    checks.extend(configuration::parts(&scene.config));
    let status_port = port.or_else(|| parts::ports::status(&scene.config));
    let (files, token, upstream, signed, capture, envoy, limits, running) = tokio::join!(
        blocking("files", end, {
            let scene = scene.clone();
            move || files::checks(&scene)
        }),
        token::checks(&scene),
        upstream::checks(&scene),
        sign::checks(&scene, sign),
        blocking("capture", end, {
            let config = captured(&scene.config);
            move || capture::checks(config)
        }),
        envoy::checks(&scene),
        blocking("limits", end, limits::checks),
        running::look(status_port.unwrap_or(15020)),
    );
    let ports = blocking("ports", end, {
        let (scene, alive) = (scene.clone(), running.is_alive());
        move || ports::checks(&scene, status_port, alive)
    });
    let ports = ports.await;
    let (token, claims) = token;
    let clock = clock::check(scene.now, claims.as_ref(), &upstream.chains, upstream.date.as_deref());
    checks.extend(files);
    checks.push(token);
    checks.push(clock);
    checks.extend(upstream.checks);
    checks.push(signed);
    for part in [ports, capture, envoy, limits] {
        checks.extend(part);
    }
    report.checks = checks;
    report.add_running(running);
    report.weigh();
    report.finish(started.elapsed());
    report
}

/// What captures traffic, one line a set; empty where nothing does or this user may not read it.
pub(crate) async fn capture(config: &Sources) -> Vec<String> {
    let config = captured(config);
    let end = Instant::now() + Duration::from_secs(5);
    let checks = blocking("capture", end, move || capture::checks(config)).await;
    checks.into_iter().filter(|c| c.state != Outcome::Skip).map(|c| c.sentence()).collect()
}

/// What there is to say before a start about roots, files, rights and the token, for `proxy --dry-run`: one line each,
/// nothing where all is well. Asks nobody but the disk.
pub(crate) async fn preflight(config: &Arc<Sources>) -> Vec<String> {
    let plan = identity::plan(config).ok();
    let end = Instant::now() + LIMIT;
    let scene = Arc::new(Scene { config: config.clone(), plan, now: SystemTime::now(), end });
    let mut checks = blocking("files", end, {
        let scene = scene.clone();
        move || files::checks(&scene)
    })
    .await;
    checks.push(token::checks(&scene).await.0);
    let odd = checks.iter().filter(|c| matches!(c.state, Outcome::Warn | Outcome::Fail));
    odd.map(|c| format!("{}: {}", c.name, c.sentence())).collect()
}

async fn load(inputs: Inputs) -> (Option<Arc<Sources>>, Vec<Check>) {
    let read = move || {
        let annotations = pod::read(&inputs.root.join(pod::ANNOTATIONS)).unwrap_or_default();
        let annotation = |key: &str| annotations.get(key).cloned();
        let loaded = config::read_within(inputs.flags, &inputs.env, &inputs.root, annotation, PATIENCE);
        let checks = configuration::checks(loaded.as_ref(), &inputs.env, &inputs.root, &annotations);
        (loaded.ok(), checks)
    };
    match on_thread("configuration", read).await {
        Ok(done) => done,
        Err(e) => (None, vec![Check::fail("configuration", Kind::ConfigInvalid, e.to_string())]),
    }
}

async fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BoxError> {
    let answer = lane::begin(name, work)?;
    answer.await.map_err(|_| "the check panicked; the message stands in the log".into())
}

// A name that does not resolve or a disk that hangs must not hold up the other checks.
async fn within<T>(end: Instant, name: &'static str, work: impl Future<Output = T>) -> Result<T, Check> {
    timeout_at(end, work).await.map_err(|_| unfinished(name))
}

fn unfinished(name: &'static str) -> Check {
    let said = format!("not finished within {} s", (LIMIT - MARGIN).as_secs());
    Check::warn(
        name,
        said,
        "something this check asks does not answer: look at the disk, DNS and load of this machine",
    )
}

async fn blocking(
    name: &'static str,
    end: Instant,
    work: impl FnOnce() -> Vec<Check> + Send + 'static,
) -> Vec<Check> {
    match within(end, name, on_thread(name, work)).await {
        Ok(Ok(checks)) => checks,
        Ok(Err(e)) => vec![Check::warn(name, e.to_string(), "report this line with the agent's version")],
        Err(late) => vec![late],
    }
}
