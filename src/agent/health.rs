//! Health checks of the application: Envoy's word comes from readiness, changes go to the relay.

use std::net::SocketAddr;
use std::sync::Arc;

use super::stages::Stages;
use crate::base::clock::Clock;
use crate::base::metrics::Metrics;
use crate::config::Config;
use crate::config::parts::envoy::Presence;
use crate::health::{Checker, EnvoyReady, Handle, Parts};
use crate::status::ready;
use crate::trouble::Reporter;
use crate::{envoy, status, xds};

/// What the checks are joined to.
pub(super) struct Joined<'a> {
    pub envoy: &'a envoy::Handle,
    pub xds: &'a xds::Handle,
    pub metrics: &'a Metrics,
    pub clock: &'a Arc<dyn Clock>,
    pub trouble: Reporter,
}

/// Starts the checks that ProxyConfig asks for. They end with the relay, which tells istiod.
pub(super) fn start(config: &Config, joined: Joined<'_>, stages: &Stages) -> Option<Handle> {
    let checks = match &config.health {
        Ok(checks) => checks.clone()?,
        Err(refused) => {
            tracing::error!(target: "healthcheck", "{refused}");
            return None;
        }
    };
    let xds = joined.xds.clone();
    let (checker, handle) = Checker::new(
        checks,
        Parts {
            envoy: (config.envoy.presence != Presence::None).then(|| asked(config, joined.envoy)),
            report: Box::new(move |unhealthy: Option<String>| xds.report_health(unhealthy)),
            trouble: joined.trouble,
            crypto: config.crypto.clone(),
            metrics: joined.metrics.clone(),
            clock: joined.clock.clone(),
        },
    );
    stages.xds.lasting("application health", checker.run(stages.xds.token()));
    Some(handle)
}

// With a memory of its own: what readiness has learned is its business. Before Envoy's process is first
// seen only its admin port counts: the first probe may come before it.
fn asked(config: &Config, process: &envoy::Handle) -> EnvoyReady {
    let admin = SocketAddr::new(status::loopback(config.all_ipv6), config.envoy.process.admin.port);
    let external = config.envoy.presence == Presence::External;
    let envoy = if external { ready::Envoy::external(admin) } else { ready::Envoy::new(admin) };
    let known = Arc::new(ready::Followed::new(envoy));
    let process = process.clone();
    Box::new(move || {
        let (known, process) = (known.clone(), process.clone());
        Box::pin(async move { Ok(known.ready(process.running(), || process.generation()).await?) })
    })
}
