//! The name table: from what istiod sends to what a name has for answers. Pure.
//!
//! istiod's message is kept as it came, and beside it an index of 9 bytes a name: where in the message the
//! host is, and which of its names this one is. Names and addresses are read from the message when somebody
//! asks, so that a table costs its message and little more, also while it is made.

mod index;
mod message;
mod page;

use std::net::IpAddr;

use bytes::Bytes;
use prost::DecodeError;
use rand::seq::SliceRandom;

use super::resolv::Search;
use super::wire::{self, Data, Query, Record};
use index::Index;
use message::{NameInfo, Source};
pub(crate) use page::Page;

const KUBERNETES: &str = "Kubernetes";
/// Addresses of an answer: no message, of 64 kB at most, holds more of 16 bytes each.
const MOST: usize = 4096;

/// From where names are seen: it decides which short forms there are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scope {
    /// The proxy's namespace.
    pub namespace: String,
    /// The proxy's domain without the namespace: `svc.cluster.local`.
    pub domain: String,
}

impl Scope {
    /// Takes the namespace off the domain if it is its first label.
    #[must_use]
    pub(crate) fn new(namespace: &str, domain: &str) -> Self {
        let domain = match domain.split_once('.') {
            Some((first, rest)) if first == namespace => rest,
            None if domain == namespace => "",
            _ => domain,
        };
        Self { namespace: namespace.to_owned(), domain: domain.to_owned() }
    }

    // The names of an entry, its own first; with a final dot.
    fn names(&self, host: &str, info: &NameInfo) -> Vec<String> {
        if info.registry != KUBERNETES {
            return vec![if host.ends_with('.') { host.to_owned() } else { format!("{host}.") }];
        }
        if host.ends_with('.') {
            return Vec::new();
        }
        let mut out = vec![format!("{host}.")];
        if self.domain.is_empty() || !host.ends_with(&self.domain) {
            return out;
        }
        let (short, namespace) = (&info.shortname, &info.namespace);
        out.push(format!("{short}.{namespace}."));
        if *namespace == self.namespace {
            out.push(format!("{short}."));
        }
        let first = self.domain.split('.').next().unwrap_or_default();
        out.push(format!("{short}.{namespace}.{first}."));
        out.extend(info.alt_hosts.iter().map(|h| format!("{h}.")));
        out
    }
}

/// A table that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadTable {
    #[error("{0}")]
    Message(#[from] DecodeError),
    #[error("a host of the name table has more than {} addresses and names, or {} MB", message::MOST, message::LONGEST >> 20)]
    Host,
}

/// One table, whole. Forms with the search domain are not stored but seen through at look-up.
#[derive(Debug)]
pub(crate) struct Table {
    index: Index,
    source: Source,
}

impl Table {
    /// Reads istiod's message.
    ///
    /// # Errors
    /// When the bytes are no such message, or one of a host that no mesh has; the text says where.
    pub(crate) fn decode(body: Bytes, scope: &Scope) -> Result<Self, BadTable> {
        let source = Source { body, scope: scope.clone() };
        if !source.has_small_hosts() {
            return Err(BadTable::Host);
        }
        Ok(Self { index: Index::of(&source)?, source })
    }

    // The host of a name, and the name that the search domain was appended to.
    fn find(&self, name: &str, search: Option<&Search>) -> Option<(u32, Option<String>)> {
        let own = self.index.find(&self.source, name);
        let appended = search.and_then(|search| {
            let inner = search.inner(name)?;
            let at = self.index.find(&self.source, inner)?;
            (own != Some(at)).then(|| (at, Some(inner.to_owned())))
        });
        appended.or_else(|| own.map(|at| (at, None)))
    }

    /// What `query` has for answers; `None`: the host is not ours. No answers: it has no such addresses.
    #[must_use]
    pub(crate) fn answer(&self, query: &Query, search: Option<&Search>) -> Option<Vec<Record>> {
        let host = query.host();
        let (at, inner) = self.find(&host, search).or_else(|| {
            let mut stem = host.as_str();
            while let Some((_, rest)) = stem.split_once('.').filter(|(_, rest)| !rest.is_empty()) {
                let found = self.find(&format!("*.{rest}"), search);
                if found.is_some() {
                    return found;
                }
                stem = rest;
            }
            None
        })?;
        let of_type = |ip: &IpAddr| ip.is_ipv4() == (query.qtype == wire::A);
        let mut addresses: Vec<IpAddr> = self.source.addresses_at(at).filter(of_type).collect();
        if addresses.is_empty() {
            return Some(Vec::new());
        }
        let (addresses, _) = addresses.partial_shuffle(&mut rand::rng(), MOST);
        let mut out = Vec::with_capacity(addresses.len() + 1);
        let mut owner = query.owner().to_vec();
        if let Some(target) = inner {
            let target = wire::encode(&target)?;
            out.push(Record { owner, data: Data::Cname(target.clone()) });
            owner = target;
        }
        out.extend(addresses.iter().map(|ip| Record { owner: owner.clone(), data: Data::Address(*ip) }));
        Some(out)
    }
}

/// What bytes reach first.
#[cfg(debug_assertions)]
pub mod fuzz {
    use std::sync::Arc;

    use serde_json::{Map, Value};

    use super::{Bytes, Page, Scope, Search, Table};

    /// istiod's message: refused as a whole, or each of its names is looked for and shown.
    pub fn names(body: &[u8]) {
        let scope = Scope::new("ns1", "ns1.svc.cluster.local");
        let Ok(table) = Table::decode(Bytes::copy_from_slice(body), &scope) else { return };
        let table = Arc::new(table);
        let page = Page::of(table.clone()).expect("it was read before");
        let page: Map<String, Value> =
            serde_json::from_slice(&page.collect::<Vec<_>>().concat()).expect("a page is JSON");
        for name in page.get("table").and_then(Value::as_object).into_iter().flat_map(Map::keys) {
            for name in [name.to_lowercase(), format!("{name}.ns1.svc.cluster.local.")] {
                let found = table.find(&name, Some(&Search::new("ns1.svc.cluster.local")));
                assert!(
                    found.is_none_or(|(at, _)| table.source.host_at(at).is_some_and(|host| host.answers()))
                );
            }
        }
    }
}

#[cfg(test)]
mod tests;
