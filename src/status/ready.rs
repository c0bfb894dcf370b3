//! `/healthz/ready`: is there any use in sending traffic here?
//!
//! Asked in this order, the first "no" answers 503: Envoy has received clusters and listeners; the agent
//! is not shutting down; Envoy is live and its workers run; the bootstrap of proxyless gRPC is there and
//! so are the files it names; every part of the agent that must have started has. What Envoy has once
//! said yes to is not asked again, as in the Go agent, unless its process has gone in between.
//!
//! The body is empty, as scripts know it. Why stands in the header `x-not-ready` and, for
//! `/healthz/ready?verbose`, in the body: the verdict of [`crate::trouble`] first, then what follows from it. The strict mode
//! (off by default) also takes readiness away while something that once worked is broken. Where nobody asks, `watch` does.

mod envoy;
mod followed;
mod grpc;
mod said;
mod verdict;
mod watch;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::{HeaderValue, StatusCode};
use tokio::time::Instant;

use super::Agent;
use crate::serve::respond::{Answer, TEXT, page, status};
use crate::trouble::{Kind, Report, Reporter, Severity, Trouble, What};

pub(crate) use envoy::{Envoy, NotReady};
pub(crate) use followed::Followed;
pub(super) use watch::watch;

/// What readiness depends on.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Envoy's admin interface; `None` with Envoy disabled.
    pub envoy_admin: Option<SocketAddr>,
    /// Whether somebody else starts and ends that Envoy.
    pub external: bool,
    /// `GRPC_XDS_BOOTSTRAP`; `None` when it is the empty string.
    pub grpc_bootstrap: Option<PathBuf>,
    /// Whether what [`Agent::degraded`] tells makes the agent not ready.
    pub strict: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            envoy_admin: Some(SocketAddr::from(([127, 0, 0, 1], 15000))),
            external: false,
            grpc_bootstrap: None,
            strict: false,
        }
    }
}

impl Config {
    /// Whoever is asked; `None` with Envoy disabled.
    pub(crate) fn envoy(&self) -> Option<Envoy> {
        self.envoy_admin.map(if self.external { Envoy::external } else { Envoy::new })
    }
}

/// The first seconds of the process in which "not ready" is no news.
const START: Duration = Duration::from_secs(30);

/// Readiness, with what it has learned so far.
pub(super) struct Readiness {
    /// `None` with Envoy disabled.
    envoy: Option<Envoy>,
    /// Which of Envoy's processes what is known belongs to.
    generation: AtomicU64,
    strict: bool,
    grpc: grpc::Bootstrap,
    said: said::Said,
    startup: prometheus::GaugeVec,
    started: Instant,
    /// Of what only Envoy knows.
    own: Reporter,
}

impl Readiness {
    pub(super) fn new(
        config: Config,
        startup: prometheus::GaugeVec,
        started: Instant,
        own: Reporter,
    ) -> Self {
        Self {
            own,
            envoy: config.envoy(),
            generation: AtomicU64::new(0),
            strict: config.strict,
            grpc: grpc::Bootstrap::new(config.grpc_bootstrap),
            said: said::Said::default(),
            startup,
            started,
        }
    }

    /// What is missing; empty: ready. Each detail is a sentence.
    async fn missing(&self, agent: &dyn Agent) -> Vec<Report> {
        let envoy = self.envoy(agent).await;
        if let Some(cause) = agent.terminating() {
            return vec![NotReady::Terminated(cause).report()];
        }
        if let Err(error) = envoy {
            return vec![error.report()];
        }
        if let Err(error) = self.grpc.check().await {
            return vec![Report::new(Kind::GrpcBootstrapMissing, error)];
        }
        let mut missing = agent.not_ready();
        if self.strict {
            missing.extend(agent.degraded());
        }
        missing
    }

    async fn envoy(&self, agent: &dyn Agent) -> Result<(), NotReady> {
        let Some(envoy) = &self.envoy else { return Ok(()) };
        if !agent.envoy_running() && agent.terminating().is_none() {
            envoy.forget();
            return Err(NotReady::NotRunning);
        }
        let generation = agent.envoy_generation();
        if self.generation.swap(generation, Relaxed) != generation {
            envoy.forget();
        }
        envoy.configured().await?;
        if let Some(cause) = agent.terminating() {
            return Err(NotReady::Terminated(cause));
        }
        let news = envoy.live().await?;
        if agent.envoy_generation() != generation {
            envoy.forget();
            return Err(NotReady::Restarted);
        }
        if news && self.startup_unset() {
            let took = self.started.elapsed();
            self.startup.with_label_values::<&str>(&[]).set(took.as_secs_f64());
            tracing::info!("Readiness succeeded in {took:?}");
        }
        Ok(())
    }

    // The first readiness of the process counts, not that of an Envoy started again.
    fn startup_unset(&self) -> bool {
        use prometheus::core::Collector;
        self.startup.collect().iter().all(|family| family.get_metric().is_empty())
    }

    /// Of an Envoy that was live: what it says now. Readiness does not ask again, people want to know.
    async fn still_live(&self) -> Option<Report> {
        Some(self.envoy.as_ref()?.still_live().await.err()?.report())
    }

    /// What Envoy tells of itself; null without one.
    pub(super) async fn envoy_info(&self) -> serde_json::Value {
        match &self.envoy {
            Some(envoy) => envoy.info().await,
            None => serde_json::Value::Null,
        }
    }

    /// Everything that is wrong now, the verdict first: what the parts have told and what readiness waits for.
    pub(super) async fn verdict(&self, agent: &dyn Agent) -> Vec<Trouble> {
        let mut missing = self.missing(agent).await;
        if missing.is_empty() {
            missing.extend(self.still_live().await);
        }
        if missing.is_empty() {
            self.own.end();
        }
        verdict::all(&agent.troubles(), missing, self.said.since())
    }
}

pub(super) async fn answer(readiness: &Readiness, agent: &dyn Agent, query: Option<&str>) -> Answer {
    let mut missing = readiness.missing(agent).await;
    let verbose = query.is_some_and(|q| q.split('&').any(|p| p == "verbose" || p.starts_with("verbose=")));
    let list = agent.troubles();
    if missing.is_empty() {
        if readiness.said.ready() {
            tracing::info!("Envoy proxy is ready");
            list.note(What::Ready, "the proxy is ready");
        }
        if !verbose {
            return status(StatusCode::OK);
        }
        // People read this: an Envoy that has become silent is named here as everywhere.
        missing.extend(readiness.still_live().await);
        return page(StatusCode::OK, TEXT, verdict::body("ready", &verdict::all(&list, missing, None)));
    }
    let all = verdict::all(&list, missing, readiness.said.since());
    let text = verdict::line(&all);
    let broken = list.verdict().is_some_and(|t| t.kind.severity() == Severity::Broken);
    let quiet = !broken && readiness.started.elapsed() < START;
    // While a part says so every now and then, the log needs no second voice.
    let told = list.verdict().is_some();
    match readiness.said.not_ready(all.first().map(|t| t.kind), told) {
        said::How::Loud if !quiet => tracing::warn!("Envoy proxy is NOT ready: {text}"),
        said::How::Loud => tracing::info!("Envoy proxy is NOT ready: {text}"),
        said::How::Quiet => tracing::debug!("Envoy proxy is NOT ready: {text}"),
    }
    let code = StatusCode::SERVICE_UNAVAILABLE;
    let mut answer = if verbose { page(code, TEXT, verdict::body("not ready", &all)) } else { status(code) };
    let line: String =
        text.chars().map(|c| if (' '..='~').contains(&c) { c } else { ' ' }).take(512).collect();
    if let Ok(line) = HeaderValue::from_str(line.trim()) {
        answer.headers_mut().insert("x-not-ready", line);
    }
    answer
}

#[cfg(test)]
mod tests;
