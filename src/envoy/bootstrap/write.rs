//! Puts a generated file where others read it, whole or not at all.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Who may use the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Exactly these bits: a file that applications of other users in the pod read.
    Exact(u32),
    /// These bits less the umask.
    Masked(u32),
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write {path}")]
pub struct Error {
    /// The file or the folder it was for.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Writes `text` beside `path` and renames it there. Missing folders are made with mode 0700, as the Go
/// agent makes them.
///
/// # Errors
/// With the path that could not be made or written; what was at `path` before is still there.
pub fn write(path: &Path, text: &[u8], mode: Mode) -> Result<(), Error> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| Error { path, source }
    };
    if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty() && !p.is_dir()) {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(fail(folder))?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let done = put(&beside, text, mode).and_then(|()| std::fs::rename(&beside, path));
    if done.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    done.map_err(fail(path))
}

fn put(path: &Path, text: &[u8], mode: Mode) -> io::Result<()> {
    let (Mode::Exact(bits) | Mode::Masked(bits)) = mode;
    // A left-over of an agent that was killed between writing and renaming, perhaps with other bits.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(bits).open(path)?;
    if let Mode::Exact(bits) = mode {
        file.set_permissions(Permissions::from_mode(bits))?;
    }
    file.write_all(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_whole_files_with_their_modes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/down/file.json");
        std::fs::create_dir(dir.path().join("deep")).unwrap();
        write(&path, b"one", Mode::Exact(0o644)).unwrap();
        std::fs::write(dir.path().join("deep/down/file.json.new"), "left over").unwrap();
        write(&path, b"two", Mode::Exact(0o640)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o640);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        std::fs::create_dir_all(path.join("full")).unwrap();
        let error = write(&path, b"x", Mode::Masked(0o666)).unwrap_err();
        assert_eq!(error.path, path);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
