//! `proxy`: the agent itself.

use std::path::Path;
use std::sync::Arc;

use tokio::runtime::Runtime;

use super::{logging_options, request, tell};
use crate::agent::{Early, upgrade};
use crate::base::error::BoxError;
use crate::base::{build_info, error, heap, logging, open_files, spare};
use crate::config::args::{self, Flag, Parsed};
use crate::config::env::Env;
use crate::config::parts::Error;
use crate::config::{self, Config, Sources, pod, report};
use crate::trouble::Kind;

/// Runs the agent to its end; gives the exit status.
pub(super) fn run(parsed: Parsed, env: &Env) -> u8 {
    if parsed.is_true(args::PROXY, args::DRY_RUN) {
        return dry_run(parsed, env);
    }
    let early = Early::watched();
    // `vm run` starts /proc/self/exe; people look for the agent's name.
    if std::fs::read("/proc/self/comm").is_ok_and(|name| name == b"exe\n") {
        let _ = rustix::thread::set_name(c"pilot-agent");
    }
    // Before anything that is sized by it.
    open_files::raise();
    heap::share();
    spare::keep();
    upgrade::guarded(|heir| {
        let mut logs = logging_options(&parsed);
        // Whoever stops reading the log must not stop the agent.
        logs.patient = false;
        let started = prepare(parsed, env, &logs).and_then(|(_, config, runtime)| {
            let status = runtime.block_on(crate::agent::run(config, heir, early));
            // A name look-up or a disk that hangs in a thread of its own must not hold up the end.
            runtime.shutdown_background();
            status.map_err(|e| refused(&e, logs.as_json))
        });
        started.unwrap_or_else(|status| status)
    })
}

// Apart, as each command that ends soon is: what it needs of the stack is not the agent's.
#[inline(never)]
fn dry_run(parsed: Parsed, env: &Env) -> u8 {
    let mut logs = logging_options(&parsed);
    // Standard output is for the bootstrap.
    logs.targets = vec!["stderr".to_owned()];
    let done = prepare(parsed, env, &logs).map(|(sources, config, runtime)| {
        for line in runtime.block_on(crate::doctor::preflight(&sources)) {
            tracing::warn!("{line}");
        }
        let status = match runtime.block_on(crate::agent::dry_run(&config)) {
            Ok(bootstrap) => request::print(&bootstrap),
            Err(e) => refused(&e, logs.as_json),
        };
        runtime.shutdown_background();
        status
    });
    done.unwrap_or_else(|status| status)
}

/// Whether this program could take the place of the agent that asks; `words` are those the agent was called with.
#[inline(never)]
pub(super) fn rehearse(words: &[String], env: &Env) -> u8 {
    let table: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    let words = of_proxy(words);
    let read = || -> Result<_, BoxError> { Ok((upgrade::on_trial()?, args::parse(&words, &table, true)?)) };
    let (heir, parsed) = match read() {
        Ok(both) => both,
        Err(error) => return misread(&*error),
    };
    let mut logs = logging_options(&parsed);
    logs.targets = vec!["stderr".to_owned()];
    // Only the reason is of interest.
    logs.output_level = "all:error".to_owned();
    let done = prepare(parsed, env, &logs).map(|(_, config, runtime)| {
        let status = match runtime.block_on(upgrade::rehearse(&config, &heir)) {
            Ok(line) => request::print(format!("{line}\n").as_bytes()),
            Err(e) => refused(&e, logs.as_json),
        };
        runtime.shutdown_background();
        status
    });
    done.unwrap_or_else(|status| status)
}

// The words without the command's name, before which flags of the log may stand.
fn of_proxy(words: &[String]) -> Vec<String> {
    match super::find(words) {
        Ok((Some(command), rest)) if command.name == "proxy" => rest,
        _ => words.to_vec(),
    }
}

// Everything before the first thing is bound; else the exit status, and all is told.
fn prepare(
    parsed: Parsed,
    env: &Env,
    logs: &logging::Options,
) -> Result<(Arc<Sources>, Arc<Config>, Runtime), u8> {
    let as_json = logs.as_json;
    logging::init(logs).map_err(|e| misread(&e))?;
    crate::base::tasks::remember_places();
    #[cfg(debug_assertions)]
    env.get("AGENT_TEST_PANIC").into_iter().for_each(crate::base::on_purpose::plan);
    let table: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).chain(&[args::HELP]).copied().collect();
    logging::together(|| {
        report::flags(&parsed, &table).iter().for_each(|line| tracing::info!("{line}"));
        tracing::info!(
            "Version {}-{}-{}",
            build_info::ISTIO_VERSION,
            build_info::REVISION,
            build_info::STATUS
        );
    });
    let annotations = pod::read(Path::new(pod::ANNOTATIONS)).unwrap_or_default();
    let annotation = |key: &str| annotations.get(key).cloned();
    let (sources, config) = config::load(parsed, env, Path::new("."), annotation, show);
    let config = config.map_err(|problems| {
        // Every problem is a line of its own, so that one start shows all there is to repair. The last line is what
        // explains the others, as doctor has it.
        let mut causes: Vec<&Error> = problems.iter().collect();
        causes.sort_by_key(|problem| problem.kind);
        for problem in causes.into_iter().rev() {
            refused(problem, as_json);
        }
        problems.first().map_or(super::FAILED, |first| first.exit_code)
    })?;
    let runtime = super::runtime::build().map_err(|why| {
        let why = why.to_string();
        let kind = Kind::of_start(&why).unwrap_or(Kind::PartFailed);
        refused(&Error::new(why).of(kind), as_json)
    })?;
    Ok((sources, config, runtime))
}

/// Flags that cannot be read: what they say of the log is not known either.
pub(super) fn misread(error: &(dyn std::error::Error + 'static)) -> u8 {
    let _ = logging::init(&logging::Options::default());
    refused(&Error::new(error::chain(error)), false)
}

/// A start that is refused: on standard error for people and scripts, and as the log's last line with what to do.
fn refused(error: &Error, as_json: bool) -> u8 {
    upgrade::because(&error.text);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_heir_is_given_what_the_agent_was_called_with() {
        for (line, rest) in [
            ("proxy sidecar --domain x", "sidecar --domain x"),
            ("--log_as_json proxy sidecar", "--log_as_json sidecar"),
            ("--log_output_level all:debug proxy router", "--log_output_level all:debug router"),
            ("--log_output_level=all:debug proxy", "--log_output_level=all:debug"),
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(of_proxy(&words).join(" "), rest, "{line}");
        }
    }
}
