//! The command line: one file a command.

mod proxy;

use crate::config::env::Env;

/// Runs the command that the words (after the program's name) say; gives the exit status.
#[must_use]
pub fn run(words: &[String], env: Env) -> u8 {
    match words.iter().position(|w| !w.starts_with('-')).map(|at| (at, words[at].as_str())) {
        Some((at, "proxy")) => {
            let rest: Vec<String> = words[..at].iter().chain(&words[at + 1..]).cloned().collect();
            proxy::run(&rest, &env)
        }
        _ => {
            eprintln!(
                "Error: unknown command {words:?} for \"pilot-agent\"\nRun 'pilot-agent --help' for usage."
            );
            255
        }
    }
}
