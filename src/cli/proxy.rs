//! `pilot-agent proxy`.

use std::path::Path;

use crate::config::env::Env;
use crate::config::{self, args, pod};

/// Runs the agent to its end; gives the exit status.
pub fn run(words: &[String], env: &Env) -> u8 {
    let flags: Vec<args::Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    let parsed = match args::parse(words, &flags, true) {
        Ok(parsed) => parsed,
        Err(e) => {
            eprintln!("Error: {e}");
            return 255;
        }
    };
    tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_writer(std::io::stdout).init();
    let annotations = pod::read(Path::new(pod::ANNOTATIONS)).unwrap_or_default();
    let config = match config::load(parsed, env, Path::new("."), |key| annotations.get(key).cloned()) {
        Ok(config) => config,
        Err(errors) => {
            for e in errors {
                tracing::error!("{e}");
                eprintln!("Error: {e}");
            }
            return 255;
        }
    };
    config.warnings.iter().for_each(|w| tracing::warn!("{w}"));
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("Error: the runtime cannot be built: {e}");
            return 255;
        }
    };
    runtime.block_on(crate::agent::run(config))
}
