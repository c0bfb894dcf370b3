//! One entry of a tar archive that arrives in pieces. Pure, and bounded: names are kept, contents passed
//! through.
//!
//! Why not the `tar` crate: it reads, and so would take a thread that may block, or the whole archive in
//! memory; ours is pushed. It knows what module archives hold: POSIX and GNU headers, long names of either
//! kind, pax sizes. Sparse files are not known.

/// Everything comes in blocks of this size.
const BLOCK: usize = 512;
/// Long names and pax records are kept up to this; a path has 4,096 bytes at most.
const LONGEST: u64 = 64 << 10;
/// Where "ustar" stands.
pub(super) const MAGIC_AT: usize = 257;
/// What stands there.
pub(super) const MAGIC: &[u8] = b"ustar";

/// Which entry is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// The first, whatever it is.
    First,
    /// The first whose base name is this.
    Named(&'static str),
}

/// An archive that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A header's checksum or numbers are wrong.
    #[error("the archive is damaged")]
    Damaged,
    /// A name or pax record is too long.
    #[error("a name in the archive is too long")]
    Long,
    /// The end came within an entry or a header.
    #[error("the archive ends too early")]
    Short,
}

enum Reading {
    Header,
    /// The wanted entry's content.
    Wanted,
    /// A name or record for the next header.
    Meta(u8, Vec<u8>),
    /// Content of others.
    Other,
    /// The wanted entry is whole, or the archive's end was met.
    Done,
}

/// The reader. Feed it with [`Tar::push`].
pub struct Tar {
    pick: Pick,
    state: Reading,
    header: Vec<u8>,
    // Of the content in hand, and of its padding.
    left: u64,
    padding: u64,
    zeros: bool,
    long_name: Option<Vec<u8>>,
    long_size: Option<u64>,
    found: bool,
}

impl Tar {
    /// At the archive's start.
    #[must_use]
    pub fn new(pick: Pick) -> Self {
        Self {
            pick,
            state: Reading::Header,
            header: Vec::with_capacity(BLOCK),
            left: 0,
            padding: 0,
            zeros: false,
            long_name: None,
            long_size: None,
            found: false,
        }
    }

    /// Takes a piece of the archive; content of the wanted entry goes to `out`.
    ///
    /// # Errors
    /// When the archive cannot be read.
    pub fn push<E: From<Error>>(
        &mut self,
        mut input: &[u8],
        out: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while !input.is_empty() && !matches!(self.state, Reading::Done) {
            if matches!(self.state, Reading::Header) {
                let n = input.len().min(BLOCK - self.header.len());
                self.header.extend_from_slice(&input[..n]);
                input = &input[n..];
                if self.header.len() == BLOCK {
                    self.begin()?;
                    self.header.clear();
                    self.end_of_content()?;
                }
                continue;
            }
            let n = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len());
            let (content, rest) = input.split_at(n);
            match &mut self.state {
                Reading::Wanted => out(content)?,
                Reading::Meta(_, kept) => kept.extend_from_slice(content),
                _ => {}
            }
            self.left -= n as u64;
            input = rest;
            let n = usize::try_from(self.padding).unwrap_or(usize::MAX).min(input.len());
            if self.left == 0 {
                input = &input[n..];
                self.padding -= n as u64;
            }
            self.end_of_content()?;
        }
        Ok(())
    }

    /// The archive has ended: whether the wanted entry was there.
    ///
    /// # Errors
    /// When it ended in the middle of something.
    pub fn end(&self) -> Result<bool, Error> {
        let between = matches!(self.state, Reading::Header) && self.header.is_empty();
        let whole = matches!(self.state, Reading::Done) || between || (self.found && self.left == 0);
        if whole { Ok(self.found) } else { Err(Error::Short) }
    }

    /// Whether the entry of that name is there, whole: nothing behind it is looked at.
    #[must_use]
    pub fn has_named(&self) -> bool {
        matches!(self.pick, Pick::Named(_)) && self.found && matches!(self.state, Reading::Done)
    }

    fn end_of_content(&mut self) -> Result<(), Error> {
        // The wanted entry counts as whole before its padding.
        if self.left == 0 && matches!(self.state, Reading::Wanted) {
            self.state = Reading::Done;
        }
        if self.left > 0 || self.padding > 0 || matches!(self.state, Reading::Header | Reading::Done) {
            return Ok(());
        }
        if let Reading::Meta(kind, kept) = std::mem::replace(&mut self.state, Reading::Header) {
            match kind {
                b'L' => self.long_name = Some(kept.split(|b| *b == 0).next().unwrap_or_default().to_vec()),
                b'x' => self.pax(&kept)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), Error> {
        let header = &self.header;
        if header.iter().all(|b| *b == 0) {
            // Two empty blocks end the archive; one alone does not.
            if std::mem::replace(&mut self.zeros, true) {
                self.state = Reading::Done;
            }
            return Ok(());
        }
        if self.zeros || !checksum_fits(header) {
            return Err(Error::Damaged);
        }
        let kind = header[156];
        let mut size = number(&header[124..136]).ok_or(Error::Damaged)?;
        if matches!(kind, b'L' | b'x') {
            if size > LONGEST {
                return Err(Error::Long);
            }
            self.state = Reading::Meta(kind, Vec::new());
        } else if matches!(kind, b'K' | b'g') {
            // The target of a link, and records for all entries: of no use here.
            self.state = Reading::Other;
        } else {
            let short = name(header);
            let name = self.long_name.take().unwrap_or(short);
            size = self.long_size.take().unwrap_or(size);
            // Links, devices and folders have no content, whatever their size says.
            if matches!(kind, b'1'..=b'6') {
                size = 0;
            }
            let wanted = match self.pick {
                Pick::First => true,
                Pick::Named(wanted) => base(&name) == wanted.as_bytes(),
            };
            self.found |= wanted;
            self.state = if wanted { Reading::Wanted } else { Reading::Other };
        }
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64).checked_sub(size).ok_or(Error::Damaged)?;
        Ok(())
    }

    // Records are "<length> <key>=<value>\n".
    fn pax(&mut self, mut records: &[u8]) -> Result<(), Error> {
        while !records.is_empty() {
            let space = records.iter().position(|b| *b == b' ').ok_or(Error::Damaged)?;
            let length = std::str::from_utf8(&records[..space]).ok().and_then(|t| t.parse::<usize>().ok());
            let length = length.filter(|n| *n > space + 1 && *n <= records.len()).ok_or(Error::Damaged)?;
            let (record, rest) = records.split_at(length);
            let record = record[space + 1..].strip_suffix(b"\n").ok_or(Error::Damaged)?;
            let equals = record.iter().position(|b| *b == b'=').ok_or(Error::Damaged)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.long_name = Some(value.to_vec()),
                b"size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|t| t.parse::<u64>().ok());
                    self.long_size = Some(size.filter(|n| *n < 1 << 62).ok_or(Error::Damaged)?);
                }
                _ => {}
            }
            records = rest;
        }
        Ok(())
    }
}

/// The last part of a path, trailing slashes aside.
fn base(name: &[u8]) -> &[u8] {
    let end = name.iter().rposition(|b| *b != b'/').map_or(0, |at| at + 1);
    let name = &name[..end];
    &name[name.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1)..]
}

fn name(header: &[u8]) -> Vec<u8> {
    let text = |range: std::ops::Range<usize>| header[range].split(|b| *b == 0).next().unwrap_or_default();
    let posix = header[MAGIC_AT..].starts_with(b"ustar\0");
    let prefix = if posix { text(345..500) } else { b"" };
    if prefix.is_empty() { text(0..100).to_vec() } else { [prefix, b"/", text(0..100)].concat() }
}

// Octal digits between blanks and zeros, or GNU's binary form for large ones.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let mut value = u64::from(field[0] & 0x7f);
        for byte in &field[1..] {
            value = value.checked_mul(256)?.checked_add(u64::from(*byte))?;
        }
        return (value < 1 << 62).then_some(value);
    }
    let text = field.split(|b| *b == 0).next()?;
    let text = std::str::from_utf8(text).ok()?.trim_matches(' ');
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

// The sum of all bytes with the checksum's own field as blanks; old writers took bytes as signed.
fn checksum_fits(header: &[u8]) -> bool {
    let blanked = |at: usize| if (148..156).contains(&at) { b' ' } else { header[at] };
    let unsigned: u64 = (0..BLOCK).map(|at| u64::from(blanked(at))).sum();
    let signed: i64 = (0..BLOCK).map(|at| i64::from(blanked(at).cast_signed())).sum();
    number(&header[148..156]).is_some_and(|sum| sum == unsigned || i64::try_from(sum) == Ok(signed))
}

#[cfg(test)]
pub(super) mod tests;
