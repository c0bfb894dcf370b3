//! What the SDS server counts; the names are the Go agent's.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use crate::base::metrics::Metrics as Registry;

const SDS: &[&str] = &["sds"];
const NONE: &[&str] = &[];

/// Handles to the families; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Metrics {
    rejects: IntCounterVec,
    expired: IntCounterVec,
    send_time: HistogramVec,
    internal: IntCounterVec,
    streams: IntGaugeVec,
    turned_away: IntCounterVec,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            rejects: registry.counter(
                "pilot_total_xds_rejects",
                "Total number of XDS responses from pilot rejected by proxy.",
                &["type"],
            ),
            expired: registry.counter(
                "pilot_xds_expired_nonce",
                "Total number of XDS requests with an expired nonce.",
                &["type"],
            ),
            send_time: registry.histogram(
                "pilot_xds_send_time",
                "Total time in seconds Pilot takes to send generated configuration.",
                &[],
                &[0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0],
            ),
            internal: registry.counter(
                "pilot_total_xds_internal_errors",
                "Total number of internal XDS errors in pilot.",
                &[],
            ),
            turned_away: registry.counter(
                "sds_refused_peers_total",
                "Clients of the SDS sockets whose user is not among SDS_ALLOWED_UIDS.",
                &[],
            ),
            streams: registry.gauge("sds_streams", "Open streams on the SDS sockets.", &[]),
        }
    }

    pub(super) fn turned_away(&self) {
        self.turned_away.with_label_values(NONE).inc();
    }

    pub(super) fn rejected(&self) {
        self.rejects.with_label_values(SDS).inc();
    }

    pub(super) fn stale(&self) {
        self.expired.with_label_values(SDS).inc();
    }

    pub(super) fn sent(&self, took: Duration) {
        self.send_time.with_label_values(NONE).observe(took.as_secs_f64());
    }

    pub(super) fn receive_failed(&self) {
        self.internal.with_label_values(NONE).inc();
    }

    pub(super) fn opened(&self) -> Open {
        self.streams.with_label_values(NONE).inc();
        Open(self.streams.clone())
    }
}

/// Counts a stream as open until dropped.
#[derive(Debug)]
pub(super) struct Open(IntGaugeVec);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.with_label_values(NONE).dec();
    }
}
