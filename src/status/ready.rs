//! `/healthz/ready`: is there any use in sending traffic here?
//!
//! Asked in this order, the first "no" answers 503: Envoy has received clusters and listeners; the agent
//! is not shutting down; Envoy is live and its workers run; the bootstrap of proxyless gRPC is there and
//! so are the files it names; every part of the agent that must have started has. What Envoy has once
//! said yes to is not asked again, as in the Go agent, unless its process has gone in between.
//!
//! The body is empty, as scripts know it. What is missing stands in the header `x-not-ready` and, for
//! `/healthz/ready?verbose`, in the body. The strict mode (off by default) also takes readiness away
//! while something that once worked is broken.

mod envoy;
mod grpc;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use http::{HeaderValue, StatusCode};
use tokio::time::Instant;

use super::Agent;
use super::respond::{Answer, TEXT, page, status};
use crate::base::seldom::Seldom;

pub use envoy::{Envoy, config_state, serving_state};

/// A startup probe may ask every second; more lines than this are somebody else's doing.
static NOT_READY: Seldom = Seldom::new(120);

/// What readiness depends on.
#[derive(Debug, Clone)]
pub struct Config {
    /// Envoy's admin interface; `None` with Envoy disabled.
    pub envoy_admin: Option<SocketAddr>,
    /// `GRPC_XDS_BOOTSTRAP`; `None` when it is the empty string.
    pub grpc_bootstrap: Option<PathBuf>,
    /// Whether what [`Agent::degraded`] tells makes the agent not ready.
    pub strict: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            envoy_admin: Some(SocketAddr::from(([127, 0, 0, 1], 15000))),
            grpc_bootstrap: None,
            strict: false,
        }
    }
}

/// Readiness, with what it has learned so far.
pub(super) struct Readiness {
    /// `None` with Envoy disabled.
    envoy: Option<Envoy>,
    strict: bool,
    grpc: grpc::Bootstrap,
    /// What the last answer was, so that only a change to ready is told.
    was_ready: AtomicBool,
    startup: prometheus::GaugeVec,
    started: Instant,
}

impl Readiness {
    pub(super) fn new(config: Config, startup: prometheus::GaugeVec, started: Instant) -> Self {
        Self {
            envoy: config.envoy_admin.map(Envoy::new),
            strict: config.strict,
            grpc: grpc::Bootstrap::new(config.grpc_bootstrap),
            was_ready: AtomicBool::new(false),
            startup,
            started,
        }
    }

    /// What is missing; empty: ready. Each entry is a sentence.
    async fn missing(&self, agent: &dyn Agent) -> Vec<String> {
        if let Err(error) = self.envoy(agent).await {
            return vec![error];
        }
        if let Some(cause) = agent.terminating() {
            return vec![format!("server is terminated: {cause}")];
        }
        if let Err(error) = self.grpc.check() {
            return vec![error];
        }
        let mut missing = agent.not_ready();
        if self.strict {
            missing.extend(agent.degraded());
        }
        missing
    }

    async fn envoy(&self, agent: &dyn Agent) -> Result<(), String> {
        let Some(envoy) = &self.envoy else { return Ok(()) };
        if !agent.envoy_running() && agent.terminating().is_none() {
            envoy.forget();
            return Err("Envoy is not running".to_owned());
        }
        envoy.configured().await?;
        if let Some(cause) = agent.terminating() {
            return Err(format!("server is terminated: {cause}"));
        }
        if envoy.live().await? && self.startup_unset() {
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
}

pub(super) async fn answer(readiness: &Readiness, agent: &dyn Agent, query: Option<&str>) -> Answer {
    let missing = readiness.missing(agent).await;
    let verbose = query.is_some_and(|q| q.split('&').any(|p| p == "verbose" || p.starts_with("verbose=")));
    let (code, text) = if missing.is_empty() {
        if !readiness.was_ready.swap(true, Relaxed) {
            tracing::info!("Envoy proxy is ready");
        }
        (StatusCode::OK, "ready".to_owned())
    } else {
        readiness.was_ready.store(false, Relaxed);
        let text = missing.join("; ");
        if let Some(more) = NOT_READY.may() {
            tracing::warn!("Envoy proxy is NOT ready: {text}{more}");
        }
        (StatusCode::SERVICE_UNAVAILABLE, text)
    };
    let mut answer = if verbose { page(code, TEXT, format!("{text}\n")) } else { status(code) };
    if code != StatusCode::OK {
        let line: String =
            text.chars().map(|c| if (' '..='~').contains(&c) { c } else { ' ' }).take(512).collect();
        if let Ok(line) = HeaderValue::from_str(line.trim()) {
            answer.headers_mut().insert("x-not-ready", line);
        }
    }
    answer
}

#[cfg(test)]
mod tests;
