//! An index from names to hosts, a few bytes a name.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use prost::DecodeError;

use super::message::{Host, Source};

/// A name: where its host is in the message, and which of the host's names it is.
#[derive(Debug, Clone, Copy)]
struct Slot {
    at: u32,
    form: u32,
}

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
            count += host.names(&source.scope).len();
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
                for (form, name) in (0_u32..).zip(&host.names(&source.scope)).skip(1) {
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
                let before = source.host_at(held.get().at).unwrap_or_default().name;
                let better = match (slot.form, held.get().form) {
                    (0, 0) => host.name > before,
                    (0, _) => true,
                    (_, 0) => false,
                    (..) => host.name < before,
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
    let name = |at: u32| source.host_at(at).unwrap_or_default().name;
    let entry = hosts.entry(
        hasher.hash_one(&host.name),
        |known| name(*known) == host.name,
        |known| hasher.hash_one(name(*known)),
    );
    entry.insert(at);
}

fn text(source: &Source, slot: Slot) -> String {
    let mut names = source.host_at(slot.at).unwrap_or_default().names(&source.scope);
    let form = usize::try_from(slot.form).unwrap_or(usize::MAX);
    if form < names.len() { names.swap_remove(form) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::{KUBERNETES, Scope};
    use super::*;
    use crate::dns::table::message::{NameInfo, NameTable};

    #[test]
    fn a_host_may_have_more_names_than_16_bits_count() {
        let alt_hosts = (0..70_000).map(|n| format!("n{n}")).collect();
        let host = "web.ns1.svc.cluster.local".to_owned();
        let (registry, namespace) = (KUBERNETES.to_owned(), "ns1".to_owned());
        let info = NameInfo { registry, namespace, shortname: "web".to_owned(), alt_hosts, ips: Vec::new() };
        let body = NameTable { table: [(host, info)].into() }.encode_to_vec().into();
        let source = Source { body, scope: Scope::new("ns1", "ns1.svc.cluster.local") };
        let mut at = 0;
        source.each(|place, _| at = place).unwrap();
        // Its own name and three short ones come first.
        assert_eq!(text(&source, Slot { at, form: 70_003 }), "n69999.");
        assert_eq!(text(&source, Slot { at, form: 70_004 }), "");
    }
}
