//! `proxy`: the agent itself.

use std::path::Path;

use super::{logging_options, request, tell};
use crate::base::{build_info, error, logging};
use crate::config::args::{self, Flag, Parsed};
use crate::config::env::Env;
use crate::config::parts::Error;
use crate::config::{self, Sources, pod, report};
use crate::trouble::Kind;

/// Runs the agent to its end; gives the exit status.
pub(super) fn run(parsed: Parsed, env: &Env) -> u8 {
    let dry_run = parsed.is_true(args::PROXY, args::DRY_RUN);
    let mut logs = logging_options(&parsed);
    let as_json = logs.as_json;
    if dry_run {
        // Standard output is for the bootstrap.
        logs.targets = vec!["stderr".to_owned()];
    } else {
        // Whoever stops reading the log must not stop the agent.
        logs.patient = false;
    }
    if let Err(e) = logging::init(&logs) {
        return misread(error::chain(&e));
    }
    crate::base::tasks::remember_places();
    let table: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    report::flags(&parsed, &table).iter().for_each(|line| tracing::info!("{line}"));
    tracing::info!("Version {}-{}-{}", build_info::ISTIO_VERSION, build_info::REVISION, build_info::STATUS);
    let annotations = pod::read(Path::new(pod::ANNOTATIONS)).unwrap_or_default();
    let annotation = |key: &str| annotations.get(key).cloned();
    let (sources, config) = config::load(parsed, env, Path::new("."), annotation, show);
    let config = match config {
        Ok(config) => config,
        Err(problems) => {
            // Every problem is a line of its own, so that one start shows all there is to repair.
            for problem in &problems {
                refused(problem, as_json);
            }
            return problems.first().map_or(super::FAILED, |first| first.exit_code);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            let error = Error::new(format!("the runtime cannot be built: {e}")).of(Kind::PartFailed);
            return refused(&error, as_json);
        }
    };
    let status = if dry_run {
        for line in runtime.block_on(crate::doctor::preflight(&sources)) {
            tracing::warn!("{line}");
        }
        match runtime.block_on(crate::agent::dry_run(config)) {
            Ok(bootstrap) => request::print(&bootstrap),
            Err(e) => refused(&e, as_json),
        }
    } else {
        runtime.block_on(crate::agent::run(config)).unwrap_or_else(|e| refused(&e, as_json))
    };
    // A name look-up or a disk that hangs in a thread of its own must not hold up the end.
    runtime.shutdown_background();
    status
}

/// Flags that cannot be read: what they say of the log is not known either.
pub(super) fn misread(error: String) -> u8 {
    let _ = logging::init(&logging::Options::default());
    refused(&Error::new(error), false)
}

/// A start that is refused: on standard error for people and scripts, and as the log's last line with what to do.
fn refused(error: &Error, as_json: bool) -> u8 {
    // Whoever asked for JSON reads nothing else.
    if !as_json {
        tell(&error.text);
    }
    tracing::error!("{}", error.report().last_line(&error.text));
    error.exit_code
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
