//! Fields of a connection (`connection`, `upgrade`) in answers of HTTP/2, where they may not stand and some applications
//! put them all the same: what a web server behind another one said of its own connection is passed on.
//!
//! Go's client passes over them; the HTTP library takes the answer for malformed. So, as in [`super::framing`], they get
//! names that nobody knows before the library sees them, in the place where they stand. Only the last letter changes, to one
//! of the same length in the Huffman code, so that everything else, the table of names above all, stays as it is for
//! both sides. A name from the static table (`transfer-encoding`) gets another one of that length.
//!
//! What cannot be read is left to the library, which has the better error.

use super::frame::{CONTINUATION, HEADER, HEADERS, PADDED, PRIORITIES, PRIORITY};

/// A name as it stands in a block, and what its last byte becomes.
const PLAIN: [(&[u8], u8); 5] = [
    (b"connection", b'm'),
    (b"keep-alive", b'c'),
    (b"proxy-connection", b'm'),
    (b"transfer-encoding", b'm'),
    (b"upgrade", b'c'),
];
/// The same in the Huffman code (RFC 7541, appendix B).
const CODED: [(&[u8], u8); 5] = [
    (b"\x21\xea\xa8\xa4\x49\x8f\x57", 0x4f),
    (b"\xea\x52\xd6\xb0\xe8\x37\x72\xff", 0x7f),
    (b"\xae\xc3\xf9\xf4\xb1\x0f\x55\x45\x22\x4c\x7a\xbf", 0x7f),
    (b"\x4d\x83\xa9\x12\x96\xc5\x8b\x51\x0f\x21\xaa\x9b", 0xa7),
    (b"\xb6\xb9\xac\x1c\x85", 0x84),
];
/// No name above is longer.
const LONGEST: usize = 17;
/// `transfer-encoding` and `if-modified-since` in the static table (RFC 7541, appendix A).
const CODING: u8 = 57;
const SINCE: u8 = 40;

/// Follows the frames of a connection as their bytes come.
#[derive(Debug, Default)]
pub(super) struct Fields {
    head: [u8; HEADER],
    got: usize,
    /// The next byte is the length of a padding.
    padded: bool,
    /// Bytes of a frame that are to come: before the part of a block, of the block, and behind it.
    before: usize,
    block: usize,
    behind: usize,
    at: At,
}

/// What the next byte of a header block is.
#[derive(Debug, Clone, Copy, Default)]
enum At {
    /// The first of a field, or of a new size of the table.
    #[default]
    Field,
    /// Of the number of a field, or of a size.
    Number,
    /// Of the number of a name; the second byte of it, behind the four bits of the first.
    Named {
        second: bool,
    },
    /// The first of a text's length; the text is a name.
    Length {
        name: bool,
    },
    /// Another one of a length of which so much is known, in so many bits beyond the first.
    Longer {
        text: Text,
        length: usize,
        bits: u32,
    },
    Name {
        coded: bool,
        left: usize,
        got: usize,
        name: [u8; LONGEST],
    },
    Value {
        left: usize,
    },
}

/// What a text of a block is.
#[derive(Debug, Clone, Copy)]
enum Text {
    /// A name, in the Huffman code or as it is.
    Name {
        coded: bool,
    },
    Value,
}

impl Fields {
    /// Bytes that come next.
    pub(super) fn pass(&mut self, bytes: &mut [u8]) {
        let mut at = 0;
        while let Some(byte) = bytes.get_mut(at) {
            at += 1;
            if self.padded {
                self.padded = false;
                self.behind = usize::from(*byte);
                self.block = self.block.saturating_sub(self.behind);
            } else if self.before > 0 {
                self.before -= 1;
            } else if self.block > 0 {
                self.block -= 1;
                self.at = self.at.step(byte);
            } else if self.behind > 0 {
                let passed = self.behind.min(bytes.len() - at + 1);
                self.behind -= passed;
                at += passed - 1;
            } else {
                self.head[self.got] = *byte;
                self.got = (self.got + 1) % HEADER;
                if self.got == 0 {
                    self.begin();
                }
            }
        }
    }

    // The header of a frame is there.
    fn begin(&mut self) {
        let [a, b, c, kind, flags, ..] = self.head;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        (self.before, self.block, self.behind) = match kind {
            HEADERS => {
                self.at = At::Field;
                self.padded = flags & PADDED != 0;
                let priority = if flags & PRIORITY == 0 { 0 } else { PRIORITIES };
                (priority, length.saturating_sub(priority + usize::from(self.padded)), 0)
            }
            CONTINUATION => (0, length, 0),
            _ => (0, 0, length),
        };
    }
}

impl At {
    fn step(self, byte: &mut u8) -> Self {
        let now = *byte;
        let ends = now & 0x80 == 0;
        match self {
            Self::Field => Self::field(byte),
            Self::Number => {
                if ends {
                    Self::Field
                } else {
                    Self::Number
                }
            }
            Self::Named { second } => {
                if second && now == CODING - 0x0f {
                    *byte = SINCE - 0x0f;
                }
                if ends { Self::Length { name: false } } else { Self::Named { second: false } }
            }
            Self::Length { name } => {
                let text = if name { Text::Name { coded: now & 0x80 != 0 } } else { Text::Value };
                match usize::from(now & 0x7f) {
                    0x7f => Self::Longer { text, length: 0x7f, bits: 0 },
                    length => Self::text(text, length),
                }
            }
            Self::Longer { text, length, bits } => {
                let length = length.saturating_add(usize::from(now & 0x7f) << bits);
                // Nothing in a block is longer.
                if ends || bits >= 21 {
                    Self::text(text, length)
                } else {
                    Self::Longer { text, length, bits: bits + 7 }
                }
            }
            Self::Name { coded, left, got, mut name } => {
                if let Some(place) = name.get_mut(got) {
                    *place = now;
                }
                let (left, got) = (left - 1, got + 1);
                if left > 0 {
                    return Self::Name { coded, left, got, name };
                }
                let known = if coded { CODED } else { PLAIN };
                if let Some((_, last)) = known.iter().find(|(known, _)| name.get(..got) == Some(*known)) {
                    *byte = *last;
                }
                Self::Length { name: false }
            }
            Self::Value { left: 1 } => Self::Field,
            Self::Value { left } => Self::Value { left: left - 1 },
        }
    }

    fn field(byte: &mut u8) -> Self {
        let now = *byte;
        // How much of a number the first byte holds, and whether it is a name's.
        let (most, name) = match now {
            0x80.. => (0x7f, false),
            0x40..0x80 => (0x3f, true),
            0x20..0x40 => (0x1f, false),
            _ => (0x0f, true),
        };
        let number = now & most;
        if number == CODING && most > 0x1f {
            *byte = now - CODING + SINCE;
        }
        match (name, number) {
            (false, _) if number == most => Self::Number,
            (false, _) => Self::Field,
            (true, 0) => Self::Length { name: true },
            (true, _) if number == most => Self::Named { second: most == 0x0f },
            (true, _) => Self::Length { name: false },
        }
    }

    fn text(text: Text, length: usize) -> Self {
        match (text, length) {
            (Text::Name { .. }, 0) => Self::Length { name: false },
            (Text::Value, 0) => Self::Field,
            (Text::Name { coded }, left) => Self::Name { coded, left, got: 0, name: [0; LONGEST] },
            (Text::Value, left) => Self::Value { left },
        }
    }
}

#[cfg(test)]
mod tests {
    use httlib_huffman::DecoderSpeed;

    use super::*;

    #[test]
    fn both_forms_of_a_name_become_one() {
        for (plain, coded) in PLAIN.into_iter().zip(CODED) {
            let renamed = |(name, last): (&[u8], u8)| [&name[..name.len() - 1], &[last]].concat();
            let mut decoded = Vec::new();
            httlib_huffman::decode(coded.0, &mut decoded, DecoderSpeed::FourBits).unwrap();
            assert_eq!(decoded, plain.0);
            decoded.clear();
            httlib_huffman::decode(&renamed(coded), &mut decoded, DecoderSpeed::FourBits).unwrap();
            assert_eq!(decoded, renamed(plain));
        }
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, 1][..], payload].concat()
    }

    #[test]
    fn only_names_are_changed_however_they_come() {
        let long = [&[0x7f, 0x23][..], &[b'v'; 162]].concat();
        for (block, changed) in [
            // A status from the table; a new name in each of the three forms; the same in the Huffman code.
            (&b"\x88\x40\x0aconnection\x05close"[..], &b"\x88\x40\x0aconnectiom\x05close"[..]),
            (b"\x00\x0aconnection\x00\x00\x07upgrade\x01x", b"\x00\x0aconnectiom\x00\x00\x07upgradc\x01x"),
            (b"\x10\x85\xb6\xb9\xac\x1c\x85\x82\x9c\x1c", b"\x10\x85\xb6\xb9\xac\x1c\x84\x82\x9c\x1c"),
            // As a value, as a part of a name, behind a new size of the table, behind a value with a long length.
            (
                b"\x00\x01a\x0aconnection\x00\x0bconnections\x00",
                b"\x00\x01a\x0aconnection\x00\x0bconnections\x00",
            ),
            // What is a name only in the other form.
            (
                b"\x00\x87upgrade\x01x\x00\x05\xb6\xb9\xac\x1c\x85\x01x",
                b"\x00\x87upgrade\x01x\x00\x05\xb6\xb9\xac\x1c\x85\x01x",
            ),
            (b"\x3f\xe1\x1f\x40\x0aconnection\x01x", b"\x3f\xe1\x1f\x40\x0aconnectiom\x01x"),
            (
                &[&b"\x00\x01a"[..], &long, b"\x40\x07upgrade\x00"].concat(),
                &[&b"\x00\x01a"[..], &long, b"\x40\x07upgradc\x00"].concat(),
            ),
            // From the static table in all forms.
            (b"\x79\x01x\x0f\x2a\x01x\x1f\x2a\x01x\xb9", b"\x68\x01x\x0f\x19\x01x\x1f\x19\x01x\xa8"),
            // Other numbers: of a long table, of a name whose third byte looks like that, of a size.
            (
                b"\xff\x2a\x0f\xaa\x2a\x01x\x7f\x2a\x01x\x3f\x2a",
                b"\xff\x2a\x0f\xaa\x2a\x01x\x7f\x2a\x01x\x3f\x2a",
            ),
        ] {
            let frames = |block: &[u8]| {
                let (first, rest) = block.split_at(block.len() / 2);
                [
                    frame(4, 0, b"\x40\x0aconnection\x01x"),
                    frame(0, 0, b"\x01\x04\x40\x0aconnection\x01x"),
                    frame(HEADERS, 4, block),
                    frame(HEADERS, 4 | PADDED, &[&[3][..], block, b"\x79pq"].concat()),
                    frame(HEADERS, 4 | PRIORITY, &[&[0x79; 5][..], block].concat()),
                    frame(
                        HEADERS,
                        PADDED | PRIORITY,
                        &[&b"\x01\x79\x79\x79\x79\x79"[..], first, b"\x79"].concat(),
                    ),
                    frame(CONTINUATION, 0, &rest[..1]),
                    frame(CONTINUATION, 4, &rest[1..]),
                    frame(HEADERS, 5, block),
                ]
                .concat()
            };
            let (whole, want) = (frames(block), frames(changed));
            for cut in [1, 2, 7, whole.len()] {
                let (mut fields, mut bytes) = (Fields::default(), whole.clone());
                bytes.chunks_mut(cut).for_each(|piece| fields.pass(piece));
                assert_eq!(bytes, want, "{cut}: {}", block.escape_ascii());
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn only_names_are_changed_in_any_bytes(
            parts in proptest::collection::vec(proptest::sample::select(PARTS), 0..20),
            rest in proptest::collection::vec(proptest::num::u8::ANY, 0..20),
            cut in 1..40_usize,
        ) {
            crate::net::fuzz::block(&[parts.concat(), rest].concat(), cut);
        }
    }

    // What header blocks are made of, and what looks like it.
    const PARTS: &[&[u8]] = &[
        b"\x87upgrade",
        b"\x05\xb6\xb9\xac\x1c\x85",
        b"\x0aconnection",
        b"\x85\xb6\xb9\xac\x1c\x85",
        b"\x07upgrade",
        b"\x01x",
        b"\x00",
        b"\x40",
        b"\x10",
        b"\x79",
        b"\xb9",
        b"\x88",
        b"\xbe",
        b"\x0f\x2a",
        b"\x1f\x2a",
        b"\x3f\xe1\x1f",
        b"\x7f\x00",
        b"\x7f\x80\x80\x00",
        b"\x0f\xaa\x00",
        b"\x20",
    ];
}
