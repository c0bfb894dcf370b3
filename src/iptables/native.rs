//! Applies or removes the rules through `nft`, in one transaction; then takes away what an earlier start
//! left in iptables, which would stay active beside them. And the other way round.

use super::apply::{self, Others};
use super::error::Error;
use super::model::Rule;
use super::nft;
use super::run::{Program, Runner};
use super::settings::{Resolved, Settings};
use super::verify::Names;

/// Replaces whatever our tables hold by `rules`, or removes the tables.
///
/// # Errors
/// One line with nft's complaint; nothing was changed then.
pub(crate) fn run(
    runner: &mut dyn Runner,
    settings: &Settings,
    resolved: &Resolved,
    rules: &[Rule],
    names: &Names,
) -> Result<Others, Error> {
    let transaction =
        if settings.cleanup_only { nft::removal() } else { nft::transaction(rules, resolved.options.ipv6) };
    if settings.dry_run {
        tracing::info!("dry run, not applied: nftables rules:\n{transaction}");
        return Ok(Others::default());
    }
    if !runner.exists("nft") {
        let place =
            if settings.cni_mode { "on the host filesystem" } else { "in the sidecar container image" };
        return Err(Error::NoNft(place));
    }
    let earlier = there(runner);
    commit(runner, &transaction)?;
    tracing::info!("nftables rules programmed:\n{transaction}");
    let mut others = apply::remove_leftovers(runner, rules, names)?;
    others.gone |= earlier;
    Ok(others)
}

/// Takes away the tables of an earlier start, for a run that makes its rules through iptables; whether there were
/// any. What cannot be removed is logged.
pub(crate) fn remove_leftovers(runner: &mut dyn Runner) -> bool {
    let there = runner.exists("nft") && there(runner);
    if there {
        tracing::info!("removing the native nftables rules of an earlier start");
        if let Err(reason) = commit(runner, &nft::removal()) {
            tracing::error!("native rules of an earlier start stay active: {reason}");
        }
    }
    there
}

/// Whether this network namespace has tables of ours.
#[must_use]
pub(crate) fn there(runner: &mut dyn Runner) -> bool {
    match runner.inet_tables() {
        Ok(names) => names.iter().any(ours),
        Err(e) => {
            tracing::debug!("cannot look for native rules of an earlier start: {e}");
            false
        }
    }
}

fn ours(name: &String) -> bool {
    nft::TABLES.iter().any(|(table, _)| table == name)
}

const FAILED: &str = "nftables run failed";

fn commit(runner: &mut dyn Runner, transaction: &str) -> Result<(), Error> {
    let mut program = Program::new("nft", &["-f", "-"]);
    program.stdin = Some(transaction.to_owned());
    let out = runner.run(&program).map_err(|source| Error::Start { what: FAILED.to_owned(), source })?;
    if out.ok() {
        return Ok(());
    }
    let complaint = out.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(Error::Refused { what: FAILED.to_owned(), complaint })
}
