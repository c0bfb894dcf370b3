//! When a connection was last read from: what a keepalive needs to know below HTTP/2.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::AsyncRead;
use tokio::time::Instant;
use tokio_util::io::InspectReader;

/// When, and how often, something was read from a connection.
#[derive(Debug, Clone)]
pub(crate) struct Reads(Arc<ReadsInner>);

#[derive(Debug)]
struct ReadsInner {
    start: Instant,
    last: AtomicU64,
    count: AtomicU64,
}

impl Reads {
    fn new() -> Self {
        Self(Arc::new(ReadsInner {
            start: Instant::now(),
            last: AtomicU64::new(0),
            count: AtomicU64::new(0),
        }))
    }

    fn note(&self) {
        let now = u64::try_from(self.0.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.store(now, Ordering::Relaxed);
        self.0.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Time since the last read, or since the beginning.
    pub(crate) fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.0.last.load(Ordering::Relaxed));
        self.0.start.elapsed().saturating_sub(last)
    }
}

/// A connection that is watched.
pub(crate) type Tracked<T> = InspectReader<T, Box<dyn FnMut(&[u8]) + Send>>;

/// Watches `inner`.
pub(crate) fn tracked<T: AsyncRead>(inner: T) -> (Tracked<T>, Reads) {
    let reads = Reads::new();
    let noted = reads.clone();
    let note = move |new: &[u8]| {
        if !new.is_empty() {
            noted.note();
        }
    };
    (InspectReader::new(inner, Box::new(note)), reads)
}
