//! Numbers of HTTP/2's frames (RFC 9113, 4.1, 6.2 and 6.10), for who looks at them before the library does.

/// Bytes before a frame's payload.
pub(super) const HEADER: usize = 9;
/// Kind: the first of a header block.
pub(super) const HEADERS: u8 = 1;
/// Kind: more of it.
pub(super) const CONTINUATION: u8 = 9;
/// Flag: the block ends here.
pub(super) const END_HEADERS: u8 = 4;
/// Flag: a length of padding comes first.
pub(super) const PADDED: u8 = 8;
/// Flag: priority fields are there.
pub(super) const PRIORITY: u8 = 0x20;
/// Bytes of those.
pub(super) const PRIORITIES: usize = 5;
