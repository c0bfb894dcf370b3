//! Applies or removes the rules through `nft`, in one transaction; then takes away what an earlier start
//! left in iptables, which would stay active beside them.

use super::model::Rule;
use super::run::{Program, Runner};
use super::settings::{Resolved, Settings};
use super::verify::Names;
use super::{apply, nft};

/// Replaces whatever our tables hold by `rules`, or removes the tables.
///
/// # Errors
/// One line with nft's complaint; nothing was changed then.
pub fn run(
    runner: &mut dyn Runner,
    settings: &Settings,
    resolved: &Resolved,
    rules: &[Rule],
    names: &Names,
) -> Result<(), String> {
    let transaction =
        if settings.cleanup_only { nft::removal() } else { nft::transaction(rules, resolved.options.ipv6) };
    if settings.dry_run {
        tracing::info!("dry run, not applied: nftables rules:\n{transaction}");
        return Ok(());
    }
    if !runner.exists("nft") {
        let place =
            if settings.cni_mode { "on the host filesystem" } else { "in the sidecar container image" };
        return Err(format!("nativeNftables is enabled, but the nft binary is missing {place}"));
    }
    let mut program = Program::new("nft", &["-f", "-"]);
    program.stdin = Some(transaction.clone());
    let out = runner.run(&program).map_err(|e| format!("nftables run failed: {e}"))?;
    if !out.ok() {
        let reason = out.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        return Err(format!("nftables run failed: {reason}"));
    }
    tracing::info!("nftables rules programmed:\n{transaction}");
    apply::remove_leftovers(runner, rules, names);
    Ok(())
}
