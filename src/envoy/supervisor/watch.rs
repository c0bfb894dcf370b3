//! When watched files are worth a look: at most once in ten seconds.
//!
//! The batching is the historic agents' (0.8–1.6): the first change starts a fixed time, what follows in
//! it is absorbed, then the contents are looked at once. A mounted secret changes file by file, and a
//! restart in the middle would pair a new certificate with an old key.

use std::time::Duration;

use tokio::time::Instant;

use crate::base::files::Watcher;
use crate::envoy::restart;

/// From the first change to the look.
const BATCH: Duration = Duration::from_secs(10);

/// Changes within this are one report of the watcher; the batch comes on top.
const QUIET: Duration = Duration::from_millis(100);

/// The look that needs no report, for file systems that make none.
const SLOW: Duration = Duration::from_secs(300);

pub(super) struct FileWatch {
    watcher: Watcher,
    due: Option<Instant>,
    slow: Instant,
}

impl FileWatch {
    /// `None` when nothing is to be watched, or a change would change nothing.
    pub(super) fn of(config: &restart::Config) -> Option<Self> {
        if !config.hot_restart || config.watched.is_empty() {
            return None;
        }
        let mut watcher = Watcher::new(QUIET);
        watcher.set(config.watched.iter().cloned().collect());
        Some(Self { watcher, due: None, slow: Instant::now() + SLOW })
    }

    async fn due(&mut self) {
        loop {
            let at = self.due.unwrap_or(self.slow);
            tokio::select! {
                () = tokio::time::sleep_until(at) => {
                    self.due = None;
                    self.slow = Instant::now() + SLOW;
                    self.watcher.refresh();
                    return;
                }
                () = self.watcher.changed(), if self.due.is_none() => {
                    self.due = Some(Instant::now() + BATCH);
                }
            }
        }
    }
}

/// Waits until the files should be looked at; for ever when none are watched. Nothing is lost when the
/// future is dropped.
pub(super) async fn due(files: &mut Option<FileWatch>) {
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
        assert!(FileWatch::of(&config).is_none());
        assert!(FileWatch::of(&restart::Config { hot_restart: true, ..config.clone() }).is_some());
        assert!(
            FileWatch::of(&restart::Config { hot_restart: true, watched: Vec::new(), ..config }).is_none()
        );
    }
}
