//! The relay's metrics: the Go agent's by name and label, and the ones that show what it hides.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::status::Class;
use crate::base::metrics::Metrics;

/// All of them.
#[derive(Debug)]
pub struct Meters {
    istiod: IntCounterVec,
    envoy: IntCounterVec,
    requests: IntCounterVec,
    responses: IntCounterVec,
    largest: IntGaugeVec,
    nacks: IntCounterVec,
    stalls: IntCounterVec,
    held: IntGaugeVec,
    holds: IntCounterVec,
    dials: IntCounterVec,
}

const NONE: [&str; 0] = [];

impl Meters {
    /// Registers them.
    #[must_use]
    pub fn new(metrics: &Metrics) -> Self {
        let counter = |name, help, labels: &[&str]| metrics.counter(name, help, labels);
        Self {
            istiod: counter(
                "istiod_connection_terminations",
                "The total number of connection errors to Istiod",
                &["type"],
            ),
            envoy: counter(
                "envoy_connection_terminations",
                "The total number of connection errors from envoy",
                &["type"],
            ),
            requests: counter("xds_proxy_requests", "The total number of Xds Proxy Requests", &[]),
            responses: counter("xds_proxy_responses", "The total number of Xds Proxy Responses", &[]),
            largest: metrics.gauge(
                "pilot_xds_recv_max",
                "The maximum size of the data received by Xds server from Envoy, in bytes",
                &[],
            ),
            nacks: counter("xds_nacks", "Configuration that Envoy rejected, by type", &["type"]),
            stalls: counter(
                "xds_stalls",
                "Times that a leg of the relay did not move for ten seconds although bytes were waiting",
                &["leg"],
            ),
            held: metrics.gauge(
                "xds_held_streams",
                "Envoy streams that wait while the agent dials istiod",
                &[],
            ),
            holds: counter("xds_holds", "Envoy streams that were held, by how it ended", &["result"]),
            dials: counter("xds_dials", "Attempts to open a stream to istiod", &["result"]),
        }
    }

    /// The upstream leg ended.
    pub fn istiod_ended(&self, class: Class) {
        self.istiod.with_label_values(&[class.label()]).inc();
    }

    /// The downstream leg ended.
    pub fn envoy_ended(&self, class: Class) {
        self.envoy.with_label_values(&[class.label()]).inc();
    }

    /// A request goes to istiod.
    pub fn request(&self) {
        self.requests.with_label_values(&NONE).inc();
    }

    /// A request of that many bytes came from Envoy.
    pub fn request_size(&self, bytes: u64) {
        let gauge = self.largest.with_label_values(&NONE);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        if bytes > gauge.get() {
            gauge.set(bytes);
        }
    }

    /// A response came from istiod.
    pub fn response(&self) {
        self.responses.with_label_values(&NONE).inc();
    }

    /// Envoy rejected something.
    pub fn nack(&self, kind: &str) {
        self.nacks.with_label_values(&[kind]).inc();
    }

    /// A leg does not move.
    pub fn stall(&self, leg: &str) {
        self.stalls.with_label_values(&[leg]).inc();
    }

    /// A stream begins (+1) or ends (−1) to wait.
    pub fn held(&self, change: i64) {
        self.held.with_label_values(&NONE).add(change);
    }

    /// A hold has ended.
    pub fn hold_ended(&self, result: &str) {
        self.holds.with_label_values(&[result]).inc();
    }

    /// An attempt upstream.
    pub fn dial(&self, result: &str) {
        self.dials.with_label_values(&[result]).inc();
    }
}
