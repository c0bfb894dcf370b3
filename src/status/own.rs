//! The agent's own families, in the text format, under the names the Go agent gives them.

use prometheus::{Encoder, GaugeVec, IntCounterVec, TextEncoder};

use crate::base::metrics::Metrics;

/// What goes before every name.
const PREFIX: &str = "istio_agent_";

/// Families that the server itself keeps.
#[derive(Clone)]
pub(super) struct Own {
    pub(super) startup: GaugeVec,
    pub(super) scrapes: IntCounterVec,
    pub(super) failures: IntCounterVec,
    /// Why, beside `failures`; not among the Go agent's families (see [`GO`]).
    pub(super) reasons: IntCounterVec,
    lost: IntCounterVec,
}

impl Own {
    pub(super) fn new(metrics: &Metrics) -> prometheus::Result<Self> {
        metrics.register(Box::new(super::process::Process::new()))?;
        Ok(Self {
            startup: metrics.float_gauge(
                "startup_duration_seconds",
                "Seconds from the start of the process to the first time it was ready.",
                &[],
            ),
            scrapes: metrics.counter("scrapes_total", "Requests for metrics.", &[]),
            failures: metrics.counter(
                "scrape_failures_total",
                "Parts of a scrape that failed or were cut, by the part.",
                &["type"],
            ),
            reasons: metrics.counter(
                "scrape_failure_reasons_total",
                "Parts of a scrape that failed or were cut, by the part and the reason.",
                &["type", "reason"],
            ),
            lost: metrics.counter(
                "log_lines_lost_total",
                "Lines of the log that were dropped because nobody read it.",
                &[],
            ),
        })
    }

    /// Brings up to date what is counted elsewhere.
    pub(super) fn look(&self) {
        let lost = crate::base::logging::dropped();
        if lost > 0 {
            let lost_so_far = self.lost.with_label_values::<&str>(&[]);
            lost_so_far.inc_by(lost.saturating_sub(lost_so_far.get()));
        }
    }
}

/// Families of our own that are always exported: no other tells that a proxy runs on old or refused configuration.
const ALWAYS: &[&str] = &["xds_config_state"];

/// The Go agent's families. Others are of our own making and exported only when asked for, so that the
/// set of series of a mesh does not change with the agent.
const GO: &[&str] = &[
    "startup_duration_seconds",
    "scrapes_total",
    "scrape_failures_total",
    "istiod_connection_failures",
    "istiod_connection_terminations",
    "envoy_connection_terminations",
    "xds_proxy_requests",
    "xds_proxy_responses",
    "dns_requests_total",
    "dns_upstream_requests_total",
    "dns_upstream_failures_total",
    "dns_upstream_request_duration_seconds",
    "num_outgoing_requests",
    "num_failed_outgoing_requests",
    "outgoing_latency",
    "num_outgoing_retries",
    "num_file_watcher_failures_total",
    "num_file_secret_failures_total",
    "cert_expiry_seconds",
    "wasm_cache_entries",
    "wasm_cache_lookup_count",
    "wasm_remote_fetch_count",
    "wasm_config_conversion_count",
    "wasm_config_conversion_duration",
    "pilot_xds_recv_max",
    "pilot_xds_send_time",
    "pilot_xds_write_timeout",
    "pilot_xds_expired_nonce",
    "pilot_total_xds_rejects",
    "pilot_total_xds_internal_errors",
];

/// All families, sorted by name, as text; with `all`, also those that the Go agent does not have.
///
/// # Errors
/// When a family cannot be written; the ones before it are in `out`.
pub(super) fn encode(metrics: &Metrics, all: bool, out: &mut Vec<u8>) -> prometheus::Result<()> {
    let mut families = metrics.registry().gather();
    families.retain(|f| !f.get_metric().is_empty());
    if !all {
        families.retain(|f| {
            GO.contains(&f.name()) || ALWAYS.contains(&f.name()) || f.name().starts_with("process_")
        });
    }
    for family in &mut families {
        family.set_name(format!("{PREFIX}{}", family.name()));
    }
    families.sort_by(|a, b| a.name().cmp(b.name()));
    let encoder = TextEncoder::new();
    for family in families {
        let before = out.len();
        if let Err(error) = encoder.encode(&[family], out) {
            out.truncate(before);
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_prefixed_sorted_and_only_those_with_samples() {
        let metrics = Metrics::new();
        let own = Own::new(&metrics).unwrap();
        own.scrapes.with_label_values::<&str>(&[]).inc();
        own.reasons.with_label_values(&["envoy", "refused"]).inc();
        let text = |all| {
            let mut out = Vec::new();
            encode(&metrics, all, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let go = text(false);
        assert!(
            go.contains("# TYPE istio_agent_scrapes_total counter\nistio_agent_scrapes_total 1\n"),
            "{go}"
        );
        assert!(go.contains("# HELP istio_agent_process_open_fds"));
        assert!(!go.contains("failure"), "no sample, no family; reasons are ours alone");
        assert!(
            text(true)
                .contains("istio_agent_scrape_failure_reasons_total{reason=\"refused\",type=\"envoy\"} 1\n")
        );
        let names: Vec<_> = go.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
        assert!(names.is_sorted());
    }
}
