//! SHA-256 as people write it: 64 small hexadecimal digits.

use aws_lc_rs::digest::{Digest, SHA256, digest};

/// The sum of `bytes`.
pub(crate) fn of(bytes: &[u8]) -> String {
    written(&digest(&SHA256, bytes))
}

/// A sum that was made in pieces.
pub(crate) fn written(sum: &Digest) -> String {
    sum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
