//! istiod's message, and reading one host of it without the others.

#[cfg(test)]
use std::collections::BTreeMap;
use std::net::IpAddr;

use bytes::Bytes;
use prost::encoding::decode_varint;
use prost::{DecodeError, Message};

use super::Scope;
use crate::base::wire::{each, has_few_fields};
use crate::dns::resolv;

/// `istio.networking.nds.v1.NameTable`.
#[cfg(test)]
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NameTable {
    #[prost(btree_map = "string, message", tag = "1")]
    pub table: BTreeMap<String, NameInfo>,
}

/// What the table says of a host.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NameInfo {
    #[prost(string, repeated, tag = "1")]
    pub ips: Vec<String>,
    #[prost(string, tag = "2")]
    pub registry: String,
    #[prost(string, tag = "3")]
    pub shortname: String,
    #[prost(string, tag = "4")]
    pub namespace: String,
    #[prost(string, repeated, tag = "5")]
    pub alt_hosts: Vec<String>,
}

impl NameInfo {
    /// In the message's order; texts that are no addresses are left out.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().filter_map(|ip| resolv::ip(ip)).collect()
    }
}

/// Where things stand: a host in the message, what is known of it in the host, and there each of `alt_hosts`.
const HOST: u32 = 1;
const INFO: u32 = 2;
const ADDRESS: u32 = 1;
const ALT_HOST: u32 = 5;

/// A host's own name, read without what is known of the host.
#[derive(Clone, PartialEq, prost::Message)]
struct Named {
    #[prost(string, tag = "1")]
    name: String,
}

/// An entry of the message's map.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Host {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    info: Option<NameInfo>,
}

impl Host {
    /// Empty where the message has none.
    pub(super) fn info(&self) -> NameInfo {
        self.info.clone().unwrap_or_default()
    }

    /// Whether it has any address.
    pub(super) fn answers(&self) -> bool {
        self.info.as_ref().is_some_and(|info| info.ips.iter().any(|ip| resolv::ip(ip).is_some()))
    }

    /// The names it is found by, in lower case, its own first.
    pub(super) fn names(&self, scope: &Scope) -> Vec<String> {
        let mut names = scope.names(&self.name, self.info.as_ref().unwrap_or(&NameInfo::default()));
        names.iter_mut().for_each(|name| name.make_ascii_lowercase());
        names
    }
}

/// The message, and from where its names are seen.
#[derive(Debug)]
pub(super) struct Source {
    /// As it came.
    pub body: Bytes,
    pub scope: Scope,
}

/// What a host's own names are made of, however many addresses and other names it has.
#[derive(Clone, PartialEq, prost::Message)]
struct Brief {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    info: Option<BriefInfo>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct BriefInfo {
    #[prost(string, tag = "2")]
    registry: String,
    #[prost(string, tag = "3")]
    shortname: String,
    #[prost(string, tag = "4")]
    namespace: String,
}

impl Source {
    /// Whether no host has more addresses and names than [`MOST`], nor takes more than [`LONGEST`]. Bytes that are no such
    /// message have none.
    pub(super) fn has_small_hosts(&self) -> bool {
        bodies(&self.body, HOST).all(is_small)
    }

    /// Each host with its place, in the message's order.
    ///
    /// # Errors
    /// Where the bytes are no such message.
    pub(super) fn each(&self, mut visit: impl FnMut(u32, &Host)) -> Result<(), DecodeError> {
        for field in each(&self.body) {
            let field = field?;
            if field.tag != HOST || field.body().is_none() {
                continue;
            }
            // A table of 4 GiB is none that istiod sends.
            let Ok(at) = u32::try_from(behind(&self.body, field.value)) else { return Ok(()) };
            visit(at, &Host::decode_length_delimited(field.value)?);
        }
        Ok(())
    }

    /// The host at a place that [`Source::each`] gave.
    pub(super) fn host_at(&self, at: u32) -> Option<Host> {
        let host = self.body.get(usize::try_from(at).ok()?..)?;
        #[cfg(test)]
        tests::READ.with(|read| read.set(read.get() + 1));
        Host::decode_length_delimited(host).ok()
    }

    /// The addresses of that host; a query asks for nothing else, and a host may have many.
    pub(super) fn addresses_at(&self, at: u32) -> impl Iterator<Item = IpAddr> {
        let host = usize::try_from(at).ok().and_then(|at| inside(self.body.get(at..)?));
        let fields = bodies(host.unwrap_or_default(), INFO).flat_map(|info| bodies(info, ADDRESS));
        fields.filter_map(|ip| resolv::ip(std::str::from_utf8(ip).ok()?))
    }

    /// That host without its addresses and its `alt_hosts`.
    pub(super) fn brief_at(&self, at: u32) -> Option<Host> {
        let host = self.body.get(usize::try_from(at).ok()?..)?;
        let Brief { name, info } = Brief::decode_length_delimited(host).ok()?;
        let whole = |BriefInfo { registry, shortname, namespace }| NameInfo {
            registry,
            shortname,
            namespace,
            ..NameInfo::default()
        };
        Some(Host { name, info: info.map(whole) })
    }

    /// Its own name, however many others it has.
    pub(super) fn name_at(&self, at: u32) -> Option<String> {
        let host = self.body.get(usize::try_from(at).ok()?..)?;
        Some(Named::decode_length_delimited(host).ok()?.name)
    }

    /// Where each of its `alt_hosts` is, in their order, as bytes behind `at`; only asked of what was decoded before.
    pub(super) fn others_at(&self, at: u32) -> Vec<u32> {
        let host = usize::try_from(at).ok().and_then(|at| self.body.get(at..)).unwrap_or_default();
        let others = bodies(inside(host).unwrap_or_default(), INFO).flat_map(each).flatten();
        let places = others.filter(|field| field.tag == ALT_HOST).map(|field| behind(host, field.value));
        places.filter_map(|place| u32::try_from(place).ok()).collect()
    }

    /// One of the `alt_hosts`, from where [`Source::others_at`] says that it is.
    pub(super) fn other_at(&self, at: u32, behind: u32) -> Option<&str> {
        let start = usize::try_from(at.checked_add(behind)?).ok()?;
        std::str::from_utf8(inside(self.body.get(start..)?)?).ok()
    }
}

/// Addresses and names of one host at most: each takes a hundred bytes while the table is read, or ten times its own.
pub(super) const MOST: usize = 100_000;

/// What a host takes at most, in bytes: its names are put together in five forms, and 100,000 addresses take 1.7 MB.
pub(super) const LONGEST: usize = 2 << 20;

// A name and what is known of it, of which the parts would be put together if it were there twice.
fn is_small(host: &[u8]) -> bool {
    host.len() <= LONGEST
        && has_few_fields(host, 3)
        && bodies(host, INFO).all(|info| has_few_fields(info, MOST))
}

// What the message fields of this number hold, up to where the bytes are no message.
fn bodies(message: &[u8], tag: u32) -> impl Iterator<Item = &[u8]> {
    each(message).flatten().filter(move |field| field.tag == tag).filter_map(|field| field.body())
}

// How far into `whole` this part of it begins.
fn behind(whole: &[u8], part: &[u8]) -> usize {
    part.as_ptr().addr() - whole.as_ptr().addr()
}

// What a field holds whose length stands at the beginning.
fn inside(mut rest: &[u8]) -> Option<&[u8]> {
    let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
    rest.get(..length)
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// How often a host was read whole beside the passes over the message.
        pub(crate) static READ: Cell<usize> = const { Cell::new(0) };
    }
}
