//! `completion bash|zsh|fish|powershell`, and man pages (`completion man DIR DATE`, for those who make packages).

use std::io::Write as _;
use std::path::Path;

use clap::builder::PossibleValue;
use clap_complete::Shell;

use super::{Command, fail, help, hints};
use crate::config::args::Parsed;

/// A flag of the Go agent's completion of each shell.
pub(super) const NO_DESCRIPTIONS: &str = "no-descriptions";

/// Makes bash see whole words; bash alone splits them.
const WHOLE_WORDS: &str = include_str!("whole_words.bash");

/// Prints the script; without a shell, the help.
pub(super) fn run(command: &Command, parsed: &Parsed) -> u8 {
    let shell = parsed.positional.first().map(String::as_str);
    let is_shell = shell.is_some_and(|name| hints::SHELLS.contains(&name));
    if parsed.get(NO_DESCRIPTIONS).is_some() && !is_shell {
        return fail(&format!("unknown flag: --{NO_DESCRIPTIONS}"), None);
    }
    if let (true, [shell, more, ..]) = (is_shell, parsed.positional.as_slice()) {
        return fail(&format!("unknown command {more:?} for \"pilot-agent completion {shell}\""), None);
    }
    let shell = match shell {
        None => return help::print(Some(command)),
        Some("bash") => Shell::Bash,
        Some("zsh") => Shell::Zsh,
        Some("fish") => Shell::Fish,
        Some("powershell") => Shell::PowerShell,
        Some("man") => {
            let dir = parsed.positional.get(1).map_or(".", String::as_str);
            // Given, so that the same sources make the same pages.
            let date = parsed.positional.get(2).map_or("", String::as_str);
            return man(Path::new(dir), date).map_or_else(
                |e| {
                    fail(
                        &format!(
                            "man pages into {dir}: {e}; name a folder that is there and can be written to"
                        ),
                        None,
                    )
                },
                |()| 0,
            );
        }
        // As of the Go agent's library: the help, and 0.
        Some(other) => {
            let _ = writeln!(
                std::io::stderr(),
                "unknown shell {other:?}: it is one of {}",
                hints::SHELLS.join(", ")
            );
            return help::print(Some(command));
        }
    };
    let mut script = Vec::new();
    let mut tree = help::tree(help::For::Completion);
    clap_complete::generate(shell, &mut tree, "pilot-agent", &mut script);
    if shell == Shell::Fish {
        script.extend(fish_words(&tree).into_bytes());
    }
    if shell == Shell::Bash {
        // clap_complete 4.6 sets one name for a command and looks for another where the program's has a hyphen.
        let text = String::from_utf8_lossy(&script)
            .replace("pilot__subcmd__agent__subcmd__", "pilot__agent__subcmd__");
        script = (text + WHOLE_WORDS).into_bytes();
    }
    super::request::print(&script)
}

// clap_complete 4.6 leaves out for fish what can stand behind a command. Each word is offered behind the one before it,
// until one of its own is there.
fn fish_words(tree: &clap::Command) -> String {
    let mut script = String::new();
    for command in tree.get_subcommands() {
        let mut when = format!("__fish_pilot_agent_using_subcommand {}", command.get_name());
        for word in command.get_positionals() {
            let values = word.get_possible_values();
            // `help` is a word behind itself.
            let names = values.iter().map(PossibleValue::get_name).filter(|name| *name != command.get_name());
            let names: Vec<&str> = names.collect();
            let offered: Vec<String> = values
                .iter()
                .map(|value| {
                    let about = value.get_help().map(ToString::to_string).unwrap_or_default();
                    format!("{}\\t'{}'", value.get_name(), about.replace('\'', "\\'"))
                })
                .collect();
            let (seen, offered) =
                (format!("__fish_seen_subcommand_from {}", names.join(" ")), offered.join("\n"));
            script.push_str(&format!(
                "complete -c pilot-agent -n \"{when}; and not {seen}\" -f -a \"{offered}\"\n"
            ));
            when.push_str(&format!("; and {seen}"));
        }
    }
    script
}

// pilot-agent.1 and one page for each command.
fn man(dir: &Path, date: &str) -> std::io::Result<()> {
    let tree = help::tree(help::For::Manual);
    let one = |page: &clap::Command, name: &str| -> std::io::Result<()> {
        let page = page.clone().name(name.to_owned()).version(crate::base::build_info::VERSION);
        // Clap's own, with -V, which no command takes.
        let page = page.disable_version_flag(true);
        let man = clap_mangen::Man::new(page)
            .title(name)
            .date(date)
            .manual("pilot-agent")
            .source(format!("pilot-agent {}", crate::base::build_info::VERSION));
        let mut text = Vec::new();
        man.render(&mut text)?;
        std::fs::write(dir.join(format!("{name}.1")), text)
    };
    for command in tree.get_subcommands() {
        one(command, &format!("pilot-agent-{}", command.get_name()))?;
    }
    one(&tree, "pilot-agent")
}
