//! Unix sockets that are there from bind until drop.
//!
//! The rules are the Go agent's (its SDS and XDS sockets alike): unlink what is in the way, make the
//! parent folder 0750, bind, then 0666 so that Envoy under another uid may connect. The file is removed
//! again at the end, but only if it is still the one we made.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use tokio::net::UnixListener;

use super::disk::Looks;
use super::{handover, lane};

/// The mode of a socket that Envoy may use as another user.
pub(crate) const SHARED: u32 = 0o666;
/// And of one that is only for the agent's user.
pub(crate) const PRIVATE: u32 = 0o600;

/// How long the removal of a socket's file is waited for; a disk that works needs a millisecond.
const REMOVED: Duration = Duration::from_secs(1);

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

/// What became of a socket's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// It is there.
    Ours,
    /// Nothing is there any more.
    Gone,
    /// Something else is there.
    Other,
}

/// Where a socket's file is, and which one it is.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    path: PathBuf,
    identity: (u64, u64),
}

impl Place {
    /// Asks the disk, which may take as long as it likes.
    #[must_use]
    pub(crate) fn look(&self) -> Found {
        match identity(&self.path) {
            Ok(now) if now == self.identity => Found::Ours,
            Ok(_) => Found::Other,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Found::Gone
            }
            // Nothing can be told, and nothing could be done.
            Err(_) => Found::Ours,
        }
    }
}

impl SocketFile {
    /// For looking whether it is still there. When it is not (removed or replaced by somebody), new clients cannot
    /// reach us and the owner should bind again.
    #[must_use]
    pub(crate) fn place(&self) -> Place {
        Place { path: self.path.clone(), identity: self.identity }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A successor listens on it.
        if handover::passing() {
            return;
        }
        let (path, ours) = (std::mem::take(&mut self.path), self.identity);
        // At the end of the agent: a folder that does not answer must not keep it.
        lane::briefly("removing a socket", REMOVED, move || {
            if identity(&path).is_ok_and(|now| now == ours) {
                let _ = std::fs::remove_file(&path);
            }
        });
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
    Some(Bound::of(listener, SocketFile { path: path.to_owned(), identity }))
}

impl Bound {
    fn of(listener: UnixListener, file: SocketFile) -> Self {
        let (device, inode) = file.identity;
        handover::offer(key(&file.path), format!("{device} {inode}"), &listener);
        Self { listener, file }
    }
}

/// Binds a stream socket at `path`, replacing a stale file, with mode 0666.
///
/// # Errors
/// When the path cannot be cleared, bound or given its mode.
pub(crate) fn bind(path: &Path) -> Result<Bound, Error> {
    bind_with(path, SHARED)
}

/// As [`bind`], with another mode.
///
/// # Errors
/// As [`bind`].
pub(crate) fn bind_with(path: &Path, mode: u32) -> Result<Bound, Error> {
    let Some(bound) = inherited(path) else { return Unpolled::bind(path, mode)?.polled() };
    // The program before this one may have had another mind. Nobody waits for it: the folder may not answer.
    let (path, ours) = (path.to_owned(), bound.file.identity);
    let shown = path.display().to_string();
    let begun = lane::begin("a socket's mode", move || {
        if identity(&path).is_ok_and(|now| now == ours)
            && let Err(error) = give_mode(&path, Some(ours), mode)
        {
            tracing::warn!("unix://{} keeps its mode: {error}", path.display());
        }
    });
    if let Err(error) = begun {
        tracing::warn!("unix://{shown} keeps its mode: {error}");
    }
    Ok(bound)
}

/// As [`bind_with`], on a thread of `binds`: a folder that does not answer holds up who asks for its socket. `None`: it
/// does not answer yet.
pub(crate) async fn bind_beside(
    path: &Path,
    mode: u32,
    binds: &mut Looks<Result<Unpolled, Error>>,
) -> Option<Result<Bound, Error>> {
    let path = path.to_owned();
    let bound = binds.run(move || Unpolled::bind(&path, mode)).await?;
    Some(bound.and_then(Unpolled::polled))
}

/// A socket that no runtime knows yet.
#[derive(Debug)]
pub(crate) struct Unpolled {
    listener: std::os::unix::net::UnixListener,
    file: SocketFile,
}

impl Unpolled {
    fn polled(self) -> Result<Bound, Error> {
        let Self { listener, file } = self;
        let at = |source| Error::Bind { path: file.path.clone(), source };
        listener.set_nonblocking(true).map_err(at)?;
        let listener = UnixListener::from_std(listener).map_err(at)?;
        Ok(Bound::of(listener, file))
    }

    fn bind(path: &Path, mode: u32) -> Result<Self, Error> {
        let at = |source| (path.to_owned(), source);
        clear(path).map_err(at).map_err(|(path, source)| Error::Remove { path, source })?;
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty() && !p.exists())
            && let Err(error) = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(parent)
        {
            // Not that there is no such folder, which is what listening would say.
            return Err(Error::Bind { path: path.to_owned(), source: error });
        }
        let listener = std::os::unix::net::UnixListener::bind(path)
            .map_err(at)
            .map_err(|(path, source)| Error::Bind { path, source })?;
        let identity =
            give_mode(path, None, mode).map_err(at).map_err(|(path, source)| Error::Mode { path, source })?;
        Ok(Self { listener, file: SocketFile { path: path.to_owned(), identity } })
    }
}

/// Gives a socket its mode, if it is the one that is wanted; which one it is. Whoever owns the folder may put another file
/// in its place at any moment, or a link to one, and the agent may be root: what is open is looked at, and given the mode.
fn give_mode(path: &Path, wanted: Option<(u64, u64)>, mode: u32) -> io::Result<(u64, u64)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
    let meta = file.metadata()?;
    let found = (meta.dev(), meta.ino());
    if !meta.file_type().is_socket() || wanted.is_some_and(|wanted| wanted != found) {
        return Err(io::Error::other("something else has taken the socket's place"));
    }
    let permissions = std::fs::Permissions::from_mode(mode);
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    match std::fs::set_permissions(open, permissions.clone()) {
        // Without /proc there is no other way before Linux 6.6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::set_permissions(path, permissions)?,
        other => other?,
    }
    Ok(found)
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

    #[test]
    fn what_has_taken_a_sockets_place_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let [socket, other, link, file] =
            ["socket", "other", "link", "file"].map(|name| dir.path().join(name));
        let _open = [&socket, &other].map(|path| std::os::unix::net::UnixListener::bind(path).unwrap());
        std::fs::write(&file, "x").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for path in [&socket, &other, &file] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        let ours = give_mode(&socket, None, 0o640).unwrap();
        assert_eq!((mode(&socket), ours), (0o640, identity(&socket).unwrap()));
        give_mode(&socket, Some(ours), SHARED).unwrap();
        assert_eq!(mode(&socket), SHARED);
        give_mode(&other, Some(ours), SHARED).unwrap_err();
        give_mode(&file, None, SHARED).unwrap_err();
        for target in [&file, &other] {
            std::os::unix::fs::symlink(target, &link).unwrap();
            give_mode(&link, None, SHARED).unwrap_err();
            std::fs::remove_file(&link).unwrap();
        }
        assert_eq!([mode(&file), mode(&other)], [0o600, 0o600]);
    }

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
