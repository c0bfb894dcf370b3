//! What 0.8 to 1.8 took from flags and variables, below every newer source.
//!
//! To the agents of today these are unknown and passed over, so none of them may end a start: what cannot be
//! read, or would make the proxy config invalid, is told and left out.

use serde_json::{Value, json};

use super::{Fault, Layers, validate};
use crate::config::args;
use crate::config::env::var;
use crate::config::envoy_options;

/// Flags that are a field of ProxyConfig, by its name.
const FIELDS: [&str; 12] = [
    "configPath",
    "binaryPath",
    "drainDuration",
    "discoveryAddress",
    "statsdUdpAddress",
    "proxyAdminPort",
    "controlPlaneAuthPolicy",
    "customConfigFile",
    "statusPort",
    "availabilityZone",
    "discoveryRefreshDelay",
    "envoyMetricsServiceAddress",
];

impl Layers<'_> {
    pub(super) fn older(&mut self) {
        let seconds = var::TERMINATION_DRAIN_DURATION_SECONDS;
        if self.settings.env().get(seconds.name()).is_some_and(|text| text.parse::<i64>().is_ok()) {
            let span = format!("{}s", self.settings.int(seconds));
            self.lay_older(seconds.name(), "terminationDrainDuration", Value::String(span));
        }
        for field in FIELDS {
            // Empty stood for "not given".
            let given = self.flag(field).map(str::to_owned);
            if let Some(value) = given.filter(|_| !(field == "statusPort" && self.no_status_port())) {
                self.lay_older(&format!("--{field}"), field, Value::String(value));
            }
        }
        for field in ["envoyMetricsService", "envoyAccessLogService"] {
            let source = format!("--{field}");
            match self.flag(field).map(serde_json::from_str::<Value>) {
                None => {}
                Some(Ok(value)) => self.lay_older(&source, field, value),
                Some(Err(error)) => self
                    .warnings
                    .push(format!("{source} is passed over: {error}; it must be a RemoteService as JSON")),
            }
        }
        for (source, tracer) in [("--zipkinAddress", "zipkin"), ("--datadogAgentAddress", "datadog")] {
            if let Some(address) = self.flag(&source[2..]) {
                let tracing = json!({tracer: {"address": address}});
                self.lay_older(source, "tracing", tracing);
                break;
            }
        }
        if self.flag("lightstepAddress").is_some() {
            self.warnings.push(
                "--lightstepAddress is passed over: the tracer is not part of Envoy any more, which would refuse to start with \
                 it; use zipkin, datadog or an OpenTelemetry extension provider"
                    .to_owned(),
            );
        }
    }

    /// What only shows when all newer sources have been laid.
    pub(super) fn older_last(&mut self) {
        // A status port of 0 meant no status server, which a ProxyConfig cannot say.
        if self.no_status_port() && self.mesh.proxy.status_port == super::super::mesh::STATUS_PORT {
            self.warnings.push(
                "--statusPort=0: there is no status server, so no readiness, no application probes and no merged metrics"
                    .to_owned(),
            );
            let laid = self.mesh.set("statusPort", Value::from(0));
            self.take("--statusPort", laid);
        }
        let Some(flag) = self.flag("discoveryAddress") else { return };
        let used = &self.mesh.proxy.discovery_address;
        let line = if used == flag {
            format!(
                "--discoveryAddress={flag}, a flag of releases up to 1.8, decides which istiod is asked; newer sources are \
                 discoveryAddress in PROXY_CONFIG or in defaultConfig of {}: write it there, or take the flag away",
                self.flags.or_default(args::PROXY, "meshConfig")
            )
        } else {
            format!(
                "--discoveryAddress={flag}, a flag of releases up to 1.8, has no effect: PROXY_CONFIG, the mesh file or an \
                 annotation names {used}; take the flag away"
            )
        };
        self.warnings.push(line);
    }

    fn flag(&self, name: &str) -> Option<&str> {
        self.flags.get(name).filter(|v| !v.is_empty())
    }

    fn no_status_port(&self) -> bool {
        self.flag("statusPort").and_then(|port| port.parse::<u16>().ok()) == Some(0)
    }

    fn lay_older(&mut self, source: &str, field: &str, value: Value) {
        let before = self.mesh.clone();
        let faults = match self.mesh.set(field, value) {
            Ok(()) => validate::proxy(&self.mesh).into_iter().chain(self.blind(field)).collect(),
            Err(faults) => faults,
        };
        if let Some(fault) = faults.first() {
            self.mesh = before;
            self.warnings
                .push(format!("{source} is passed over, and what holds without it is kept: {fault}"));
        }
    }

    // Of a newer source that ends the start, because Envoy would refuse it.
    fn blind(&self, field: &str) -> Option<Fault> {
        let proxy = &self.mesh.proxy;
        let service = match field {
            "envoyMetricsService" => &proxy.envoy_metrics_service,
            "envoyAccessLogService" => &proxy.envoy_access_log_service,
            _ => return None,
        };
        let metadata = |key: &str| self.settings.env().get(&format!("ISTIO_META_{key}"));
        let tls = envoy_options::tls(service.as_ref()?.tls_settings.as_ref()?, metadata);
        tls.is_blind().then(|| Fault {
            at: format!("{field}.tlsSettings"),
            reason: "no caCertificates are named, and Envoy would refuse its configuration".to_owned(),
        })
    }
}
