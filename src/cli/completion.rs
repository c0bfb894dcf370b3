//! `completion bash|zsh|fish|powershell`.

use clap_complete::Shell;

use super::{Command, fail, help};
use crate::config::args::Parsed;

/// Prints the script; without a shell, the help.
pub(super) fn run(command: &Command, parsed: &Parsed) -> u8 {
    let shell = match parsed.positional.first().map(String::as_str) {
        None => return help::print(Some(command)),
        Some("bash") => Shell::Bash,
        Some("zsh") => Shell::Zsh,
        Some("fish") => Shell::Fish,
        Some("powershell") => Shell::PowerShell,
        Some(other) => {
            return fail(&format!("unknown shell {other:?}: it is one of {}", help::SHELLS.join(", ")), None);
        }
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut help::tree(), "pilot-agent", &mut script);
    super::request::print(&script)
}
