//! `help`, `--help` and a bare `pilot-agent`, rendered by clap from the tables of flags.

use clap::{Arg, ArgAction};

use super::{COMMANDS, Command, hints};
use crate::config::args::{self, Flag, Kind, Parsed};

/// What a rendering of the command line is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// Help: what the Go agent does not list is not listed, so that pages can be compared.
    Help,
    /// A shell's completion: all that is of use today.
    Completion,
    /// A man page: likewise.
    Manual,
}

/// What the help of a flag begins with that the Go agent's command of the same name lacks.
const OURS: &str = "ours: ";

/// The whole command line; never used to parse.
pub(super) fn tree(purpose: For) -> clap::Command {
    let root = clap::Command::new("pilot-agent")
        .about("Runs beside Envoy in every sidecar, gateway and VM of an Istio mesh")
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .args(args::LOGGING.iter().map(|flag| argument("", flag)));
    let root = if purpose != For::Help {
        root.arg(Arg::new("version").long("version").action(ArgAction::SetTrue).help("what this build is"))
    } else {
        root
    };
    let listed = COMMANDS.iter().filter(|command| !command.hidden);
    listed.fold(root, |root, command| root.subcommand(one(command, purpose)))
}

// In help, `after_help` tells of what is not listed.
fn one(command: &Command, purpose: For) -> clap::Command {
    // Where the usage says so itself they stand elsewhere: behind `run --` all is the command's.
    let flags = if command.usage.contains("[flags") { "" } else { "[flags]" };
    let usage = ["pilot-agent", command.name, command.usage, flags];
    let usage: Vec<&str> = usage.into_iter().filter(|w| !w.is_empty()).collect();
    let listed =
        |flag: &Flag| argument(command.name, flag).hide(purpose == For::Help && flag.help.starts_with(OURS));
    let out = clap::Command::new(command.name)
        .about(command.about)
        .override_usage(usage.join(" "))
        .hide(command.hidden)
        .args(command.flags.iter().filter(|f| !f.old).map(listed))
        .args(args::LOGGING.iter().map(|flag| argument(command.name, flag)))
        .args(if purpose == For::Completion { hints::words(command.name) } else { Vec::new() });
    match command.name {
        "vm" => out.after_help(
            super::vm::ACTIONS.iter().map(|(name, about)| format!("  vm {name:<8} {about}\n")).collect::<String>()
                + super::vm::STATUSES,
        ),
        "proxy" => out.after_help(
            "Also taken: the flags of releases 0.8 to 1.8 (into ProxyConfig, below every newer source); unknown flags are passed over \
             together with a following word; --gateway-secrets-dir, --gatewayUdsPath and --workloadUDSPath, which are this agent's \
             own. To see what would run without running it, add --dry-run. Every flag and variable stands in docs/CONFIG.md.",
        ),
        _ => out,
    }
}

fn argument(command: &str, flag: &Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name).help(flag.help);
    let arg = if flag.short == '\0' { arg } else { arg.short(flag.short) };
    match flag.kind {
        Kind::Bool => arg.action(ArgAction::SetTrue),
        kind => {
            let name = match kind {
                Kind::Int(_) | Kind::Decimal(_) | Kind::Uint(_) => "number",
                Kind::Duration => "duration",
                _ => "text",
            };
            let action = if kind == Kind::Array { ArgAction::Append } else { ArgAction::Set };
            let arg = arg.action(action).value_name(name);
            let arg = hints::flag(command, flag.name, arg);
            if flag.default.is_empty() { arg } else { arg.default_value(flag.default) }
        }
    }
}

/// Prints the help of a command, or of the whole.
pub(super) fn print(command: Option<&Command>) -> u8 {
    let mut tree = tree(For::Help);
    let text = match command {
        None => tree.render_help(),
        Some(command) => one(command, For::Help).render_help(),
    };
    super::request::print(text.to_string().as_bytes())
}

/// `help [command]`; of an unknown one it says so on standard error and ends with 0, as cobra does.
pub(super) fn run(parsed: &Parsed) -> u8 {
    match parsed.positional.first() {
        None => print(None),
        Some(name) => match COMMANDS.iter().find(|c| c.name == name) {
            Some(command) => print(Some(command)),
            None => {
                eprintln!("Unknown help topic {:?}\n{}", parsed.positional, tree(For::Help).render_usage());
                0
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_holds_together_and_hides_what_is_old() {
        for purpose in [For::Help, For::Completion, For::Manual] {
            tree(purpose).debug_assert();
        }
        let text = one(&COMMANDS[0], For::Help).render_help().to_string();
        assert!(text.contains("--meshConfig <text>") && text.contains("--log_as_json"));
        assert!(!text.contains("\n      --configPath") && !text.contains("\n      --dry-run"));
    }

    #[test]
    fn pages_list_the_flags_that_the_go_agent_lists() {
        let listed = |name: &str| -> Vec<String> {
            let command = COMMANDS.iter().find(|command| command.name == name).unwrap();
            let text = one(command, For::Help).render_help().to_string();
            let flags = text.lines().filter_map(|line| {
                let line = line.strip_prefix("  ")?.trim_start();
                let (short, rest) = line.split_at_checked(4).unwrap_or((line, ""));
                let long = if short.starts_with('-') && short.ends_with(", ") { rest } else { line };
                long.strip_prefix("--")?.split(' ').next().map(str::to_owned)
            });
            let mut flags: Vec<String> =
                flags.filter(|flag| !args::LOGGING.iter().any(|f| f.name == flag)).collect();
            flags.sort();
            flags
        };
        let proxy = "concurrency domain help meshConfig outlierLogPath profiling proxyComponentLogLevel proxyLogLevel \
                     serviceCluster stsPort templateFile tokenManagerPlugin";
        assert_eq!(listed("proxy").join(" "), proxy);
        assert_eq!(listed("request"), ["debug-port", "help"]);
        assert_eq!(listed("version"), ["help", "output", "short"]);
        assert_eq!(listed("completion"), ["help"]);
        // Behind `--` all is the command's.
        for (name, usage) in [
            ("run", "pilot-agent run [flags] -- command ..."),
            ("doctor", "pilot-agent doctor [sidecar|router|waypoint] [flags, and those of proxy]"),
            ("wait", "pilot-agent wait [flags]"),
        ] {
            let command = COMMANDS.iter().find(|command| command.name == name).unwrap();
            let text = one(command, For::Manual).render_help().to_string();
            assert!(text.lines().any(|line| line == format!("Usage: {usage}")), "{text}");
        }
        let redirection = listed("istio-iptables");
        assert!(
            redirection.len() == 33 && !redirection.iter().any(|f| f == "restore-format"),
            "{redirection:?}"
        );
    }
}
