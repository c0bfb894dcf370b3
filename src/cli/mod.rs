//! The command line: one file a command; finding the command, help and errors are here.
//!
//! The words are read by cobra's and pflag's rules ([`crate::config::args`]), because scripts rely on
//! them: a boolean takes no following word, and before a command (and on `proxy`) an unknown flag swallows
//! the next bare word. clap, which cannot be told such rules, renders help and shell completion from the
//! same tables.

mod completion;
#[cfg(test)]
mod config_md;
mod doctor;
mod endpoint;
mod help;
mod hints;
mod http;
mod istio_iptables;
mod proxy;
mod request;
mod run;
mod runtime;
mod sleep;
mod status;
mod upgrade;
mod version;
mod vm;
mod wait;

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use crate::base::error::{BoxError, chain};
use crate::base::{handover, logging, process};
use crate::config::args::{self, Flag, Kind, Parsed};
use crate::config::env::Env;
use crate::config::parts::iptables;
use crate::envoy::{guard, launch};
use crate::tls::keys;

/// The exit status of every error that a command returns; the Go agent ends with -1.
const FAILED: u8 = 255;

/// A command as the command line knows it.
#[derive(Debug, Clone, Copy)]
struct Command {
    name: &'static str,
    /// What comes behind the name in the usage line.
    usage: &'static str,
    about: &'static str,
    flags: &'static [Flag],
    /// Unknown flags are passed over.
    tolerant: bool,
    hidden: bool,
}

const REQUEST: &[Flag] =
    &[Flag::new("debug-port", Kind::Int(32), "15000", "port to ask: 15000, 15004, 15020 or 15021")];

const WAIT: &[Flag] = &[
    Flag::new("timeoutSeconds", Kind::Int(64), "60", "seconds to wait at most"),
    Flag::new("requestTimeoutMillis", Kind::Int(64), "500", "milliseconds one request may take; 0: any time"),
    Flag::new("periodMillis", Kind::Int(64), "500", "milliseconds before each request, the first too"),
    Flag::new("url", Kind::Text, "http://localhost:15021/healthz/ready", "what to ask"),
];

const PORT: Flag = Flag::new(
    "port",
    Kind::Int(32),
    "",
    "the agent's status port; empty: found as the agent finds it, 15020 unless configured",
);

const DOCTOR: &[Flag] = &[
    Flag::new("json", Kind::Bool, "false", "print one JSON document: healthy, verdict, checks, troubles"),
    Flag::new("sign", Kind::Bool, "false", "also have the CA sign for a key that is thrown away"),
    PORT,
];

const STATUS: &[Flag] = &[
    PORT,
    Flag::new(
        "json",
        Kind::Bool,
        "false",
        "print one JSON document; its fields are stable, times are RFC 3339",
    ),
    Flag::new("watch", Kind::Bool, "false", "again every two seconds"),
];

const UPGRADE: &[Flag] = &[
    Flag::new(
        "binary",
        Kind::Text,
        "",
        "the new pilot-agent; empty: what lies where the running one was started from",
    ),
    Flag::new("envoy", Kind::Text, "", "another Envoy instead, by hot restart (ENVOY_HOT_RESTART)"),
    Flag::new("socket", Kind::Text, "", "where the agent takes it; empty: UPGRADE in its configPath"),
];

const RUN: &[Flag] = &[
    Flag::new("wait-timeout", Kind::Duration, "60s", "how long to wait until the proxy is ready"),
    Flag::new("quit", Kind::Bool, "false", "end the proxy when the command has ended"),
    PORT,
];

const VERSION: &[Flag] = &[
    Flag::new("output", Kind::Text, "", "json or yaml; full or full-json tells more").short('o'),
    Flag::new("short", Kind::Bool, "false", "only the version's number").short('s'),
];

const COMPLETION: &[Flag] = &[Flag::old(
    completion::NO_DESCRIPTIONS,
    Kind::Bool,
    "of the Go agent's completion, behind a shell; without effect, the script has descriptions",
)];

const fn command(
    name: &'static str,
    usage: &'static str,
    about: &'static str,
    flags: &'static [Flag],
) -> Command {
    Command { name, usage, about, flags, tolerant: false, hidden: false }
}

const COMMANDS: &[Command] = &[
    Command {
        tolerant: true,
        ..command("proxy", "[sidecar|router|waypoint]", "Run the agent and its Envoy", args::PROXY)
    },
    command(
        "request",
        "<method> <path> [<body>]",
        "Ask Envoy's admin port, or the agent's own, and print the answer",
        REQUEST,
    ),
    command("wait", "", "Wait until Envoy is ready", WAIT),
    Command {
        tolerant: true,
        ..command(
            "doctor",
            "[sidecar|router|waypoint] [flags, and those of proxy]",
            "Find out why a proxy does not work here; ends with 0 when nothing is broken, else 1",
            DOCTOR,
        )
    },
    command("run", "[flags] -- command ...", "Run a command once Envoy is ready, for Jobs", RUN),
    command("sleep", "<time>", "Sleep, for hooks in images without a shell", &[]),
    command(
        "status",
        "",
        "Show what the running agent says; ends with 0 healthy, 1 not healthy, 2 not reachable",
        STATUS,
    ),
    command(
        "upgrade",
        "",
        "Have the running agent give its place to a new version while Envoy runs on (AGENT_UPGRADE); ends with 0 when the new one serves, 1 when the old one goes on, 255 when none was asked or has answered",
        UPGRADE,
    ),
    command("version", "", "Print what this build is", VERSION),
    command("vm", "<run|clean|check|install>", "A virtual machine's part in the mesh", vm::FLAGS),
    command(
        "istio-iptables",
        "",
        "Redirect a pod's or VM's traffic to Envoy, check that it is, or undo it",
        iptables::FLAGS,
    ),
    command(
        "istio-clean-iptables",
        "",
        "Remove all rules that redirect traffic to Envoy, as releases 1.5 to 1.8 did; istio-iptables --cleanup-only --reconcile",
        iptables::FLAGS,
    ),
    command(
        "completion",
        "<bash|zsh|fish|powershell>",
        "Print a script that completes commands and flags in a shell",
        COMPLETION,
    ),
    command("help", "[command]", "Print what a command does and its flags", &[]),
    Command { hidden: true, ..command("collateral", "", "Not in this build", &[]) },
];

/// The program: gives its exit status.
#[must_use]
pub fn main() -> ExitCode {
    // Before anything else, above all before a runtime: this may be the child that becomes Envoy, or guards it.
    let child = launch::intercept(std::env::args_os()).or_else(|| guard::intercept(std::env::args_os()));
    if let Some(status) = child {
        return ExitCode::from(status);
    }
    // Signals that come between two programs wait for the handlers of the next.
    if !handover::is_left() {
        process::hear();
    }
    // As Go's runtime does: a file at the size that the process may write fails the write, also the log's, no more. A
    // handler, which a program that is started does not inherit.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let mut words = std::env::args_os().map(|w| w.to_string_lossy().into_owned());
    let name = words.next().unwrap_or_default();
    let status = run(&called(&name, words.collect()), Env::of_process());
    keys::settle();
    logging::flush();
    ExitCode::from(status)
}

/// What the words mean to the program under its name: the scripts and binaries of older releases were commands
/// of their own.
#[must_use]
pub(crate) fn called(name: &str, mut words: Vec<String>) -> Vec<String> {
    let name = name.rsplit('/').next().unwrap_or_default();
    let command = match name {
        "istio-iptables.sh" if words.first().is_some_and(|w| w == "clean") => {
            words.remove(0);
            "istio-clean-iptables"
        }
        "istio-iptables.sh" | "istio-iptables" => "istio-iptables",
        "istio-clean-iptables" => name,
        _ => return words,
    };
    words.insert(0, command.to_owned());
    words
}

/// Runs the command that the words (behind the program's name) say; gives the exit status.
#[must_use]
pub(crate) fn run(words: &[String], env: Env) -> u8 {
    if let Some((_, words)) =
        words.split_first().filter(|(first, _)| *first == crate::agent::upgrade::ARGUMENT)
    {
        return proxy::rehearse(words, &env);
    }
    let (found, mut rest) = match find(words) {
        Ok(found) => found,
        Err(error) => return fail(&error.to_string(), Some("Run 'pilot-agent --help' for usage.")),
    };
    if found.is_some_and(|c| c.name == "istio-clean-iptables") {
        rest.splice(..0, ["--cleanup-only".to_owned(), "--reconcile".to_owned()]);
    }
    // What `doctor` judges is what `proxy` would be given.
    let more = found.filter(|c| c.name == "doctor").map_or(&[][..], |_| args::PROXY);
    let own = found.map_or(&[][..], |c| c.flags);
    let flags: Vec<Flag> = own.iter().chain(more).chain(args::LOGGING).copied().collect();
    let parsed = match args::parse(&rest, &flags, found.is_none_or(|c| c.tolerant)) {
        Ok(parsed) => parsed,
        Err(error) if found.is_some_and(|c| c.name == "proxy") => {
            return crate::agent::upgrade::guarded(|_| proxy::misread(&error));
        }
        Err(error) => return fail(&error.to_string(), None),
    };
    let Some(command) = found else {
        // To the Go agent it is an unknown flag of the root, which prints help.
        let asked = parsed.unknown.iter().any(|flag| flag == "--version");
        return if asked { request::print(version::full().as_bytes()) } else { help::print(None) };
    };
    if parsed.help {
        return help::print(Some(command));
    }
    match command.name {
        "proxy" => proxy::run(parsed, &env),
        _ => other(command, parsed, &env),
    }
}

// Apart, or the proxy would have the room of every command on its stack, in memory for good.
#[inline(never)]
fn other(command: &'static Command, parsed: Parsed, env: &Env) -> u8 {
    match command.name {
        "request" => given(request::run(&parsed)),
        "wait" => quietly(wait::run(&parsed, env)),
        "doctor" => given(doctor::run(parsed, env)),
        "run" => given(run::run(&parsed, env)),
        "sleep" => given(sleep::run(&parsed)),
        "status" => given(status::run(&parsed, env)),
        "upgrade" => given(upgrade::run(&parsed, env)),
        "version" => given(version::run(&parsed)),
        "istio-iptables" | "istio-clean-iptables" => match logging::init(&logging_options(&parsed)) {
            Ok(_) => istio_iptables::run(&parsed, env),
            Err(error) => fail(&error.to_string(), None),
        },
        "vm" if parsed.positional.is_empty() => help::print(Some(command)),
        "vm" => vm::run(&parsed, env),
        "completion" => completion::run(command, &parsed),
        "help" => help::run(&parsed),
        _ => fail("this build is not compiled with collateral support", None),
    }
}

fn given(result: Result<u8, BoxError>) -> u8 {
    result.unwrap_or_else(|error| fail(&chain(&*error), None))
}

fn quietly(result: Result<(), BoxError>) -> u8 {
    given(result.map(|()| 0))
}

/// Shows an error where scripts and people look for it: standard error, and the log on standard output.
fn fail(error: &str, hint: Option<&str>) -> u8 {
    // Where no command has set up logging, its defaults hold.
    let _ = logging::init(&logging::Options::default());
    tell(error);
    if let Some(hint) = hint {
        let _ = writeln!(std::io::stderr(), "{hint}");
    }
    tracing::error!("{error}");
    FAILED
}

/// As cobra does; nowhere is left to say that standard error is closed.
fn tell(error: &str) {
    let _ = writeln!(std::io::stderr(), "Error: {error}");
}

/// What the logging flags of a parsed command line say.
fn logging_options(parsed: &Parsed) -> logging::Options {
    let text = |name: &str| parsed.or_default(args::LOGGING, name).to_owned();
    let targets = parsed.all("log_target");
    let defaults = logging::Options::default();
    logging::Options {
        output_level: text("log_output_level"),
        stacktrace_level: text("log_stacktrace_level"),
        caller: text("log_caller"),
        as_json: parsed.is_true(args::LOGGING, "log_as_json"),
        targets: if targets.is_empty() {
            defaults.targets
        } else {
            targets.into_iter().map(str::to_owned).collect()
        },
        patient: defaults.patient,
    }
}

/// A word that is no command; the text names the nearest.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UnknownCommand(String);

// The command by cobra's rule, and the words without its name: on the root a flag without `=` that is
// no known boolean swallows the following word.
fn find(words: &[String]) -> Result<(Option<&'static Command>, Vec<String>), UnknownCommand> {
    let mut at = 0;
    while at < words.len() {
        let word = words[at].as_str();
        if word == "--" {
            break;
        } else if swallows(word) {
            at += 1;
        } else if !word.is_empty() && !word.starts_with('-') {
            let Some(command) = COMMANDS.iter().find(|c| c.name == word) else {
                return Err(UnknownCommand(unknown(word)));
            };
            let mut rest = words.to_vec();
            rest.remove(at);
            return Ok((Some(command), rest));
        }
        at += 1;
    }
    Ok((None, words.to_vec()))
}

fn swallows(word: &str) -> bool {
    if word.contains('=') {
        return false;
    }
    match word.strip_prefix("--") {
        Some(long) => !args::LOGGING.iter().any(|f| f.name == long && f.kind == Kind::Bool),
        None => word.starts_with('-') && word.len() == 2,
    }
}

fn unknown(word: &str) -> String {
    let mut text = format!("unknown command {word:?} for \"pilot-agent\"");
    let lower = word.to_lowercase();
    let near: Vec<&str> = COMMANDS
        .iter()
        .filter(|c| !c.hidden && (strsim::levenshtein(&lower, c.name) <= 2 || c.name.starts_with(&lower)))
        .map(|c| c.name)
        .collect();
    if !near.is_empty() {
        text.push_str("\n\nDid you mean this?\n");
        near.iter().for_each(|name| {
            text.push('\t');
            text.push_str(name);
            text.push('\n');
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Result<(Option<&'static str>, Vec<String>), String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        find(&words).map(|(c, rest)| (c.map(|c| c.name), rest)).map_err(|e| e.to_string())
    }

    #[test]
    fn the_command_is_found_as_cobra_finds_it() {
        for (line, name, rest) in [
            ("", None, ""),
            ("proxy sidecar --domain x", Some("proxy"), "sidecar --domain x"),
            ("--log_as_json proxy sidecar", Some("proxy"), "--log_as_json sidecar"),
            ("--log_output_level default:debug proxy", Some("proxy"), "--log_output_level default:debug"),
            ("--log_output_level=a:debug wait", Some("wait"), "--log_output_level=a:debug"),
            ("--unknown proxy", None, "--unknown proxy"),
            ("--nope version -s", None, "--nope version -s"),
            ("-- proxy", None, "-- proxy"),
        ] {
            let (got, words) = found(line).unwrap();
            assert_eq!(got, name, "{line}");
            assert_eq!(words.join(" "), rest, "{line}");
        }
        assert_eq!(
            found("--unknown proxy sidecar").unwrap_err(),
            "unknown command \"sidecar\" for \"pilot-agent\""
        );
        assert!(found("prox").unwrap_err().ends_with("\n\nDid you mean this?\n\tproxy\n"));
        assert_eq!(found("istio-clean-iptables -n").unwrap().0, Some("istio-clean-iptables"));
    }

    #[test]
    fn names_of_older_programs_are_commands() {
        let of = |name: &str, line: &str| {
            called(name, line.split_whitespace().map(str::to_owned).collect()).join(" ")
        };
        assert_eq!(of("/usr/local/bin/pilot-agent", "proxy"), "proxy");
        assert_eq!(
            of("/usr/local/bin/istio-iptables.sh", "-p 15001 -u 1337"),
            "istio-iptables -p 15001 -u 1337"
        );
        assert_eq!(of("istio-iptables.sh", "clean"), "istio-clean-iptables");
        assert_eq!(of("./istio-clean-iptables", "-n"), "istio-clean-iptables -n");
    }

    #[test]
    fn logging_flags_add_up() {
        let words: Vec<String> =
            ["--log_target=a", "--log_target", "b", "--log_as_json"].map(str::to_owned).to_vec();
        let parsed = args::parse(&words, args::LOGGING, false).unwrap();
        let options = logging_options(&parsed);
        assert_eq!((options.targets, options.as_json), (vec!["a".to_owned(), "b".to_owned()], true));
        let options = logging_options(&args::parse(&[], args::LOGGING, false).unwrap());
        assert_eq!(options, logging::Options::default());
    }

    #[test]
    fn flags_for_what_is_not_here_are_checked_all_the_same() {
        let of = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            args::parse(&words, args::LOGGING, false)
        };
        assert!(of(&["--vklog=9", "--log_stacktrace_level=default:error"]).is_ok());
        assert!(of(&["--vklog=08"]).is_ok() && of(&["--vklog=0x8"]).is_err());
        assert!(of(&["--vklog=many"]).is_err());
        let bad = of(&["--log_stacktrace_level=default:loud"]).unwrap();
        assert!(logging::init(&logging_options(&bad)).is_err());
    }
}
