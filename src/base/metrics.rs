//! The agent's own metrics, in one registry.
//!
//! Names carry no prefix here; the scrape endpoint adds `istio_agent_`, as the Go agent's does. A
//! family appears in a scrape with its first sample ("counters appear only after the first
//! increment"), which is what the `*_vec` families give and why plain counters are vectors without
//! labels. Cardinality is bounded by the callers: label values come from closed sets.

use prometheus::core::Collector;
use prometheus::{
    CounterVec, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry,
};

/// A handle to the registry; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Metrics(Registry);

impl Metrics {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What the scrape endpoint reads.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.0
    }

    fn add<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let collector = made.expect("metric names and labels are constants of this program");
        self.0.register(Box::new(collector.clone())).expect("each family is registered once");
        collector
    }

    /// A counter of whole events.
    #[must_use]
    pub fn counter(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    /// A counter of fractions, such as summed milliseconds.
    #[must_use]
    pub(crate) fn float_counter(&self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.add(CounterVec::new(Opts::new(name, help), labels))
    }

    /// A gauge of whole numbers.
    #[must_use]
    pub(crate) fn gauge(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// A gauge of fractions.
    #[must_use]
    pub(crate) fn float_gauge(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.add(GaugeVec::new(Opts::new(name, help), labels))
    }

    /// A histogram with the given upper bounds.
    #[must_use]
    pub fn histogram(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
        self.add(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
    }

    /// Registers a collector that computes its samples at scrape time.
    ///
    /// # Errors
    /// When one of its names is taken.
    pub(crate) fn register(&self, collector: Box<dyn Collector>) -> prometheus::Result<()> {
        self.0.register(collector)
    }
}
