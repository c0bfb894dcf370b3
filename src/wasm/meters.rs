//! The part's metrics, by the Go agent's names and labels.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use crate::base::metrics::Metrics;

pub(super) struct Meters {
    entries: IntGaugeVec,
    lookups: IntCounterVec,
    fetches: IntCounterVec,
    conversions: IntCounterVec,
    durations: HistogramVec,
}

const NONE: [&str; 0] = [];

impl Meters {
    pub(super) fn new(metrics: &Metrics) -> Self {
        // 1, 2, 4 ... 16384 ms.
        let buckets: Vec<f64> = (0..15).map(|n| f64::from(1 << n)).collect();
        Self {
            entries: metrics.gauge("wasm_cache_entries", "number of Wasm remote fetch cache entries.", &[]),
            lookups: metrics.counter(
                "wasm_cache_lookup_count",
                "number of Wasm remote fetch cache lookups.",
                &["hit"],
            ),
            fetches: metrics.counter(
                "wasm_remote_fetch_count",
                "number of Wasm remote fetches and results, including success, download failure, and checksum mismatch.",
                &["result"],
            ),
            conversions: metrics.counter(
                "wasm_config_conversion_count",
                "number of Wasm config conversion count and results, including success, no remote load, marshal failure, remote fetch failure, miss remote fetch hint.",
                &["result"],
            ),
            durations: metrics.histogram(
                "wasm_config_conversion_duration",
                "Total time in milliseconds istio-agent spends on converting remote load in Wasm config.",
                &[],
                &buckets,
            ),
        }
    }

    pub(super) fn entries(&self, count: usize) {
        self.entries.with_label_values(&NONE).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn lookup(&self, hit: bool) {
        self.lookups.with_label_values(&[if hit { "true" } else { "false" }]).inc();
    }

    pub(super) fn fetch(&self, result: &str) {
        self.fetches.with_label_values(&[result]).inc();
    }

    pub(super) fn conversion(&self, result: &str) {
        self.conversions.with_label_values(&[result]).inc();
    }

    pub(super) fn took(&self, time: Duration) {
        self.durations.with_label_values(&NONE).observe(time.as_secs_f64() * 1000.0);
    }
}
