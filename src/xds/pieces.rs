//! Bytes that are kept for a while, at the price of the bytes themselves.
//!
//! HTTP/2's windows count bytes, not frames: whoever sends a byte a frame makes each byte cost what a piece costs,
//! and pins the buffer it was read into. So small pieces are copied together, and large ones are kept as they came.

use std::future::poll_fn;
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;

/// A smaller piece is copied: a piece of its own costs a few hundred bytes on its way.
const SMALL: usize = 1024;
/// So much of small pieces is put together at most before it goes on.
const TOGETHER: usize = 16 * 1024;

/// Bytes in order.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    whole: Vec<Bytes>,
    // After all of `whole`.
    tail: BytesMut,
    gathered: bool,
}

impl Pieces {
    /// Appends a piece.
    pub(super) fn push(&mut self, piece: Bytes) {
        if self.gathered || piece.len() < SMALL {
            self.tail.extend_from_slice(&piece);
            return;
        }
        if !self.tail.is_empty() {
            self.whole.push(self.tail.split().freeze());
        }
        self.whole.push(piece);
    }

    /// From now on everything is one piece, which grows with what comes.
    pub(super) fn gather(&mut self) {
        if !self.gathered {
            self.gathered = true;
            let rest = std::mem::take(&mut self.tail);
            for piece in self.whole.drain(..).chain([rest.freeze()]) {
                self.tail.extend_from_slice(&piece);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.tail.is_empty()
    }

    /// Takes everything out.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Bytes> + use<> {
        let Self { whole, tail, .. } = std::mem::take(self);
        whole.into_iter().chain((!tail.is_empty()).then(|| tail.freeze()))
    }

    /// Everything, which stays.
    pub(super) fn all(&self) -> Vec<Bytes> {
        let tail = (!self.tail.is_empty()).then(|| Bytes::copy_from_slice(&self.tail));
        self.whole.iter().cloned().chain(tail).collect()
    }

    /// Everything as one piece.
    pub(super) fn into_one(mut self) -> Bytes {
        self.gather();
        self.tail.freeze()
    }
}

/// A small piece together with what has arrived behind it: many tiny frames become one, and nothing is waited for.
pub(super) async fn with_more(body: &mut RecvStream, first: Bytes) -> Bytes {
    if first.len() >= SMALL {
        return first;
    }
    let mut all = BytesMut::new();
    poll_fn(|cx| {
        while all.len() + first.len() < TOGETHER {
            // An end or an error is found again by whoever reads next.
            let Poll::Ready(Some(Ok(data))) = body.poll_data(cx) else { break };
            if all.is_empty() {
                all.extend_from_slice(&first);
            }
            all.extend_from_slice(&data);
        }
        Poll::Ready(())
    })
    .await;
    if all.is_empty() { first } else { all.freeze() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_stays_and_only_small_pieces_are_copied() {
        let sizes = [3, 5000, 1, 1, 1023, 1024, 2, 70_000];
        let input: Vec<Bytes> = sizes.iter().zip(1..).map(|(size, n)| Bytes::from(vec![n; *size])).collect();
        for gathered_at in 0..=sizes.len() {
            let mut pieces = Pieces::default();
            for (n, piece) in input.iter().enumerate() {
                if n == gathered_at {
                    pieces.gather();
                }
                pieces.push(piece.clone());
            }
            assert_eq!(pieces.all().concat(), input.concat());
            if gathered_at == sizes.len() {
                assert_eq!(
                    pieces.whole.len(),
                    6,
                    "three of them as they came, between three that were copied"
                );
                assert_eq!(pieces.whole[1].as_ptr(), input[1].as_ptr());
                assert_eq!(pieces.take().collect::<Vec<_>>().concat(), input.concat());
                assert!(pieces.is_empty());
            } else {
                assert_eq!(pieces.into_one(), input.concat());
            }
        }
    }

    #[test]
    fn a_byte_a_piece_costs_bytes() {
        let mut pieces = Pieces::default();
        for _ in 0..100_000 {
            pieces.push(Bytes::from_static(b"a"));
        }
        assert!(pieces.whole.is_empty() && pieces.tail.capacity() <= 200_000, "{}", pieces.tail.capacity());
    }
}
