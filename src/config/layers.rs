//! The layers of the ProxyConfig in their order, each fault with the source it stands in.
//!
//! All sources are read before any fault is reported, so that one start shows everything there is to
//! repair. Contents are never quoted: a ProxyConfig may hold access tokens.

mod older;

use std::fmt;
use std::io::ErrorKind;
use std::num::IntErrorKind;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::args::{self, Parsed};
use super::env::Settings;
use super::go;
use super::jsonpb::Fault;
use super::mesh::Effective;
use super::release::Release;
use super::{unknown, validate};
use crate::base::bounded;
use crate::config::env::var;

/// A fault and the source it stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    source: String,
    fault: Fault,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.fault)
    }
}

struct Layers<'a> {
    settings: &'a Settings,
    flags: &'a Parsed,
    mesh: Effective,
    problems: Vec<Problem>,
    warnings: &'a mut Vec<String>,
    patience: Duration,
}

/// Merges everything and validates the result. A look-up of a name takes no longer than `patience`.
pub(super) fn merge(
    flags: &Parsed,
    settings: &Settings,
    release: Release,
    root: &Path,
    annotation: &impl Fn(&str) -> Option<String>,
    warnings: &mut Vec<String>,
    patience: Duration,
) -> Result<Effective, Vec<Problem>> {
    let mesh = Effective::of(release);
    let mut l = Layers { settings, flags, mesh, problems: Vec::new(), warnings, patience };
    l.older();
    l.mesh_file(root);
    let text = settings.text(var::PROXY_CONFIG);
    if !text.is_empty() {
        tracing::info!("Apply proxy config from env");
        let laid = l.mesh.overlay(text);
        l.take("failed to unmarshal mesh config from environment (PROXY_CONFIG)", laid);
        l.slips("the field of PROXY_CONFIG ", &unknown::fields(text));
    }
    if let Some(text) = annotation("proxy.istio.io/config").filter(|t| !t.is_empty()) {
        tracing::info!("Apply proxy config from annotation proxy.istio.io/config");
        let laid = l.mesh.overlay(&text);
        l.take("failed to unmarshal mesh config from annotation (proxy.istio.io/config)", laid);
        l.slips("the field of the annotation proxy.istio.io/config ", &unknown::fields(&text));
    }
    l.concurrency();
    l.service_cluster();
    l.statsd();
    l.check("invalid ProxyConfig", validate::proxy(&l.mesh));
    l.older_last();
    l.annotations(annotation);
    if l.problems.is_empty() { Ok(l.mesh) } else { Err(l.problems) }
}

impl Layers<'_> {
    fn take<T>(&mut self, source: &str, laid: Result<T, Vec<Fault>>) -> Option<T> {
        laid.map_err(|faults| self.check(source, faults)).ok()
    }

    // A problem that an earlier layer has shown already is not shown again.
    fn check(&mut self, source: &str, faults: Vec<Fault>) {
        for fault in faults {
            if !self.problems.iter().any(|p| p.fault == fault) {
                self.problems.push(Problem { source: source.to_owned(), fault });
            }
        }
    }

    fn problem(&mut self, source: &str, at: &str, reason: String) {
        self.check(source, vec![Fault { at: at.to_owned(), reason }]);
    }

    fn slips(&mut self, source: &str, found: &[unknown::Unknown]) {
        self.warnings.extend(found.iter().filter_map(|u| unknown::line(source, u)));
    }

    fn mesh_file(&mut self, root: &Path) {
        let name = self.flags.or_default(args::PROXY, "meshConfig");
        if name.is_empty() {
            return;
        }
        let text = match bounded::given(&root.join(name)) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::NotFound => return,
            Err(e) if e.kind() == ErrorKind::FileTooLarge => {
                let reason = format!("{e}; name the mesh's own file with --meshConfig");
                return self.problem("failed to read mesh config file", name, reason);
            }
            Err(e) => {
                let reason = format!(
                    "{e}; make it readable for the agent's user, or name another file with --meshConfig"
                );
                return self.problem("failed to read mesh config file", name, reason);
            }
        };
        if text.is_empty() {
            return;
        }
        let source = format!("failed to unmarshal mesh config from file {name}");
        let Ok(text) = String::from_utf8(text) else {
            return self.problem(&source, "document", "yaml: invalid UTF-8; save it as UTF-8".to_owned());
        };
        tracing::info!("Apply mesh config from file {name}");
        let laid = self.mesh.overlay_mesh(&text);
        self.slips(&format!("the field of {name} "), &unknown::mesh_fields(&text));
        if let Some(document) = self.take(&source, laid) {
            self.check(&source, validate::mesh(&document));
            // The file must be valid on its own, also where a later layer would repair it.
            let faults = validate::proxy(&self.mesh);
            self.check(&source, faults);
        }
    }

    fn concurrency(&mut self) {
        let limit = self.settings.int(var::ISTIO_CPU_LIMIT);
        if self.mesh.proxy.concurrency.is_none() && limit != 0 {
            tracing::info!("cpu limit detected as {limit}, setting concurrency");
            let laid = self.mesh.set("concurrency", Value::from(cut(limit)));
            self.take("ISTIO_CPU_LIMIT", laid);
        }
        let flag = go::integer(self.flags.or_default(args::PROXY, "concurrency"), 64).unwrap_or(0);
        if flag != 0 {
            self.warnings
                .push(format!("legacy --concurrency={flag} flag detected; prefer to use ProxyConfig"));
            let laid = self.mesh.set("concurrency", Value::from(cut(flag)));
            self.take("--concurrency", laid);
        }
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = self.mesh.proxy.concurrency.as_ref().map_or(0, |c| c.value);
        if threads < 0 {
            self.warnings.push(format!(
                "concurrency={threads} of the proxy config, ISTIO_CPU_LIMIT or --concurrency is below zero and counts as 0: Envoy \
                 has a worker thread for each of the {cores} CPUs; write how many it is to have, or leave it out"
            ));
        } else if threads == 0 && u64::try_from(limit).unwrap_or(0) < cores as u64 {
            // No warning: every start without a limit would begin with one.
            tracing::info!(
                "concurrency is set to 0, which will use a thread per CPU on the host ({cores}); the CPU limit is {limit}. \
                 This is not recommended and can lead to performance issues: set concurrency in ProxyConfig"
            );
        }
    }

    // The flag is inert unless ProxyConfig names nothing on purpose.
    fn service_cluster(&mut self) {
        use crate::proto::mesh::proxy_config::ClusterName::ServiceCluster;
        if matches!(&self.mesh.proxy.cluster_name, Some(ServiceCluster(name)) if name.is_empty()) {
            let flag = self.flags.or_default(args::PROXY, "serviceCluster");
            let laid = self.mesh.set("serviceCluster", Value::from(flag));
            self.take("--serviceCluster", laid);
        }
    }

    // A collector that cannot be found is no reason not to start.
    fn statsd(&mut self) {
        let address = self.mesh.proxy.statsd_udp_address.clone();
        if address.is_empty() {
            return;
        }
        let resolved = super::statsd::resolve(&address, self.patience).unwrap_or_else(|reason| {
            self.warnings.push(format!(
                "resolve StatsdUdpAddress failed: {reason}; Envoy starts without statsd: make {address:?} a host:port that resolves"
            ));
            String::new()
        });
        let laid = self.mesh.set("statsdUdpAddress", Value::from(resolved));
        self.take("statsdUdpAddress", laid);
    }

    // After validation, as in the Go agent: the first is taken as it is.
    fn annotations(&mut self, annotation: &impl Fn(&str) -> Option<String>) {
        if let Some(address) = annotation("sidecar.istio.io/discoveryAddress") {
            let laid = self.mesh.set("discoveryAddress", Value::String(address));
            self.take("annotation sidecar.istio.io/discoveryAddress", laid);
        }
        if let Some(port) = annotation("status.sidecar.istio.io/port") {
            // As the Go agent reads it: cut to 32 bits, and what is beyond 64 as the last number there is.
            let number = port.parse::<i64>().unwrap_or_else(|e| {
                self.warnings.push(format!(
                    "Invalid annotation status.sidecar.istio.io/port={port}: it is no number, so there is no status server; write a port or take it away"
                ));
                if *e.kind() == IntErrorKind::PosOverflow { i64::MAX } else { 0 }
            });
            let number = cut(number);
            let laid = self.mesh.set("statusPort", Value::from(number));
            self.take("annotation status.sidecar.istio.io/port", laid);
        }
    }
}

// What a field of 32 bits keeps of a number, as in the Go agent.
#[expect(clippy::cast_possible_truncation, reason = "cutting is what is wanted")]
fn cut(number: i64) -> i32 {
    number as i32
}
