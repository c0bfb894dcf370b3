//! The name table: from what istiod sends to what a name has for answers. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use prost::Message;
use rand::seq::SliceRandom;
use serde_json::{Map, Value, json};

use super::wire::{self, Data, Query, Record};

const KUBERNETES: &str = "Kubernetes";

/// `istio.networking.nds.v1.NameTable`.
#[derive(Clone, PartialEq, prost::Message)]
struct NameTable {
    #[prost(btree_map = "string, message", tag = "1")]
    table: BTreeMap<String, NameInfo>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NameInfo {
    #[prost(string, repeated, tag = "1")]
    ips: Vec<String>,
    #[prost(string, tag = "2")]
    registry: String,
    #[prost(string, tag = "3")]
    shortname: String,
    #[prost(string, tag = "4")]
    namespace: String,
    #[prost(string, repeated, tag = "5")]
    alt_hosts: Vec<String>,
}

/// From where names are seen: it decides which short forms there are.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// The proxy's namespace.
    pub namespace: String,
    /// The proxy's domain without the namespace: `svc.cluster.local`.
    pub domain: String,
}

impl Scope {
    /// Takes the namespace off the domain if it is its first label.
    #[must_use]
    pub fn new(namespace: &str, domain: &str) -> Self {
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

/// Addresses of one entry.
#[derive(Debug)]
struct Entry {
    v4: Box<[Ipv4Addr]>,
    v6: Box<[Ipv6Addr]>,
}

impl Entry {
    fn of(info: &NameInfo) -> Option<Self> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for ip in info.ips.iter().filter_map(|ip| ip.parse().ok()) {
            match ip {
                IpAddr::V4(ip) => v4.push(ip),
                IpAddr::V6(ip) => v6.push(ip),
            }
        }
        (!v4.is_empty() || !v6.is_empty()).then(|| Self { v4: v4.into(), v6: v6.into() })
    }
}

/// One table, whole. Forms with the search domain are not stored but seen through at look-up.
#[derive(Debug)]
pub struct Table {
    hosts: HashMap<Box<str>, u32>,
    entries: Vec<Entry>,
    scope: Scope,
    /// As it came: what `/debug/ndsz` shows is made when somebody asks.
    body: Bytes,
}

impl Table {
    /// Reads istiod's message.
    ///
    /// # Errors
    /// When the bytes are no such message; the text says where.
    pub fn decode(body: Bytes, scope: &Scope) -> Result<Self, String> {
        let decoded = NameTable::decode(body.clone()).map_err(|e| e.to_string())?;
        let mut out = Self { hosts: HashMap::new(), entries: Vec::new(), scope: scope.clone(), body };
        let mut short = Vec::new();
        for (host, info) in &decoded.table {
            let Some(entry) = Entry::of(info) else { continue };
            let at = u32::try_from(out.entries.len()).map_err(|e| e.to_string())?;
            out.entries.push(entry);
            let mut names = scope.names(host, info).into_iter().map(|name| name.to_ascii_lowercase());
            if let Some(own) = names.next() {
                out.hosts.insert(own.into(), at);
            }
            short.extend(names.map(|name| (name, at)));
        }
        // A host's own name beats another's short form; of two short forms the first host's stays.
        for (name, at) in short {
            out.hosts.entry(name.into()).or_insert(at);
        }
        out.hosts.shrink_to_fit();
        Ok(out)
    }

    // The entry of a name, and the name that the search domain was appended to.
    fn find(&self, name: &str, search: Option<&str>) -> Option<(u32, Option<String>)> {
        let own = self.hosts.get(name).copied();
        let appended = search.and_then(|search| {
            let inner = name.strip_suffix('.')?.strip_suffix(search)?;
            let doubled = inner.strip_suffix('.').is_some_and(|i| i.ends_with(search));
            let at = self.hosts.get(inner).copied().filter(|_| inner.ends_with('.') && !doubled)?;
            (own != Some(at)).then(|| (at, Some(inner.to_owned())))
        });
        appended.or_else(|| own.map(|at| (at, None)))
    }

    /// What `query` has for answers; `None`: the host is not ours. No answers: it has no such addresses.
    #[must_use]
    pub fn answer(&self, query: &Query, search: Option<&str>) -> Option<Vec<Record>> {
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
        let entry = self.entries.get(usize::try_from(at).ok()?)?;
        let mut addresses: Vec<IpAddr> = match query.qtype {
            wire::A => entry.v4.iter().copied().map(IpAddr::V4).collect(),
            _ => entry.v6.iter().copied().map(IpAddr::V6).collect(),
        };
        if addresses.is_empty() {
            return Some(Vec::new());
        }
        addresses.shuffle(&mut rand::rng());
        let mut out = Vec::with_capacity(addresses.len() + 1);
        let mut owner = query.owner().to_vec();
        if let Some(target) = inner {
            let target = wire::encode(&target)?;
            out.push(Record { owner, data: Data::Cname(target.clone()) });
            owner = target;
        }
        out.extend(addresses.into_iter().map(|ip| Record { owner: owner.clone(), data: Data::Address(ip) }));
        Some(out)
    }

    /// The table as JSON, with the names it is found by.
    ///
    /// # Errors
    /// Never in practice: the message was read once already.
    pub fn json(&self) -> Result<String, String> {
        let decoded = NameTable::decode(self.body.clone()).map_err(|e| e.to_string())?;
        let mut out: BTreeMap<String, Value> = BTreeMap::new();
        let mut added = HashSet::new();
        for (host, info) in &decoded.table {
            out.insert(host.clone(), shown(info));
            let Some(entry) = Entry::of(info) else { continue };
            for name in self.scope.names(host, info) {
                if !decoded.table.contains_key(&name) && added.insert(name.clone()) {
                    let v4 = entry.v4.iter().map(ToString::to_string);
                    let ips: Vec<String> = v4.chain(entry.v6.iter().map(ToString::to_string)).collect();
                    out.insert(name, json!({ "ips": ips, "registry": KUBERNETES }));
                }
            }
        }
        let table = Map::from_iter(out);
        let all = if table.is_empty() { json!({}) } else { json!({ "table": table }) };
        Ok(all.to_string())
    }
}

// Empty fields are left out, as protobuf's JSON does.
fn shown(info: &NameInfo) -> Value {
    let mut out = Map::new();
    let mut list = |key: &str, values: &[String]| {
        if !values.is_empty() {
            out.insert(key.to_owned(), json!(values));
        }
    };
    list("ips", &info.ips);
    for (key, text) in
        [("registry", &info.registry), ("shortname", &info.shortname), ("namespace", &info.namespace)]
    {
        if !text.is_empty() {
            out.insert(key.to_owned(), json!(text));
        }
    }
    if !info.alt_hosts.is_empty() {
        out.insert("altHosts".to_owned(), json!(info.alt_hosts));
    }
    Value::Object(out)
}

#[cfg(test)]
mod tests;
