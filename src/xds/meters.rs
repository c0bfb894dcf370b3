//! The relay's metrics: the Go agent's by name and label, and the ones that show what it hides.

use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts};

use super::end_status::Class;
use super::state::RelayState;
use crate::base::metrics::Metrics;

/// All of them.
#[derive(Debug)]
pub(super) struct Meters {
    failures: IntCounterVec,
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
    aged: IntCounterVec,
}

const NONE: [&str; 0] = [];

impl Meters {
    /// Registers them.
    #[must_use]
    pub(super) fn new(metrics: &Metrics) -> Self {
        let counter = |name, help, labels: &[&str]| metrics.counter(name, help, labels);
        Self {
            failures: counter(
                "istiod_connection_failures",
                "The total number of connection failures to Istiod",
                &[],
            ),
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
            aged: counter("xds_aged_streams", "Streams to istiod that ended because of their age", &[]),
            dials: counter("xds_dials", "Attempts to open a stream to istiod", &["result"]),
        }
    }

    /// The way upstream could not even be set up.
    pub(super) fn failure(&self) {
        self.failures.with_label_values(&NONE).inc();
    }

    /// The upstream leg ended.
    pub(super) fn istiod_ended(&self, class: Class) {
        self.istiod.with_label_values(&[class.label()]).inc();
    }

    /// The downstream leg ended.
    pub(super) fn envoy_ended(&self, class: Class) {
        self.envoy.with_label_values(&[class.label()]).inc();
    }

    /// A request goes to istiod.
    pub(super) fn request(&self) {
        self.requests.with_label_values(&NONE).inc();
    }

    /// A request of that many bytes came from Envoy.
    pub(super) fn request_size(&self, bytes: u64) {
        let gauge = self.largest.with_label_values(&NONE);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        if bytes > gauge.get() {
            gauge.set(bytes);
        }
    }

    /// A response came from istiod.
    pub(super) fn response(&self) {
        self.responses.with_label_values(&NONE).inc();
    }

    /// Envoy rejected something.
    pub(super) fn nack(&self, kind: &str) {
        self.nacks.with_label_values(&[kind]).inc();
    }

    /// A leg does not move.
    pub(super) fn stall(&self, leg: &str) {
        self.stalls.with_label_values(&[leg]).inc();
    }

    /// A stream has become too old.
    pub(super) fn aged(&self) {
        self.aged.with_label_values(&NONE).inc();
    }

    /// A stream begins (+1) or ends (−1) to wait.
    pub(super) fn held(&self, change: i64) {
        self.held.with_label_values(&NONE).add(change);
    }

    /// A hold has ended.
    pub(super) fn hold_ended(&self, result: &str) {
        self.holds.with_label_values(&[result]).inc();
    }

    /// An attempt upstream.
    pub(super) fn dial(&self, result: &str) {
        self.dials.with_label_values(&[result]).inc();
    }
}

// The state of each type's configuration, read when somebody scrapes.
struct States {
    state: Arc<RelayState>,
    gauge: IntGaugeVec,
}

/// Shows how fresh each type is, as one sample of value 1 per type.
pub(super) fn export(metrics: &Metrics, state: &Arc<RelayState>) {
    let opts =
        Opts::new("xds_config_state", "How fresh the configuration of each type is, as the label says");
    let gauge = IntGaugeVec::new(opts, &["type", "state"]).expect("names and labels are constants");
    let states = States { state: state.clone(), gauge };
    metrics.register(Box::new(states)).expect("the family is registered once");
}

impl Collector for States {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.reset();
        for view in self.state.snapshot().types {
            self.gauge.with_label_values(&[view.name, view.state.label()]).set(1);
        }
        self.gauge.collect()
    }
}
