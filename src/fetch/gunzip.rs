//! Decompression in bounded pieces: a small body that unpacks to gigabytes passes through in sixteen
//! kilobytes at a time.

use bytes::{Buf, Bytes};
use flate2::{Decompress, FlushDecompress, Status};

use super::{Error, PIECE};

pub(crate) struct Gunzip {
    inner: Decompress,
    input: Bytes,
    /// Between two members, or before the first.
    between: bool,
    any: bool,
    /// What came before the damage has been handed on.
    broken: bool,
}

impl Gunzip {
    pub(crate) fn new() -> Self {
        // 15: the largest window of the format.
        Self {
            inner: Decompress::new_gzip(15),
            input: Bytes::new(),
            between: true,
            any: false,
            broken: false,
        }
    }

    /// Takes more input; what came before has been used up.
    pub(crate) fn feed(&mut self, input: Bytes) {
        self.input = input;
    }

    /// The next piece of output; `None`: more input is needed.
    pub(crate) fn piece(&mut self) -> Result<Option<Bytes>, Error> {
        let broken = || Error::Gzip("its data is broken");
        if self.broken {
            return Err(broken());
        }
        let mut out = Vec::new();
        while !self.input.is_empty() || (!self.between && out.is_empty()) {
            if self.between {
                self.inner = Decompress::new_gzip(15);
                self.between = false;
                self.any = true;
            }
            out.reserve_exact(PIECE);
            let (before_in, before_out) = (self.inner.total_in(), out.len());
            let status = match self.inner.decompress_vec(&self.input, &mut out, FlushDecompress::None) {
                Ok(status) => status,
                Err(_) if out.is_empty() => return Err(broken()),
                Err(_) => {
                    self.broken = true;
                    return Ok(Some(out.into()));
                }
            };
            let used = usize::try_from(self.inner.total_in() - before_in).unwrap_or(usize::MAX);
            self.input.advance(used.min(self.input.len()));
            if status == Status::StreamEnd {
                self.between = true;
            }
            if !out.is_empty() {
                return Ok(Some(out.into()));
            }
            if used == 0 && out.len() == before_out && status != Status::StreamEnd {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Whether there was any input.
    pub(crate) fn begun(&self) -> bool {
        self.any
    }

    /// The input has ended: may it end here?
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        if self.between && self.any { Ok(()) } else { Err(Error::Gzip("it ends too early")) }
    }
}
