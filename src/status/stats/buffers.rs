//! A few buffers that go round while a scrape is sent: filled here, handed to the server, and back when the
//! kernel has what was in them.
//!
//! Without them each chunk would be memory fresh from the kernel, which costs more than copying into it,
//! and a reader slower than the application would pile up chunks in the server.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

/// One being filled, one being sent, one between.
const COUNT: usize = 3;

/// Buffers of one size.
pub(super) struct Buffers {
    shelf: Arc<Shelf>,
    size: usize,
}

struct Shelf {
    free: Mutex<Vec<Vec<u8>>>,
    returned: Notify,
}

impl Shelf {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffers {
    /// Buffers for `size` bytes each; memory is taken when they are first used.
    pub(super) fn new(size: usize) -> Self {
        let free = Mutex::new(vec![Vec::new(); COUNT]);
        Self { shelf: Arc::new(Shelf { free, returned: Notify::new() }), size }
    }

    /// An empty one; waits until one comes back. The server closes a connection whose reader stands still,
    /// which ends this wait as well.
    pub(super) async fn take(&self) -> Vec<u8> {
        loop {
            // Nobody else takes from this shelf, so a notice cannot be lost between look and wait.
            let free = self.shelf.free().pop();
            if let Some(mut buffer) = free {
                buffer.reserve(self.size);
                return buffer;
            }
            self.shelf.returned.notified().await;
        }
    }

    /// What a buffer holds now, as bytes that bring it back when they are dropped; one that was not taken
    /// here joins the round.
    pub(super) fn lend(&self, buffer: Vec<u8>) -> Bytes {
        Bytes::from_owner(Lent { buffer, shelf: self.shelf.clone() })
    }
}

struct Lent {
    buffer: Vec<u8>,
    shelf: Arc<Shelf>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        self.shelf.free().push(buffer);
        self.shelf.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fourth_waits_for_one_to_come_back() {
        let buffers = Buffers::new(8);
        let mut lent = Vec::new();
        for n in 0..3 {
            let mut buffer = buffers.take().await;
            buffer.push(n);
            lent.push(buffers.lend(buffer));
        }
        assert_eq!(lent.concat(), [0, 1, 2]);
        let mut fourth = Box::pin(buffers.take());
        assert!(futures_util::poll!(&mut fourth).is_pending());
        let last = lent.pop().unwrap();
        let copy = last.clone();
        drop(last);
        assert!(futures_util::poll!(&mut fourth).is_pending(), "somebody still reads it");
        drop(copy);
        assert!(fourth.await.is_empty());
    }
}
