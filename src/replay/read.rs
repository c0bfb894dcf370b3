//! What a message of the discovery protocol says, without decoding what is in its resources.

use bytes::{Bytes, BytesMut};
use prost::DecodeError;

use super::Mode;
use crate::base::wire::{Field, each, last, put};

/// A request of Envoy's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Request {
    /// The type asked for.
    pub type_url: String,
    /// The nonce of the response it answers; empty: none.
    pub nonce: String,
    /// The version that Envoy has (SotW).
    pub version: String,
    /// It rejects that response.
    pub rejects: bool,
    /// Names asked for: all of them (SotW), or those that are new (delta).
    pub names: Vec<String>,
    /// Names no longer asked for (delta).
    pub dropped: Vec<String>,
    /// What Envoy has, and in which version (delta, the first request of a type).
    pub has: Vec<(String, String)>,
    /// The message `Node` as it came.
    pub node: Option<Bytes>,
}

/// A response of istiod's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Response {
    /// The type it brings.
    pub type_url: String,
    /// Its nonce.
    pub nonce: String,
    /// Version of all (SotW).
    pub version: String,
    /// Names and bytes: an `Any` (SotW), or a `Resource` (delta).
    pub resources: Vec<(String, Bytes)>,
    /// Names that are no more (delta).
    pub removed: Vec<String>,
}

/// No message of the discovery protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is no message of the discovery protocol")]
pub struct Malformed;

impl From<DecodeError> for Malformed {
    fn from(_: DecodeError) -> Self {
        Self
    }
}

fn utf8(body: &[u8]) -> Result<String, Malformed> {
    std::str::from_utf8(body).map(str::to_owned).map_err(|_| Malformed)
}

fn text(field: &Field<'_>) -> Result<String, Malformed> {
    utf8(field.body().unwrap_or_default())
}

fn text_in(message: &[u8], tag: u32) -> Result<String, Malformed> {
    utf8(last(message, tag)?.unwrap_or_default())
}

/// What a held text costs beside its letters: a `String` (24 bytes), its allocation, and its part of a tree.
pub(super) const ENTRY: usize = 64;

/// What is held of a stream's names, and of those of one request, in bytes: names, versions and first requests, with [`ENTRY`]
/// for each text. An Envoy with 20,000 clusters of 80 bytes has 18 MB: clusters and endpoints with versions, endpoints as
/// they are asked for, wanted, and told to istiod.
pub(super) const HELD: usize = 32 << 20;

/// What a text costs that is held.
pub(super) fn weight(text: impl AsRef<str>) -> usize {
    text.as_ref().len() + ENTRY
}

/// Why a message is not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// It is none.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// A name of a byte takes many times that.
    #[error("it names more than is held of one message")]
    TooMuch,
}

impl From<DecodeError> for Unread {
    fn from(_: DecodeError) -> Self {
        Malformed.into()
    }
}

/// Reads a request, of which names and versions may take `most` bytes, with [`ENTRY`] for each.
///
/// # Errors
/// When it is no such message, or has more of them.
pub(crate) fn request(mode: Mode, message: &Bytes, most: usize) -> Result<Request, Unread> {
    let mut out = Request::default();
    let mut left = most;
    let mut held = |text: String| {
        left = left.checked_sub(weight(&text)).ok_or(Unread::TooMuch)?;
        Ok::<_, Unread>(text)
    };
    for field in each(message) {
        let field = field?;
        match (mode, field.tag) {
            (Mode::Sotw, 1) => out.version = text(&field)?,
            (Mode::Sotw, 2) | (Mode::Delta, 1) => {
                out.node = field.body().map(|body| message.slice_ref(body));
            }
            (Mode::Sotw, 3) | (Mode::Delta, 3) => out.names.push(held(text(&field)?)?),
            (Mode::Sotw, 4) | (Mode::Delta, 2) => out.type_url = text(&field)?,
            (Mode::Sotw, 5) | (Mode::Delta, 6) => out.nonce = text(&field)?,
            (Mode::Sotw, 6) | (Mode::Delta, 7) => out.rejects = true,
            (Mode::Delta, 4) => out.dropped.push(held(text(&field)?)?),
            (Mode::Delta, 5) => {
                let entry = field.body().unwrap_or_default();
                out.has.push((held(text_in(entry, 1)?)?, held(text_in(entry, 2)?)?));
            }
            _ => {}
        }
    }
    Ok(out)
}

/// The type and the nonce of a request, whatever else it holds.
///
/// # Errors
/// When it is none.
pub(crate) fn answers(mode: Mode, message: &Bytes) -> Result<(String, String), Malformed> {
    let (type_url, nonce) = match mode {
        Mode::Sotw => (4, 5),
        Mode::Delta => (2, 6),
    };
    let mut out = (String::new(), String::new());
    for field in each(message) {
        let field = field?;
        if field.tag == type_url {
            out.0 = text(&field)?;
        } else if field.tag == nonce {
            out.1 = text(&field)?;
        }
    }
    Ok(out)
}

/// Reads a response, of which the names may take [`HELD`] bytes, with [`ENTRY`] for each.
///
/// # Errors
/// When it is no such message, or has more of them.
pub(crate) fn response(mode: Mode, message: &Bytes) -> Result<Response, Unread> {
    let (mut out, mut left) = (Response::default(), HELD);
    let mut held = |name: String| {
        left = left.checked_sub(weight(&name)).ok_or(Unread::TooMuch)?;
        Ok::<_, Unread>(name)
    };
    for field in each(message) {
        let field = field?;
        match (mode, field.tag) {
            (_, 1) => out.version = text(&field)?,
            (_, 2) => {
                let body = field.body().unwrap_or_default();
                let name = match mode {
                    Mode::Sotw => name_in(body)?,
                    Mode::Delta => text_in(body, 3)?,
                };
                out.resources.push((held(name)?, message.slice_ref(body)));
            }
            (_, 4) => out.type_url = text(&field)?,
            (_, 5) => out.nonce = text(&field)?,
            (Mode::Delta, 6) => out.removed.push(held(text(&field)?)?),
            _ => {}
        }
    }
    Ok(out)
}

/// The version of a delta resource.
///
/// # Errors
/// When it is none.
pub(crate) fn version(resource: &[u8]) -> Result<String, Malformed> {
    text_in(resource, 1)
}

// Every resource of Envoy's has its name in field 1; a wrapper has it in field 3.
fn name_in(any: &[u8]) -> Result<String, Malformed> {
    let wrapped = text_in(any, 1)?.ends_with("envoy.service.discovery.v3.Resource");
    text_in(last(any, 2)?.unwrap_or_default(), if wrapped { 3 } else { 1 })
}

fn put_some(out: &mut BytesMut, tag: u32, text: &str) {
    if !text.is_empty() {
        put(out, tag, text.as_bytes());
    }
}

/// Writes a response; the resources' bytes go in as they are.
#[must_use]
pub(crate) fn write_response(response: &Response) -> Bytes {
    let size = response.resources.iter().map(|(_, body)| body.len() + 8).sum::<usize>();
    let mut out = BytesMut::with_capacity(size + 256);
    put_some(&mut out, 1, &response.version);
    for (_, body) in &response.resources {
        put(&mut out, 2, body);
    }
    put_some(&mut out, 4, &response.type_url);
    put_some(&mut out, 5, &response.nonce);
    for name in &response.removed {
        put(&mut out, 6, name.as_bytes());
    }
    out.freeze()
}

/// Writes a request; of what it answers only a nonce is told.
#[must_use]
pub(crate) fn write_request(mode: Mode, request: &Request) -> Bytes {
    let mut out = BytesMut::new();
    let (node, type_url) = match mode {
        Mode::Sotw => (2, 4),
        Mode::Delta => (1, 2),
    };
    if mode == Mode::Sotw {
        put_some(&mut out, 1, &request.version);
    }
    if let Some(body) = &request.node {
        put(&mut out, node, body);
    }
    put_some(&mut out, type_url, &request.type_url);
    for name in &request.names {
        put(&mut out, 3, name.as_bytes());
    }
    if mode == Mode::Delta {
        for name in &request.dropped {
            put(&mut out, 4, name.as_bytes());
        }
        for (name, version) in &request.has {
            let mut entry = BytesMut::new();
            put_some(&mut entry, 1, name);
            put_some(&mut entry, 2, version);
            put(&mut out, 5, &entry);
        }
    }
    put_some(&mut out, if mode == Mode::Sotw { 5 } else { 6 }, &request.nonce);
    out.freeze()
}
