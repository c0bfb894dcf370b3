//! An index from names to hosts, a few bytes a name.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use prost::DecodeError;

use super::message::{Host, Source};

/// A name: where its host is in the message, and which of the host's names it is: of those made of its own name 0 to 3,
/// of its `alt_hosts` where the text is, [`OWN`] and the bytes behind `at`. A host may have tens of thousands of those, so
/// none is looked for among all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    at: u32,
    form: u32,
}

/// As many names at most are made of a host's own name.
const OWN: u32 = 4;

/// The names of a message. The texts themselves stay in the message.
#[derive(Debug, Default)]
pub(super) struct Index {
    names: HashTable<Slot>,
    hasher: RandomState,
}

impl Index {
    /// Reads the message three times rather than hold its texts.
    ///
    /// # Errors
    /// Where the bytes are no such message.
    pub(super) fn of(source: &Source) -> Result<Self, DecodeError> {
        let hasher = RandomState::new();
        let mut hosts = HashTable::new();
        let mut count = 0;
        source.each(|at, host| {
            if host.answers() {
                count += host.names(&source.scope).len();
            }
            last(&mut hosts, &hasher, source, at, host);
        })?;
        let mut out = Self { names: HashTable::with_capacity(count), hasher };
        let counts = |hasher: &RandomState, at: u32, host: &Host| {
            host.answers() && hosts.find(hasher.hash_one(&host.name), |known| *known == at).is_some()
        };
        source.each(|at, host| {
            if counts(&out.hasher, at, host)
                && let Some(own) = host.names(&source.scope).first()
            {
                out.enter(source, own, Slot { at, form: 0 }, host);
            }
        })?;
        source.each(|at, host| {
            if counts(&out.hasher, at, host) {
                let names = host.names(&source.scope);
                let places = source.others_at(at);
                // Either all of them are among the names, at their end, or none.
                let own = names.len().checked_sub(places.len()).filter(|own| *own > 1).unwrap_or(names.len());
                let others = places.iter().map(|place| OWN.saturating_add(*place));
                let forms = (0_u32..OWN).take(own).chain(others);
                for (form, name) in forms.zip(&names).skip(1) {
                    out.enter(source, name, Slot { at, form }, host);
                }
            }
        })?;
        Ok(out)
    }

    /// Where the host that has this name is.
    pub(super) fn find(&self, source: &Source, name: &str) -> Option<u32> {
        let hash = self.hasher.hash_one(name);
        self.names.find(hash, |slot| text(source, *slot) == name).map(|slot| slot.at)
    }

    /// Memory that the index takes beside the message.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.names.allocation_size()
    }

    // A host's own name beats another's short form; of two short forms the first host's stays, and of two hosts
    // that differ by case only the last.
    fn enter(&mut self, source: &Source, name: &str, slot: Slot, host: &Host) {
        match self.entry(source, name) {
            Entry::Vacant(place) => {
                place.insert(slot);
            }
            Entry::Occupied(mut held) => {
                let before = || source.name_at(held.get().at).unwrap_or_default();
                let better = match (slot.form, held.get().form) {
                    (0, 0) => host.name > before(),
                    (0, _) => true,
                    (_, 0) => false,
                    (..) => host.name < before(),
                };
                if better {
                    *held.get_mut() = slot;
                }
            }
        }
    }

    fn entry(&mut self, source: &Source, name: &str) -> Entry<'_, Slot> {
        let Self { names, hasher } = self;
        let hash = hasher.hash_one(name);
        names.entry(hash, |slot| text(source, *slot) == name, |slot| hasher.hash_one(text(source, *slot)))
    }
}

// Of a host that stands in the message twice the last one counts, as in any map of protobuf.
fn last(hosts: &mut HashTable<u32>, hasher: &RandomState, source: &Source, at: u32, host: &Host) {
    let name = |at: u32| source.name_at(at).unwrap_or_default();
    let entry = hosts.entry(
        hasher.hash_one(&host.name),
        |known| name(*known) == host.name,
        |known| hasher.hash_one(name(*known)),
    );
    entry.insert(at);
}

fn text(source: &Source, slot: Slot) -> String {
    if let Some(behind) = slot.form.checked_sub(OWN) {
        let mut name = source.other_at(slot.at, behind).unwrap_or_default().to_ascii_lowercase();
        name.push('.');
        return name;
    }
    if slot.form == 0 {
        let mut name = source.name_at(slot.at).unwrap_or_default().to_ascii_lowercase();
        if !name.ends_with('.') {
            name.push('.');
        }
        return name;
    }
    let mut names = source.brief_at(slot.at).unwrap_or_default().names(&source.scope);
    let form = usize::try_from(slot.form).unwrap_or(usize::MAX);
    if form < names.len() { names.swap_remove(form) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prost::Message;

    use super::super::{KUBERNETES, Page, Scope, Table};
    use super::*;
    use crate::dns::table::message::tests::READ;
    use crate::dns::table::message::{NameInfo, NameTable};

    const HOST: &str = "web.ns1.svc.cluster.local";

    // One host with so many names beside its own four, as istiod sends it.
    fn source(others: Vec<String>) -> Source {
        let (registry, namespace) = (KUBERNETES.to_owned(), "ns1".to_owned());
        let ips = vec!["10.0.0.1".to_owned()];
        let info = NameInfo { registry, namespace, shortname: "web".to_owned(), alt_hosts: others, ips };
        let body = NameTable { table: [(HOST.to_owned(), info)].into() }.encode_to_vec().into();
        Source { body, scope: Scope::new("ns1", "ns1.svc.cluster.local") }
    }

    #[test]
    fn a_host_may_have_more_names_than_16_bits_count() {
        let source = source((0..70_000).map(|n| format!("N{n}")).collect());
        let index = Index::of(&source).unwrap();
        let mut at = 0;
        source.each(|place, _| at = place).unwrap();
        let own = ["web.ns1.svc.cluster.local.", "web.ns1.", "web.", "web.ns1.svc."];
        for name in own.into_iter().chain(["n0.", "n69999."]) {
            assert_eq!(index.find(&source, name), Some(at), "{name}");
        }
        for name in ["n70000.", "n1", "N1.", "", "web.ns1.svc.cluster."] {
            assert_eq!(index.find(&source, name), None, "{name}");
        }
        assert_eq!(index.names.len(), 70_004);
        assert_eq!(text(&source, Slot { at, form: u32::MAX }), ".");
    }

    #[test]
    fn a_host_with_many_names_is_not_read_anew_for_each() {
        // Each name twice, and its own among them.
        let names = (0..20_000).map(|n| format!("n{}", n / 2)).chain([HOST.to_owned()]);
        let source = source(names.collect());
        let before = READ.get();
        let index = Index::of(&source).unwrap();
        assert_eq!(index.names.len(), 10_004);
        for n in 0..10_000 {
            assert!(index.find(&source, &format!("n{n}.")).is_some());
        }
        // A short form that only looks alike by a few bits of its hash is read whole: that is rare.
        let whole = READ.get() - before;
        assert!(whole < 100, "a host of 20,000 names was read {whole} times");
        let before = READ.get();
        let page: usize = Page::of(Arc::new(Table { index, source })).unwrap().map(|piece| piece.len()).sum();
        assert!(page > 10_000 * "n0.".len());
        let whole = READ.get() - before;
        assert!(whole < 10, "a host of 20,000 names was read {whole} times for its page");
    }
}
