//! Unix sockets that are there from bind until drop.
//!
//! The rules are the Go agent's (its SDS and XDS sockets alike): unlink what is in the way, make the
//! parent folder 0750, bind, then 0666 so that Envoy under another uid may connect. The file is removed
//! again at the end, but only if it is still the one we made.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

use super::handover;

/// Why a socket could not be bound; each names the path.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something at the path could not be removed.
    #[error("failed to remove unix://{path}: something is in the way of the socket and cannot be unlinked")]
    Remove {
        /// The socket's path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Binding failed.
    #[error("failed to listen on unix socket {path}")]
    Bind {
        /// The socket's path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The mode could not be set.
    #[error("failed to update {path} permission")]
    Mode {
        /// The socket's path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A bound socket whose file is removed when this is dropped.
#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    file: SocketFile,
}

/// The socket's file, removed on drop if it is still ours.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Bound {
    /// Splits into the listener and the guard of its file.
    #[must_use]
    pub fn into_parts(self) -> (UnixListener, SocketFile) {
        (self.listener, self.file)
    }
}

impl SocketFile {
    /// Whether the file at the path is still the socket that was bound here. When it is not (removed or
    /// replaced by somebody), new clients cannot reach us and the owner should bind again.
    #[must_use]
    pub fn still_ours(&self) -> bool {
        identity(&self.path).is_ok_and(|now| now == self.identity)
    }

    /// Where the socket is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A successor listens on it.
        if !handover::passing() && self.still_ours() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Under what a socket is handed to a successor.
#[must_use]
pub(crate) fn key(path: &Path) -> String {
    format!("unix {}", path.display())
}

// The socket that a predecessor has left open.
fn inherited(path: &Path) -> Option<Bound> {
    let (detail, fd) = handover::take(&key(path))?;
    let (device, inode) = detail.split_once(' ')?;
    let identity = (device.parse().ok()?, inode.parse().ok()?);
    let listener = std::os::unix::net::UnixListener::from(fd);
    listener.set_nonblocking(true).ok()?;
    let listener = UnixListener::from_std(listener).ok()?;
    Some(Bound::new(listener, path, identity))
}

impl Bound {
    fn new(listener: UnixListener, path: &Path, identity: (u64, u64)) -> Self {
        handover::offer(key(path), format!("{} {}", identity.0, identity.1), &listener);
        Self { listener, file: SocketFile { path: path.to_owned(), identity } }
    }
}

/// Binds a stream socket at `path`, replacing a stale file, with mode 0666.
///
/// # Errors
/// When the path cannot be cleared, bound or given its mode.
pub(crate) fn bind(path: &Path) -> Result<Bound, Error> {
    bind_with(path, 0o666)
}

/// As [`bind`], with another mode.
///
/// # Errors
/// As [`bind`].
pub(crate) fn bind_with(path: &Path, mode: u32) -> Result<Bound, Error> {
    if let Some(bound) = inherited(path) {
        return Ok(bound);
    }
    let at = |source| (path.to_owned(), source);
    clear(path).map_err(at).map_err(|(path, source)| Error::Remove { path, source })?;
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty() && !p.exists())
        && let Err(error) = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(parent)
    {
        tracing::warn!("cannot create the folder {} of a socket: {error}", parent.display());
    }
    let listener =
        UnixListener::bind(path).map_err(at).map_err(|(path, source)| Error::Bind { path, source })?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(at)
        .map_err(|(path, source)| Error::Mode { path, source })?;
    let identity = identity(path).map_err(at).map_err(|(path, source)| Error::Bind { path, source })?;
    Ok(Bound::new(listener, path, identity))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

// A regular file or an empty folder in the way is removed as well, as the Go agent does.
fn clear(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => Ok(()),
        Err(e) => Err(e),
        Ok(meta) if meta.is_dir() => std::fs::remove_dir(path),
        Ok(_) => std::fs::remove_file(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn replaces_what_is_in_the_way_and_cleans_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/socket");
        let bound = bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let again = bind(&path).unwrap();
        drop(bound);
        assert!(path.exists(), "the first owner must not remove the second one's file");
        drop(again);
        assert!(!path.exists());
        std::fs::create_dir(&path).unwrap();
        drop(bind(&path).unwrap());
        std::fs::create_dir_all(path.join("full")).unwrap();
        assert!(matches!(bind(&path), Err(Error::Remove { .. })));
    }
}
