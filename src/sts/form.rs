//! A form (`application/x-www-form-urlencoded`) read as it arrives, by the rules of Go's `url.ParseQuery`.
//!
//! Only wanted parameters are held; the rest is looked at for broken escapes and forgotten. Why not the
//! `form_urlencoded` crate: it accepts every text, and a form that Go refuses must be refused.

use zeroize::Zeroizing;

/// The most that wanted parameters may hold together. A token has a few kB; one of 1 MB passes, with all that stands
/// beside it.
const HELD: usize = 2 << 20;
/// Longer names are none of ours.
const NAME: usize = 32;

/// Why a form is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A percent sign without two hexadecimal digits.
    Escape,
    /// A semicolon, which once separated pairs and is refused since.
    Semicolon,
    /// Wanted parameters hold more than [`HELD`].
    Large,
}

impl Fault {
    pub(super) fn why(self) -> &'static str {
        match self {
            Self::Escape => "it has a broken percent escape",
            Self::Semicolon => "it has a semicolon between its pairs",
            Self::Large => "its parameters are larger than 2 MiB",
        }
    }
}

/// Reads one form.
pub(super) struct Form<const N: usize> {
    wanted: [&'static str; N],
    values: [Option<Zeroizing<Vec<u8>>>; N],
    fault: Option<Fault>,
    held: usize,
    name: Vec<u8>,
    value: Zeroizing<Vec<u8>>,
    /// Behind the `=`: which wanted parameter, if it is one that has not been seen.
    place: Option<Option<usize>>,
    /// Digits that an escape still lacks, and its first one.
    escape: u8,
    high: u8,
    empty: bool,
}

impl<const N: usize> Form<N> {
    pub(super) fn new(wanted: [&'static str; N]) -> Self {
        Self {
            wanted,
            values: [const { None }; N],
            fault: None,
            held: 0,
            name: Vec::new(),
            value: Zeroizing::default(),
            place: None,
            escape: 0,
            high: 0,
            empty: true,
        }
    }

    /// Bytes of wanted parameters so far.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// The next piece.
    pub(super) fn feed(&mut self, piece: &[u8]) {
        for &byte in piece {
            if self.escape > 0 {
                self.digit(byte);
                continue;
            }
            match byte {
                b'&' => self.end_pair(),
                b';' => self.fail(Fault::Semicolon),
                b'=' if self.place.is_none() => self.place = Some(self.find()),
                b'%' => self.escape = 2,
                b'+' => self.put(b' '),
                byte => self.put(byte),
            }
            self.empty &= byte == b'&';
        }
    }

    fn digit(&mut self, byte: u8) {
        let Some(digit) = char::from(byte).to_digit(16).and_then(|d| u8::try_from(d).ok()) else {
            self.escape = 0;
            self.fail(Fault::Escape);
            if byte == b'&' {
                self.end_pair();
            }
            return;
        };
        self.escape -= 1;
        if self.escape == 1 {
            self.high = digit;
        } else {
            self.put(self.high << 4 | digit);
        }
    }

    fn put(&mut self, byte: u8) {
        match self.place {
            None if self.name.len() <= NAME => self.name.push(byte),
            Some(Some(_)) if self.held < HELD => {
                self.held += 1;
                self.value.push(byte);
            }
            Some(Some(_)) => self.fail(Fault::Large),
            _ => {}
        }
    }

    fn fail(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    fn find(&self) -> Option<usize> {
        let at = self.wanted.iter().position(|name| name.as_bytes() == self.name)?;
        self.values[at].is_none().then_some(at)
    }

    fn end_pair(&mut self) {
        if !self.empty {
            let place = self.place.unwrap_or_else(|| self.find());
            let value = std::mem::take(&mut self.value);
            if let Some(at) = place {
                self.values[at] = Some(value);
            }
        }
        self.name.clear();
        self.place = None;
        self.empty = true;
    }

    /// The wanted parameters in their order; one that is absent is empty.
    ///
    /// # Errors
    /// The first fault of the form.
    pub(super) fn end(mut self) -> Result<[Zeroizing<String>; N], Fault> {
        if self.escape > 0 {
            self.fail(Fault::Escape);
        }
        self.end_pair();
        match self.fault {
            Some(fault) => Err(fault),
            None => Ok(self.values.map(|value| {
                let value = value.unwrap_or_default();
                Zeroizing::new(String::from_utf8_lossy(&value).into_owned())
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str, step: usize) -> Result<[String; 2], Fault> {
        let mut form = Form::new(["a", "b"]);
        text.as_bytes().chunks(step).for_each(|piece| form.feed(piece));
        form.end().map(|values| values.map(|v| v.to_string()))
    }

    #[test]
    fn pairs_are_read_as_go_does() {
        for (text, a, b) in [
            ("", "", ""),
            ("a=1&b=2", "1", "2"),
            ("&&a=1&&", "1", ""),
            ("a&b=", "", ""),
            ("a=&a=2", "", ""),
            ("a&a=2", "", ""),
            ("%61=x%2By+z&b=%C3%BC", "x+y z", "ü"),
            ("a=b=c%3d", "b=c=", ""),
            ("=7&c=%00&a=1", "1", ""),
            ("a=%ff", "\u{fffd}", ""),
        ] {
            for step in [1, 2, 100] {
                assert_eq!(read(text, step).unwrap(), [a, b], "{text}");
            }
        }
        for (text, fault) in [
            ("a=%", Fault::Escape),
            ("a=%2", Fault::Escape),
            ("c=%zz&a=1", Fault::Escape),
            ("%&a=1", Fault::Escape),
            ("a=1;b=2", Fault::Semicolon),
            ("c;", Fault::Semicolon),
        ] {
            assert_eq!(read(text, 1), Err(fault), "{text}");
        }
    }

    #[test]
    fn only_what_is_wanted_is_held() {
        assert!(read(&format!("c={}&a=1", "x".repeat(3 << 20)), 4096).is_ok());
        assert_eq!(read(&format!("a={}", "x".repeat(HELD + 1)), 4096), Err(Fault::Large));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "[ab=&%;+2fz]{0,40}", step in 1usize..9) {
            prop_assert_eq!(read(&text, step), read(&text, 1000));
        }
    }
}
