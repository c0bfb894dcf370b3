//! `/stats/prometheus` and `/metrics`: the agent's metrics, Envoy's and the application's, in this order.

pub mod config;

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, StatusCode};

pub use config::{Target, parse_annotations};

use super::own::{Own, encode};
use super::respond::{Answer, page};
use super::routes::Shared;
use crate::base::metrics::Metrics;

/// What is merged.
#[derive(Debug, Clone)]
pub struct Config {
    /// `ENVOY_PROMETHEUS_PORT` (15090) on localhost; `None` with Envoy disabled or
    /// `PILOT_AGENT_MERGE_ENVOY_STATS=false`.
    pub envoy_port: Option<u16>,
    /// The application's endpoints, in the order they are merged; from [`parse_annotations`].
    pub targets: Vec<Target>,
    /// `METRICS_LOCALHOST_ACCESS_ONLY`.
    pub local_only: bool,
    /// Most bytes of one part that are passed on (after decompression); the rest is cut and a comment
    /// line says so. `None`: all.
    pub limit: Option<u64>,
    /// Whether families that the Go agent does not have are exported, and each cut part ends with a
    /// comment line that says why.
    pub details: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { envoy_port: Some(15090), targets: Vec::new(), local_only: false, limit: None, details: false }
    }
}

/// Merges metrics.
pub(super) struct Merger {
    config: Config,
    own: Own,
    metrics: Metrics,
}

impl Merger {
    pub(super) fn new(config: Config, own: Own, metrics: Metrics) -> Self {
        Self { config, own, metrics }
    }

    pub(super) fn local_only(&self) -> bool {
        self.config.local_only
    }

    /// The last failures, for `/debug/agentz`.
    pub(super) fn failures(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

pub(super) async fn answer(shared: &Arc<Shared>, _headers: &HeaderMap, _query: Option<&str>) -> Answer {
    let merger = &shared.stats;
    merger.own.scrapes.with_label_values::<&str>(&[]).inc();
    let mut out = Vec::new();
    if let Err(error) = encode(&merger.metrics, merger.config.details, &mut out) {
        tracing::warn!("the agent's own metrics cannot be written whole: {error}");
        merger.own.failures.with_label_values(&["agent"]).inc();
    }
    page(StatusCode::OK, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"), out)
}
