//! The agent's own requests on a stream, waiting for their turn between two of Envoy's.
//!
//! The response side puts them in and must never wait for the request side (else istiod, blocked in
//! sending, and we, blocked in answering, would wait for each other): putting in always succeeds at once.
//! The queue has a bound all the same: beyond it a newer answer replaces an older one of the same type,
//! which is what the older one's receiver would do with it anyway.

use std::collections::VecDeque;
use std::sync::Mutex;

use bytes::Bytes;
use tokio::sync::Notify;

/// Requests waiting before older answers give way. istiod sends the next response of a type when the
/// last is answered, so a queue of more than a handful means that it does not read.
const BOUND: usize = 256;

/// A request of the agent's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Own {
    /// Its type URL.
    pub type_url: &'static str,
    /// The framed message.
    pub frame: Bytes,
    /// Health reports wait for nothing and are dropped before Envoy has asked for listeners.
    pub health: bool,
}

/// The queue of one stream.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<VecDeque<Own>>,
    more: Notify,
}

impl Queue {
    /// Appends a request; never waits.
    pub(super) fn put(&self, own: Own) {
        let mut waiting = self.waiting.lock().expect("no panic holds this lock");
        if waiting.len() >= BOUND {
            let older = waiting.iter().position(|w| w.type_url == own.type_url).unwrap_or(0);
            waiting.remove(older);
        }
        waiting.push_back(own);
        drop(waiting);
        self.more.notify_one();
    }

    /// The next request, if there is one.
    pub(super) fn take(&self) -> Option<Own> {
        self.waiting.lock().expect("no panic holds this lock").pop_front()
    }

    /// Returns when something may have been put in.
    pub(super) async fn more(&self) {
        self.more.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_replaces_the_oldest_of_the_same_type() {
        let queue = Queue::default();
        let own = |type_url, n: usize| Own { type_url, frame: Bytes::from(n.to_string()), health: false };
        queue.put(own("a", 0));
        for n in 0..BOUND {
            queue.put(own("b", n));
        }
        assert_eq!(queue.take().unwrap().frame, "0");
        assert_eq!(queue.take().unwrap().frame, "1", "the oldest of b gave way, a did not");
        assert_eq!(std::iter::from_fn(|| queue.take()).count(), BOUND - 2);
    }
}
