//! Puts a file in its place, whole or not at all. The only part that makes files beside others.
//!
//! Who may write to the folder must not make a privileged agent write elsewhere. So a file on its way has a name
//! that nobody can know before ([`beside`]: drawn at random, opened with `O_EXCL` and `O_NOFOLLOW`), and gets to its
//! place by a rename, which replaces a link and never follows it. It is gone again when it does not get there.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use tempfile::NamedTempFile;

/// A file that was on its way for longer is on its way no more.
const LEFT: Duration = Duration::from_secs(60);

/// Who may use the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Exactly these bits: a file that other users in the pod read, or that none of them may.
    Exact(u32),
    /// These bits less the umask.
    Masked(u32),
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write {path}")]
pub(crate) struct Error {
    /// The file or the folder it was for.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// An empty file in `folder` on its way to a place there ([`NamedTempFile::persist`]); `name` is what its own name
/// begins with. Its bits are there before its first byte.
///
/// # Errors
/// The system's.
pub(crate) fn beside(folder: &Path, name: &str, mode: Mode) -> io::Result<NamedTempFile> {
    let (Mode::Exact(bits) | Mode::Masked(bits)) = mode;
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    // Never more than the owner's before the bits are exact.
    let first = if matches!(mode, Mode::Exact(_)) { bits & 0o600 } else { bits };
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let file = tempfile::Builder::new().prefix(&way_to(name)).rand_bytes(0).make_in(folder, |path| {
        OpenOptions::new().write(true).create_new(true).mode(first).custom_flags(flags).open(path)
    })?;
    if let Mode::Exact(bits) = mode {
        // The mode of creation passes through the umask; this does not.
        file.as_file().set_permissions(Permissions::from_mode(bits))?;
    }
    Ok(file)
}

/// The name of a file on its way to `name`: 16 hexadecimal digits that nobody can know stand behind it.
fn way_to(name: impl AsRef<OsStr>) -> OsString {
    let mut way = name.as_ref().to_owned();
    way.push(format!(".{:016x}.new", rand::random::<u64>()));
    way
}

/// Whether a file of ours on its way to `name` is called so, and no user's own.
fn is_way_to(file: &OsStr, name: &str) -> bool {
    let drawn = file.to_str().and_then(|f| f.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(".new"));
    drawn.is_some_and(|drawn| {
        drawn.len() == 16 && drawn.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// Writes `text` at `path`. Missing folders are made with mode 0700, as the Go agent makes them.
///
/// # Errors
/// With the path that could not be made or written; what was at `path` before is still there.
pub(crate) fn put(path: &Path, text: &[u8], mode: Mode) -> Result<(), Error> {
    put_by(path, mode, |file| file.write_all(text))
}

/// As [`put`], of what `write` writes, which need not be in memory as a whole.
///
/// # Errors
/// As [`put`].
pub(crate) fn put_by(
    path: &Path,
    mode: Mode,
    write: impl FnOnce(&mut NamedTempFile) -> io::Result<()>,
) -> Result<(), Error> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| Error { path, source }
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    if !folder.as_os_str().is_empty() && !folder.is_dir() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(fail(folder))?;
    }
    replace_by(path, mode, write).map_err(fail(path))
}

/// As [`put`], in a folder that must be there.
///
/// # Errors
/// The system's; what was at `path` before is still there.
pub(crate) fn replace(path: &Path, text: &[u8], mode: Mode) -> io::Result<()> {
    replace_by(path, mode, |file| file.write_all(text))
}

fn replace_by(
    path: &Path,
    mode: Mode,
    write: impl FnOnce(&mut NamedTempFile) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = beside(path.parent().unwrap_or(Path::new("")), &name(path), mode)?;
    write(&mut file)?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// Waits until what was written is on the disk, as far as the file system can say: many have a rename there before the
/// content, and an empty file after a power cut.
///
/// # Errors
/// The disk's.
pub(crate) fn settle(file: &File) -> io::Result<()> {
    use io::ErrorKind as E;
    match file.sync_data() {
        Err(error) if matches!(error.kind(), E::InvalidInput | E::Unsupported) => Ok(()),
        synced => synced,
    }
}

/// As [`replace`], in a folder that is held open, whatever its path leads to by now; the file has exactly these `bits`, and
/// what `last` does to it before it gets to its place.
///
/// # Errors
/// The system's; what was there before is still there, and nothing beside it.
pub(crate) fn replace_in(
    folder: &File,
    name: &OsStr,
    text: &[u8],
    bits: u32,
    last: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let way = way_to(name);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(folder, &way, flags, (bits & 0o600).into())?);
    let put = |file: &mut File| {
        file.write_all(text)?;
        // The mode of creation passes through the umask; this does not.
        file.set_permissions(Permissions::from_mode(bits))?;
        last(file)?;
        rustix::fs::renameat(folder, &way, folder, name).map_err(io::Error::from)
    };
    put(&mut file).inspect_err(|_| {
        let _ = rustix::fs::unlinkat(folder, &way, rustix::fs::AtFlags::empty());
    })
}

/// Writes `text` into the file that is at `path`, for a folder that takes no other (a file mounted by itself). A
/// link is refused, and so is what is no regular file.
///
/// # Errors
/// The system's; the file may hold a part of the text then.
pub(crate) fn over(path: &Path, text: &[u8]) -> io::Result<()> {
    // Not to wait for the reader of a pipe before it is seen to be one.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut file = OpenOptions::new().write(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    file.set_len(0)?;
    file.write_all(text)
}

/// Removes what processes that were killed have left on its way to these `names` in `folder`. Nobody needs as long as
/// [`LEFT`] to bring a file to its place.
pub(crate) fn sweep(folder: &Path, names: &[&str]) {
    sweep_older(folder, names, LEFT);
}

/// As [`sweep`], for files that may be on their way for so long.
pub(crate) fn sweep_older(folder: &Path, names: &[&str], than: Duration) {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if !names.iter().any(|of| is_way_to(&name, of)) {
            continue;
        }
        let about = entry.metadata().ok().filter(std::fs::Metadata::is_file);
        let age = about.and_then(|about| about.modified().ok()?.elapsed().ok());
        if age.is_some_and(|age| age > than) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// What a file's name on its way begins with.
#[must_use]
pub(crate) fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn writes_whole_files_with_their_modes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/down/file.json");
        std::fs::create_dir(dir.path().join("deep")).unwrap();
        put(&path, b"one", Mode::Exact(0o644)).unwrap();
        put(&path, b"two", Mode::Exact(0o640)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(mode(&path), 0o640);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        std::fs::create_dir_all(path.join("full")).unwrap();
        let error = put(&path, b"x", Mode::Masked(0o666)).unwrap_err();
        assert_eq!(error.path, path);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_process_has_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, age: u64| {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_modified(std::time::SystemTime::now() - Duration::from_secs(age)).unwrap();
        };
        let (left, fresh) = ("config.0123456789abcdef.new", "config.0123456789abcdee.new");
        // A user's own names, and another's.
        let kept = ["config", "config.new", "config.a-b.new", "config.word.new", "config.backup.new"];
        let kept = kept.into_iter().chain(["config.A1B2C3D4E5F60718.new", "other.0123456789abcdef.new"]);
        let kept: Vec<&str> = kept.collect();
        kept.iter().for_each(|name| put(name, 3600));
        put(fresh, 0);
        put(left, 3600);
        let folder = dir.path().join("config.00000000deadbeef.new");
        std::fs::create_dir(&folder).unwrap();
        sweep(dir.path(), &["config"]);
        assert!(!dir.path().join(left).exists());
        assert!(dir.path().join(fresh).exists() && folder.exists());
        let gone: Vec<_> = kept.iter().filter(|name| !dir.path().join(name).exists()).collect();
        assert!(gone.is_empty(), "{gone:?}");
        // The way of a real one.
        let way = beside(dir.path(), "config", Mode::Exact(0o600)).unwrap().keep().unwrap();
        way.0.set_modified(std::time::UNIX_EPOCH).unwrap();
        sweep(dir.path(), &["config"]);
        assert!(!way.1.exists());
    }

    #[test]
    fn links_are_replaced_and_what_they_lead_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, path) = (dir.path().join("victim"), dir.path().join("file"));
        std::fs::write(&victim, "kept").unwrap();
        symlink(&victim, &path).unwrap();
        let refused = over(&path, b"x").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
        put(&path, b"new", Mode::Masked(0o666)).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
        assert!(!std::fs::symlink_metadata(&path).unwrap().is_symlink());
        over(&path, b"over").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"over");
    }

    #[test]
    fn what_cannot_be_waited_for_is_written_all_the_same() {
        let file = beside(tempfile::tempdir().unwrap().path(), "x", Mode::Exact(0o600)).unwrap();
        settle(file.as_file()).unwrap();
        // A pipe has no disk, and says so.
        let (_reads, pipe) = std::io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(pipe));
        assert!(pipe.sync_data().is_err());
        settle(&pipe).unwrap();
    }

    #[test]
    fn a_pipe_in_the_place_of_a_mounted_file_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        crate::base::reading::pipe::make(&path);
        assert!(over(&path, b"x").is_err());
    }
}
