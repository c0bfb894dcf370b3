//! What is counted and shown of Envoy's processes.

use prometheus::{IntCounterVec, IntGaugeVec};

use crate::base::metrics::Metrics;

/// See the module.
pub(super) struct Meters {
    restarts: IntCounterVec,
    waiting: IntGaugeVec,
    waits: bool,
    open: IntGaugeVec,
    requests: IntGaugeVec,
}

impl Meters {
    pub(super) fn new(metrics: &Metrics) -> Self {
        Self {
            restarts: metrics.counter(
                "envoy_restarts_total",
                "Envoys started after the first, by cause.",
                &["cause"],
            ),
            waiting: metrics.gauge(
                "envoy_hot_restart_waiting",
                "1 while a hot restart that was asked for waits: for more changes of files, for istiod, or for the Envoy before it.",
                &[],
            ),
            waits: false,
            open: metrics.gauge(
                "envoy_drain_open_connections",
                "Connections that Envoy's listeners held at the last poll of an exit-on-zero drain.",
                &[],
            ),
            requests: metrics.gauge(
                "envoy_drain_open_requests",
                "Requests under way at the last poll of an exit-on-zero drain (DRAIN_COUNT_REQUESTS).",
                &[],
            ),
        }
    }

    /// Another Envoy is about to be started, `cause` being one of a closed set.
    pub(super) fn restart(&self, cause: &'static str) {
        self.restarts.with_label_values(&[cause]).inc();
    }

    /// Whether a hot restart waits. Without one that ever waited there is no sample.
    pub(super) fn waits(&mut self, waits: bool) {
        if waits != self.waits {
            self.waits = waits;
            self.waiting.with_label_values::<&str>(&[]).set(i64::from(waits));
        }
    }

    /// Open connections at a poll.
    pub(super) fn open(&self, connections: u64) {
        self.open.with_label_values::<&str>(&[]).set(number(connections));
    }

    /// Requests under way at a poll.
    pub(super) fn requests(&self, requests: u64) {
        self.requests.with_label_values::<&str>(&[]).set(number(requests));
    }
}

fn number(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
