//! What Envoy has asked for on the stream that feeds the store.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Mode;
use super::read::{Request, Response, weight};
use super::set::Set;

/// The stream that feeds the store.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: u64,
    pub(super) mode: Mode,
    pub(super) asked: BTreeMap<String, Asked>,
    /// What has come, at most, since all that is held was weighed.
    pub(super) unweighed: usize,
}

impl Stream {
    /// What its names take in bytes, with an entry for each.
    pub(super) fn weight(&self) -> usize {
        self.asked.iter().map(|(of, asked)| weight(of) + asked.weight()).sum()
    }
}

/// What it has asked for of one type, and what of that has yet to come.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// All there are, whatever their names.
    pub(super) all: bool,
    pub(super) names: BTreeSet<String>,
    /// What Envoy had when it asked first; taken by the first response, which brings what it had not.
    pub(super) had: Option<BTreeSet<String>>,
    /// What Envoy had and is not here, or in another version (delta): it came with a stream that was not noted, or that ended
    /// before Envoy's answer was heard. An empty name: the type as a whole (SotW), which the first response brings.
    pub(super) missing: BTreeSet<String>,
    pub(super) waiting: VecDeque<Waiting>,
}

/// A response that Envoy has not answered.
#[derive(Debug)]
pub(super) struct Waiting {
    /// What it takes, in bytes.
    pub(super) bytes: usize,
    pub(super) nonce: String,
    /// `None`: it cannot be read, though Envoy may take it.
    pub(super) response: Option<Response>,
}

impl Asked {
    fn weight(&self) -> usize {
        let names = self.names.iter().chain(self.had.iter().flatten()).chain(&self.missing);
        names.map(weight).sum()
    }

    /// A request of the delta form; `first` on its stream, `kept` what is held of the type.
    pub(super) fn delta(&mut self, request: &Request, first: bool, kept: Option<&Set>) {
        self.names.extend(request.names.iter().cloned());
        if first {
            self.all = request.names.is_empty() || request.names.iter().any(|name| name == "*");
            let mine = request.has.iter().filter(|(name, _)| self.all || self.names.contains(name));
            self.missing = match kept {
                Some(set) => set.lacks(mine),
                None => mine.map(|(name, _)| name.clone()).collect(),
            };
            self.had = Some(request.has.iter().map(|(name, _)| name.clone()).collect());
        }
        for name in &request.dropped {
            self.names.remove(name);
            self.missing.remove(name);
        }
    }

    /// Likewise, of the state of the world.
    pub(super) fn sotw(&mut self, request: &Request, first: bool, kept: Option<&Set>) {
        if first {
            self.all = request.names.is_empty();
            self.missing.extend((kept.is_none() && !request.version.is_empty()).then(String::new));
        }
        self.names = request.names.iter().cloned().collect();
    }
}
