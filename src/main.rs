//! `pilot-agent`: parses arguments, calls a command, gives an exit code.

use std::process::ExitCode;

use pilot_agent::config::env::Env;

fn main() -> ExitCode {
    // Before anything else, above all before a runtime: this may be the child that becomes Envoy, or guards it.
    let child = pilot_agent::envoy::launch::intercept(std::env::args_os())
        .or_else(|| pilot_agent::envoy::guard::intercept(std::env::args_os()));
    if let Some(status) = child {
        return ExitCode::from(status);
    }
    let mut words = std::env::args_os().map(|w| w.to_string_lossy().into_owned());
    let name = words.next().unwrap_or_default();
    let words = pilot_agent::cli::called(&name, words.collect());
    let status = pilot_agent::cli::run(&words, Env::of_process());
    pilot_agent::tls::keys::settle();
    pilot_agent::base::logging::flush();
    ExitCode::from(status)
}
