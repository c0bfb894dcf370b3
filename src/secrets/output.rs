//! `OUTPUT_CERTS`: the secrets as files, for those who read files.
//!
//! Each file is written beside, with its mode set on creation, and only when its content differs; when all
//! are there, and on the disk, they are renamed one after the other, so a disk that fills up never leaves a key beside the
//! chain of another; where a rename fails, what was in the places of those before it is put back. The folder must exist; it is never made. A failure leaves the old files, and the
//! `Writer` tries again until it works.

mod writer;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use zeroize::Zeroizing;

pub(super) use writer::{Content, Writer};

use super::seal::Seal;
use crate::base::path::cleaned;
use crate::base::{bounded, place};

/// Where and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// The folder.
    pub dir: PathBuf,
    /// Mode of each file: 0600, or 0644 in a cluster, where other containers read them.
    pub mode: u32,
    /// What the key is sealed with, where it is.
    pub seal: Option<Seal>,
}

/// What the key's file is called.
pub(super) fn key_name(seal: Option<&Seal>) -> &'static str {
    if seal.is_some() { "key.sealed" } else { "key.pem" }
}

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}")]
pub(crate) struct Error {
    /// The file.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// The three files, in the order they are written. `None` leaves a file alone.
#[derive(Default, Clone, Copy)]
pub(super) struct Files<'a> {
    pub(super) key: Option<&'a [u8]>,
    pub(super) chain: Option<&'a [u8]>,
    pub(super) root: Option<&'a [u8]>,
}

impl Config {
    /// Whether `file` lies in the folder: then it is our own output, not a source.
    #[must_use]
    pub(crate) fn holds(&self, file: &Path) -> bool {
        let folder = file.parent().unwrap_or(Path::new(""));
        match (std::path::absolute(&self.dir), std::path::absolute(Path::new(".").join(folder))) {
            (Ok(a), Ok(b)) => cleaned(&a) == cleaned(&b),
            _ => false,
        }
    }

    /// Writes what differs.
    pub(super) fn write(&self, files: Files<'_>) -> Result<(), Error> {
        self.write_by(files, place::settle)
    }

    // `sync` has a file on the disk before its rename is.
    fn write_by(&self, files: Files<'_>, sync: impl Fn(&File) -> io::Result<()>) -> Result<(), Error> {
        let name = key_name(self.seal.as_ref());
        let sealed = match (&self.seal, files.key) {
            (Some(seal), Some(key)) => {
                let path = self.dir.join(name);
                let sealed = seal.again(&path, key);
                Some(sealed.map_err(|why| Error { path, source: io::Error::other(why) })?)
            }
            _ => None,
        };
        let key = sealed.as_deref().or(files.key);
        place::sweep(&self.dir, &[name, "cert-chain.pem", "root-cert.pem"]);
        let all = [(name, key), ("cert-chain.pem", files.chain), ("root-cert.pem", files.root)];
        // Removed again, all of them, when anything below fails.
        let mut fresh = Vec::with_capacity(all.len());
        for (name, content) in all {
            let Some(content) = content else { continue };
            let path = self.dir.join(name);
            match beside(&path, content, self.mode, &sync) {
                Ok(file) => fresh.extend(file.map(|(file, old)| (path, file, old))),
                Err(source) => return Err(Error { path, source }),
            }
        }
        let mut done = Vec::with_capacity(fresh.len());
        for (path, file, old) in fresh {
            if let Err(error) = file.persist(&path) {
                self.put_back(&done);
                return Err(Error { path, source: error.error });
            }
            done.push((path, old));
        }
        if sealed.is_some() {
            // Of before it was sealed.
            let _ = std::fs::remove_file(self.dir.join("key.pem"));
        }
        Ok(())
    }

    // As far as it can be: a place that takes no file may not take the old one either.
    fn put_back(&self, done: &[(PathBuf, Old)]) {
        for (path, old) in done {
            let _ = match old {
                Some(old) => place::replace(path, old, place::Mode::Exact(self.mode)),
                None => std::fs::remove_file(path),
            };
        }
    }
}

/// What was at a place.
type Old = Option<Zeroizing<Vec<u8>>>;

/// The file that will take the place of `path`, and what is there now; `None` when that has the content already.
fn beside(
    path: &Path,
    content: &[u8],
    mode: u32,
    sync: impl Fn(&File) -> io::Result<()>,
) -> io::Result<Option<(NamedTempFile, Old)>> {
    let old = bounded::usual(path).ok().map(Zeroizing::new);
    if old.as_ref().is_some_and(|old| old.as_slice() == content) {
        return Ok(None);
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = place::beside(folder, &place::name(path), place::Mode::Exact(mode))?;
    file.write_all(content)?;
    sync(file.as_file())?;
    Ok(Some((file, old)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn files_are_replaced_only_when_they_differ() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { dir: dir.path().to_owned(), mode: 0o600, seal: None };
        let root = dir.path().join("root-cert.pem");
        config.write(Files { key: Some(b"k"), chain: Some(b"c"), root: Some(b"r") }).unwrap();
        assert_eq!(mode(&dir.path().join("key.pem")), 0o600);
        let first = std::fs::metadata(&root).unwrap().ino();
        config.write(Files { root: Some(b"r"), ..Files::default() }).unwrap();
        assert_eq!(std::fs::metadata(&root).unwrap().ino(), first);
        config.write(Files { root: Some(b"s"), ..Files::default() }).unwrap();
        assert_eq!(std::fs::read(&root).unwrap(), b"s");
        assert_eq!(std::fs::read(dir.path().join("cert-chain.pem")).unwrap(), b"c");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is left over");
    }

    #[test]
    fn what_a_file_holds_is_on_the_disk_before_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { dir: dir.path().to_owned(), mode: 0o600, seal: None };
        let synced = std::cell::RefCell::new(Vec::new());
        let sync = |file: &File| {
            assert_eq!(file.metadata().unwrap().len(), 1);
            assert!(
                ["key.pem", "cert-chain.pem", "root-cert.pem"].iter().all(|n| !dir.path().join(n).exists())
            );
            synced.borrow_mut().push(file.metadata().unwrap().ino());
            Ok(())
        };
        config.write_by(Files { key: Some(b"k"), chain: Some(b"c"), root: Some(b"r") }, sync).unwrap();
        let placed = ["key.pem", "cert-chain.pem", "root-cert.pem"]
            .map(|n| dir.path().join(n).metadata().unwrap().ino());
        assert_eq!(*synced.borrow(), placed);
        // What a disk does not take is not put in its place.
        let full = |_: &File| Err(io::Error::from(io::ErrorKind::StorageFull));
        assert!(
            config.write_by(Files { key: Some(b"l"), chain: Some(b"d"), root: Some(b"s") }, full).is_err()
        );
        assert_eq!(std::fs::read(dir.path().join("key.pem")).unwrap(), b"k");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is left over");
        place::settle(&File::open("/dev/null").unwrap()).unwrap();
    }

    #[test]
    fn a_link_is_replaced_and_its_target_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("target"), "t").unwrap();
        std::os::unix::fs::symlink("target", dir.path().join("key.pem")).unwrap();
        let config = Config { dir: dir.path().to_owned(), mode: 0o644, seal: None };
        config.write(Files { key: Some(b"k"), ..Files::default() }).unwrap();
        assert!(!std::fs::symlink_metadata(dir.path().join("key.pem")).unwrap().is_symlink());
        assert_eq!(mode(&dir.path().join("key.pem")), 0o644);
        assert_eq!(std::fs::read(dir.path().join("target")).unwrap(), b"t");
    }

    #[test]
    fn a_file_that_cannot_be_replaced_leaves_nothing_over() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { dir: dir.path().to_owned(), mode: 0o600, seal: None };
        config.write(Files { key: Some(b"k"), chain: Some(b"c"), root: Some(b"r") }).unwrap();
        let chain = dir.path().join("cert-chain.pem");
        std::fs::remove_file(&chain).unwrap();
        std::fs::create_dir(&chain).unwrap();
        let error = config.write(Files { key: Some(b"l"), chain: Some(b"d"), root: Some(b"r") }).unwrap_err();
        assert!(error.to_string().contains("cert-chain.pem"));
        assert_eq!(std::fs::read(dir.path().join("key.pem")).unwrap(), b"k", "no key without its chain");
        assert_eq!(mode(&dir.path().join("key.pem")), 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is left over");
    }

    #[test]
    fn a_key_that_a_killed_agent_has_left_beside_its_place_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { dir: dir.path().to_owned(), mode: 0o600, seal: None };
        let left = dir.path().join("key.pem.0123456789abcdef.new");
        let file = std::fs::File::create(&left).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        config.write(Files { key: Some(b"k"), chain: Some(b"c"), root: Some(b"r") }).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn a_missing_folder_is_an_error_that_names_the_file() {
        let config = Config { dir: "nowhere/at/all".into(), mode: 0o600, seal: None };
        let error = config.write(Files { key: Some(b"k"), ..Files::default() }).unwrap_err();
        assert!(error.to_string().contains("nowhere/at/all/key.pem"));
        assert!(!Path::new("nowhere").exists());
    }

    #[test]
    fn own_output_is_recognised_however_it_is_written() {
        let config = |dir: &str| Config { dir: dir.into(), mode: 0o600, seal: None };
        assert!(config("etc/certs").holds(Path::new("./etc/certs/cert-chain.pem")));
        assert!(config("./etc/../etc/certs/").holds(Path::new("etc/certs/key.pem")));
        assert!(config(".").holds(Path::new("cert-chain.pem")));
        assert!(!config("etc").holds(Path::new("etc/certs/key.pem")));
    }
}
