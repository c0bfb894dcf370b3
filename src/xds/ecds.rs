//! Extension configs are converted beside the stream, and the newest wins.
//!
//! A conversion may download for half a minute. Meanwhile other types pass, and so may a newer response
//! of the same type that needs no download. The Go agent then lets the slow, older one overtake: it
//! arrives last, and Envoy goes back to it. Here each response has a generation; what has been passed on
//! per resource name is remembered, and an older response arrives without the resources that a newer one
//! has brought (or not at all, if none is left).

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use prost::Message;

use super::protocol::Protocol;
use super::tap::Convert;
use crate::base::error::BoxError;
use crate::base::tasks::{Set, caught};
use crate::base::wire;

/// What a conversion is called where it panics.
const NAME: &str = "conversion of an extension config";

/// Conversions under way on a stream at most, and bytes of their responses where it is more than one. An istiod that is
/// well has a few kB in a response, and waits for a registry half a minute. What is converted takes a few times its bytes;
/// the names that have passed meanwhile count, too.
const MOST: usize = 128;
const HELD: usize = 4 << 20;

/// A response that comes while too much is under way. It is refused, and the next one may be taken.
#[derive(Debug, thiserror::Error)]
#[error("{count} extension configs of {held} bytes are being converted already")]
pub(super) struct Crowded {
    count: usize,
    held: usize,
}

struct Done {
    generation: u64,
    length: usize,
    nonce: String,
    result: Result<Bytes, BoxError>,
}

/// The conversions of one stream; dropped with it.
pub(super) struct Conversions {
    protocol: Protocol,
    convert: Option<Arc<dyn Convert>>,
    running: Set<Done>,
    // How many run, and the bytes of what they convert.
    count: usize,
    held: usize,
    order: Order,
}

impl Conversions {
    pub(super) fn new(protocol: Protocol, convert: Option<Arc<dyn Convert>>) -> Self {
        Self { protocol, convert, running: Set::new(NAME), count: 0, held: 0, order: Order::default() }
    }

    /// Starts the conversion of a whole response.
    ///
    /// # Errors
    /// When too many are under way.
    pub(super) fn begin(&mut self, nonce: String, response: Bytes) -> Result<(), Crowded> {
        let Some(convert) = self.convert.clone() else { return Ok(()) };
        let length = response.len();
        // Names are remembered as long as anything is under way.
        let held = self.held + self.order.weight();
        if self.count >= MOST || (self.count > 0 && held + length > HELD) {
            return Err(Crowded { count: self.count, held });
        }
        self.count += 1;
        self.held += length;
        let generation = self.order.begin();
        let protocol = self.protocol;
        self.running.spawn(async move {
            // A defect is a reason to refuse: Envoy would wait for the response for ever.
            let result = caught(NAME, convert.convert(protocol, response)).await;
            let result = result.unwrap_or_else(|panicked| Err(panicked.into()));
            Done { generation, length, nonce, result }
        });
        Ok(())
    }

    /// The next response to pass on, or the nonce and reason of one to refuse.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, (String, String)>> {
        while let Poll::Ready(done) = self.running.poll_next(cx) {
            self.count -= 1;
            self.held -= done.length;
            match done.result {
                Err(reason) => {
                    self.order.ended(done.generation);
                    return Poll::Ready(Err((done.nonce, reason.to_string())));
                }
                Ok(response) => {
                    let fresh = self.order.finish(done.generation, self.protocol, response);
                    self.order.ended(done.generation);
                    if let Some(response) = fresh {
                        return Poll::Ready(Ok(response));
                    }
                }
            }
        }
        Poll::Pending
    }
}

/// Which generation of each name has been passed on. Pure.
#[derive(Debug, Default)]
pub(super) struct Order {
    next: u64,
    open: Vec<u64>,
    passed: HashMap<String, u64>,
}

impl Order {
    pub(super) fn begin(&mut self) -> u64 {
        self.next += 1;
        self.open.push(self.next);
        self.next
    }

    /// Bytes of the names that are remembered, each with its place.
    fn weight(&self) -> usize {
        const PLACE: usize = 64;
        self.passed.keys().map(|name| name.len() + PLACE).sum()
    }

    // Names matter only while an older response is still being converted.
    pub(super) fn ended(&mut self, generation: u64) {
        self.open.retain(|g| *g != generation);
        let oldest = self.open.iter().min().copied().unwrap_or(u64::MAX);
        self.passed.retain(|_, passed| *passed > oldest);
    }

    /// What is left of a response once newer ones have passed.
    pub(super) fn finish(&mut self, generation: u64, protocol: Protocol, response: Bytes) -> Option<Bytes> {
        let newer =
            |name: &str, passed: &HashMap<String, u64>| passed.get(name).is_some_and(|g| *g > generation);
        let (mut named, mut left) = (0, 0);
        let read = each(protocol, &response, |_, name| {
            let Some(name) = name else { return };
            named += 1;
            if !newer(&name, &self.passed) {
                left += 1;
                self.passed.insert(name, generation);
            }
        });
        if read.is_err() || left == named {
            return Some(response);
        }
        if left == 0 {
            return None;
        }
        let mut kept = BytesMut::new();
        // It has been read before.
        let _ = each(protocol, &response, |raw, name| {
            if !name.is_some_and(|name| newer(&name, &self.passed)) {
                kept.extend_from_slice(raw);
            }
        });
        Some(kept.freeze())
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Named {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Body {
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Envelope {
    #[prost(string, tag = "3")]
    name: String,
}

/// The field of both protocols' responses that holds resources.
const RESOURCE: u32 = 2;

// Each top-level field as it came; those that are about one resource with its name. One after the other: a response may
// be millions of tiny ones.
fn each(
    protocol: Protocol,
    response: &Bytes,
    mut visit: impl FnMut(&[u8], Option<String>),
) -> Result<(), prost::DecodeError> {
    const REMOVED: u32 = 6;
    for field in wire::each(response) {
        let field = field?;
        let name = match (protocol, field.tag, field.body()) {
            (Protocol::Delta, RESOURCE, Some(body)) => Some(Envelope::decode(body)?.name),
            (Protocol::Sotw, RESOURCE, Some(_)) => {
                Some(Named::decode(field.message::<Body>(response)?.value)?.name)
            }
            (Protocol::Delta, REMOVED, Some(body)) => String::from_utf8(body.to_vec()).ok(),
            _ => None,
        };
        visit(field.raw, name);
    }
    Ok(())
}

/// Replaces the body of every resource of a response, keeping everything else byte for byte. For
/// converters: gives each resource's `Any` (encoded) to `change`; of one without a body an empty one, of which nothing
/// is kept.
///
/// # Errors
/// When the response cannot be decoded, or with what `change` gives.
pub(crate) fn map_resources(
    protocol: Protocol,
    response: &Bytes,
    mut change: impl FnMut(Bytes) -> Result<Bytes, BoxError>,
) -> Result<Bytes, BoxError> {
    let mut made = BytesMut::with_capacity(response.len());
    for field in wire::each(response) {
        let field = field?;
        let Some(body) = field.body().filter(|_| field.tag == RESOURCE) else {
            made.extend_from_slice(field.raw);
            continue;
        };
        let body = response.slice_ref(body);
        let body = match protocol {
            Protocol::Sotw => change(body)?,
            // In delta the body is a field of the same number one level below.
            Protocol::Delta => {
                let mut bare = true;
                let mut inner = |any| {
                    bare = false;
                    change(any)
                };
                let made = map_resources(Protocol::Sotw, &body, &mut inner as &mut dyn FnMut(Bytes) -> _)?;
                if bare {
                    change(Bytes::new())?;
                }
                made
            }
        };
        wire::put(&mut made, RESOURCE, &body);
    }
    Ok(made.freeze())
}

#[cfg(test)]
mod tests;
