//! Reading: what lies in the files at this moment, and whether it can be served.
//!
//! Never more than [`MAX_BYTES`], and pipes and devices are not opened. All of it may wait for the file system,
//! so it is done on a thread of its own (`disk`).

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use zeroize::Zeroizing;

use crate::base::bounded;
use crate::base::pressure;
use crate::base::quote::shown;
use crate::base::reading;
use crate::base::seldom::Seldom;
use crate::secrets::{Identity, Roots};
use crate::tls::cert;

/// Whoever asks for a file can write it, too.
static LEFT_OUT: Seldom = Seldom::new(60);

/// Far above any bundle; guards against a path that never ends.
const MAX_BYTES: u64 = 16 << 20;

/// Files of more than this are read and taken apart one at a time: each takes a few times its size, and there may be thousands.
pub(super) const LARGE: u64 = 1 << 20;
static ONE: Mutex<()> = Mutex::new(());

/// Where a resource lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::secrets) enum Source {
    Pair { cert: PathBuf, key: PathBuf },
    Roots(PathBuf),
}

impl Source {
    /// The files it is made of.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        match self {
            Self::Pair { cert, key } => vec![cert.clone(), key.clone()],
            Self::Roots(path) => vec![path.clone()],
        }
    }

    /// Whether its files are there to be used: they can be opened and are not empty.
    pub(in crate::secrets) fn usable(&self) -> bool {
        let there = |path: &Path| {
            std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0) && File::open(path).is_ok()
        };
        match self {
            Self::Pair { cert, key } => there(cert) && there(key),
            Self::Roots(path) => there(path),
        }
    }
}

/// Why a pair is not used of which something is there: what is wrong with the first file that is to blame.
pub(in crate::secrets) fn half(cert: &Path, key: &Path) -> Option<String> {
    let wrong = |path: &Path| match std::fs::metadata(path) {
        Err(error) => Some(error.to_string()),
        Ok(meta) if meta.is_dir() => Some("a folder is in its place".to_owned()),
        Ok(meta) if !meta.is_file() => Some("it is no file".to_owned()),
        Ok(meta) if meta.len() == 0 => Some("it is empty".to_owned()),
        Ok(_) => reading::opens(path).err().map(|error| error.to_string()),
    };
    let there = |path: &Path| std::fs::symlink_metadata(path).is_ok();
    if !there(cert) && !there(key) {
        return None;
    }
    [cert, key].into_iter().find_map(|path| Some(format!("{}: {}", path.display(), wrong(path)?)))
}

/// What was read; followers hold the same.
#[derive(Debug, Clone)]
pub(in crate::secrets) enum Loaded {
    Pair(Arc<Identity>),
    /// PEM, each block encoded anew.
    Roots(Arc<Roots>),
}

impl Loaded {
    /// What it takes, in bytes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Pair(identity) => identity.chain.len() + identity.key.len(),
            Self::Roots(roots) => roots.pem.len(),
        }
    }
}

/// What a read brought.
#[derive(Debug)]
pub(super) enum Read {
    Same,
    New { loaded: Loaded, hash: u64, whole: bool },
}

/// Why files cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A pipe, a device, a folder.
    #[error("{}: not a regular file", .0.display())]
    NoFile(PathBuf),
    #[error("{}: longer than {MAX_BYTES} bytes", .0.display())]
    TooLong(PathBuf),
    #[error("{} with {}: {source}", cert.display(), key.display())]
    Pair { cert: PathBuf, key: PathBuf, source: cert::Error },
    #[error("{} changed while it was read", .0.display())]
    Changed(PathBuf),
    #[error("failed to parse root certs from file {}: {why}", path.display())]
    Roots { path: PathBuf, why: String },
    #[error("with it the file resources in use would take more than {0} bytes")]
    TooMuch(usize),
    #[error(
        "its {0} bytes do not fit into the memory that is left; raise the container's memory limit or GOMEMLIMIT"
    )]
    NoRoom(u64),
    #[error("its file system does not answer")]
    Silent,
    /// They are as they were when they could not be read.
    #[error("the same as before")]
    Still,
}

/// Reads a source; `known` is the hash of what is loaded. `clients`: somebody has asked for it by its path. Of others a key must
/// belong to a chain that is known, too, and there is always room for them.
pub(super) fn read(source: &Source, known: Option<u64>, clients: bool) -> Result<Read, Unreadable> {
    let length = |path: PathBuf| std::fs::metadata(path).map_or(0, |meta| meta.len());
    let length = source.paths().into_iter().map(length).fold(0, u64::saturating_add);
    // What stands still here holds a thread, as it would without.
    let _one = (length > LARGE).then(|| ONE.lock().unwrap_or_else(PoisonError::into_inner));
    // It is held as it lies there and as it is served.
    if clients && (LARGE..=MAX_BYTES).contains(&length) && !pressure::has_room(2 * length) {
        return Err(Unreadable::NoRoom(length));
    }
    match source {
        Source::Pair { cert, key } => {
            let chain = bytes(cert)?;
            let hash = hash_of(&chain);
            let same = known == Some(hash);
            if same && clients {
                return Ok(Read::Same);
            }
            let key_pem = Zeroizing::new(bytes(key)?);
            cert::check_pair(&chain, &key_pem).map_err(|source| Unreadable::Pair {
                cert: cert.clone(),
                key: key.clone(),
                source,
            })?;
            if same {
                return Ok(Read::Same);
            }
            // Both halves must be of one moment.
            if bytes(cert)? != chain.as_slice() {
                return Err(Unreadable::Changed(cert.clone()));
            }
            let loaded = Loaded::Pair(Arc::new(Identity { chain, key: key_pem }));
            Ok(Read::New { loaded, hash, whole: true })
        }
        Source::Roots(path) => {
            let text = bytes(path)?;
            let hash = hash_of(&text);
            if known == Some(hash) {
                return Ok(Read::Same);
            }
            let roots = cert::readable_certs(&text);
            if roots.pem.is_empty() {
                return Err(Unreadable::Roots { path: path.clone(), why: roots.trouble().to_string() });
            }
            if roots.dropped > 0
                && !roots.unfinished
                && let Some(more) = LEFT_OUT.may()
            {
                tracing::warn!(target: "cache", "{}: {} of its blocks cannot be read and are left out: {}{more}",
                    shown(&path.to_string_lossy()), roots.dropped, roots.trouble());
            }
            let loaded = Loaded::Roots(Arc::new(Roots { pem: roots.pem.into_bytes() }));
            Ok(Read::New { loaded, hash, whole: !roots.unfinished })
        }
    }
}

/// The content of a regular file.
pub(in crate::secrets) fn bytes(path: &Path) -> Result<Vec<u8>, Unreadable> {
    let said = |source| Unreadable::Io { path: path.to_owned(), source };
    // Opening a pipe would wait for its writer.
    let meta = std::fs::metadata(path).map_err(said)?;
    if !meta.is_file() {
        return Err(Unreadable::NoFile(path.to_owned()));
    }
    match bounded::read(path, MAX_BYTES) {
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            Err(Unreadable::TooLong(path.to_owned()))
        }
        read => read.map_err(said),
    }
}

fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}
