//! What Envoy has accepted, by type and name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;

use super::asked::{Stream, Waiting};
use super::blocks::Place;
use super::read::{self, ENTRY, HELD, Request, Response, Unread};
use super::set::Set;
use super::{CLUSTER, LISTENER, Mode};

/// What a response that waits for Envoy's answer counts for at least, in bytes: a thousand of them wait at most where little
/// is kept, twice as many by default. Each that comes has all of them gone through.
const LEAST: usize = 32 * 1024;

/// The last good configuration.
#[derive(Debug)]
pub struct Store {
    /// Compressed bytes at most; beyond it nothing is kept.
    most: usize,
    pub(super) mode: Option<Mode>,
    // What others read meanwhile stays as it is.
    pub(super) types: BTreeMap<String, Arc<Set>>,
    stream: Option<Stream>,
    /// It was whole when this stream began.
    was_whole: bool,
    /// This stream and those before it have brought something that is not here: what they bring still is no whole.
    spoiled: Option<u64>,
    overflowed: bool,
    changes: u64,
}

impl Store {
    /// Nothing yet, and at most so many compressed bytes.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let (mode, types, stream, spoiled) = (None, BTreeMap::new(), None, None);
        Self { most, mode, types, stream, was_whole: false, spoiled, overflowed: false, changes: 0 }
    }

    // Names of one stream, and of one request, at most, in bytes: as much as all else, and no less than the stand-in holds.
    fn most_names(&self) -> usize {
        self.most.max(HELD)
    }

    /// A request of Envoy's has gone to istiod on stream `id`; a higher one takes the place of a lower. Whether there was
    /// room for its names; if not, what is kept is given up as by [`Self::lost`].
    pub fn request(&mut self, id: u64, mode: Mode, message: &Bytes) -> bool {
        if self.spoiled.is_some_and(|last| id <= last) {
            return true;
        }
        let most = self.most_names();
        let request = match read::request(mode, message, most) {
            Ok(request) => request,
            Err(Unread::Malformed(_)) => return true,
            Err(Unread::TooMuch) => {
                self.lost(id);
                return false;
            }
        };
        if self.stream.as_ref().is_none_or(|s| s.id < id) {
            self.was_whole = self.is_whole();
            self.stream = Some(Stream { id, mode, asked: BTreeMap::new(), unweighed: 0 });
        }
        let Some(stream) = self.stream.as_mut().filter(|s| s.id == id) else { return true };
        stream.unweighed += message.len() + (1 + request.names.len() + 2 * request.has.len()) * ENTRY;
        let kept = self.types.get(&request.type_url).filter(|_| self.mode == Some(mode)).map(|set| &**set);
        let first = !stream.asked.contains_key(&request.type_url);
        let asked = stream.asked.entry(request.type_url.clone()).or_default();
        match mode {
            Mode::Delta => asked.delta(&request, first, kept),
            Mode::Sotw => asked.sotw(&request, first, kept),
        }
        let is_part = mode == Mode::Delta && !asked.all;
        // All of it is gone through only after as much as a sixteenth has come.
        if stream.unweighed >= most / 16 {
            stream.unweighed = 0;
            if stream.weight() > most {
                self.lost(id);
                return false;
            }
        }
        if is_part {
            self.forget(&request.type_url, &request.dropped);
        }
        if request.nonce.is_empty() {
            return true;
        }
        let Some(accepted) = self.answered(&request) else { return true };
        // Half a set is none.
        if accepted.response.is_none_or(|response| self.take(&response).is_err()) {
            self.lost(id);
        }
        true
    }

    /// A response of istiod's is on its way to Envoy on stream `id`. Whether there was room for it beside those that Envoy
    /// has not answered, which are not compressed; if not, what is kept is given up as by [`Self::lost`].
    pub fn response(&mut self, id: u64, mode: Mode, message: &Bytes) -> bool {
        let response = match read::response(mode, message) {
            Ok(response) => Ok(response),
            // Of both forms: type and nonce stand in the same fields.
            Err(Unread::Malformed(_)) => Err(read::answers(Mode::Sotw, message).unwrap_or_default()),
            // What is kept would no longer be what Envoy has.
            Err(Unread::TooMuch) => {
                self.lost(id);
                return true;
            }
        };
        let Some(stream) = self.stream.as_mut().filter(|s| s.id == id) else { return true };
        let (type_url, nonce, resources) = match &response {
            Ok(response) => (&response.type_url, &response.nonce, response.resources.len()),
            Err((type_url, nonce)) => (type_url, nonce, 0),
        };
        let Some(asked) = stream.asked.get_mut(type_url) else { return true };
        let (bytes, nonce) = ((message.len() + resources * ENTRY).max(LEAST), nonce.clone());
        asked.waiting.push_back(Waiting { bytes, nonce, response: response.ok() });
        let all: usize = stream.asked.values().flat_map(|asked| &asked.waiting).map(|each| each.bytes).sum();
        // One alone has its own bound.
        let fits = all - bytes <= self.most.max(HELD);
        if !fits {
            self.lost(id);
        }
        fits
    }

    /// Something of stream `id` was missed: what is kept may be old, and is given up until a later stream brings it anew.
    /// The rest of this one would be a part that looks like the whole.
    pub fn lost(&mut self, id: u64) {
        self.types.clear();
        self.spoiled = self.spoiled.max(Some(id)).max(self.stream.take().map(|stream| stream.id));
    }

    // The response that Envoy has accepted with this request.
    fn answered(&mut self, request: &Request) -> Option<Waiting> {
        let stream = self.stream.as_mut()?;
        let waiting = &mut stream.asked.get_mut(&request.type_url)?.waiting;
        let place = waiting.iter().position(|each| each.nonce == request.nonce)?;
        // Answers come in order: what was passed over will not be answered any more.
        let answered = waiting.drain(..=place).next_back()?;
        (!request.rejects).then_some(answered)
    }

    fn take(&mut self, response: &Response) -> std::io::Result<()> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if self.mode != Some(stream.mode) {
            self.types.clear();
            self.mode = Some(stream.mode);
        }
        let Some(asked) = stream.asked.get_mut(&response.type_url) else { return Ok(()) };
        self.changes += 1;
        asked.missing.remove("");
        let set = Arc::make_mut(self.types.entry(response.type_url.clone()).or_default());
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
            asked.missing.remove(name);
        }
        for (name, body) in &response.resources {
            asked.missing.remove(name);
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
        let Some(set) = self.types.get_mut(type_url) else { return };
        if names.iter().any(|name| set.names.contains_key(name.as_str())) {
            let set = Arc::make_mut(set);
            names.iter().for_each(|name| set.remove(name));
            self.changes += 1;
        }
    }

    fn bound(&mut self) {
        if self.held() > self.most {
            self.lost(0);
            self.overflowed = true;
        } else if self.is_whole() {
            self.overflowed = false;
        }
    }

    /// What is kept, as it stays while this goes on: both share it until it changes here. Of what is changed meanwhile names
    /// are copied, and what is not compressed yet.
    #[must_use]
    pub(crate) fn shared(&self) -> Self {
        let types = self.types.clone();
        Self { mode: self.mode, types, changes: self.changes, ..Self::new(self.most) }
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

    /// Whether Envoy could serve with what is kept: it has clusters and listeners, and all that the last Envoy had. Until istiod
    /// has said something of a type, what was kept before is still one piece.
    #[must_use]
    pub(crate) fn is_whole(&self) -> bool {
        let asked = self.stream.iter().flat_map(|stream| &stream.asked);
        [CLUSTER, LISTENER].iter().all(|of| self.types.contains_key(*of))
            && asked.into_iter().all(|(of, asked)| {
                asked.missing.is_empty()
                    || self.was_whole && asked.had.is_some() && self.types.contains_key(of)
            })
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

    /// The bytes of all resources of a type.
    ///
    /// # Errors
    /// When a block is damaged.
    pub(crate) fn all(&self, type_url: &str) -> std::io::Result<Vec<Bytes>> {
        let all = self.resources(type_url, self.names(type_url))?;
        Ok(all.into_iter().map(|(_, body)| body).collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    // A delta resource of this name with so many bytes that do not get smaller.
    fn resource(name: &str, size: usize) -> (String, Bytes) {
        use rand::{RngCore, SeedableRng};
        let mut value = vec![0; size];
        rand::rngs::StdRng::seed_from_u64(7).fill_bytes(&mut value);
        let mut out = vec![0x1a, u8::try_from(name.len()).unwrap()];
        out.extend_from_slice(name.as_bytes());
        out.push(0x12);
        prost::encoding::encode_varint(value.len() as u64, &mut out);
        out.extend_from_slice(&value);
        (name.to_owned(), out.into())
    }

    // Envoy asks for clusters and listeners on this stream, and has these of each.
    fn opened(store: &mut Store, id: u64, has: &[&str]) {
        for of in [CLUSTER, LISTENER] {
            let has = has.iter().map(|name| ((*name).to_owned(), "1".to_owned())).collect();
            let request = Request { type_url: of.to_owned(), has, ..Request::default() };
            store.request(id, Mode::Delta, &read::write_request(Mode::Delta, &request));
        }
    }

    // It is brought clusters and listeners of these names, and accepts them.
    fn brought(store: &mut Store, id: u64, names: &[&str], size: usize) {
        for of in [CLUSTER, LISTENER] {
            let resources = names.iter().map(|name| resource(name, size)).collect();
            let (type_url, nonce) = (of.to_owned(), "n".to_owned());
            let response = Response { type_url, nonce, resources, ..Response::default() };
            store.response(id, Mode::Delta, &read::write_response(&response));
            let request = Request { type_url: of.to_owned(), nonce: "n".to_owned(), ..Request::default() };
            store.request(id, Mode::Delta, &read::write_request(Mode::Delta, &request));
        }
    }

    #[test]
    fn what_comes_on_a_stream_of_which_something_was_missed_is_no_whole() {
        let mut store = Store::new(1 << 20);
        opened(&mut store, 1, &[]);
        brought(&mut store, 1, &["a", "b"], 10);
        assert!(store.is_whole());
        store.lost(1);
        brought(&mut store, 1, &["a"], 10);
        assert!(!store.is_whole(), "of a and b there is a");
        // Nor does a stream before it, or the first part of the next one.
        opened(&mut store, 2, &["a", "b"]);
        brought(&mut store, 2, &["a"], 10);
        assert!(!store.is_whole(), "Envoy has b, which istiod need not say again");
        brought(&mut store, 2, &["b"], 10);
        assert!(store.is_whole());
        // What is lost before anything of a stream was noted concerns that stream.
        store.lost(3);
        opened(&mut store, 3, &[]);
        brought(&mut store, 3, &["a"], 10);
        assert!(!store.is_whole());
        opened(&mut store, 4, &[]);
        brought(&mut store, 4, &["a"], 10);
        assert!(store.is_whole());
    }

    // A delta request for resources of these names.
    fn asking(names: impl Iterator<Item = String>) -> Bytes {
        let (type_url, names) = ("type.googleapis.com/a".to_owned(), names.collect());
        read::write_request(Mode::Delta, &Request { type_url, names, ..Request::default() })
    }

    #[test]
    fn responses_that_wait_for_an_answer_take_so_many_bytes() {
        let mut store = Store::new(HELD);
        opened(&mut store, 1, &[]);
        let unanswered = |store: &mut Store, of: &str| {
            let (type_url, resources) = (of.to_owned(), vec![resource("a", HELD / 8)]);
            let response = Response { type_url, resources, ..Response::default() };
            store.response(1, Mode::Delta, &read::write_response(&response))
        };
        let fit = (0..64).take_while(|n| unanswered(&mut store, [CLUSTER, LISTENER][n % 2])).count();
        assert_eq!(fit, 8);
        assert!(store.stream.is_none(), "nothing waits any more");
        opened(&mut store, 2, &[]);
        brought(&mut store, 2, &["a"], 10);
        assert!(store.is_whole(), "a later stream brings it anew");
    }

    #[test]
    fn small_responses_wait_by_the_hundred_and_none_goes_unsaid() {
        for (responses, fit) in [(HELD / LEAST, true), (HELD / LEAST + 2, false)] {
            let mut store = Store::new(1 << 20);
            opened(&mut store, 1, &[]);
            let brings = |store: &mut Store, n: usize| {
                let (type_url, nonce) = (CLUSTER.to_owned(), n.to_string());
                let resources = vec![resource(&n.to_string(), 10)];
                let response = Response { type_url, nonce, resources, ..Response::default() };
                store.response(1, Mode::Delta, &read::write_response(&response))
            };
            let taken = (0..responses).take_while(|n| brings(&mut store, *n)).count();
            assert_eq!((taken == responses, store.stream.is_some()), (fit, fit));
            for n in 0..responses {
                let (type_url, nonce) = (CLUSTER.to_owned(), n.to_string());
                let accepted = Request { type_url, nonce, ..Request::default() };
                store.request(1, Mode::Delta, &read::write_request(Mode::Delta, &accepted));
            }
            assert_eq!(store.names(CLUSTER).count(), if fit { responses } else { 0 }, "all of them or none");
        }
    }

    // Of the store's changes Envoy has one more than was heard, and istiod need not say it again.
    #[test]
    fn what_envoy_has_in_another_version_is_missed_once_istiod_has_spoken() {
        let mut store = Store::new(1 << 20);
        opened(&mut store, 1, &[]);
        brought(&mut store, 1, &["a", "b"], 10);
        // All have none.
        for (version, is_whole) in [("", true), ("2", false)] {
            let id = if is_whole { 2 } else { 3 };
            for of in [CLUSTER, LISTENER] {
                let has = [("a", ""), ("b", version)].map(|(name, of)| (name.to_owned(), of.to_owned()));
                let request = Request { type_url: of.to_owned(), has: has.into(), ..Request::default() };
                store.request(id, Mode::Delta, &read::write_request(Mode::Delta, &request));
            }
            assert!(store.is_whole(), "it is what it was");
            brought(&mut store, id, &["a"], 10);
            assert_eq!(store.is_whole(), is_whole);
        }
        brought(&mut store, 3, &["b"], 10);
        assert!(store.is_whole());
    }

    #[test]
    fn what_cannot_be_read_makes_no_whole_if_envoy_takes_it() {
        for accepts in [false, true] {
            let mut store = Store::new(1 << 20);
            opened(&mut store, 1, &[]);
            brought(&mut store, 1, &["a"], 10);
            let (type_url, nonce) = (CLUSTER.to_owned(), "m".to_owned());
            let rest =
                read::write_response(&Response { type_url, nonce: nonce.clone(), ..Response::default() });
            // A resource whose name is no text.
            store.response(1, Mode::Delta, &[&[0x12, 3, 0x1a, 1, 0xff][..], &rest].concat().into());
            assert!(store.is_whole());
            let answer = Request { type_url: CLUSTER.to_owned(), nonce, ..Request::default() };
            let mut answer = read::write_request(Mode::Delta, &answer).to_vec();
            if !accepts {
                answer.extend([0x3a, 0]);
            }
            store.request(1, Mode::Delta, &answer.into());
            assert_eq!(store.is_whole(), !accepts);
        }
    }

    #[test]
    fn what_envoy_drops_is_a_change() {
        let mut store = Store::new(1 << 20);
        opened(&mut store, 1, &[]);
        let type_url = "type.googleapis.com/a".to_owned();
        let names = vec!["a".to_owned()];
        let asked = Request { type_url: type_url.clone(), names: names.clone(), ..Request::default() };
        store.request(1, Mode::Delta, &read::write_request(Mode::Delta, &asked));
        let (nonce, resources) = ("n".to_owned(), vec![resource("a", 10)]);
        let response = Response { type_url: type_url.clone(), nonce, resources, ..Response::default() };
        store.response(1, Mode::Delta, &read::write_response(&response));
        let accepted = Request { type_url: type_url.clone(), nonce: "n".to_owned(), ..Request::default() };
        store.request(1, Mode::Delta, &read::write_request(Mode::Delta, &accepted));
        let (before, dropped) =
            (store.changes(), Request { type_url: type_url.clone(), dropped: names, ..Request::default() });
        for _ in 0..2 {
            store.request(1, Mode::Delta, &read::write_request(Mode::Delta, &dropped));
            assert_eq!((store.changes(), store.all(&type_url).unwrap().len()), (before + 1, 0));
        }
    }

    #[test]
    fn names_are_bounded_in_one_request_and_in_many() {
        // A name costs an entry, however short it is.
        let fits = HELD / (ENTRY + 1);
        for (names, has_room) in [(fits, true), (fits + 1, false)] {
            let mut store = Store::new(1 << 20);
            opened(&mut store, 1, &[]);
            brought(&mut store, 1, &["a"], 10);
            let asked = asking(std::iter::repeat_n("a".to_owned(), names));
            assert_eq!((store.request(1, Mode::Delta, &asked), store.is_whole()), (has_room, has_room));
        }
        let mut store = Store::new(1 << 20);
        opened(&mut store, 1, &[]);
        brought(&mut store, 1, &["a"], 10);
        let each = 10_000;
        let mut asked = (0..).step_by(each).map(|from| asking((from..from + each).map(|n| n.to_string())));
        let taken = asked.by_ref().take(100).take_while(|asked| store.request(1, Mode::Delta, asked)).count();
        assert!((40..60).contains(&taken), "{taken} requests");
        assert!(!store.is_whole() && store.stream.is_none(), "nothing is held of it");
        assert!(store.request(1, Mode::Delta, &asked.next().unwrap()) && store.stream.is_none());
    }

    #[test]
    fn resources_of_one_response_are_bounded() {
        let fits = HELD / ENTRY;
        for (resources, is_whole) in [(fits, true), (fits + 1, false)] {
            let mut store = Store::new(1 << 20);
            opened(&mut store, 1, &[]);
            brought(&mut store, 1, &["a"], 10);
            // Of nothing but empty ones, two bytes each.
            let (type_url, nonce) = (CLUSTER.to_owned(), "m".to_owned());
            let rest = read::write_response(&Response { type_url, nonce, ..Response::default() });
            store.response(1, Mode::Delta, &[&[0x12, 0].repeat(resources)[..], &rest[..]].concat().into());
            assert_eq!(store.is_whole(), is_whole);
        }
    }

    #[test]
    fn more_than_the_bound_is_told_until_a_later_stream_brings_less() {
        let mut store = Store::new(100_000);
        opened(&mut store, 1, &[]);
        brought(&mut store, 1, &["a", "b"], 10);
        brought(&mut store, 1, &["c"], 200_000);
        assert!(store.is_overflowed() && !store.is_whole());
        brought(&mut store, 1, &["d"], 10);
        assert!(store.is_overflowed() && !store.is_whole(), "a part is no whole");
        opened(&mut store, 2, &[]);
        brought(&mut store, 2, &["a", "b"], 10);
        assert!(!store.is_overflowed() && store.is_whole());
    }

    #[test]
    fn what_is_shared_stays_as_it_was_and_costs_no_second_copy() {
        let mut store = Store::new(1 << 20);
        opened(&mut store, 1, &[]);
        brought(&mut store, 1, &["a", "b"], 100_000);
        let shared = store.shared();
        assert!(shared.is_whole() && Arc::ptr_eq(&shared.types[CLUSTER], &store.types[CLUSTER]));
        let before = crate::replay::disk::write(&shared, "me", 7).unwrap();
        brought(&mut store, 1, &["c"], 100);
        assert_eq!(store.names(CLUSTER).count(), 3);
        assert_eq!(crate::replay::disk::write(&shared, "me", 7).unwrap(), before);
        assert!(store.types[CLUSTER].blocks.shares(&shared.types[CLUSTER].blocks));
        store.lost(1);
        assert_eq!(crate::replay::disk::write(&shared, "me", 7).unwrap(), before);
    }
}
