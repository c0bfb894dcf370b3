//! What an Envoy is told that comes without anything, and one that lives.

use super::*;
use crate::base::wire::put;
use bytes::BytesMut;

const EDS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

// What the last Envoy had accepted, everything in version 1.
const KEPT: [(&str, &[&str]); 3] = [(CLUSTER, &["a", "b"]), (EDS, &["a", "b"]), (LISTENER, &["l"])];

fn resource(mode: Mode, name: &str) -> (String, Bytes) {
    let (mut value, mut any, mut out) = (BytesMut::new(), BytesMut::new(), BytesMut::new());
    put(&mut value, 1, name.as_bytes());
    put(&mut any, 2, &value);
    if mode == Mode::Sotw {
        return (name.to_owned(), any.freeze());
    }
    put(&mut out, 1, b"1");
    put(&mut out, 2, &any);
    put(&mut out, 3, name.as_bytes());
    (name.to_owned(), out.freeze())
}

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

fn store(mode: Mode) -> Store {
    let mut store = Store::new(1 << 20);
    for (of, kept) in KEPT {
        let names = if of == EDS { texts(kept) } else { Vec::new() };
        let mut request = Request { type_url: of.to_owned(), names: names.clone(), ..Request::default() };
        store.request(1, mode, &read::write_request(mode, &request));
        let response = Response {
            type_url: of.to_owned(),
            nonce: "n".to_owned(),
            version: if mode == Mode::Sotw { "1".to_owned() } else { String::new() },
            resources: kept.iter().map(|name| resource(mode, name)).collect(),
            ..Response::default()
        };
        store.response(1, mode, &read::write_response(&response));
        request.nonce = "n".to_owned();
        request.names = if mode == Mode::Sotw { names } else { Vec::new() };
        store.request(1, mode, &read::write_request(mode, &request));
    }
    assert!(store.is_whole());
    store
}

struct Stream {
    mode: Mode,
    store: Store,
    envoy: StandIn,
}

/// Of one answer: its type, what it brings, and what it says is not there.
type Told = (String, Vec<String>, Vec<String>);

fn told(of: &str, brings: &[&str], removed: &[&str]) -> Told {
    (of.to_owned(), texts(brings), texts(removed))
}

impl Stream {
    fn new(mode: Mode) -> Self {
        Self { mode, store: store(mode), envoy: StandIn::new(mode, "memory-".to_owned()) }
    }

    // A request that asks for these names (all of them in SotW), where Envoy has these in these versions.
    fn asks(&mut self, of: &str, names: &[&str], has: &[(&str, &str)]) -> &mut Self {
        let has = has.iter().map(|(name, version)| ((*name).to_owned(), (*version).to_owned())).collect();
        let request = Request { type_url: of.to_owned(), names: texts(names), has, ..Request::default() };
        self.envoy.request(&read::write_request(self.mode, &request)).unwrap();
        self
    }

    // The first request of SotW, with the version of what Envoy has.
    fn has(&mut self, of: &str, names: &[&str], version: &str) -> &mut Self {
        let (type_url, version) = (of.to_owned(), version.to_owned());
        let request = Request { type_url, names: texts(names), version, ..Request::default() };
        self.envoy.request(&read::write_request(self.mode, &request)).unwrap();
        self
    }

    // All that there is to say, each accepted.
    fn told(&mut self) -> Vec<Told> {
        let mut all = Vec::new();
        while let Some(message) = self.envoy.answer(&self.store).unwrap() {
            let response = read::response(self.mode, &message).unwrap();
            let (type_url, nonce) = (response.type_url.clone(), response.nonce);
            let mut answer = Request { type_url, nonce, version: response.version, ..Request::default() };
            if self.mode == Mode::Sotw {
                answer.names = self.envoy.asked[&response.type_url].names.iter().cloned().collect();
            }
            self.envoy.request(&read::write_request(self.mode, &answer)).unwrap();
            let brings = response.resources.into_iter().map(|(name, _)| name).collect();
            all.push((response.type_url, brings, response.removed));
        }
        all
    }
}

#[test]
fn an_envoy_without_anything_is_told_everything() {
    let mut envoy = Stream::new(Mode::Delta);
    envoy.asks(LISTENER, &[], &[]).asks(CLUSTER, &[], &[]);
    assert_eq!(envoy.told(), [told(CLUSTER, &["a", "b"], &[]), told(LISTENER, &["l"], &[])]);
    // It need not wait for what nobody knows.
    envoy.asks(EDS, &["a", "b", "c"], &[]);
    assert_eq!(envoy.told(), [told(EDS, &["a", "b"], &["c"])]);
    let mut envoy = Stream::new(Mode::Sotw);
    envoy.asks(LISTENER, &[], &[]).asks(CLUSTER, &[], &[]).asks(EDS, &["a", "c"], &[]);
    let all = [told(CLUSTER, &["a", "b"], &[]), told(EDS, &["a"], &[]), told(LISTENER, &["l"], &[])];
    assert_eq!(envoy.told(), all);
    envoy.asks(EDS, &["a", "b"], &[]);
    assert_eq!(envoy.told(), [told(EDS, &["b"], &[])]);
}

#[test]
fn of_what_an_envoy_has_nothing_is_removed_or_set_back() {
    for version in ["1", "2"] {
        let mut envoy = Stream::new(Mode::Delta);
        envoy.asks(CLUSTER, &[], &[("a", version), ("c", version)]);
        // It waits for one of each kind that is kept, and one that is not.
        envoy.asks(EDS, &["a", "b", "c", "d"], &[("a", version), ("c", version)]);
        envoy.asks(LISTENER, &[], &[("l", version), ("m", version)]);
        assert_eq!(envoy.told(), [told(EDS, &["b"], &[])]);
        // What istiod is asked has all that Envoy has.
        let asked: Vec<Request> =
            envoy.envoy.hand_over().iter().map(|m| read::request(Mode::Delta, m, HELD).unwrap()).collect();
        assert_eq!(asked.iter().map(|asked| asked.has.len()).collect::<Vec<_>>(), [2, 3, 2]);
    }
}

#[test]
fn in_the_older_protocol_an_envoy_that_has_something_is_told_what_it_asks_for_later() {
    for version in ["1", "2"] {
        let mut envoy = Stream::new(Mode::Sotw);
        envoy.has(CLUSTER, &[], version).has(EDS, &["a"], version).has(LISTENER, &[], version);
        assert_eq!(envoy.told(), []);
        envoy.asks(EDS, &["a", "b", "c"], &[]);
        assert_eq!(envoy.told(), [told(EDS, &["b"], &[])]);
        assert!(envoy.envoy.asked.values().all(|asked| asked.lives));
        // By name or not, an answer of these is all there is.
        envoy.asks(CLUSTER, &["b"], &[]);
        assert_eq!(envoy.told(), []);
    }
}

#[test]
fn an_envoy_that_has_one_type_is_told_all_of_another() {
    let mut envoy = Stream::new(Mode::Delta);
    envoy.asks(CLUSTER, &[], &[("a", "2"), ("c", "2")]).asks(EDS, &["a", "c"], &[]).asks(LISTENER, &[], &[]);
    // Whoever takes the place of an older one must not begin without what istiod would give it.
    assert_eq!(envoy.told(), [told(EDS, &["a"], &[]), told(LISTENER, &["l"], &[])]);
    let mut envoy = Stream::new(Mode::Sotw);
    envoy.has(CLUSTER, &[], "2").asks(EDS, &["a", "c"], &[]).asks(LISTENER, &[], &[]);
    assert_eq!(envoy.told(), [told(EDS, &["a"], &[]), told(LISTENER, &["l"], &[])]);
}

#[test]
fn what_is_asked_for_anew_is_answered_unless_envoy_has_it_newer() {
    let mut envoy = Stream::new(Mode::Delta);
    envoy.asks(CLUSTER, &[], &[("a", "2"), ("b", "1")]).asks(EDS, &["a"], &[("a", "2")]);
    assert_eq!(envoy.told(), []);
    // One of which Envoy has dropped what it had.
    let request = Request { type_url: EDS.to_owned(), dropped: texts(&["a"]), ..Request::default() };
    envoy.envoy.request(&read::write_request(Mode::Delta, &request)).unwrap();
    assert_eq!(envoy.told(), []);
    envoy.asks(EDS, &["a"], &[]);
    assert_eq!(envoy.told(), [told(EDS, &["a"], &[])]);
    envoy.asks(CLUSTER, &["a", "b"], &[]);
    assert_eq!(envoy.told(), [told(CLUSTER, &["b"], &[])]);
}
