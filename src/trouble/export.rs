//! The list as a metric, read when somebody scrapes.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};

use super::Troubles;
use crate::base::metrics::Metrics;

struct Export {
    list: Troubles,
    gauge: IntGaugeVec,
}

/// Shows each kind that is on the list as one sample: how many there are of it. None is shown while nothing
/// is wrong.
///
/// # Panics
/// When called twice for one registry.
pub(crate) fn export(list: &Troubles, metrics: &Metrics) {
    let opts = Opts::new("trouble", "What is wrong now, by kind (docs/OPERATIONS.md); no sample: nothing");
    let gauge = IntGaugeVec::new(opts, &["kind", "severity"]).expect("names and labels are constants");
    let export = Export { list: list.clone(), gauge };
    metrics.register(Box::new(export)).expect("the family is registered once");
}

impl Collector for Export {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.reset();
        for trouble in self.list.snapshot() {
            let labels = [trouble.kind.name(), trouble.kind.severity().name()];
            self.gauge.with_label_values(&labels).inc();
        }
        self.gauge.collect()
    }
}
