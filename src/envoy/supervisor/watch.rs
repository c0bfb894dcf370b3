//! When watched files are worth a look: at most once in ten seconds.
//!
//! The batching is the historic agents' (0.8–1.6): the first change starts a fixed time, what follows in
//! it is absorbed, then the contents are looked at once. A mounted secret changes file by file, and a
//! restart in the middle would pair a new certificate with an old key.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::disk::Watching;
use crate::base::files::Watches;
use crate::envoy::restart;

/// From the first change to the look.
pub(super) const BATCH: Duration = Duration::from_secs(10);

/// Changes within this are one report of the watcher; the batch comes on top.
const QUIET: Duration = Duration::from_millis(100);

/// The look that needs no report, for file systems that make none.
const SLOW: Duration = Duration::from_secs(300);
/// And where nothing is reported.
const BLIND: Duration = Duration::from_secs(30);

pub(super) struct FileWatch {
    /// Something has changed, and is not looked at yet.
    is_batching: bool,
    // Owns what it waits for, so that nothing is lost when who waits for it does something else.
    turn: Pin<Box<dyn Future<Output = Turn> + Send>>,
}

struct Turn {
    watcher: Watching,
    slow: Instant,
    /// When the batch that has begun is over.
    batch: Option<Instant>,
}

impl FileWatch {
    /// `None` when nothing is to be watched, or a change would change nothing.
    pub(super) fn of(config: &restart::Config, watches: &Watches) -> Option<Self> {
        let watched: BTreeSet<_> = config.watched.iter().chain(&config.inputs).cloned().collect();
        if !config.hot_restart || watched.is_empty() {
            return None;
        }
        let mut watcher = Watching::new(watches, QUIET);
        let turn = async move {
            watcher.set(watched).await;
            let slow = Instant::now() + if watcher.blind() { BLIND } else { SLOW };
            Turn { watcher, slow, batch: None }.next().await
        };
        Some(Self { is_batching: false, turn: Box::pin(turn) })
    }

    async fn due(&mut self) -> bool {
        let turn = (&mut self.turn).await;
        self.is_batching = turn.batch.is_some();
        self.turn = Box::pin(turn.next());
        !self.is_batching
    }

    /// Whether a change waits for the end of its batch.
    pub(super) fn is_batching(&self) -> bool {
        self.is_batching
    }
}

impl Turn {
    async fn next(mut self) -> Self {
        match self.batch.take() {
            Some(end) => tokio::time::sleep_until(end).await,
            None => tokio::select! {
                () = tokio::time::sleep_until(self.slow) => {}
                () = self.watcher.news() => {
                    self.batch = Some(Instant::now() + BATCH);
                    self.watcher.refresh().await;
                    return self;
                }
            },
        }
        self.watcher.refresh().await;
        self.slow = Instant::now() + if self.watcher.blind() { BLIND } else { SLOW };
        self
    }
}

/// Waits until the files should be looked at, or (`false`) a batch of changes has begun; for ever when none are watched.
/// Nothing is lost when the future is dropped.
pub(super) async fn due(files: &mut Option<FileWatch>) -> bool {
    match files {
        Some(files) => files.due().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_hot_restart_watches() {
        let watched = vec!["/etc/certs/key.pem".into()];
        let config = restart::Config { watched, ..restart::Config::default() };
        let of = |config: &restart::Config| FileWatch::of(config, &Watches::default());
        assert!(of(&config).is_none());
        assert!(of(&restart::Config { hot_restart: true, ..config.clone() }).is_some());
        let config = restart::Config { hot_restart: true, watched: Vec::new(), ..config };
        assert!(of(&config).is_none());
        assert!(of(&restart::Config { inputs: vec!["/etc/template.json".into()], ..config }).is_some());
    }
}
