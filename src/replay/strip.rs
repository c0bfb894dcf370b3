//! Envoy's answers to the stand-in, which must not reach istiod: it knows nothing of those nonces, and would pass over
//! a change of names that comes with one.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};

use super::Mode;
use super::read::{self, HELD, Unread, weight};
use crate::base::wire::each;

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
    /// When it is no request, or an answer to the stand-in that names more than that holds.
    pub fn pass(&mut self, message: Bytes) -> Result<Option<Bytes>, Unread> {
        let (type_url, nonce) = read::answers(self.mode, &message)?;
        if !nonce.starts_with(&self.mark) {
            // From now on istiod has the word for this type.
            self.names.remove(&type_url);
            return Ok(Some(message));
        }
        let request = read::request(self.mode, &message, HELD)?;
        let says_nothing = match self.mode {
            Mode::Delta => request.names.is_empty() && request.dropped.is_empty(),
            Mode::Sotw => {
                let now: BTreeSet<String> = request.names.into_iter().collect();
                if self.names.get(&request.type_url) == Some(&now) {
                    return Ok(None);
                }
                self.names.insert(request.type_url, now);
                // One answer is bounded; any number of them, each for another type, is not.
                if self.weight() > HELD {
                    return Err(Unread::TooMuch);
                }
                false
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
        for field in each(&message) {
            let field = field?;
            if !taken.contains(&field.tag) {
                out.extend_from_slice(field.raw);
            }
        }
        Ok(Some(out.freeze()))
    }
    fn weight(&self) -> usize {
        self.names.iter().flat_map(|(of, names)| names.iter().chain([of])).map(weight).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::read::{Request, write_request};

    #[test]
    fn answers_for_types_without_end_are_bounded() {
        let mut strip = Strip::new(Mode::Sotw, "m-".to_owned(), BTreeMap::new());
        let names: Vec<String> = (0..10_000).map(|n| n.to_string()).collect();
        let mut pass = |of: usize, nonce: &str| {
            let (type_url, nonce) = (of.to_string(), nonce.to_owned());
            let request = Request { type_url, nonce, names: names.clone(), ..Request::default() };
            strip.pass(write_request(Mode::Sotw, &request))
        };
        let taken = (0..100).take_while(|of| pass(*of, "m-1").is_ok()).count();
        assert!((40..60).contains(&taken), "{taken}");
        // What istiod has the word for is held no more, however much of it there is.
        assert!((0..100).all(|of| pass(of, "istiod's").is_ok()));
        assert!(pass(0, "m-1").is_ok());
    }
}
