//! `proxy`: the agent itself.

use std::path::Path;

use super::{fail, logging_options, request};
use crate::base::{build_info, error, logging};
use crate::config::args::{self, Flag, Parsed};
use crate::config::env::Env;
use crate::config::{self, Config, Sources, pod, report};

/// Runs the agent to its end; gives the exit status.
pub(super) fn run(parsed: Parsed, env: &Env) -> u8 {
    let dry_run = parsed.is_true(args::PROXY, args::DRY_RUN);
    let mut logs = logging_options(&parsed);
    if dry_run {
        // Standard output is for the bootstrap.
        logs.targets = vec!["stderr".to_owned()];
    } else {
        // Whoever stops reading the log must not stop the agent.
        logs.patient = false;
    }
    if let Err(e) = logging::init(&logs) {
        return fail(&error::chain(&e), None);
    }
    crate::base::tasks::remember_places();
    let table: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    report::flags(&parsed, &table).iter().for_each(|line| tracing::info!("{line}"));
    tracing::info!("Version {}-{}-{}", build_info::ISTIO_VERSION, build_info::REVISION, build_info::STATUS);
    let annotations = pod::read(Path::new(pod::ANNOTATIONS)).unwrap_or_default();
    let annotation = |key: &str| annotations.get(key).cloned();
    let (sources, errors) = config::gather(parsed, env, Path::new("."), annotation);
    if errors.is_empty() {
        show(&sources);
    }
    let config = match Config::new(&sources, errors) {
        Ok(config) => config,
        Err(problems) => {
            // Every problem is a line of its own, so that one start shows all there is to repair.
            for problem in &problems {
                fail(&problem.text, None);
            }
            return problems.first().map_or(super::FAILED, |first| first.exit_code);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return fail(&format!("the runtime cannot be built: {e}"), None),
    };
    let status = if dry_run {
        for line in runtime.block_on(crate::doctor::preflight(&sources)) {
            tracing::warn!("{line}");
        }
        match runtime.block_on(crate::agent::dry_run(config)) {
            Ok(bootstrap) => request::print(&bootstrap),
            Err(e) => fail(&e.to_string(), None),
        }
    } else {
        runtime.block_on(crate::agent::run(config))
    };
    // A name look-up or a disk that hangs in a thread of its own must not hold up the end.
    runtime.shutdown_background();
    status
}

fn show(config: &Sources) {
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    tracing::info!(
        ips = %format!("[{}]", config.addresses.join(" ")),
        "type" = %config.node_type,
        id = %report::pod(config),
        domain = %config.domain,
        "Proxy role"
    );
    let set = report::variables(config);
    if !set.is_empty() {
        tracing::info!("Variables in effect: {}", set.join(" "));
    }
    tracing::info!("Effective config: {}", report::proxy_config(config).trim_end());
}
