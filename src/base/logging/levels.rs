//! `scope:level,scope:level`: which lines are shown.

use super::{Error, SCOPES};

/// From the most to the least verbose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// What happens step by step.
    Debug,
    /// State changes.
    Info,
    /// Odd but tolerated.
    Warn,
    /// Something does not work.
    Error,
    /// The agent cannot go on; our errors end it in an orderly way, so nothing has this level.
    Fatal,
    /// Nothing.
    None,
}

impl Level {
    /// As it stands in lines.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
            Self::Fatal => "fatal",
            Self::None => "none",
        }
    }

    fn parse(name: &str) -> Result<Self, Error> {
        [Self::Debug, Self::Info, Self::Warn, Self::Error, Self::Fatal, Self::None]
            .into_iter()
            .find(|level| level.name() == name)
            .ok_or_else(|| Error::Level(name.to_owned()))
    }
}

/// The level of each scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Levels([Level; SCOPES.len()]);

impl Levels {
    /// What the user's list makes of `default:info,grpc:none`; every other scope starts at info.
    ///
    /// # Errors
    /// On an unknown level and on more than one colon; unknown scopes are passed over.
    pub(crate) fn parse(list: &str) -> Result<Self, Error> {
        let mut out = Self([Level::Info; SCOPES.len()]);
        out.set("grpc", Level::None);
        if list.is_empty() {
            return Ok(out);
        }
        for item in list.split(',') {
            let (scope, level) = match item.split_once(':') {
                None => ("default", item),
                Some((_, level)) if level.contains(':') => return Err(Error::Format(item.to_owned())),
                Some(pair) => pair,
            };
            let level = Level::parse(level)?;
            if scope == "all" {
                out.0 = [level; SCOPES.len()];
            } else {
                out.set(scope, level);
            }
        }
        Ok(out)
    }

    fn set(&mut self, scope: &str, level: Level) -> bool {
        let at = SCOPES.iter().position(|s| *s == scope);
        if let Some(at) = at {
            self.0[at] = level;
        }
        at.is_some()
    }

    /// Sets one scope's level, or that of all (`all`).
    ///
    /// # Errors
    /// Names what is unknown.
    pub(crate) fn change(&mut self, scope: &str, level: &str) -> Result<(), Error> {
        let level = Level::parse(level)?;
        if scope == "all" {
            self.0 = [level; SCOPES.len()];
            return Ok(());
        }
        if self.set(scope, level) { Ok(()) } else { Err(Error::Scope(scope.to_owned())) }
    }

    /// Each scope with its level.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, Level)> {
        SCOPES.into_iter().zip(self.0)
    }

    /// Whether a line of this scope and level is shown.
    #[must_use]
    pub(crate) fn shows(&self, scope: &str, level: Level) -> bool {
        SCOPES.iter().position(|s| *s == scope).is_some_and(|at| self.0[at] <= level)
    }

    /// The level that some scope shows.
    #[must_use]
    pub(crate) fn most_verbose(&self) -> tracing::Level {
        match self.0.iter().min() {
            Some(Level::Debug) => tracing::Level::DEBUG,
            Some(Level::Info) => tracing::Level::INFO,
            Some(Level::Warn) => tracing::Level::WARN,
            _ => tracing::Level::ERROR,
        }
    }
}
