//! docs/CONFIG.md, made from the tables; the test fails when the file is not what they say.

use std::fmt::Write as _;

use super::COMMANDS;
use crate::config::args::{self, Flag};
use crate::config::env::{FAMILIES, Kind, OLDER, VARS, Var, WITHOUT_EFFECT};
use crate::config::parts::iptables;
use crate::vm::variables::VARIABLES;

const HEAD: &str = "# Flags and variables

Generated from the tables in `src/config` (`make docs`); a test fails when it is not current.

`pilot-agent proxy [sidecar|router|waypoint]` reads these. A ProxyConfig is merged from, each over the one before:
built-in defaults, flags of old releases, the mesh file (`--meshConfig`), `PROXY_CONFIG`, the annotation
`proxy.istio.io/config`; then CPU limit, `--concurrency` and the two single-value annotations
`sidecar.istio.io/discoveryAddress` and `status.sidecar.istio.io/port`. What results is logged at start as
`Effective config`. `pilot-agent proxy --dry-run` shows it, prints Envoy's bootstrap (with `customConfigFile`: that file) on
standard output, has the Envoy that would be started judge it with what `ISTIO_BOOTSTRAP_OVERRIDE` puts over it, and ends
without binding anything.

A variable that cannot be read (`abc` for a number) gives a warning and keeps its default; set but empty is empty for text.
Everything else that is wrong is shown at once, one line each with its source, and ends the start with 255 (with 1 where the folder of `PROV_CERT` has no root).

Booleans: `1 t T TRUE true True 0 f F FALSE false False`. Durations: `300ms`, `1.5h`, `2h45m`.
";

fn flag_type(flag: &Flag) -> &'static str {
    match flag.kind {
        args::Kind::Text => "text",
        args::Kind::Bool => "boolean",
        args::Kind::Int(32) | args::Kind::Decimal(_) => "integer, 32 bits",
        args::Kind::Int(_) => "integer",
        args::Kind::Uint(_) => "port",
        args::Kind::Duration => "duration",
        args::Kind::Array => "text, may be repeated",
    }
}

fn variable_type(var: &Var) -> &'static str {
    match var.kind {
        Kind::Text => "text",
        Kind::Bool => "boolean",
        Kind::Int => "integer",
        Kind::Float => "number",
        Kind::Duration => "duration",
    }
}

fn code(text: &str) -> String {
    if text.is_empty() { "empty".to_owned() } else { format!("`{}`", text.replace('|', "\\|")) }
}

fn prose(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

fn flags<'a>(out: &mut String, title: &str, flags: impl Iterator<Item = &'a Flag>) {
    let _ = write!(out, "\n## {title}\n\n| flag | type | default | meaning |\n|---|---|---|---|\n");
    for flag in flags {
        let default = if flag.old { "not given".to_owned() } else { code(flag.default) };
        let _ =
            writeln!(out, "| `--{}` | {} | {default} | {} |", flag.name, flag_type(flag), prose(flag.help));
    }
}

fn redirection(out: &mut String, title: &str) {
    let _ = write!(
        out,
        "\n## {title}\n\nA variable counts where its flag is not given; of two, the first that is set.\n\n\
         | flag | variable | type | default | meaning |\n|---|---|---|---|---|\n"
    );
    for flag in iptables::FLAGS {
        let variables: Vec<String> = iptables::variables(flag.name).iter().map(|name| code(name)).collect();
        let variables = if variables.is_empty() { "none".to_owned() } else { variables.join(", ") };
        let default = if flag.old { "not given".to_owned() } else { code(flag.default) };
        let (kind, help) = (flag_type(flag), prose(flag.help));
        let _ = writeln!(out, "| `--{}` | {variables} | {kind} | {default} | {help} |", flag.name);
    }
}

fn generate() -> String {
    let mut out = HEAD.to_owned();
    flags(&mut out, "Flags of `proxy`", args::PROXY.iter().filter(|f| !f.old));
    flags(&mut out, "Logging, for every command", args::LOGGING.iter());
    for command in COMMANDS.iter().filter(|c| c.name != "proxy" && !c.flags.is_empty()) {
        let title = format!("Flags of `{}`", command.name);
        if ["istio-iptables", "istio-clean-iptables"].contains(&command.name) {
            redirection(&mut out, &title);
        } else {
            flags(&mut out, &title, command.flags.iter());
        }
        if command.name == "vm" {
            out.push_str(
                "\nVariables of its own, from the environment and, over it, `sidecar.env` and `cluster.env`, which may set all \
                 others, too:\n\n| variable | default | meaning |\n|---|---|---|\n",
            );
            for (name, default, meaning) in VARIABLES {
                let _ = writeln!(out, "| `{name}` | {} | {} |", code(default), prose(meaning));
            }
        }
    }
    flags(&mut out, "Flags of releases 0.8 to 1.8", args::PROXY.iter().filter(|f| f.old));
    let mut parts: Vec<&str> = Vec::new();
    VARS.iter().for_each(|v| {
        if !parts.contains(&v.part) {
            parts.push(v.part);
        }
    });
    for part in parts {
        let _ = write!(
            out,
            "\n## Variables: {part}\n\n| variable | type | default | meaning |\n|---|---|---|---|\n"
        );
        for var in VARS.iter().filter(|v| v.part == part) {
            let ours = if var.ours { " (not in the Go agent)" } else { "" };
            let _ = writeln!(
                out,
                "| `{}` | {} | {} | {}{ours} |",
                var.name,
                variable_type(var),
                code(var.default),
                prose(var.help)
            );
        }
    }
    out.push_str("\n## Variables with open names\n\n| variable | meaning |\n|---|---|\n");
    for (name, meaning) in FAMILIES {
        let _ = writeln!(out, "| `{name}` | {meaning} |");
    }
    out.push_str("\nOf older releases, accepted without effect:\n\n| variable | why |\n|---|---|\n");
    for (name, why) in OLDER {
        let _ = writeln!(out, "| `{name}` | {why} |");
    }
    out.push_str("\nAccepted without effect: ");
    let all: Vec<String> = WITHOUT_EFFECT.iter().map(|name| format!("`{name}`")).collect();
    out.push_str(&all.join(", "));
    out.push_str(".\n");
    out
}

#[test]
#[expect(clippy::disallowed_methods, reason = "`make docs` says to write instead of to compare")]
fn config_md_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/CONFIG.md");
    let text = generate();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == text, "docs/CONFIG.md is stale: run `make docs`");
}

#[test]
fn names_are_unique() {
    let mut names: Vec<&str> = VARS.iter().map(|v| v.name).chain(WITHOUT_EFFECT.iter().copied()).collect();
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all, "a variable stands in the tables twice");
    for command in COMMANDS {
        let mut flags: Vec<&str> = command.flags.iter().chain(args::LOGGING).map(|f| f.name).collect();
        flags.sort_unstable();
        let all = flags.len();
        flags.dedup();
        assert_eq!(flags.len(), all, "{}: a flag stands in the tables twice", command.name);
    }
}

// What a machine's files may say is written down, whether the agent, its rules or only `vm` reads it.
#[test]
fn each_variable_of_a_machine_stands_in_a_table() {
    let known = |name: &str| {
        VARS.iter().any(|var| var.name == name)
            || VARIABLES.iter().any(|(var, ..)| *var == name)
            || OLDER.iter().any(|(var, _)| *var == name)
            || WITHOUT_EFFECT.contains(&name)
            || iptables::FLAGS.iter().any(|flag| iptables::variables(flag.name).iter().any(|var| var == name))
    };
    let is_name = |word: &&str| {
        word.contains('_') && word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
    };
    let code = |text: &'static str| text.split("#[cfg(test)]").next().unwrap_or_default();
    let (plan, places) = (include_str!("../vm/plan.rs"), include_str!("../vm/places.rs"));
    let mut names: Vec<&str> = [code(plan), code(places)].iter().flat_map(|text| text.split('"')).collect();
    let settings = include_str!("../../packaging/etc/sidecar.env");
    names.extend(
        settings.lines().filter_map(|line| line.trim_start_matches("# ").split_once('=')).map(|l| l.0),
    );
    names.retain(|word| is_name(word) && *word != "MUTUAL_TLS");
    assert!(names.len() > 20, "the sources were read: {names:?}");
    names.retain(|name| !known(name));
    assert!(names.is_empty(), "these stand in no table: {names:?}");
}
