//! `--dry-run`: no program is started; what would be fed to them is logged, and written to
//! `DRY_RUN_FILE_PATH` line by line.

use std::fmt::Write;

use super::model::{Family, Rule};
use super::restore;
use super::settings::{Resolved, Settings};
use super::undo::{self, Step};

/// Logs and writes; a file that cannot be written is no error, as for the Go agent.
pub(crate) fn run(settings: &Settings, resolved: &Resolved, rules: &[Rule]) {
    let families: &[Family] = if resolved.options.ipv6 { &[Family::V4, Family::V6] } else { &[Family::V4] };
    let mut text = String::from("iptables-save\nip6tables-save\n");
    if settings.cleanup_only {
        for family in families {
            text.push_str(&cleanup(rules, *family));
        }
    } else {
        for family in families {
            let document = restore::document(rules, *family);
            let name = if *family == Family::V4 { "iptables" } else { "ip6tables" };
            tracing::info!(
                "Running iptables restore with: {name}-restore and the following input:\n{document}"
            );
            text.push_str(&document);
        }
    }
    text.push_str("iptables-save\n");
    if resolved.options.ipv6 {
        text.push_str("ip6tables-save\n");
    }
    if settings.dry_run_file.is_empty() {
        return;
    }
    if let Err(e) = std::fs::write(&settings.dry_run_file, text) {
        tracing::warn!("DRY_RUN_FILE_PATH={}: cannot be written: {e}", settings.dry_run_file);
    }
}

// The single commands that undo the rules, as the Go agent lists them.
fn cleanup(rules: &[Rule], family: Family) -> String {
    let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
    let mut text = String::new();
    for step in undo::steps(rules, family) {
        let table = step.table().name();
        let _ = match step {
            Step::Delete(rule) => {
                let words = restore::words(rule).join(" ");
                writeln!(text, "{name} -t {table} -D {} {words}", rule.chain)
            }
            Step::Flush(_, chain) => writeln!(text, "{name} -t {table} -F {chain}"),
            Step::Remove(_, chain) => writeln!(text, "{name} -t {table} -X {chain}"),
        };
    }
    text
}
