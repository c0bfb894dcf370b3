//! Which set of iptables programs to use for a family, with as few runs as it takes.
//!
//! The Go agent runs a save, a version query and two probing writes for each set it looks at. Here:
//! a legacy set is not looked at where the kernel says that this network namespace has no legacy table;
//! what holds rules of ours needs no proof that it works; the version is asked for only where the lock
//! option depends on it; and the proof is a listing, which leaves no rule behind.

use super::change::{self, Guards};
use super::error::Error;
use super::model::Family;
use super::run::{Program, Runner};
use super::state::SavedTables;

/// `FORCE_IPTABLES_BINARY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Force {
    /// `legacy`
    Legacy,
    /// `nft`
    Nft,
}

/// A usable set of programs and what it saved when it was looked at.
#[derive(Debug, Clone)]
pub(crate) struct Backend {
    /// `iptables-nft`, `ip6tables-legacy`, `iptables`, …
    pub name: String,
    /// Writes through nf_tables; never needs the lock.
    pub nft: bool,
    /// As printed by `--version`; zero when unknown or too old to tell.
    pub version: (u32, u32, u32),
    /// The output of the save command.
    pub saved: String,
    /// The same, read.
    pub state: SavedTables,
    /// What an interrupted run has left to block traffic.
    pub guards: Guards,
}

impl Backend {
    /// `--wait=30`, where the program knows it and a lock is taken.
    #[must_use]
    pub(crate) fn wait(&self) -> Option<&'static str> {
        (!self.nft && self.version >= (1, 6, 2)).then_some("--wait=30")
    }
}

/// The set to use for a family, and further sets that hold rules of ours.
#[derive(Debug, Clone)]
pub(crate) struct Choice {
    /// Fit for writing.
    pub backend: Backend,
    /// Fit for writing as well: what they hold must not stay active beside the first.
    pub others: Vec<Backend>,
}

fn plain_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// Chooses a set for `family`.
///
/// # Errors
/// One line: which sets were looked at and why none can be used.
pub(crate) fn choose(runner: &mut dyn Runner, family: Family, force: Option<Force>) -> Result<Choice, Error> {
    let plain = plain_name(family);
    let [legacy, nft] = names(family);
    let forced = match force {
        Some(Force::Legacy) => Some(&legacy),
        Some(Force::Nft) => Some(&nft),
        None => None,
    };
    if let Some(name) = forced {
        let backend = look(runner, name).and_then(|seen| seen.fit(runner))?;
        return Ok(Choice { backend, others: Vec::new() });
    }
    let mut reasons = Reasons::default();
    let legacy = reasons.keep(glance(runner, &legacy, family));
    let nft = reasons.keep(look(runner, &nft));
    // Rules count, not tables: looking at a legacy table makes it appear. Ours beat other people's.
    let holds = |seen: &Option<Seen>, f: fn(&SavedTables) -> bool| seen.as_ref().is_some_and(|s| f(&s.state));
    let legacy_first = holds(&legacy, SavedTables::in_use)
        && (holds(&legacy, SavedTables::has_ours) || !holds(&nft, SavedTables::has_ours));
    let [first, second] = if legacy_first { [legacy, nft] } else { [nft, legacy] };
    if let Some(backend) = first.and_then(|seen| reasons.keep(seen.fit(runner))) {
        let others = second.filter(|seen| seen.state.has_ours());
        let others = others.and_then(|seen| reasons.keep(seen.fit(runner)));
        return Ok(Choice { backend, others: others.into_iter().collect() });
    }
    // The Go agent gives up after the plain name, even when the other suffixed set works.
    let plain_seen = reasons.keep(look(runner, plain));
    for seen in [plain_seen, second].into_iter().flatten() {
        if let Some(backend) = reasons.keep(seen.fit(runner)) {
            return Ok(Choice { backend, others: Vec::new() });
        }
    }
    Err(Error::NoneUsable { program: plain, reasons: reasons.0 })
}

/// Why sets were passed over.
#[derive(Default)]
struct Reasons(Vec<Error>);

impl Reasons {
    fn keep<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        result.map_err(|reason| self.0.push(reason)).ok()
    }
}

/// The sets that hold anything of ours, for a family that is to have none.
#[must_use]
pub(crate) fn leftovers(runner: &mut dyn Runner, family: Family, force: Option<Force>) -> Option<Choice> {
    let [legacy, nft] = names(family);
    let candidates = match force {
        Some(Force::Legacy) => vec![legacy],
        Some(Force::Nft) => vec![nft],
        None if runner.exists(&format!("{legacy}-save")) || runner.exists(&format!("{nft}-save")) => {
            vec![nft, legacy]
        }
        None => vec![plain_name(family).to_owned()],
    };
    let mut found = Vec::new();
    for name in candidates {
        match glance(runner, &name, family) {
            Ok(seen) if seen.state.has_ours() || seen.guards.any() => found.extend(seen.fit(runner).ok()),
            Ok(_) => {}
            Err(reason) => tracing::debug!("cannot look for rules of an earlier run: {reason}"),
        }
    }
    let mut found = found.into_iter();
    found.next().map(|backend| Choice { backend, others: found.collect() })
}

fn names(family: Family) -> [String; 2] {
    ["legacy", "nft"].map(|kind| format!("{}-{kind}", plain_name(family)))
}

/// A set whose rules are known; whether it can write is not.
#[derive(Debug)]
struct Seen {
    name: String,
    nft: bool,
    version: Option<(u32, u32, u32)>,
    saved: String,
    state: SavedTables,
    guards: Guards,
}

impl Seen {
    // Kernel support, without leaving anything behind, and the version where a lock is taken.
    fn fit(mut self, runner: &mut dyn Runner) -> Result<Backend, Error> {
        // The heading of a legacy save may come from a wrapper; the lock option must not be guessed.
        if !self.nft || self.version.is_none() {
            (self.nft, self.version) = ask_version(runner, &self.name)?;
        }
        let Seen { name, nft, version, saved, state, guards } = self;
        let backend = Backend { name, nft, version: version.unwrap_or_default(), saved, state, guards };
        if backend.state.has_ours() {
            return Ok(backend);
        }
        let mut program = Program::new(&backend.name, &["-t", "nat", "-S", "INPUT"]);
        program.args.extend(backend.wait().map(str::to_owned));
        let out =
            runner.run(&program).map_err(|source| Error::Start { what: backend.name.clone(), source })?;
        if out.ok() && !out.stderr.contains("does not exist") {
            return Ok(backend);
        }
        let what = format!("{} has no loaded kernel support and cannot be used", backend.name);
        Err(Error::Refused { what, complaint: out.stderr.trim().to_owned() })
    }
}

// As `look`, but a legacy set is known to be empty where the kernel has no legacy table.
fn glance(runner: &mut dyn Runner, name: &str, family: Family) -> Result<Seen, Error> {
    let installed = runner.exists(&format!("{name}-save"));
    if installed && name.ends_with("-legacy") && runner.no_legacy_tables(family) {
        let (saved, state, guards) = Default::default();
        return Ok(Seen { name: name.to_owned(), nft: false, version: None, saved, state, guards });
    }
    look(runner, name)
}

fn look(runner: &mut dyn Runner, name: &str) -> Result<Seen, Error> {
    let save = format!("{name}-save");
    if !runner.exists(&save) {
        return Err(Error::NotInstalled(save));
    }
    let out = runner.run(&Program::new(&save, &[])).map_err(start(&save))?;
    if !out.ok() {
        return Err(Error::Refused { what: save, complaint: out.complaint() });
    }
    let heading = out.stdout.lines().find(|l| l.starts_with("# Generated by ")).unwrap_or_default();
    let (mut nft, mut version) = (heading.contains("nf_tables"), version_in(heading));
    if name.ends_with("-nft") {
        nft = true;
        version = version.or(Some((0, 0, 0)));
    }
    for line in out.stdout.lines().filter(|line| line.contains("is incompatible, use 'nft' tool")) {
        tracing::warn!(
            "{save}: {}: nft has put rules into it that iptables cannot read, so rules of an earlier run in that table \
             are neither seen nor removed; move nft's to a table of another name, or use --native-nftables",
            line.trim_start_matches('#').trim()
        );
    }
    let state = SavedTables::parse(&out.stdout);
    let guards = if change::may_be_guarded(&state) {
        guards(runner, name).map_or_else(|_| Guards::read(&out.stdout), |(_, guards)| guards)
    } else {
        Guards::default()
    };
    Ok(Seen { name: name.to_owned(), nft, version, saved: out.stdout, state, guards })
}

/// What the set holds now, with the counters that tell our guardrails from a user's rules.
///
/// # Errors
/// When the save command does not say.
pub(crate) fn guards(runner: &mut dyn Runner, name: &str) -> Result<(SavedTables, Guards), Error> {
    let save = format!("{name}-save");
    let out = runner.run(&Program::new(&save, &["-c"])).map_err(start(&save))?;
    if !out.ok() {
        return Err(Error::Refused { what: save, complaint: out.complaint() });
    }
    Ok((SavedTables::parse(&out.stdout), Guards::read(&out.stdout)))
}

fn start(program: &str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Start { what: program.to_owned(), source }
}

type Version = (u32, u32, u32);

// Flavour and version; a program that does not know the question is a very old legacy one.
fn ask_version(runner: &mut dyn Runner, name: &str) -> Result<(bool, Option<Version>), Error> {
    let save = format!("{name}-save");
    let asked = runner.run(&Program::new(&save, &["--version"])).map_err(start(&save))?;
    if !asked.ok() || asked.stderr.contains("unrecognized option") {
        return Ok((false, Some((0, 0, 0))));
    }
    match version_in(&asked.stdout) {
        None => Err(Error::NoVersion(save)),
        version => Ok((asked.stdout.contains("nf_tables"), version)),
    }
}

// The first `v<digits>.<digits>…`.
fn version_in(text: &str) -> Option<Version> {
    text.match_indices('v').find_map(|(at, _)| {
        let rest = &text[at + 1..];
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let mut parts = rest[..end].split('.').filter(|p| !p.is_empty()).map(str::parse);
        let major = parts.next()?.ok()?;
        let minor = parts.next()?.ok()?;
        Some((major, minor, parts.next().and_then(Result::ok).unwrap_or(0)))
    })
}

#[cfg(test)]
mod tests;
