//! Envoy's answers to the stand-in, which must not reach istiod: it knows nothing of those nonces, and would pass over
//! a change of names that comes with one.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};

use super::Mode;
use super::read::{self, Malformed};
use crate::base::wire::fields;

/// What becomes of Envoy's requests after a hand-over.
#[derive(Debug)]
pub struct Strip {
    mode: Mode,
    mark: String,
    /// The names that istiod knows of, by type.
    names: BTreeMap<String, BTreeSet<String>>,
}

impl Strip {
    pub(super) fn new(mode: Mode, mark: String, names: BTreeMap<String, BTreeSet<String>>) -> Self {
        Self { mode, mark, names }
    }

    /// The message for istiod: as it is, without what it says to the stand-in, or none.
    ///
    /// # Errors
    /// When it is no request.
    pub fn pass(&mut self, message: Bytes) -> Result<Option<Bytes>, Malformed> {
        let request = read::request(self.mode, &message)?;
        if !request.nonce.starts_with(&self.mark) {
            // From now on istiod has the word for this type.
            self.names.remove(&request.type_url);
            return Ok(Some(message));
        }
        let says_nothing = match self.mode {
            Mode::Delta => request.names.is_empty() && request.dropped.is_empty(),
            Mode::Sotw => {
                let now: BTreeSet<String> = request.names.iter().cloned().collect();
                self.names.insert(request.type_url, now.clone()).is_some_and(|known| known == now)
            }
        };
        if says_nothing {
            return Ok(None);
        }
        let taken: &[u32] = match self.mode {
            Mode::Sotw => &[1, 5, 6],
            Mode::Delta => &[6, 7],
        };
        let mut out = BytesMut::with_capacity(message.len());
        for field in fields(&message)?.iter().filter(|field| !taken.contains(&field.tag)) {
            out.extend_from_slice(&field.raw);
        }
        Ok(Some(out.freeze()))
    }
}
