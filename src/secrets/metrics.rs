//! What the secret manager counts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{CounterVec, GaugeVec, IntCounterVec, Opts};

use crate::base::clock::Clock;
use crate::base::metrics::Metrics as Registry;

const CSR: &[&str] = &["csr"];
const DEFAULT: &[&str] = &["default"];

/// Handles to the families; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Metrics {
    latency: CounterVec,
    calls: IntCounterVec,
    failed_calls: IntCounterVec,
    watch_failures: IntCounterVec,
    file_failures: IntCounterVec,
    renewal_failures: IntCounterVec,
    early: IntCounterVec,
    last_success: GaugeVec,
    expiry: GaugeVec,
    not_after: Arc<Mutex<Option<SystemTime>>>,
    used: Arc<AtomicBool>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry, clock: Arc<dyn Clock>) -> Self {
        let request = &["request_type"];
        let (not_after, used) = (Arc::default(), Arc::new(AtomicBool::new(true)));
        let left = Left::new(Arc::clone(&not_after), Arc::clone(&used), clock);
        if let Err(error) = registry.register(Box::new(left)) {
            tracing::debug!(target: "monitoring", "cert_expiry_seconds is not shown: {error}");
        }
        Self {
            latency: registry.float_counter(
                "outgoing_latency",
                "The latency of outgoing requests (e.g. to a token exchange server, CA, etc.) in milliseconds.",
                request,
            ),
            calls: registry.counter(
                "num_outgoing_requests",
                "Number of total outgoing requests (e.g. to a token exchange server, CA, etc.)",
                request,
            ),
            failed_calls: registry.counter(
                "num_failed_outgoing_requests",
                "Number of failed outgoing requests (e.g. to a token exchange server, CA, etc.)",
                request,
            ),
            watch_failures: registry.counter(
                "num_file_watcher_failures_total",
                "Watches for certificate files that could not be placed.",
                &[],
            ),
            file_failures: registry.counter(
                "num_file_secret_failures_total",
                "Times a secret could not be loaded from files.",
                &[],
            ),
            renewal_failures: registry.counter(
                "cert_renewal_failures_total",
                "Attempts to get a workload certificate that failed, by gRPC code or cause.",
                &["reason"],
            ),
            early: registry.counter(
                "cert_early_renewals_total",
                "Certificates asked for before they were due, because of trouble on the way to istiod.",
                &["result"],
            ),
            last_success: registry.float_gauge(
                "cert_last_success_timestamp_seconds",
                "When the CA last issued a workload certificate (Unix time).",
                &["resource_name"],
            ),
            expiry: registry.float_gauge(
                "cert_expiry_timestamp_seconds",
                "End of validity of the workload certificate (Unix time).",
                &["resource_name"],
            ),
            not_after,
            used,
        }
    }

    /// Whether somebody uses the certificate, so that it is renewed.
    pub(super) fn used(&self, used: bool) {
        self.used.store(used, Ordering::Relaxed);
    }

    pub(super) fn call_started(&self) {
        self.calls.with_label_values(CSR).inc();
    }

    pub(super) fn call_ended(&self, took: Duration) {
        self.latency.with_label_values(CSR).inc_by((took.as_secs_f64() * 1000.0).floor());
    }

    pub(super) fn call_failed(&self) {
        self.failed_calls.with_label_values(CSR).inc();
    }

    pub(super) fn renewal_failed(&self, reason: &str) {
        self.renewal_failures.with_label_values(&[reason]).inc();
    }

    pub(super) fn early(&self, result: &str) {
        self.early.with_label_values(&[result]).inc();
    }

    pub(super) fn issued(&self, now: SystemTime, not_after: SystemTime) {
        self.last_success.with_label_values(DEFAULT).set(unix(now));
        self.expiry.with_label_values(DEFAULT).set(unix(not_after));
        *self.not_after.lock().expect("no panic holds this lock") = Some(not_after);
    }

    pub(super) fn file_failed(&self) {
        self.file_failures.with_label_values(&[] as &[&str]).inc();
    }

    pub(super) fn watches_failed(&self, times: u64) {
        if times > 0 {
            self.watch_failures.with_label_values(&[] as &[&str]).inc_by(times);
        }
    }
}

fn unix(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64().floor())
}

/// `cert_expiry_seconds`: what is left, computed when it is looked at; negative once it is over, and then not shown of one
/// that nobody uses.
struct Left {
    not_after: Arc<Mutex<Option<SystemTime>>>,
    used: Arc<AtomicBool>,
    clock: Arc<dyn Clock>,
    gauge: GaugeVec,
}

impl Left {
    fn new(not_after: Arc<Mutex<Option<SystemTime>>>, used: Arc<AtomicBool>, clock: Arc<dyn Clock>) -> Self {
        let help = "The time remaining, in seconds, before the certificate chain will expire. \
                    A negative value indicates the cert is expired.";
        let gauge = GaugeVec::new(Opts::new("cert_expiry_seconds", help), &["resource_name"])
            .expect("the name is a constant");
        Self { not_after, used, clock, gauge }
    }
}

impl Collector for Left {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let not_after = *self.not_after.lock().expect("no panic holds this lock");
        let Some(not_after) = not_after else { return Vec::new() };
        let now = self.clock.now();
        let left = match not_after.duration_since(now) {
            Ok(left) => left.as_secs_f64(),
            Err(_) if !self.used.load(Ordering::Relaxed) => return Vec::new(),
            Err(over) => -over.duration().as_secs_f64(),
        };
        self.gauge.with_label_values(DEFAULT).set(left);
        self.gauge.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::clock::Fixed;

    #[test]
    fn what_is_left_is_computed_at_each_look_and_goes_below_zero() {
        let clock = Fixed::at(UNIX_EPOCH + Duration::from_secs(100));
        let registry = Registry::new();
        let metrics = Metrics::new(&registry, Arc::new(clock.clone()));
        let value = || {
            let families = registry.registry().gather();
            families
                .iter()
                .find(|f| f.name() == "cert_expiry_seconds")
                .map(|f| f.get_metric()[0].get_gauge().get_value())
        };
        assert_eq!(value(), None);
        metrics.issued(clock.now(), clock.now() + Duration::from_secs(10));
        assert_eq!(value(), Some(10.0));
        clock.advance(Duration::from_secs(15));
        assert_eq!(value(), Some(-5.0));
        metrics.used(false);
        assert_eq!(value(), None, "nobody uses it, so it is not missed");
        metrics.issued(clock.now(), clock.now() + Duration::from_secs(10));
        assert_eq!(value(), Some(10.0));
    }
}
