//! A streaming scan of the top-level fields of discovery messages. Pure: bytes in, facts out.
//!
//! The relay passes messages on without decoding them; this scanner walks the wire format as the bytes
//! go by, in pieces of any size, and keeps the few facts the agent needs: type URL, version, nonce, the
//! type of the first resource (which arrives long before the type URL of a large response, since
//! encoders write fields in the order of their numbers), counts, and the error detail of a request.
//! Unknown fields, any field order, groups and repeated scalars (the last one counts) are handled as a
//! protobuf decoder would. Memory is bounded: texts are kept up to [`TEXT`] bytes each.

mod fields;

pub use fields::{Facts, Message};
use fields::{Field, Kind, Slot, field};

/// Longest text kept of one field, in bytes; longer ones are cut (at a character).
pub const TEXT: usize = 4096;
/// How many names of a request are kept.
pub(crate) const NAMES: usize = 8;
/// Deepest nesting of groups; protobuf decoders stop at 100.
const GROUPS: usize = 100;

/// Bytes that are not a protobuf message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A varint longer than ten bytes.
    #[error("a varint is longer than ten bytes")]
    Varint,
    /// A tag with field number 0 or beyond 32 bits, or an unknown wire type.
    #[error("a field tag is not valid")]
    Tag,
    /// A field reaches beyond the end of the message it is in.
    #[error("a field reaches beyond the end of its message")]
    Length,
    /// A group that does not end, ends another, or is nested too deeply.
    #[error("a group does not end where it must")]
    Group,
    /// A text that is not UTF-8.
    #[error("a text is not UTF-8")]
    Utf8,
}

#[derive(Debug, Clone)]
enum Expected {
    // Reading a tag, or between fields.
    Tag,
    // Reading the length of a field.
    Length(Field),
    // Reading a scalar varint.
    Value(Field),
    // Passing over that many bytes.
    Skip(u64),
    // Keeping a text of which so many bytes are to come.
    Text(Slot, u64),
}

/// The scanner of one message.
#[derive(Debug, Clone)]
pub struct Scanner {
    facts: Facts,
    state: Expected,
    // Absolute position, and the ends of the messages we are inside of.
    at: u64,
    levels: Vec<(Kind, u64)>,
    groups: Vec<u32>,
    varint: u64,
    shift: u32,
    text: Vec<u8>,
}

impl Scanner {
    /// Of a message of `length` bytes.
    #[must_use]
    pub fn new(message: Message, length: u64) -> Self {
        Self {
            facts: Facts::default(),
            state: Expected::Tag,
            at: 0,
            levels: vec![(Kind::Top(message), length)],
            groups: Vec::new(),
            varint: 0,
            shift: 0,
            text: Vec::new(),
        }
    }

    /// What was found so far.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// When they cannot be part of a protobuf message. The scanner must not be used afterwards.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            self.leave_finished()?;
            match self.state {
                Expected::Tag => {
                    if let Some(tag) = self.take_varint(&mut bytes)? {
                        self.tag(tag)?;
                    }
                }
                Expected::Length(field) => {
                    if let Some(length) = self.take_varint(&mut bytes)? {
                        self.begin(field, length)?;
                    }
                }
                Expected::Value(field) => {
                    if let Some(value) = self.take_varint(&mut bytes)? {
                        if field == Field::Code {
                            // int32 on the wire is the low half of a sign-extended 64-bit varint.
                            self.facts.error_code = value as u32 as i32;
                        }
                        self.state = Expected::Tag;
                    }
                }
                Expected::Skip(left) => {
                    let n = self.advance(&mut bytes, left).len() as u64;
                    self.state = if n == left { Expected::Tag } else { Expected::Skip(left - n) };
                }
                Expected::Text(slot, left) => {
                    let piece = self.advance(&mut bytes, left);
                    let room = TEXT.saturating_sub(self.text.len());
                    self.text.extend_from_slice(&piece[..piece.len().min(room)]);
                    let n = piece.len() as u64;
                    if n == left {
                        self.finish_text(slot, false)?;
                    } else {
                        self.state = Expected::Text(slot, left - n);
                    }
                }
            }
        }
        Ok(())
    }

    /// At the end of the message, before [`Scanner::finish`] where the message is to be kept back if it is none.
    ///
    /// # Errors
    /// When it ends inside a field.
    pub(crate) fn check(&mut self) -> Result<(), Malformed> {
        self.leave_finished()?;
        let clean = matches!(self.state, Expected::Tag) && self.shift == 0;
        if !clean || !self.levels.is_empty() {
            return Err(Malformed::Length);
        }
        Ok(())
    }

    /// At the end of the message.
    ///
    /// # Errors
    /// When it ends inside a field.
    pub fn finish(mut self) -> Result<Facts, Malformed> {
        self.check()?;
        Ok(self.facts)
    }

    fn end(&self) -> u64 {
        self.levels.last().map_or(0, |l| l.1)
    }

    // A level ends between fields only, so ends are looked at before each step.
    fn leave_finished(&mut self) -> Result<(), Malformed> {
        while let Some((_, end)) = self.levels.last() {
            if self.at < *end {
                return Ok(());
            }
            if !matches!(self.state, Expected::Tag) || self.shift != 0 {
                // Inside a field of zero remaining bytes, or a cut one.
                return Err(Malformed::Length);
            }
            if !self.groups.is_empty() {
                return Err(Malformed::Group);
            }
            self.levels.pop();
        }
        Ok(())
    }

    fn advance<'a>(&mut self, bytes: &mut &'a [u8], most: u64) -> &'a [u8] {
        let n = usize::try_from(most).unwrap_or(usize::MAX).min(bytes.len());
        let (taken, rest) = bytes.split_at(n);
        *bytes = rest;
        self.at += n as u64;
        taken
    }

    fn take_varint(&mut self, bytes: &mut &[u8]) -> Result<Option<u64>, Malformed> {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.at >= self.end() {
                return Err(Malformed::Length);
            }
            *bytes = rest;
            self.at += 1;
            if self.shift >= 63 && byte > 1 {
                return Err(Malformed::Varint);
            }
            self.varint |= u64::from(byte & 0x7f) << self.shift;
            if byte & 0x80 == 0 {
                let value = self.varint;
                (self.varint, self.shift) = (0, 0);
                return Ok(Some(value));
            }
            self.shift += 7;
        }
        Ok(None)
    }

    fn tag(&mut self, tag: u64) -> Result<(), Malformed> {
        let tag = u32::try_from(tag).map_err(|_| Malformed::Tag)?;
        let (number, wire) = (tag >> 3, tag & 7);
        let kind = match self.levels.last() {
            Some((kind, _)) if self.groups.is_empty() => Some(*kind),
            _ => None,
        };
        if number == 0 {
            return Err(Malformed::Tag);
        }
        let known = kind.map_or(Field::Other, |k| field(k, number, self.facts.hint.is_some()));
        match wire {
            0 => self.state = Expected::Value(if known == Field::Code { known } else { Field::Other }),
            1 => self.skip(8)?,
            2 => self.state = Expected::Length(known),
            3 => {
                if self.groups.len() >= GROUPS {
                    return Err(Malformed::Group);
                }
                self.groups.push(number);
            }
            4 => {
                if self.groups.pop() != Some(number) {
                    return Err(Malformed::Group);
                }
            }
            5 => self.skip(4)?,
            _ => return Err(Malformed::Tag),
        }
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<(), Malformed> {
        let fits = self.at.checked_add(length).is_some_and(|to| to <= self.end());
        if !fits {
            return Err(Malformed::Length);
        }
        self.state = if length == 0 { Expected::Tag } else { Expected::Skip(length) };
        Ok(())
    }

    fn begin(&mut self, field: Field, length: u64) -> Result<(), Malformed> {
        let to = self.at.checked_add(length).filter(|to| *to <= self.end()).ok_or(Malformed::Length)?;
        match field {
            Field::Text(slot) => {
                self.text.clear();
                if length == 0 {
                    return self.finish_text(slot, true);
                }
                self.state = Expected::Text(slot, length);
                return Ok(());
            }
            Field::Resource(into) => {
                self.facts.count += 1;
                if let Some(kind) = into {
                    self.enter(kind, to);
                    return Ok(());
                }
            }
            Field::Enter(kind) => {
                if kind == Kind::Status {
                    self.facts.rejected = true;
                }
                self.enter(kind, to);
                return Ok(());
            }
            Field::Removed => self.facts.removed += 1,
            Field::Known => self.facts.known += 1,
            Field::Code | Field::Other => {}
        }
        self.skip(length)
    }

    fn enter(&mut self, kind: Kind, to: u64) {
        self.levels.push((kind, to));
        self.state = Expected::Tag;
    }

    fn finish_text(&mut self, slot: Slot, empty: bool) -> Result<(), Malformed> {
        self.state = Expected::Tag;
        let text = match std::str::from_utf8(&self.text) {
            Ok(text) => text,
            // Cut inside a character by our own bound.
            Err(e) if self.text.len() == TEXT && e.error_len().is_none() => {
                std::str::from_utf8(&self.text[..e.valid_up_to()]).unwrap_or_default()
            }
            Err(_) => return Err(Malformed::Utf8),
        };
        match slot {
            Slot::Type => self.facts.type_url = Some(text.to_owned()),
            Slot::Hint if !empty => self.facts.hint = Some(text.to_owned()),
            Slot::Hint => {}
            Slot::Version => text.clone_into(&mut self.facts.version),
            Slot::Nonce => text.clone_into(&mut self.facts.nonce),
            Slot::Error => text.clone_into(&mut self.facts.error_message),
            Slot::Name => {
                self.facts.count += 1;
                if self.facts.names.len() < NAMES {
                    self.facts.names.push(text.chars().take(256).collect());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
