//! `pilot-agent istio-iptables`.

use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::parts::iptables::settings;
use crate::iptables::command;
use crate::iptables::settings::Settings;

/// Runs the command; gives the exit status.
pub(super) fn run(parsed: &Parsed, env: &Env) -> u8 {
    with(&settings(parsed, env), env)
}

/// The same with settings as they are.
pub(super) fn with(settings: &Settings, env: &Env) -> u8 {
    let runtime = match super::runtime::build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("Error: {why}");
            return command::FAILED;
        }
    };
    runtime.block_on(command::run(settings, env.get("PATH").unwrap_or_default(), env.map()))
}
