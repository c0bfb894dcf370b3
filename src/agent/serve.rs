//! The tasks, and what they are joined by.

use std::sync::Arc;
use std::time::SystemTime;

use super::bind::Bound;
use super::common::Common;
use super::document::Face;
use super::upstream::Upstream;
use super::{health, systemd, wasm};
use crate::base::pressure::{self, Shortage};
use crate::base::tasks::{Group, Stop};
use crate::base::uds;
use crate::trouble::{Kind, Reporter};
use crate::{envoy, sds, status, xds};

/// Starts all that is bound.
pub(super) fn serve(common: &Common, upstream: Upstream, bound: Bound, envoy: &envoy::Handle) {
    let Common { config, clock, metrics, troubles, tasks, started, watches } = common;
    until(&tasks.status, "log", crate::base::logging::attend());
    until(&tasks.status, "log failures", log_failures(troubles.reporter("default")));
    let short = troubles.reporter("default");
    until(&tasks.status, "memory", pressure::attend(config.memory, move |shortage| memory(&short, shortage)));
    until(&tasks.status, "troubles", {
        let troubles = troubles.clone();
        async move { troubles.attend().await }
    });
    let sts = bound.token_service.map(|service| service.spawn(tasks, metrics, clock, troubles));
    if let Some(server) = bound.dns {
        tasks.dns.lasting("dns", server.serve(tasks.dns.token()));
    }
    let names = bound.wires.names.clone();
    let xds = bound.xds.0.handle();
    bound.wires.spawn(tasks, config, &upstream.roots, &bound.identity, &xds, watches);
    if let Some(refresh) = upstream.tokens.refresh {
        let stop = tasks.secrets.token();
        tasks.secrets.lasting("token", async move { refresh.refresh(stop).await });
    }
    let (xds_server, xds_bound) = bound.xds;
    sockets(&tasks.sds, bound.sds, bound.more_sds);
    relay(&tasks.xds, xds_server, xds_bound);
    if let Some(modules) = &bound.modules {
        wasm::spawn(modules, &xds, tasks);
    }
    let trouble = troubles.reporter("healthcheck");
    let health = health::start(config, health::Joined { envoy, xds: &xds, metrics, clock, trouble }, tasks);
    let face: Arc<dyn status::Agent> = Arc::new(Face {
        node_type: config.node_type.clone(),
        envoy: envoy.clone(),
        secrets: bound.identity,
        xds,
        names,
        health,
        sts,
        gateway: bound.gateway,
        callers: bound.callers,
        tasks: tasks.clone(),
        troubles: troubles.clone(),
        since: SystemTime::now(),
    });
    if let Some(manager) = config.notify.clone() {
        let asked = config.status.as_ref().and_then(|config| config.ready.envoy());
        systemd::start(manager, systemd::Asked::new(face.clone(), asked, envoy, troubles), tasks);
    }
    if let Some(bound) = bound.status {
        let (metrics, crypto) = (metrics.clone(), config.crypto.clone());
        let handles = status::Handles { agent: face, metrics, crypto, started: *started };
        tasks.status.lasting("status", bound.serve(handles, tasks.closing(), tasks.status.token()));
    }
}

/// Runs `task` until the group is stopped.
fn until(group: &Group, name: &str, task: impl Future<Output = ()> + Send + 'static) {
    let stop: Stop = group.token();
    group.lasting(name, async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = task => {}
        }
    });
}

/// Who looks into the log sees nothing of it there.
async fn log_failures(trouble: Reporter) {
    loop {
        let error = crate::base::logging::failure().await;
        match error.as_ref().and_then(|error| Some((error, Kind::of_io(error)?))) {
            Some((error, kind)) => {
                trouble.report((
                    kind,
                    format!("the log cannot be written: {error}; lines are lost until it can"),
                ));
            }
            None => trouble.end(),
        }
    }
}

/// Clients whose connections are closed do not know why.
fn memory(trouble: &Reporter, shortage: Option<Shortage>) {
    match shortage {
        Some(shortage) => trouble.report((Kind::MemoryShort, shortage.to_string())),
        None => trouble.end(),
    }
}

fn sockets(group: &Group, server: sds::Server, more: Vec<(&'static str, sds::Server)>) {
    group.lasting("sds", server.run(group.token()));
    for (name, server) in more {
        group.lasting(name, server.run(group.token()));
    }
}

fn relay(group: &Group, server: xds::Server, bound: uds::Bound) {
    group.lasting("xds", server.serve(bound, group.token()));
}
