//! Applies or removes the rules through `nft`, in one transaction.

use super::model::Rule;
use super::nft;
use super::run::{Program, Runner};

/// Replaces whatever our tables hold by `rules`, or removes the tables.
///
/// # Errors
/// One line with nft's complaint; nothing was changed then.
pub fn run(
    runner: &mut dyn Runner,
    rules: &[Rule],
    ipv6: bool,
    cleanup: bool,
    dry_run: bool,
    cni: bool,
) -> Result<(), String> {
    let transaction = if cleanup { nft::removal() } else { nft::transaction(rules, ipv6) };
    if dry_run {
        tracing::info!("dry run, not applied: nftables rules:\n{transaction}");
        return Ok(());
    }
    if !runner.exists("nft") {
        let place = if cni { "on the host filesystem" } else { "in the sidecar container image" };
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
    Ok(())
}
