//! ISTIO_KUBE_APP_PROBERS and ISTIO_PROMETHEUS_ANNOTATIONS: any text is taken or refused, and what is taken
//! is what was meant.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::status::{probes, stats};

fuzz_target!(|text: &str| {
    if let Ok(table) = probes::parse(text) {
        for (path, _) in table.iter() {
            assert!(path.starts_with("/app-health/") || path.starts_with("/app-lifecycle/"));
            assert_eq!(path.matches('/').count(), 3);
        }
    }
    if let Ok(targets) = stats::parse_annotations(text, 15020) {
        assert!(targets.iter().all(|t| t.port != "15020" && !t.port.is_empty() && !t.path.is_empty()));
    }
});
