//! Health of the application on a virtual machine, told to istiod.
//!
//! In a pod the kubelet probes; on a VM nobody does, so the agent does it and istiod takes a workload
//! that is not healthy out of its service. What to probe stands in ProxyConfig (`readinessProbe`, which
//! for VMs is a copy of the WorkloadGroup's probe); without it this part does not exist.
//!
//! ```text
//! every period:  Envoy ready? ─► application healthy? ─► judge: thresholds ─► a change ─► istiod
//!                (a seam)        prober: http tcp exec grpc                   (a seam: the relay keeps it)
//! ```
//!
//! * One probe at a time, each with a limit. Ticks that a slow probe has missed are not made up for.
//! * Envoy first, since a workload whose Envoy cannot serve cannot serve either. Who asks Envoy is
//!   handed in ([`EnvoyReady`]): readiness knows how, and parts do not know each other.
//! * Only changes are reported ([`Report`]), the first verdict always. Delivery is the relay's business: it
//!   keeps the newest report and repeats it on each new stream once Envoy has asked for listeners.
//! * Nothing of the probing can end or hold up the agent. An invalid probe (no method, an
//!   empty command, a negative number) is refused in one line ([`Refused`]) and the agent runs without;
//!   the Go agent crashes at its first probe.
//! * Each wait can be cancelled, the initial delay too.
//!
//! | file | is about |
//! |---|---|
//! | `config` | what a ProxyConfig may ask for, and what is refused |
//! | `judge` | thresholds, pure |
//! | `prober` | one probe of each kind |
//!
//! Uses `fetch` to ask the application.

pub(crate) mod config;
pub(crate) mod judge;
mod prober;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use futures_util::future::BoxFuture;
use prometheus::{IntCounterVec, IntGaugeVec};
use rustls::crypto::CryptoProvider;
use tokio::time::{MissedTickBehavior, interval};

use crate::base::clock::Clock;
use crate::base::error::BoxError;
use crate::base::metrics::Metrics;
use crate::base::quote::cut;
use crate::base::tasks::Stop;
use crate::trouble::{Kind, Reporter};

pub(crate) use config::Refused;
pub use config::{Config, Method};
pub(crate) use judge::{AppHealth, Judge};
use prober::Prober;

/// So much of why a probe failed is shown.
const CAUSE: usize = 1024;

/// Asks whether Envoy is ready; the error says what is missing. Has limits of its
/// own, which the probe's time-out does not touch.
pub(crate) type EnvoyReady = Box<dyn Fn() -> BoxFuture<'static, Result<(), BoxError>> + Send + Sync>;

/// Takes a change: `None` is healthy, else why not. Must not block.
pub(crate) type Report = Box<dyn Fn(Option<String>) + Send + Sync>;

/// What one probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The application is well.
    Healthy,
    /// It is not, or does not answer; why.
    Unhealthy(String),
    /// It could not even be asked; why. Counts as a failure.
    Unknown(String),
}

impl Outcome {
    fn label(&self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unhealthy(_) => "unhealthy",
            Self::Unknown(_) => "unknown",
        }
    }

    fn reason(self) -> Option<String> {
        match self {
            Self::Healthy => None,
            Self::Unhealthy(why) | Self::Unknown(why) => Some(why),
        }
    }
}

/// What the checks need of the rest of the agent.
pub(crate) struct Parts {
    /// `None` with Envoy disabled.
    pub envoy: Option<EnvoyReady>,
    /// Where changes go.
    pub report: Report,
    /// Told of an application that is unhealthy.
    pub trouble: Reporter,
    /// For HTTPS probes.
    pub crypto: Arc<CryptoProvider>,
    /// Where the metrics go.
    pub metrics: Metrics,
    /// Dates of the status document.
    pub clock: Arc<dyn Clock>,
}

/// How things stand, for `/debug/agentz`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    /// What is probed.
    pub method: String,
    /// What istiod was told last.
    pub state: AppHealth,
    /// Seconds since 1970 of the last change; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// Probes made so far.
    pub probes: u64,
    /// Why the newest probe failed; absent when it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// Tells how things stand. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Handle(Arc<Mutex<Status>>);

impl Handle {
    /// How things stand now.
    #[must_use]
    pub(crate) fn status(&self) -> Status {
        self.0.lock().expect("no panic holds this lock").clone()
    }
}

/// The checks of one application.
pub(crate) struct Checker {
    config: Config,
    envoy: Option<EnvoyReady>,
    report: Report,
    trouble: Reporter,
    prober: Prober,
    judge: Judge,
    clock: Arc<dyn Clock>,
    handle: Handle,
    probes: IntCounterVec,
    state: IntGaugeVec,
}

impl Checker {
    /// Nothing runs yet.
    #[must_use]
    pub(crate) fn new(config: Config, parts: Parts) -> (Self, Handle) {
        let status = Status {
            method: config.method.to_string(),
            state: AppHealth::Undefined,
            since: None,
            probes: 0,
            last_error: None,
        };
        let handle = Handle(Arc::new(Mutex::new(status)));
        let checker = Self {
            prober: Prober::new(&config, parts.crypto),
            judge: Judge::new(config.success_threshold, config.failure_threshold),
            envoy: parts.envoy,
            report: parts.report,
            trouble: parts.trouble,
            clock: parts.clock,
            handle: handle.clone(),
            probes: parts.metrics.counter(
                "app_health_probes_total",
                "Health probes of the application, by what they found",
                &["result"],
            ),
            state: parts.metrics.gauge(
                "app_healthy",
                "Whether istiod was last told that the application is healthy",
                &[],
            ),
            config,
        };
        (checker, handle)
    }

    /// Probes until `stop`.
    pub(crate) async fn run(mut self, stop: Stop) {
        tracing::info!(
            target: "healthcheck",
            "the application's health is checked by {} every {:?}, first in {:?}",
            self.config.method, self.config.period, self.config.initial_delay
        );
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(self.config.initial_delay) => {}
        }
        let mut ticks = interval(self.config.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let (outcome, asked) = tokio::select! {
                () = stop.cancelled() => return,
                found = self.probe() => found,
            };
            self.take(outcome, asked);
        }
    }

    // And whether the application itself was asked.
    async fn probe(&self) -> (Outcome, bool) {
        if let Some(envoy) = &self.envoy
            && let Err(why) = envoy().await
        {
            return (Outcome::Unhealthy(why.to_string()), false);
        }
        (self.prober.probe(self.config.timeout).await, true)
    }

    fn take(&mut self, outcome: Outcome, asked: bool) {
        self.probes.with_label_values(&[outcome.label()]).inc();
        let healthy = outcome == Outcome::Healthy;
        let words = outcome.reason();
        // An application's words may be as long as its head; istiod is given them as they are.
        let reason = words.as_deref().map(|words| cut(words, CAUSE).into_owned());
        let change = self.judge.record(healthy);
        let state = change.unwrap_or(self.handle.status().state);
        match &reason {
            // Of an Envoy that is not ready others tell.
            Some(why) if asked && state == AppHealth::Unhealthy => {
                self.trouble
                    .report((Kind::ApplicationUnhealthy, format!("the application is unhealthy: {why}")));
            }
            None if state == AppHealth::Healthy => self.trouble.end(),
            _ => {}
        }
        tracing::debug!(target: "healthcheck", "probe: {}", reason.as_deref().unwrap_or("healthy"));
        {
            let mut status = self.handle.0.lock().expect("no panic holds this lock");
            status.probes += 1;
            status.last_error.clone_from(&reason);
            if let Some(state) = change {
                status.state = state;
                let now = self.clock.now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                status.since = Some(now.as_secs());
            }
        }
        match change {
            None => {}
            Some(AppHealth::Healthy) => {
                self.state.with_label_values::<&str>(&[]).set(1);
                tracing::info!(target: "healthcheck", "the application is healthy");
                (self.report)(None);
            }
            Some(_) => {
                self.state.with_label_values::<&str>(&[]).set(0);
                let why = reason.unwrap_or_default();
                tracing::info!(target: "healthcheck", "the application is not healthy: {why}");
                (self.report)(Some(words.unwrap_or_default()));
            }
        }
    }
}
