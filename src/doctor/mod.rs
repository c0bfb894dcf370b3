//! `doctor`: finds out why a proxy does not work here, without a running agent or beside one.
//!
//! Goes through everything a start needs, in the order of a start, and says of each whether it is well, with cause
//! and what to do. What is found has the same names ([`Kind`]) as what a running agent reports,
//! so the topmost of both, by the order of causes, is the one verdict.
//!
//! Promises:
//! - It changes nothing: no file is written, no socket bound or removed, no rule touched, nothing registered at
//!   istiod. With `sign` a key is thrown away after the CA has signed for it, which the CA's log shows.
//! - It ends within [`LIMIT`]. Checks that do not depend on each other run at once, each with a limit of its own.
//! - No key, token, header value or password is in what it tells: names, dates and identities are.
//! - It needs no shell and no program beside Envoy; what it may not see as this user it says it could not see.
//!
//! The way is the agent's own: `config::read_within` and its parts, the dial of `istiod` with its roots and proxies, the
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
use crate::config::parts::ca::Signer;
use crate::config::parts::capture::capture as captured;
use crate::config::parts::identity::{self, Fetcher, Plan};
use crate::config::{self, Sources, late, parts, pod};
use crate::istiod;
use crate::trouble::Kind;

pub(crate) use report::{Check, Outcome, Report};

/// All of it takes no longer.
pub(crate) const LIMIT: Duration = Duration::from_secs(15);
/// A check that has not ended by then is reported as unfinished; the rest of the time is for the report.
const MARGIN: Duration = Duration::from_secs(1);
/// The configuration is read within this time, so that there is some left for what is looked at without one.
const READ: Duration = Duration::from_secs(8);
/// A start waits longer for names and addresses in the configuration; here they must leave time for the rest.
const PATIENCE: Duration = Duration::from_secs(3);
/// Where an agent is asked when nothing else is said.
const STATUS_PORT: u16 = 15020;

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

/// What the checks share. All of it is known: whoever looks at it reads no file.
struct Scene {
    config: Arc<Sources>,
    plan: Option<Plan>,
    /// The way to istiod; none where it is refused.
    xds: Option<istiod::Config>,
    /// Who signs, as [`parts::ca::signer`] says it.
    ca: Result<Option<Signer>, parts::Error>,
    /// What would end the start.
    refused: Vec<parts::Error>,
    now: SystemTime,
    end: Instant,
}

impl Scene {
    /// Reads files.
    fn new(config: Arc<Sources>, now: SystemTime, end: Instant) -> Self {
        let plan = identity::plan(&config).ok();
        let mounted = plan.as_ref().is_some_and(|p| p.file_mounted);
        Self {
            xds: parts::istiod::xds(&config, mounted).ok(),
            ca: parts::ca::signer(&config, mounted),
            refused: config::refusals(&config),
            plan,
            config,
            now,
            end,
        }
    }

    /// Whether istiod knows this workload by its token, and not by a certificate. Reads files.
    fn needs_token(&self) -> bool {
        let mounted = self.plan.as_ref().is_some_and(|p| p.file_mounted);
        !mounted && !files::is_provided(&self.config, self.now)
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
    let (sign, port) = (inputs.sign, inputs.port);
    let mut report = Report::new(SystemTime::now());
    let now = report.at;
    let loaded = beside("configuration", started + READ, move || load(inputs, now, end)).await;
    let (scene, mut checks) = loaded.unwrap_or_else(|late| (None, vec![late]));
    let Some(scene) = scene.map(Arc::new) else {
        report.checks = checks;
        without_configuration(&mut report, port.unwrap_or(STATUS_PORT), end).await;
        report.finish(started.elapsed());
        return report;
    };
    let status_port = port.or_else(|| parts::ports::status(&scene.config));
    let (late, files, token, upstream, signed, capture, envoy, limits, (ports, running)) = tokio::join!(
        // Each look has a limit of its own; beyond the report's nothing is refused.
        async {
            let root = rustix::process::getuid().is_root();
            timeout_at(end, late::refusals(&scene.config, root)).await.unwrap_or_default()
        },
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
        async {
            let running = running::look(status_port.unwrap_or(STATUS_PORT)).await;
            let (scene, alive) = (scene.clone(), running.is_alive());
            let ports = blocking("ports", end, move || ports::checks(&scene, status_port, alive));
            (ports.await, running)
        },
    );
    let (token, claims) = token;
    let clock = clock::check(scene.now, claims.as_ref(), &upstream.chains, upstream.date.as_deref());
    let loading = checks.len();
    checks.extend(files);
    checks.push(token);
    checks.push(clock);
    checks.extend(upstream.checks);
    checks.push(signed);
    for part in [ports, capture, envoy, limits] {
        checks.extend(part);
    }
    let late = late.into_iter().filter(|error| !told(&checks, error));
    let late: Vec<parts::Error> = late.collect();
    checks.splice(loading..loading, configuration::refused(&late));
    report.checks = checks;
    report.add_running(running);
    report.weigh();
    report.finish(started.elapsed());
    report
}

// Each of these has a check that may have met it first.
fn told(checks: &[Check], error: &parts::Error) -> bool {
    let grpc = Kind::GrpcBootstrapMissing;
    let same = |check: &Check| check.kind == Some(grpc) && error.kind == grpc;
    checks.iter().any(|check| check.said.contains(&error.text) || same(check))
}

async fn without_configuration(report: &mut Report, port: u16, end: Instant) {
    let (limits, running) = tokio::join!(blocking("limits", end, limits::checks), running::look(port));
    report.checks.extend(limits);
    report.add_running(running);
    for name in ["files", "token", "connect", "tls", "grpc", "ports", "envoy"] {
        report.checks.push(Check::skip(name, "the configuration comes first"));
    }
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
    let (config, end) = (config.clone(), Instant::now() + LIMIT);
    let scene = beside("files", end, move || Scene::new(config, SystemTime::now(), end)).await;
    let checks = match scene.map(Arc::new) {
        Err(late) => vec![late],
        Ok(scene) => {
            let looked = scene.clone();
            let files = blocking("files", end, move || files::checks(&looked));
            let (mut checks, token) = tokio::join!(files, token::checks(&scene));
            checks.push(token.0);
            checks
        }
    };
    let odd = checks.iter().filter(|c| matches!(c.state, Outcome::Warn | Outcome::Fail | Outcome::Late));
    odd.map(|c| format!("{}: {}", c.name, c.sentence())).collect()
}

fn load(inputs: Inputs, now: SystemTime, end: Instant) -> (Option<Scene>, Vec<Check>) {
    let annotations = pod::read(&inputs.root.join(pod::ANNOTATIONS)).unwrap_or_default();
    let annotation = |key: &str| annotations.get(key).cloned();
    let loaded = config::read_within(inputs.flags, &inputs.env, &inputs.root, annotation, PATIENCE);
    let mut checks = configuration::checks(loaded.as_ref(), &inputs.env, &inputs.root, &annotations);
    let scene = loaded.ok().map(|config| Scene::new(config, now, end));
    if let Some(scene) = &scene {
        checks.extend(configuration::refused(&scene.refused));
    }
    (scene, checks)
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
    let limit = end.saturating_duration_since(Instant::now());
    timeout_at(end, work).await.map_err(|_| unfinished(name, limit))
}

fn unfinished(name: &'static str, limit: Duration) -> Check {
    let said = format!("not finished within {:.0} s", limit.as_secs_f64());
    let hint = "something this check asks does not answer: look at the disk, DNS and load of this machine";
    Check::late(name, said, hint)
}

/// Does `work` on a thread; the line that says so where it does not end in time.
async fn beside<T: Send + 'static>(
    name: &'static str,
    end: Instant,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Check> {
    let done = within(end, name, on_thread(name, work)).await?;
    done.map_err(|e| Check::late(name, e.to_string(), "report this line with the agent's version"))
}

async fn blocking(
    name: &'static str,
    end: Instant,
    work: impl FnOnce() -> Vec<Check> + Send + 'static,
) -> Vec<Check> {
    beside(name, end, work).await.unwrap_or_else(|late| vec![late])
}
