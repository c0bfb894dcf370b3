//! Brings the kernel to what is wanted: nothing, a first apply, a rebuild, or a removal.
//!
//! Per family one look (see [`super::detect`]) and at most two restores. A rebuild first raises the
//! guardrails and takes the old rules away in one restore, then puts the new ones in and lowers the
//! guardrails in a second; when that fails the tables are put back as they were, so a family has its old
//! rules or its new ones and never none. A run that is killed between the two leaves a pod without
//! traffic; the next run knows the guardrails by their mark, finishes the work and removes them.

use std::collections::BTreeSet;

use super::change::{self, Guards, Jumps};
use super::detect::{self, Backend, Choice};
use super::earlier;
use super::error::Error;
use super::model::{Family, OUR_CHAINS, Rule, Table};
use super::restore;
use super::run::{Program, Runner};
use super::settings::{Resolved, Settings};
use super::undo;
use super::verify::{self, Names};

/// What to do where the guardrails may be up and nothing more can be done.
const BLOCKED: &str = "TCP and UDP may stay blocked; run again";

/// One family's part of the work.
struct Side<'a> {
    family: Family,
    backend: Backend,
    // Sets of the other flavour that hold rules of ours, which must not stay active beside the new ones.
    others: Vec<Backend>,
    rules: &'a [Rule],
    names: &'a Names,
}

/// What became of rules that other settings made; routes and addresses depend on it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Others {
    /// An apply took some away.
    pub gone: bool,
    /// The marks by which TPROXY's rules knew packets.
    pub marks: BTreeSet<u32>,
    /// A clean-up left TPROXY rules, which need the policy rule and the route.
    pub tproxy: bool,
    /// A clean-up left IPv6 rules, which need the `::6` address.
    pub v6: bool,
}

/// Applies `rules` through iptables, or takes them away.
///
/// # Errors
/// One line with the program, its complaint and what state the kernel is in.
pub(crate) fn run(
    runner: &mut dyn Runner,
    settings: &Settings,
    resolved: &Resolved,
    rules: &[Rule],
    names: &Names,
) -> Result<Others, Error> {
    let side = |family, choice: Choice, rules| {
        let Choice { backend, others } = choice;
        Side { family, backend, others, rules, names }
    };
    let mut sides = vec![side(Family::V4, detect::choose(runner, Family::V4, resolved.force)?, rules)];
    if resolved.options.ipv6 {
        sides.push(side(Family::V6, detect::choose(runner, Family::V6, resolved.force)?, rules));
    } else if let Some(choice) = detect::leftovers(runner, Family::V6, resolved.force) {
        // Nothing is wanted there, but rules of an earlier run must go: those of any settings, or all but a user's.
        let known = if settings.cleanup_only && settings.reconcile { rules } else { &[] };
        sides.push(side(Family::V6, choice, known));
    }
    if runner.ending() {
        return Err(Error::AskedToEnd);
    }
    let mut others = Others::default();
    // What is left of a family that is off goes without --reconcile only if the other one is new as well.
    let all_new = !sides[0].backend.state.has_ours();
    for side in &sides {
        others.marks.extend(side.marks());
        let changed = if settings.cleanup_only {
            side.clean_up(runner, settings.reconcile, &mut others)
        } else {
            side.bring_about(runner, settings, all_new, &mut others)
        };
        if side.family == Family::V4 || resolved.options.ipv6 {
            side.show_final(runner, !matches!(changed, Ok(false)));
        }
        changed?;
    }
    Ok(others)
}

/// Takes away whatever an earlier run left in iptables, for a run that makes its rules elsewhere.
///
/// # Errors
/// When a guardrail is left, which stops all traffic. What else cannot be removed is logged.
pub(crate) fn remove_leftovers(
    runner: &mut dyn Runner,
    rules: &[Rule],
    names: &Names,
) -> Result<Others, Error> {
    let (mut gone, mut blocked) = (Others::default(), None);
    for family in [Family::V4, Family::V6] {
        let Some(Choice { backend, others }) = detect::leftovers(runner, family, None) else { continue };
        let side = Side { family, backend, others, rules, names };
        gone.gone = true;
        gone.marks.extend(side.marks());
        for backend in std::iter::once(&side.backend).chain(&side.others) {
            if let Err(reason) = side.remove(runner, backend, Jumps::Known) {
                tracing::error!("{reason}");
                blocked = Some(reason);
            }
        }
    }
    blocked.map_or(Ok(gone), Err)
}

impl Side<'_> {
    // By which rules of TPROXY know packets here.
    fn marks(&self) -> BTreeSet<u32> {
        let sets = std::iter::once(&self.backend).chain(&self.others);
        sets.flat_map(|backend| earlier::marks(&backend.state, self.names)).collect()
    }

    // Whether anything had to be changed.
    fn bring_about(
        &self,
        runner: &mut dyn Runner,
        settings: &Settings,
        all_new: bool,
        others: &mut Others,
    ) -> Result<bool, Error> {
        let name = &self.backend.name;
        let ours = self.backend.state.has_ours();
        let difference = verify::difference(self.rules, self.family, &self.backend.state, self.names);
        match &difference {
            None if !self.others.is_empty() && settings.reconcile => {}
            None if settings.force_apply => {
                tracing::info!("{name}: the rules are in place and are applied again as requested");
            }
            None if self.backend.guards.any() => {
                tracing::warn!(
                    "{name}: the rules are in place; removing the guardrails that an interrupted run has left"
                );
                let lower = change::lower_guardrails(self.backend.guards);
                self.restore(runner, &self.backend, &lower, true)?;
                return self.lowered(runner, &self.backend).map(|()| true);
            }
            None => {
                tracing::info!("{name}: the rules are in place, nothing to do");
                return Ok(false);
            }
            Some(reason) if ours => tracing::info!("{name}: found other rules: {reason}"),
            Some(_) => tracing::info!("{name}: clean state, no rules of ours"),
        }
        let additions = if self.rules.is_empty() { all_new } else { !self.collides() };
        if self.others.is_empty() && additions && !(ours && settings.reconcile) {
            self.first(runner)?;
            others.gone |= ours;
            return Ok(true);
        }
        if settings.reconcile || difference.is_none() {
            self.rebuild(runner)?;
            for backend in &self.others {
                self.remove(runner, backend, Jumps::All)?;
            }
            return Ok(true);
        }
        Err(Error::OtherRules { name: name.clone(), difference: difference.unwrap_or_default() })
    }

    // Takes away what the flags would make, or everything of ours; whether anything had to be changed.
    fn clean_up(&self, runner: &mut dyn Runner, everything: bool, left: &mut Others) -> Result<bool, Error> {
        let (mut any, mut failed) = (false, None);
        let mut note = |change| match change {
            Ok(change) => any |= change,
            Err(reason) => {
                if let Some(earlier) = failed.replace(reason) {
                    tracing::error!("{earlier}");
                }
            }
        };
        for backend in std::iter::once(&self.backend).chain(&self.others) {
            if everything {
                note(self.remove(runner, backend, Jumps::Known));
                continue;
            }
            let (document, state) = undo::document(&backend.state, self.rules, self.family, self.names);
            note(self.take_away(runner, backend, document));
            left.tproxy |= !state.rules("mangle", "ISTIO_TPROXY").is_empty();
            left.v6 |= self.family == Family::V6 && !state.rules("nat", "ISTIO_OUTPUT").is_empty();
            if state.has_ours() {
                tracing::warn!(
                    "{}: chains that other settings made stay ({}); --cleanup-only with those settings, or with \
                     --reconcile, removes them",
                    backend.name,
                    state.all_our_chains().join(", ")
                );
            }
        }
        failed.map_or(Ok(any), Err)
    }

    // None of the chains that are wanted is there: one restore, undone when it fails half-way. What other
    // settings left in chains of ours would stay active, and goes first.
    fn first(&self, runner: &mut dyn Runner) -> Result<(), Error> {
        let leftovers = self.backend.state.with_chains(OUR_CHAINS);
        // A rule that leads to no chain of ours is a user's, though one of ours may be equal.
        let mut document = change::removal(&leftovers, &[], self.family, self.names, Jumps::All);
        document.push_str(&restore::document(self.rules, self.family));
        document.push_str(&change::lower_guardrails(self.backend.guards));
        if document.is_empty() {
            return Ok(());
        }
        if let Err(reason) = self.restore(runner, &self.backend, &document, true) {
            if self.is_done(runner) {
                tracing::warn!("{reason}; somebody else has put the same rules in place meanwhile");
                return Ok(());
            }
            self.put_back(runner);
            return Err(reason);
        }
        if self.backend.guards.any() { self.lowered(runner, &self.backend) } else { Ok(()) }
    }

    // Whether what is wanted is there now, and nothing blocks it: another program that makes the same rules may have come first.
    fn is_done(&self, runner: &mut dyn Runner) -> bool {
        detect::guards(runner, &self.backend.name).is_ok_and(|(state, guards)| {
            !guards.any() && verify::difference(self.rules, self.family, &state, self.names).is_none()
        })
    }

    fn rebuild(&self, runner: &mut dyn Runner) -> Result<(), Error> {
        let old = change::removal(&self.backend.state, self.rules, self.family, self.names, Jumps::All);
        let clear = format!("{}{old}", change::raise_guardrails(self.backend.guards));
        self.restore(runner, &self.backend, &clear, true).inspect_err(|_| self.put_back(runner))?;
        // Deleting what somebody has removed meanwhile would fail the whole restore.
        let there = detect::guards(runner, &self.backend.name).map_or(Guards::ALL, |(_, guards)| guards);
        let new = restore::document(self.rules, self.family);
        let new = format!("{new}{}", change::lower_guardrails(there));
        if !new.is_empty() {
            self.restore(runner, &self.backend, &new, true).inspect_err(|_| self.put_back(runner))?;
        }
        self.lowered(runner, &self.backend)
    }

    // Whether nothing of ours blocks traffic any more; a look that fails says nothing against a restore
    // that has succeeded.
    fn lowered(&self, runner: &mut dyn Runner, backend: &Backend) -> Result<(), Error> {
        match detect::guards(runner, &backend.name) {
            Ok((_, guards)) if guards.any() => Err(Error::StillBlocked(backend.name.clone())),
            _ => Ok(()),
        }
    }

    // Whether a chain that is wanted is there already.
    fn collides(&self) -> bool {
        let state = &self.backend.state;
        Table::ALL.into_iter().any(|table| {
            let there = state.our_chains(table.name());
            restore::chains(self.rules, self.family, table).iter().any(|chain| there.contains(chain))
        })
    }

    // Whether there was anything to remove.
    fn remove(&self, runner: &mut dyn Runner, backend: &Backend, jumps: Jumps) -> Result<bool, Error> {
        let document = change::removal(&backend.state, self.rules, self.family, self.names, jumps);
        self.take_away(runner, backend, document)
    }

    // What cannot be removed is logged; only traffic that stays blocked is an error.
    fn take_away(&self, runner: &mut dyn Runner, backend: &Backend, rules: String) -> Result<bool, Error> {
        let lower = change::lower_guardrails(backend.guards);
        if rules.is_empty() && lower.is_empty() {
            tracing::info!("{}: no rules of ours to remove", backend.name);
            return Ok(false);
        }
        if let Err(reason) = self.restore(runner, backend, &format!("{rules}{lower}"), true) {
            tracing::error!("{reason}");
            if backend.guards.any() {
                return Err(Error::StillBlocked(backend.name.clone()));
            }
        } else if backend.guards.any() {
            self.lowered(runner, backend)?;
        }
        Ok(true)
    }

    fn put_back(&self, runner: &mut dyn Runner) {
        let (state, guards) = match detect::guards(runner, &self.backend.name) {
            Ok(now) => now,
            Err(reason) => {
                tracing::error!("{BLOCKED}: what is in place cannot be seen: {reason}");
                return;
            }
        };
        let before = &self.backend;
        if before.guards.any() {
            tracing::error!("{BLOCKED}: an interrupted run has left it so");
        }
        if state == before.state {
            return;
        }
        let [clear, full] = change::rollback(&before.saved, &state, self.rules, self.family, self.names);
        for (document, noflush) in [(clear, true), (full, false)] {
            if document.is_empty() {
                continue;
            }
            match self.restore(runner, before, &document, noflush) {
                Ok(()) => tracing::warn!("{}: the rules were put back as they were", before.name),
                Err(reason) => tracing::error!("{BLOCKED}: the rules could not be put back: {reason}"),
            }
        }
        // A filter table that was saved is back as it was, but for the mark of what blocked traffic before;
        // one that was not there holds our guardrails.
        let document = if before.guards.any() {
            change::raise_guardrails(before.guards)
        } else if before.state.tables.contains_key("filter") {
            return;
        } else {
            change::lower_guardrails(guards)
        };
        if !document.is_empty()
            && let Err(reason) = self.restore(runner, before, &document, true)
        {
            tracing::error!("{BLOCKED}: {reason}");
        }
    }

    fn restore(
        &self,
        runner: &mut dyn Runner,
        backend: &Backend,
        document: &str,
        noflush: bool,
    ) -> Result<(), Error> {
        let name = format!("{}-restore", backend.name);
        tracing::info!("Running iptables restore with: {name} and the following input:\n{document}");
        let mut program = Program::new(&name, if noflush { &["--noflush"] } else { &[] });
        program.args.extend(backend.wait().map(str::to_owned));
        program.stdin = Some(document.to_owned());
        program.old_lock = backend.wait().is_some() && backend.version < (1, 8, 6);
        let out = runner
            .run(&program)
            .map_err(|source| Error::Start { what: format!("{name} cannot be run"), source })?;
        if out.ok() {
            return Ok(());
        }
        Err(Error::Refused { what: format!("{name} failed"), complaint: out.complaint() })
    }

    fn save(&self, runner: &mut dyn Runner) -> Option<String> {
        let out = runner.run(&Program::new(&format!("{}-save", self.backend.name), &[])).ok()?;
        out.ok().then_some(out.stdout)
    }

    fn show_final(&self, runner: &mut dyn Runner, changed: bool) {
        let family = if self.family == Family::V4 { "IPv4" } else { "IPv6" };
        let text = if changed { self.save(runner) } else { Some(self.backend.saved.clone()) };
        if let Some(text) = text {
            tracing::info!("Final iptables state ({family}):\n{text}");
        }
    }
}
