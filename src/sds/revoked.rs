//! The certificate revocation list: every root names it while its file exists.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::base::lane::Lane;

static LOOKS: Lane = Lane::new("looking for the revocation list", 1);
/// A file system that takes longer changes nothing: what was last seen counts.
const GRACE: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 50 });

/// The file, and whether it was there when it was last looked for.
#[derive(Debug, Default)]
pub(crate) struct Revoked {
    path: Option<PathBuf>,
    there: AtomicBool,
}

impl Revoked {
    /// `None`: no list is ever named.
    #[must_use]
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        Self { path, there: AtomicBool::new(false) }
    }

    /// Looks whether the file is there.
    pub(super) async fn look(&self) {
        let Some(path) = self.path.clone() else { return };
        let look = LOOKS.within(GRACE, move || std::fs::metadata(path).map(drop));
        self.seen(look.await);
    }

    fn seen(&self, found: io::Result<io::Result<()>>) {
        match found {
            // Nobody has looked: there was no thread, or no end.
            Err(_) => {}
            Ok(Err(error)) if error.kind() == ErrorKind::TimedOut => {}
            Ok(Ok(())) => self.there.store(true, Relaxed),
            Ok(Err(error)) if error.kind() == ErrorKind::NotFound => self.there.store(false, Relaxed),
            Ok(Err(error)) => {
                let path = self.path.as_deref().unwrap_or(Path::new("")).display();
                tracing::warn!(target: "sds", "the revocation list {path} is left out: {error}");
                self.there.store(false, Relaxed);
            }
        }
    }

    /// The file, if it was there.
    pub(super) fn file(&self) -> Option<&Path> {
        self.path.as_deref().filter(|_| self.there.load(Relaxed))
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
        assert!(!outcome(Err(error(ErrorKind::TimedOut))), "nothing was seen yet");
        assert!(outcome(Ok(Ok(()))));
        // A disk that hangs, no thread, a panic.
        for kind in [ErrorKind::TimedOut, ErrorKind::WouldBlock, ErrorKind::Other, ErrorKind::NotFound] {
            assert!(outcome(Err(error(kind))), "{kind}");
        }
        for kind in [ErrorKind::NotFound, ErrorKind::PermissionDenied] {
            assert!(outcome(Ok(Ok(()))));
            assert!(!outcome(Ok(Err(error(kind)))), "{kind}");
        }
    }
}
