//! What Envoy has accepted, by type and name.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;

use super::blocks::{Blocks, Place};
use super::read::{self, Request, Response};
use super::{CLUSTER, LISTENER, Mode};

/// Responses of a type that wait for Envoy's answer at most; istiod waits for it, too.
const WAITING: usize = 64;

/// The last good configuration.
#[derive(Debug)]
pub struct Store {
    /// Compressed bytes at most; beyond it nothing is kept.
    most: usize,
    pub(super) mode: Option<Mode>,
    pub(super) types: BTreeMap<String, Set>,
    stream: Option<Stream>,
    overflowed: bool,
    changes: u64,
}

/// What there is of one type.
#[derive(Debug, Default)]
pub(super) struct Set {
    pub(super) version: String,
    pub(super) names: BTreeMap<Box<str>, Place>,
    pub(super) blocks: Blocks,
}

// The stream that feeds it.
#[derive(Debug)]
struct Stream {
    id: u64,
    mode: Mode,
    asked: BTreeMap<String, Asked>,
}

#[derive(Debug, Default)]
struct Asked {
    // All there are, whatever their names.
    all: bool,
    names: BTreeSet<String>,
    // What Envoy had when it asked first; taken by the first response, which brings what it had not.
    had: Option<BTreeSet<String>>,
    waiting: VecDeque<Response>,
}

impl Store {
    /// Nothing yet, and at most so many compressed bytes.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, mode: None, types: BTreeMap::new(), stream: None, overflowed: false, changes: 0 }
    }

    /// A request of Envoy's has gone to istiod on stream `id`; a higher one takes the place of a lower.
    pub fn request(&mut self, id: u64, mode: Mode, message: &Bytes) {
        let Ok(request) = read::request(mode, message) else { return };
        if self.stream.as_ref().is_none_or(|s| s.id < id) {
            self.stream = Some(Stream { id, mode, asked: BTreeMap::new() });
        }
        let Some(stream) = self.stream.as_mut().filter(|s| s.id == id) else { return };
        let first = !stream.asked.contains_key(&request.type_url);
        let asked = stream.asked.entry(request.type_url.clone()).or_default();
        match mode {
            Mode::Delta => asked.delta(&request, first),
            Mode::Sotw => asked.sotw(&request, first),
        }
        if mode == Mode::Delta && !asked.all {
            self.forget(&request.type_url, &request.dropped);
        }
        if request.nonce.is_empty() {
            return;
        }
        let answered = self.answered(&request);
        if let Some(response) = answered
            && self.take(&response).is_err()
        {
            // Half a set is none.
            self.types.remove(&request.type_url);
        }
    }

    /// A response of istiod's is on its way to Envoy on stream `id`.
    pub fn response(&mut self, id: u64, mode: Mode, message: &Bytes) {
        let Ok(response) = read::response(mode, message) else { return };
        let Some(stream) = self.stream.as_mut().filter(|s| s.id == id) else { return };
        let Some(asked) = stream.asked.get_mut(&response.type_url) else { return };
        if asked.waiting.len() >= WAITING {
            asked.waiting.pop_front();
        }
        asked.waiting.push_back(response);
    }

    /// Something was missed: what is kept may be old, and is given up until the next stream brings it anew.
    pub fn lost(&mut self) {
        self.types.clear();
        self.stream = None;
    }

    // The response that Envoy has accepted with this request.
    fn answered(&mut self, request: &Request) -> Option<Response> {
        let stream = self.stream.as_mut()?;
        let waiting = &mut stream.asked.get_mut(&request.type_url)?.waiting;
        let place = waiting.iter().position(|r| r.nonce == request.nonce)?;
        // Answers come in order: what was passed over will not be answered any more.
        let response = waiting.drain(..=place).next_back()?;
        (!request.rejects).then_some(response)
    }

    fn take(&mut self, response: &Response) -> std::io::Result<()> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if self.mode != Some(stream.mode) {
            self.types.clear();
            self.mode = Some(stream.mode);
        }
        let Some(asked) = stream.asked.get_mut(&response.type_url) else { return Ok(()) };
        self.changes += 1;
        let set = self.types.entry(response.type_url.clone()).or_default();
        set.version.clone_from(&response.version);
        match (stream.mode, asked.all) {
            (Mode::Sotw, true) => {
                let now: BTreeSet<&str> = response.resources.iter().map(|(name, _)| name.as_str()).collect();
                set.retain(|name| now.contains(name));
            }
            (Mode::Sotw, false) => set.retain(|name| asked.names.contains(name)),
            (Mode::Delta, all) => {
                if let Some(had) = asked.had.take() {
                    set.retain(|name| had.contains(name) || !all && asked.names.contains(name));
                }
            }
        }
        for name in &response.removed {
            set.remove(name);
        }
        for (name, body) in &response.resources {
            // It was dropped while it was on its way.
            if asked.all || asked.names.contains(name) {
                set.put(name, body)?;
            }
        }
        set.settle()?;
        self.bound();
        Ok(())
    }

    fn forget(&mut self, type_url: &str, names: &[String]) {
        if let Some(set) = self.types.get_mut(type_url) {
            names.iter().for_each(|name| set.remove(name));
        }
    }

    fn bound(&mut self) {
        let held = self.held();
        let over = held > self.most;
        if over {
            self.types.clear();
        }
        if over != self.overflowed && (over || self.is_whole()) {
            self.overflowed = over;
        }
    }

    /// How often it has changed.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// More than the bound was accepted, so nothing is kept.
    #[must_use]
    pub(crate) fn is_overflowed(&self) -> bool {
        self.overflowed
    }

    /// Whether Envoy could serve with what is kept: it has clusters and listeners.
    #[must_use]
    pub(crate) fn is_whole(&self) -> bool {
        [CLUSTER, LISTENER].iter().all(|of| self.types.contains_key(*of))
    }

    /// Which form of the protocol it is kept in.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Compressed bytes.
    #[must_use]
    pub fn held(&self) -> usize {
        self.types.values().map(|set| set.blocks.sizes().0).sum()
    }

    /// Bytes of the resources themselves, and how many there are.
    #[must_use]
    pub fn raw(&self) -> (usize, usize) {
        self.types
            .values()
            .fold((0, 0), |(bytes, n), set| (bytes + set.blocks.sizes().1, n + set.names.len()))
    }

    /// Whether anything of this type was ever accepted.
    pub(super) fn knows(&self, type_url: &str) -> bool {
        self.types.contains_key(type_url)
    }

    /// The version of the type as a whole (SotW).
    pub(super) fn version(&self, type_url: &str) -> &str {
        self.types.get(type_url).map_or("", |set| &set.version)
    }

    /// All names of a type.
    pub(super) fn names(&self, type_url: &str) -> impl Iterator<Item = &str> {
        self.types.get(type_url).into_iter().flat_map(|set| set.names.keys().map(|name| &**name))
    }

    /// The resources of these names that there are.
    pub(super) fn resources<'a>(
        &self,
        type_url: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> std::io::Result<Vec<(String, Bytes)>> {
        let Some(set) = self.types.get(type_url) else { return Ok(Vec::new()) };
        let (names, places): (Vec<String>, Vec<Place>) =
            names.filter_map(|name| Some((name.to_owned(), *set.names.get(name)?))).unzip();
        Ok(names.into_iter().zip(set.blocks.read(&places)?).collect())
    }
}

impl Asked {
    fn delta(&mut self, request: &Request, first: bool) {
        if first {
            self.all = request.names.is_empty() || request.names.iter().any(|name| name == "*");
            self.had = Some(request.has.iter().map(|(name, _)| name.clone()).collect());
        }
        self.names.extend(request.names.iter().cloned());
        for name in &request.dropped {
            self.names.remove(name);
        }
    }

    fn sotw(&mut self, request: &Request, first: bool) {
        if first {
            self.all = request.names.is_empty();
        }
        self.names = request.names.iter().cloned().collect();
    }
}

impl Set {
    fn put(&mut self, name: &str, body: &[u8]) -> std::io::Result<()> {
        let place = self.blocks.put(body)?;
        if let Some(old) = self.names.insert(name.into(), place) {
            self.blocks.free(old);
        }
        Ok(())
    }

    fn remove(&mut self, name: &str) {
        if let Some(old) = self.names.remove(name) {
            self.blocks.free(old);
        }
    }

    fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let Self { names, blocks, .. } = self;
        names.retain(|name, place| {
            let keep = keep(name);
            if !keep {
                blocks.free(*place);
            }
            keep
        });
    }

    fn settle(&mut self) -> std::io::Result<()> {
        self.blocks.settle()?;
        if !self.blocks.is_wasteful() {
            return Ok(());
        }
        let places: Vec<Place> = self.names.values().copied().collect();
        let all = self.blocks.read(&places)?;
        self.blocks = Blocks::default();
        for (place, body) in self.names.values_mut().zip(all) {
            *place = self.blocks.put(&body)?;
        }
        self.blocks.settle()
    }
}
