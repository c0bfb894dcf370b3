//! One stream of Envoy's, answered from the store while istiod is away, and handed over to istiod.
//!
//! The store may be behind a living Envoy: a stream can end before istiod's last push is answered, a file is older than what
//! runs. So of a type of which Envoy has something it is told nothing but what it asks for by name and has not.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::read::{self, ENTRY, HELD, Request, Response, Unread, weight};
use super::{CLUSTER, LISTENER, Mode, Store, Strip, rank};

/// The state of the stream.
#[derive(Debug)]
pub struct StandIn {
    mode: Mode,
    /// What its nonces begin with.
    mark: String,
    sent: u64,
    node: Option<Bytes>,
    asked: BTreeMap<String, Asked>,
    /// Envoy has come without anything, of whatever type.
    bare: bool,
    /// What istiod was told when it was asked in Envoy's name.
    told: Option<BTreeMap<String, BTreeSet<String>>>,
    /// What has come, at most, since all that is held was weighed.
    unweighed: usize,
}

#[derive(Debug, Default)]
struct Asked {
    // Its place among the first requests for each type: 0 for the first type asked for.
    place: usize,
    // The first request as it came, while it still says all there is to say.
    pristine: Option<Bytes>,
    all: bool,
    names: BTreeSet<String>,
    // Envoy had something of it when it came.
    lives: bool,
    // What Envoy has, with the version (delta).
    has: BTreeMap<String, String>,
    // Names that Envoy waits for.
    wanted: BTreeSet<String>,
    due: bool,
    // No answer has been given.
    new: bool,
    open: Option<Open>,
}

// An answer of ours that Envoy has not taken yet.
#[derive(Debug)]
struct Open {
    nonce: String,
    brings: Vec<(String, String)>,
    removes: Vec<String>,
}

impl StandIn {
    /// What is held of a stream, and of one request, at most, in bytes.
    pub const MOST: usize = HELD;

    /// For a stream of this mode. `mark` begins every nonce; nothing of istiod's begins so.
    #[must_use]
    pub fn new(mode: Mode, mark: String) -> Self {
        let asked = BTreeMap::new();
        Self { mode, mark, sent: 0, node: None, asked, bare: true, told: None, unweighed: 0 }
    }

    /// Takes a request of Envoy's. Gives the type it rejects, where it does.
    ///
    /// # Errors
    /// When it is none, or more than is held.
    pub fn request(&mut self, message: &Bytes) -> Result<Option<String>, Unread> {
        let request = read::request(self.mode, message, Self::MOST)?;
        let texts = 2 + request.names.len() + 2 * request.has.len();
        self.unweighed += message.len() + texts * ENTRY;
        if let Some(node) = &request.node {
            self.node = Some(node.clone());
        }
        let place = self.asked.len();
        let first = !self.asked.contains_key(&request.type_url);
        let asked = self.asked.entry(request.type_url.clone()).or_default();
        if first {
            *asked =
                Asked { place, pristine: Some(message.clone()), due: true, new: true, ..Asked::default() };
            asked.all = request.names.is_empty() || request.names.iter().any(|name| name == "*");
            asked.lives = !(request.has.is_empty() && request.version.is_empty());
            self.bare &= !asked.lives;
            asked.has = request.has.into_iter().collect();
            asked.names = request.names.into_iter().collect();
            if self.mode == Mode::Delta {
                let has = |name: &String| name == "*" || asked.has.contains_key(name);
                asked.wanted = asked.names.iter().filter(|name| !has(name)).cloned().collect();
            }
            return Ok(None);
        }
        asked.answered(&request);
        match self.mode {
            Mode::Delta => asked.delta(&request),
            Mode::Sotw => asked.sotw(&request),
        }
        Ok(request.rejects.then_some(request.type_url))
    }

    /// Whether Envoy has asked for more than [`Self::MOST`]. All of it is gone through only after as much as a sixteenth of
    /// that has come, so it may be overrun by three times that.
    pub fn holds_too_much(&mut self) -> bool {
        if self.unweighed < Self::MOST / 16 {
            return false;
        }
        self.unweighed = 0;
        let told = self.told.iter().flatten().flat_map(|(of, names)| names.iter().chain([of])).map(weight);
        let asked = self.asked.iter().map(|(of, asked)| weight(of) + asked.weight());
        let node = self.node.as_ref().map_or(0, Bytes::len);
        told.chain(asked).sum::<usize>() + node > Self::MOST
    }

    /// The next answer, in the order in which Envoy must hear of things; `None` while there is nothing to say.
    ///
    /// # Errors
    /// When the store is damaged.
    pub fn answer(&mut self, store: &Store) -> std::io::Result<Option<Bytes>> {
        loop {
            let due = self.asked.iter().filter(|(_, asked)| asked.due && asked.open.is_none());
            let next = due.min_by_key(|(type_url, asked)| (rank(type_url), asked.place));
            let Some(type_url) = next.map(|(type_url, _)| type_url.clone()) else { return Ok(None) };
            let (mode, bare, nonce) = (self.mode, self.bare, format!("{}{}", self.mark, self.sent + 1));
            let Some(asked) = self.asked.get_mut(&type_url) else { return Ok(None) };
            asked.due = false;
            let response = match mode {
                Mode::Delta => asked.answer_delta(&type_url, nonce, store, bare)?,
                Mode::Sotw => asked.answer_sotw(&type_url, nonce, store)?,
            };
            asked.new = false;
            if let Some(response) = response {
                self.sent += 1;
                return Ok(Some(read::write_response(&response)));
            }
        }
    }

    /// Whether there may be something to say.
    #[must_use]
    pub(crate) fn is_due(&self) -> bool {
        self.asked.values().any(|asked| asked.due && asked.open.is_none())
    }

    /// Whether nothing was answered yet, so that istiod can take over as if nobody had stood in.
    #[must_use]
    pub(crate) fn is_silent(&self) -> bool {
        self.sent == 0
    }

    /// Whether Envoy has answered all it was told.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.asked.values().all(|asked| asked.open.is_none() && !asked.due)
    }

    /// Whether Envoy has asked for anything yet.
    #[must_use]
    pub(crate) fn is_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The types that Envoy has asked for.
    pub fn types(&self) -> impl Iterator<Item = &str> {
        self.asked.keys().map(String::as_str)
    }

    /// What istiod is asked in Envoy's name: all it has asked for, and what it has. The first carries the node.
    #[must_use]
    pub fn hand_over(&mut self) -> Vec<Bytes> {
        self.told = Some(self.asked.iter().map(|(of, asked)| (of.clone(), asked.names.clone())).collect());
        let mut types: Vec<(&String, &Asked)> = self.asked.iter().collect();
        types.sort_by_key(|(_, asked)| asked.place);
        let node = self.node.clone();
        let write = |(n, (type_url, asked)): (usize, (&String, &Asked))| {
            asked.first(self.mode, type_url, node.clone().filter(|_| n == 0))
        };
        types.into_iter().enumerate().map(write).collect()
    }

    /// What Envoy has asked for since istiod was told last.
    #[must_use]
    pub fn more(&mut self) -> Vec<Bytes> {
        let told = self.told.get_or_insert_default();
        let mut types: Vec<(&String, &Asked)> = self.asked.iter().collect();
        types.sort_by_key(|(_, asked)| asked.place);
        let mut more = Vec::new();
        for (type_url, asked) in types {
            let mut request = Request { type_url: type_url.clone(), ..Request::default() };
            more.push(match told.get(type_url) {
                None => asked.first(self.mode, type_url, None),
                Some(told) if *told == asked.names => continue,
                Some(told) => {
                    if self.mode == Mode::Delta {
                        request.names = asked.names.difference(told).cloned().collect();
                        request.dropped = told.difference(&asked.names).cloned().collect();
                    } else {
                        request.names = asked.names.iter().cloned().collect();
                    }
                    read::write_request(self.mode, &request)
                }
            });
            told.insert(type_url.clone(), asked.names.clone());
        }
        more
    }

    /// Istiod has answered: what keeps Envoy's answers to this one from istiod.
    #[must_use]
    pub fn end(self) -> Strip {
        Strip::new(self.mode, self.mark, self.told.unwrap_or_default())
    }
}

impl Asked {
    fn weight(&self) -> usize {
        let names = self.names.iter().chain(&self.wanted);
        let has = self.has.iter().flat_map(|(name, version)| [name, version]);
        names.chain(has).map(weight).sum::<usize>() + self.pristine.as_ref().map_or(0, Bytes::len)
    }

    // What is asked for at the beginning of a stream, with what Envoy has.
    fn first(&self, mode: Mode, type_url: &str, node: Option<Bytes>) -> Bytes {
        if let Some(pristine) = &self.pristine {
            // Word for word; only the first has the node, and it is the first here as well.
            return pristine.clone();
        }
        let has = match mode {
            Mode::Delta => self.has.iter().map(|(name, version)| (name.clone(), version.clone())).collect(),
            Mode::Sotw => Vec::new(),
        };
        let request = Request {
            type_url: type_url.to_owned(),
            names: self.names.iter().cloned().collect(),
            has,
            node,
            ..Request::default()
        };
        read::write_request(mode, &request)
    }

    fn answered(&mut self, request: &Request) {
        let Some(open) = self.open.take_if(|open| open.nonce == request.nonce) else { return };
        if request.rejects {
            return;
        }
        for name in open.removes {
            self.has.remove(&name);
        }
        self.has.extend(open.brings);
    }

    fn delta(&mut self, request: &Request) {
        for name in &request.dropped {
            self.names.remove(name);
            self.wanted.remove(name);
            if !self.all {
                self.has.remove(name);
            }
        }
        self.names.extend(request.names.iter().cloned());
        self.wanted.extend(request.names.iter().filter(|name| *name != "*").cloned());
        if !(request.names.is_empty() && request.dropped.is_empty()) {
            self.pristine = None;
        }
        self.due |= !request.names.is_empty();
    }

    fn sotw(&mut self, request: &Request) {
        let names: BTreeSet<String> = request.names.iter().cloned().collect();
        if names != self.names {
            self.pristine = None;
            self.wanted.retain(|name| names.contains(name));
            self.wanted.extend(names.difference(&self.names).cloned());
            self.due |= !self.wanted.is_empty();
            self.names = names;
        }
    }

    // Nothing has been said of it to an Envoy that came without any: it is told all there is.
    fn begins(&self) -> bool {
        self.new && !self.lives
    }

    fn answer_delta(
        &mut self,
        of: &str,
        nonce: String,
        store: &Store,
        bare: bool,
    ) -> std::io::Result<Option<Response>> {
        let wanted = std::mem::take(&mut self.wanted);
        let known: BTreeSet<&str> = store.names(of).collect();
        let begins = self.begins();
        let mine = |name: &str| wanted.contains(name) || begins && self.all;
        let candidates = known.iter().copied().filter(|name| mine(name));
        let mut resources = Vec::new();
        let mut brings = Vec::new();
        for (name, body) in store.resources(of, candidates)? {
            let version = read::version(&body).unwrap_or_default();
            // One that came with all of them stays as it is when it is asked for by name, too.
            if self.all && self.has.get(&name).is_some_and(|has| *has != version) {
                continue;
            }
            brings.push((name.clone(), version));
            resources.push((name, body));
        }
        // What is asked for and there is not: an Envoy that starts need not wait for it. One that lives goes on with what it
        // has until istiod has the word.
        let tells = bare && (store.knows(of) || !self.all);
        let missing = |name: &String| tells && !known.contains(name.as_str());
        let removed: Vec<String> = wanted.iter().filter(|name| missing(name)).cloned().collect();
        let nothing = resources.is_empty() && removed.is_empty();
        if nothing && !(begins && (bare || self.all)) {
            return Ok(None);
        }
        self.pristine = None;
        self.open = Some(Open { nonce: nonce.clone(), brings, removes: removed.clone() });
        Ok(Some(Response { type_url: of.to_owned(), nonce, resources, removed, ..Response::default() }))
    }

    fn answer_sotw(&mut self, of: &str, nonce: String, store: &Store) -> std::io::Result<Option<Response>> {
        let wanted = std::mem::take(&mut self.wanted);
        // What is not in an answer of these is removed by it.
        let whole = self.all || of == CLUSTER || of == LISTENER;
        if !store.knows(of) || whole && self.lives {
            return Ok(None);
        }
        let asked = if whole || self.begins() { &self.names } else { &wanted };
        let names = store.names(of).filter(|name| self.all || asked.contains(*name));
        let resources = store.resources(of, names)?;
        if resources.is_empty() && !self.all {
            return Ok(None);
        }
        self.pristine = None;
        self.open = Some(Open { nonce: nonce.clone(), brings: Vec::new(), removes: Vec::new() });
        let version = store.version(of).to_owned();
        Ok(Some(Response { type_url: of.to_owned(), nonce, version, resources, ..Response::default() }))
    }
}

#[cfg(test)]
mod tests;
