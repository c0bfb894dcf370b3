//! Envoy, istiod and the agent between them, as models: whatever happens in whatever order, Envoy ends up with what
//! istiod has, never goes back, and a fresh Envoy without istiod gets what the last one had.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;

use super::read::{self, Request, Response};
use super::{Mode, ORDER, StandIn, Store, Strip, rank};
use crate::base::wire::{merged, put};

const MARK: &str = "memory-";
/// Clusters and listeners come all, endpoints and routes by the names of those.
const TYPES: usize = 4;

// Clusters and listeners.
fn comes_all(of: usize) -> bool {
    of.is_multiple_of(2)
}

type Have = BTreeMap<String, u64>;

// A resource as it stands in a response; its version is in its body, so that both forms have one.
fn resource(mode: Mode, of: usize, name: &str, version: u64) -> Bytes {
    let (mut value, mut any, mut out) = (BytesMut::new(), BytesMut::new(), BytesMut::new());
    put(&mut value, 1, name.as_bytes());
    put(&mut value, 2, version.to_string().as_bytes());
    put(&mut value, 99, &[b'x'; 50]);
    put(&mut any, 1, ORDER[of].as_bytes());
    put(&mut any, 2, &value);
    if mode == Mode::Sotw {
        return any.freeze();
    }
    put(&mut out, 1, version.to_string().as_bytes());
    put(&mut out, 2, &any);
    put(&mut out, 3, name.as_bytes());
    out.freeze()
}

fn version_of(mode: Mode, body: &Bytes) -> u64 {
    let any = if mode == Mode::Sotw { body.clone() } else { merged(body, 2).unwrap().unwrap() };
    let value = merged(&any, 2).unwrap().unwrap();
    assert!(value.len() > 50, "the bytes are whole");
    String::from_utf8(merged(&value, 2).unwrap().unwrap().to_vec()).unwrap().parse().unwrap()
}

#[derive(Default)]
struct Envoy {
    have: [Have; TYPES],
    accepted: [bool; TYPES],
    // Of the stream.
    asked: [Option<BTreeSet<String>>; TYPES],
    nonce: [String; TYPES],
    version: [String; TYPES],
}

impl Envoy {
    fn wants(&self, of: usize) -> BTreeSet<String> {
        if comes_all(of) { BTreeSet::new() } else { self.have[of - 1].keys().cloned().collect() }
    }

    fn open(&mut self, mode: Mode) -> Vec<Bytes> {
        self.asked = Default::default();
        self.nonce = Default::default();
        let mut out = Vec::new();
        for of in 0..TYPES {
            out.extend(self.subscribe(mode, of));
        }
        out
    }

    // What has to be said so that the subscription is what it should be.
    fn subscribe(&mut self, mode: Mode, of: usize) -> Option<Bytes> {
        let wants = self.wants(of);
        let first = self.asked[of].is_none();
        if first && !comes_all(of) && wants.is_empty() || self.asked[of].as_ref() == Some(&wants) {
            return None;
        }
        let old = self.asked[of].replace(wants.clone()).unwrap_or_default();
        let mut request = Request { type_url: ORDER[of].to_owned(), ..Request::default() };
        if mode == Mode::Sotw {
            request.names = wants.into_iter().collect();
            request.version.clone_from(&self.version[of]);
            request.nonce.clone_from(&self.nonce[of]);
        } else {
            request.names = wants.difference(&old).cloned().collect();
            request.dropped = old.difference(&wants).cloned().collect();
            for name in &request.dropped {
                self.have[of].remove(name);
            }
            if first {
                request.has = self.have[of].iter().map(|(n, v)| (n.clone(), v.to_string())).collect();
            }
        }
        if first && of == 0 {
            request.node = Some(Bytes::from_static(b"\x0a\x04node"));
        }
        Some(read::write_request(mode, &request))
    }

    fn receive(&mut self, mode: Mode, message: &Bytes, accept: bool) -> Vec<Bytes> {
        let response = read::response(mode, message).unwrap();
        let of = rank(&response.type_url);
        self.nonce[of].clone_from(&response.nonce);
        if accept {
            self.accepted[of] = true;
            self.version[of].clone_from(&response.version);
            let wants = self.asked[of].clone().unwrap_or_default();
            let mut now =
                if mode == Mode::Sotw && comes_all(of) { Have::new() } else { self.have[of].clone() };
            for name in &response.removed {
                now.remove(name);
            }
            for (name, body) in &response.resources {
                let version = version_of(mode, body);
                let before = self.have[of].get(name).copied().unwrap_or(0);
                assert!(version >= before, "{name} went back from {before} to {version}");
                let from_memory = response.nonce.starts_with(MARK);
                assert!(!from_memory || before == 0 || version == before, "what it has is istiod's");
                if comes_all(of) || wants.contains(name) {
                    now.insert(name.clone(), version);
                }
            }
            now.retain(|name, _| comes_all(of) || wants.contains(name));
            let has_gone = self.have[of].keys().any(|name| !now.contains_key(name));
            assert!(!has_gone || !response.nonce.starts_with(MARK), "memory takes nothing away");
            self.have[of] = now;
        }
        let mut answer = Request { type_url: response.type_url, nonce: response.nonce, ..Request::default() };
        if mode == Mode::Sotw {
            answer.version.clone_from(&self.version[of]);
            answer.names = self.asked[of].iter().flatten().cloned().collect();
        }
        let mut raw = BytesMut::from(&read::write_request(mode, &answer)[..]);
        if !accept {
            put(&mut raw, if mode == Mode::Sotw { 6 } else { 7 }, b"");
        }
        let mut out = vec![raw.freeze()];
        if comes_all(of) {
            // In SotW what a listener or cluster no longer names goes with it.
            let keep = self.wants(of + 1);
            self.have[of + 1].retain(|name, _| keep.contains(name));
            out.extend(self.subscribe(mode, of + 1));
        }
        out
    }
}

// What istiod knows of one stream.
#[derive(Default)]
struct Istiod {
    asked: [Option<BTreeSet<String>>; TYPES],
    known: [Have; TYPES],
    fresh: [bool; TYPES],
    nonce: [String; TYPES],
}

struct World {
    mode: Mode,
    truth: [Have; TYPES],
    versions: u64,
    nonces: u64,
    up: bool,
    envoy: Envoy,
    store: Store,
    id: u64,
    open: bool,
    istiod: Option<Istiod>,
    stand_in: Option<StandIn>,
    strip: Option<Strip>,
    // Istiod was asked in Envoy's name and has not answered.
    waiting: bool,
    flight: VecDeque<Bytes>,
    // What the store had of a type when this Envoy had accepted nothing of it.
    before: [Have; TYPES],
    // Something was not noted, ever.
    lost: bool,
    // Envoy has taken something of a type that was not heard, and istiod has not spoken since.
    behind: [bool; TYPES],
}

#[derive(Debug, Clone)]
enum Op {
    Change(usize, u8),
    Remove(usize, u8),
    Push,
    Deliver(bool),
    Stream,
    Fresh,
    Away,
    Back,
    Answered,
    // The agent has not noted something.
    Lost,
    // Envoy takes something, and its stream ends before that is heard.
    Unheard,
}

impl World {
    fn new(mode: Mode) -> Self {
        Self {
            mode,
            truth: Default::default(),
            versions: 0,
            nonces: 0,
            up: true,
            envoy: Envoy::default(),
            store: Store::new(1 << 20),
            id: 0,
            open: false,
            istiod: None,
            stand_in: None,
            strip: None,
            waiting: false,
            flight: VecDeque::new(),
            before: Default::default(),
            lost: false,
            behind: Default::default(),
        }
    }

    fn stored(&self, of: usize) -> Have {
        let names: Vec<&str> = self.store.names(ORDER[of]).collect();
        let all = self.store.resources(ORDER[of], names.into_iter()).unwrap();
        all.into_iter().map(|(name, body)| (name, version_of(self.mode, &body))).collect()
    }

    fn change(&mut self, of: usize, name: u8, gone: bool) {
        let name = format!("n{}", name % 4);
        self.versions += 1;
        // Endpoints and routes are there for every name, as istiod answers all that it is asked for.
        for of in [of, (of / 2) * 2 + 1] {
            if gone && comes_all(of) {
                self.truth[of].remove(&name);
            } else {
                self.truth[of].insert(name.clone(), self.versions);
            }
        }
    }

    fn tell_istiod(&mut self, message: Bytes) {
        self.store.request(self.id, self.mode, &message);
        let Some(istiod) = &mut self.istiod else { return };
        let request = read::request(self.mode, &message, StandIn::MOST).unwrap();
        assert!(!request.nonce.starts_with(MARK), "istiod sees a nonce that it never gave");
        let of = rank(&request.type_url);
        let first = istiod.asked[of].is_none();
        if first {
            istiod.known[of] = request.has.iter().map(|(n, v)| (n.clone(), v.parse().unwrap())).collect();
        }
        if self.mode == Mode::Delta {
            let asked = istiod.asked[of].get_or_insert_default();
            asked.extend(request.names.iter().cloned());
            for name in &request.dropped {
                asked.remove(name);
                istiod.known[of].remove(name);
            }
            for name in
                request.names.iter().filter(|name| !first || !request.has.iter().any(|h| h.0 == **name))
            {
                istiod.known[of].remove(name);
            }
            istiod.fresh[of] |= first || !request.names.is_empty();
        } else {
            // As istiod does: a nonce that is not the last one is passed over, and with it the names.
            if !first && !request.nonce.is_empty() && request.nonce != istiod.nonce[of] {
                return;
            }
            let names: BTreeSet<String> = request.names.into_iter().collect();
            istiod.fresh[of] |= request.nonce.is_empty() || istiod.asked[of].as_ref() != Some(&names);
            istiod.asked[of] = Some(names);
        }
    }

    // Istiod says what is new.
    fn push(&mut self, all: bool) {
        if self.waiting {
            return;
        }
        let Some(istiod) = &mut self.istiod else { return };
        for (of, type_url) in ORDER.iter().enumerate().take(TYPES) {
            let Some(asked) = istiod.asked[of].clone() else { continue };
            let mine = |name: &String| comes_all(of) || asked.contains(name);
            let now: Have =
                self.truth[of].iter().filter(|(n, _)| mine(n)).map(|(n, v)| (n.clone(), *v)).collect();
            if istiod.known[of] == now && !istiod.fresh[of] && !all {
                continue;
            }
            self.nonces += 1;
            let known = std::mem::replace(&mut istiod.known[of], now.clone());
            istiod.fresh[of] = false;
            let mut response = Response {
                type_url: (*type_url).to_owned(),
                nonce: format!("istiod-{}", self.nonces),
                ..Response::default()
            };
            let news = now.iter().filter(|(n, v)| self.mode == Mode::Sotw || known.get(*n) != Some(v));
            response.resources = news.map(|(n, v)| (n.clone(), resource(self.mode, of, n, *v))).collect();
            if self.mode == Mode::Sotw {
                response.version = self.versions.to_string();
                istiod.nonce[of].clone_from(&response.nonce);
            } else {
                response.removed = known.keys().filter(|n| !now.contains_key(*n)).cloned().collect();
            }
            let message = read::write_response(&response);
            self.store.response(self.id, self.mode, &message);
            self.flight.push_back(message);
        }
    }

    fn answer(&mut self) {
        let Some(stand_in) = &mut self.stand_in else { return };
        while let Some(message) = stand_in.answer(&self.store).unwrap() {
            let response = read::response(self.mode, &message).unwrap();
            assert!(response.nonce.starts_with(MARK));
            self.flight.push_back(message);
        }
    }

    fn hear_envoy(&mut self, requests: Vec<Bytes>) {
        for message in requests {
            if let Some(stand_in) = &mut self.stand_in {
                stand_in.request(&message).unwrap();
            } else if let Some(strip) = &mut self.strip {
                if let Some(message) = strip.pass(message).unwrap() {
                    self.tell_istiod(message);
                }
            } else {
                self.tell_istiod(message);
            }
        }
        self.answer();
    }

    fn stream(&mut self, fresh: bool) {
        if fresh {
            self.before = std::array::from_fn(|of| self.stored(of));
            self.envoy = Envoy::default();
            self.behind = Default::default();
        }
        self.id += 1;
        (self.istiod, self.stand_in, self.strip, self.waiting) = (None, None, None, false);
        self.flight.clear();
        self.open = true;
        if self.up {
            self.istiod = Some(Istiod::default());
        } else if self.store.is_whole() && self.store.mode() == Some(self.mode) {
            self.stand_in = Some(StandIn::new(self.mode, MARK.to_owned()));
        } else {
            self.open = false;
            return;
        }
        let requests = self.envoy.open(self.mode);
        self.hear_envoy(requests);
    }

    fn deliver(&mut self, accept: bool) {
        let Some(message) = self.flight.pop_front() else { return };
        let from_memory = read::response(self.mode, &message).unwrap().nonce.starts_with(MARK);
        // What was accepted once is accepted again.
        let requests = self.envoy.receive(self.mode, &message, accept || from_memory);
        if accept && !from_memory {
            self.behind[rank(&read::response(self.mode, &message).unwrap().type_url)] = false;
        }
        self.hear_envoy(requests);
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Change(of, name) => self.change(*of, *name, false),
            Op::Remove(of, name) => self.change(*of, *name, true),
            Op::Push => self.push(false),
            Op::Deliver(accept) => self.deliver(*accept),
            Op::Stream => self.stream(false),
            Op::Fresh => self.stream(true),
            Op::Away => {
                self.up = false;
                if self.istiod.take().is_some() && self.stand_in.is_none() {
                    // Its stream ends, and Envoy comes again.
                    self.stream(false);
                }
                self.waiting = false;
            }
            Op::Back => {
                self.up = true;
                if !self.open {
                    self.stream(false);
                } else if let Some(stand_in) = self.stand_in.as_mut().filter(|_| !self.waiting)
                    && stand_in.is_quiet()
                {
                    let requests = stand_in.hand_over();
                    // Each attempt is a stream of its own.
                    self.id += 1;
                    self.istiod = Some(Istiod::default());
                    self.waiting = true;
                    requests.into_iter().for_each(|message| self.tell_istiod(message));
                }
            }
            Op::Unheard => {
                let Some(message) = self.flight.pop_front() else { return };
                let of = rank(&read::response(self.mode, &message).unwrap().type_url);
                self.envoy.receive(self.mode, &message, true);
                // With a cluster goes what it named.
                self.behind[of] = true;
                self.behind[(of / 2) * 2 + 1] = true;
                self.lost = true;
                self.stream(false);
            }
            // Memory says nothing once it is not whole.
            Op::Lost if self.stand_in.is_some() => {}
            Op::Lost => {
                (self.lost, self.before) = (true, Default::default());
                self.store.lost(self.id);
            }
            Op::Answered => {
                if self.waiting
                    && let Some(stand_in) = self.stand_in.take()
                {
                    self.waiting = false;
                    let mut stand_in = stand_in;
                    let more = stand_in.more();
                    self.strip = Some(stand_in.end());
                    more.into_iter().for_each(|message| self.tell_istiod(message));
                    self.push(false);
                }
            }
        }
        self.check();
    }

    fn check(&self) {
        if self.store.mode() != Some(self.mode) || self.lost && !self.store.is_whole() {
            return;
        }
        for (of, type_url) in ORDER.iter().enumerate().take(TYPES) {
            if self.behind[of] {
                continue;
            }
            let stored = self.stored(of);
            if self.envoy.accepted[of] && self.stand_in.is_none() {
                let (mut stored, has) = (self.wanted(of, &stored), self.wanted(of, &self.envoy.have[of]));
                if !comes_all(of) {
                    // One that this Envoy has rejected, and the last one had not.
                    stored.retain(|name, _| has.contains_key(name));
                }
                assert_eq!(stored, has, "{}: what Envoy has is kept", type_url);
            } else if self.stand_in.is_none() && comes_all(of) {
                assert_eq!(stored, self.before[of], "{}: what the last Envoy had is kept", type_url);
            }
        }
    }

    // The part of it that Envoy asks for.
    fn wanted(&self, of: usize, have: &Have) -> Have {
        let wants = self.envoy.wants(of);
        have.iter()
            .filter(|(n, _)| comes_all(of) || wants.contains(*n))
            .map(|(n, v)| (n.clone(), *v))
            .collect()
    }

    // Everything that is under way arrives.
    fn settle(&mut self) {
        for _ in 0..60 {
            while !self.flight.is_empty() {
                self.deliver(true);
            }
            self.push(false);
            if self.flight.is_empty() {
                return;
            }
        }
        panic!("there is no end to it");
    }
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..TYPES, 0u8..4).prop_map(|(of, n)| Op::Change(of, n)),
        1 => (0..TYPES, 0u8..4).prop_map(|(of, n)| Op::Remove(of, n)),
        3 => Just(Op::Push),
        8 => prop::bool::weighted(0.9).prop_map(Op::Deliver),
        1 => Just(Op::Stream),
        1 => Just(Op::Fresh),
        1 => Just(Op::Away),
        2 => Just(Op::Back),
        2 => Just(Op::Answered),
        1 => Just(Op::Lost),
        2 => Just(Op::Unheard),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn envoy_ends_with_what_istiod_has(sotw: bool, ops in prop::collection::vec(op(), 1..120)) {
        let mut world = World::new(if sotw { Mode::Sotw } else { Mode::Delta });
        for (of, n) in [(0, 0), (0, 1), (2, 0)] {
            world.change(of, n, false);
        }
        world.stream(true);
        for op in &ops {
            world.step(op);
        }
        // A fresh Envoy without istiod has what the last one had.
        world.step(&Op::Back);
        world.settle();
        world.step(&Op::Back);
        world.step(&Op::Answered);
        world.push(true);
        world.settle();
        if world.store.is_whole() {
            let kept: Vec<Have> = (0..TYPES).map(|of| world.stored(of)).collect();
            world.up = false;
            world.stream(true);
            prop_assert!(world.stand_in.is_some());
            world.settle();
            for (of, kept) in kept.iter().enumerate() {
                // What no cluster or listener names any more may be left of an earlier Envoy.
                prop_assert_eq!(&world.envoy.have[of], &world.wanted(of, kept), "{}", ORDER[of]);
            }
            // And with istiod back it has what istiod has.
            world.change(0, 2, false);
            world.change(2, 1, true);
            world.step(&Op::Back);
            world.step(&Op::Answered);
            world.settle();
            world.push(true);
            world.settle();
            for (of, type_url) in ORDER.iter().enumerate().take(TYPES) {
                let truth = world.wanted(of, &world.truth[of]);
                prop_assert_eq!(&world.envoy.have[of], &truth, "{}", type_url);
                prop_assert_eq!(&world.wanted(of, &world.stored(of)), &truth, "{}", type_url);
            }
        }
    }
}
