//! The certificate revocation list: every root names it while its file exists.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::base::lane::Lane;
use crate::base::seldom::Seldom;

pub(super) static LOOKS: Lane = Lane::new("looking for the revocation list", 1);
/// It is looked for with each root that a client asks for.
static LEFT_OUT: Seldom = Seldom::new(10);
/// A file system that takes longer changes nothing: what was last seen counts.
const GRACE: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 50 });

/// ... but nothing was seen before the first look has ended: a root without its list is good for as long as nothing
/// changes. A third of what Envoy waits for its first secrets.
const FIRST: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// Between two tries of the first look.
const RETRY: Duration = Duration::from_secs(1);

// How many looks have found one, in a test.
#[cfg(test)]
thread_local! {
    pub(super) static FOUND: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The file, and whether it was there when it was last looked for.
#[derive(Debug, Default)]
pub(crate) struct Revoked {
    path: Option<PathBuf>,
    /// `None`: no look has ended yet.
    there: Mutex<Option<bool>>,
    first: Duration,
}

impl Revoked {
    /// `None`: no list is ever named.
    #[must_use]
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        Self { path, there: Mutex::default(), first: FIRST }
    }

    /// Waits for its first look no longer than this.
    #[cfg(test)]
    pub(super) fn hasty(self, first: Duration) -> Self {
        Self { first, ..self }
    }

    /// Looks whether the file is there.
    pub(super) async fn look(&self) {
        let Some(path) = self.path.clone() else { return };
        let grace = if self.is_known() { GRACE } else { self.first };
        let look = LOOKS.within(grace, move || std::fs::metadata(path).map(drop));
        self.seen(look.await);
    }

    /// Whether any look has ended.
    pub(super) fn is_known(&self) -> bool {
        self.path.is_none() || self.there().is_some()
    }

    /// Looks until a look has ended.
    pub(super) async fn known(&self) {
        while !self.is_known() {
            self.look().await;
            if !self.is_known() {
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    fn there(&self) -> Option<bool> {
        *self.there.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, there: bool) {
        *self.there.lock().unwrap_or_else(PoisonError::into_inner) = Some(there);
    }

    fn seen(&self, found: io::Result<io::Result<()>>) {
        match found {
            // Nobody has looked: there was no thread, or no end.
            Err(_) => {}
            Ok(Err(error)) if error.kind() == ErrorKind::TimedOut => {}
            Ok(Ok(())) => {
                #[cfg(test)]
                FOUND.set(FOUND.get() + 1);
                self.set(true);
            }
            Ok(Err(error)) if error.kind() == ErrorKind::NotFound => self.set(false),
            Ok(Err(error)) => {
                if let Some(more) = LEFT_OUT.may() {
                    let path = self.path.as_deref().unwrap_or(Path::new("")).display();
                    tracing::warn!(target: "sds", "the revocation list {path} is left out: {error}{more}");
                }
                self.set(false);
            }
        }
    }

    /// The file, if it was there.
    pub(super) fn file(&self) -> Option<&Path> {
        self.path.as_deref().filter(|_| self.there() == Some(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_look_has_found_counts() {
        let revoked = Revoked::new(Some("crl.pem".into()));
        let outcome = |found| {
            revoked.seen(found);
            revoked.file().is_some()
        };
        let error = |kind: ErrorKind| io::Error::from(kind);
        for late in [Err(error(ErrorKind::TimedOut)), Ok(Err(error(ErrorKind::TimedOut)))] {
            assert!(!outcome(late) && !revoked.is_known(), "nothing was seen yet");
        }
        assert!(outcome(Ok(Ok(()))));
        // A disk that hangs, no thread, a panic.
        for kind in [ErrorKind::TimedOut, ErrorKind::WouldBlock, ErrorKind::Other, ErrorKind::NotFound] {
            assert!(outcome(Err(error(kind))), "{kind}");
        }
        for kind in [ErrorKind::NotFound, ErrorKind::PermissionDenied] {
            assert!(outcome(Ok(Ok(()))));
            assert!(!outcome(Ok(Err(error(kind)))), "{kind}");
            assert!(revoked.is_known());
        }
    }
}
