//! Which root certificates a connection trusts, and reading them.
//!
//! The file is looked at for each dial, so a rotated root counts at the next connection. When it has
//! changed, the choice between two possible files is made anew. Where the chosen one is missing or holds
//! no certificate at that moment, the roots of the last good reading stay in use.

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Error, Roots};
use crate::base::bounded;
use crate::base::lane::Lane;
use crate::base::seldom::Seldom;
use crate::tls::anchors::Anchors;
use crate::tls::client;
use crate::trouble::{Report, Reporter};

/// Above this a root file is refused rather than read: the largest public bundles have 250 KB.
const MAX_FILE: u64 = 16 << 20;

/// Root files are read at each dial, by two connectors at most.
static FILES: Lane = Lane::new("root files", 2);

/// Far above what a disk needs that works, and well within a dial's own limit.
const PATIENCE: Duration = Duration::from_secs(2);
/// Files may change as often as they like.
static CHANGES: Seldom = Seldom::new(60);

/// The roots in use. Whoever trusts the same ones, istiod's stream and its CA mostly, reads them by one reader, so that what
/// is wrong with them is told once.
#[derive(Debug, Clone, Default)]
pub(crate) struct RootFiles(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    trouble: Option<Reporter>,
    // Istiod's and the CA's: two at most.
    readers: Mutex<Vec<Arc<Reader>>>,
}

impl RootFiles {
    /// None yet; `trouble` is told while a file is of no use and the last good roots stay in use.
    #[must_use]
    pub(crate) fn telling(trouble: Reporter) -> Self {
        Self(Arc::new(Shared { trouble: Some(trouble), readers: Mutex::default() }))
    }

    pub(super) fn reader(&self, roots: &Roots) -> Arc<Reader> {
        let mut readers = self.0.readers.lock().expect("no panic holds this lock");
        if let Some(known) = readers.iter().find(|reader| reader.roots == *roots) {
            return known.clone();
        }
        let trouble = self.0.trouble.as_ref().map(Reporter::sibling);
        let reader = Arc::new(Reader::new(roots.clone(), trouble));
        readers.push(reader.clone());
        reader
    }

    fn readers(&self) -> Vec<Arc<Reader>> {
        self.0.readers.lock().expect("no panic holds this lock").clone()
    }

    /// Those that are files.
    #[must_use]
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.readers().iter().filter_map(|reader| reader.file()).collect()
    }

    /// Looks at them now, so that what is wrong with one is told, or over, before a dial needs it.
    pub(crate) async fn look(&self) {
        for reader in self.readers() {
            // Without roots no dial succeeds, and says so.
            drop(reader.look().await);
        }
    }
}

/// Reads roots and remembers the last good ones.
#[derive(Debug)]
pub(super) struct Reader {
    roots: Roots,
    /// Who is told while the last good roots stand in for a file; without it the log is.
    trouble: Option<Reporter>,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    good: Option<Good>,
    warned: Option<String>,
}

#[derive(Debug, Clone)]
struct Good {
    path: PathBuf,
    // Of the file's content. Not for security: whoever writes the file decides what is trusted.
    hash: u64,
    store: Arc<Anchors>,
}

impl Reader {
    pub(super) fn new(roots: Roots, trouble: Option<Reporter>) -> Self {
        Self { roots, trouble, last: Mutex::default() }
    }

    /// What the roots are called in messages.
    pub(super) fn name(&self) -> String {
        self.file().map_or_else(|| "the system's pool".to_owned(), |path| path.display().to_string())
    }

    /// The file in use, where it is one.
    pub(super) fn file(&self) -> Option<PathBuf> {
        let last = self.last.lock().expect("no panic holds this lock");
        last.good.as_ref().map(|good| good.path.clone()).or_else(|| self.choose().map(Path::to_owned))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Last> {
        self.last.lock().expect("no panic holds this lock")
    }

    /// The one that is meant first, whether it is there or not.
    fn first(&self) -> Option<&Path> {
        match &self.roots {
            Roots::System => None,
            Roots::File(path) | Roots::FirstOf(path, _) => Some(path),
        }
    }

    fn choose(&self) -> Option<&Path> {
        match &self.roots {
            Roots::System => None,
            Roots::File(path) => Some(path),
            Roots::FirstOf(first, other) => Some(if first.is_file() { first } else { other }),
        }
    }

    /// As [`Reader::read`], on a thread. A disk that stands still for [`PATIENCE`] leaves the last good roots in use.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub(super) async fn look(self: &Arc<Self>) -> Result<Arc<Anchors>, Error> {
        let reader = Arc::clone(self);
        match tokio::time::timeout(PATIENCE, FILES.run(move || reader.read())).await {
            Ok(Ok(read)) => read,
            Ok(Err(error)) => self.known(error.to_string()),
            Err(_) => self.known(format!("its disk does not answer within {PATIENCE:?}")),
        }
    }

    fn known(&self, reason: String) -> Result<Arc<Anchors>, Error> {
        // Whoever hangs in `read` holds no lock while it reads.
        let mut last = self.lock();
        let Some(good) = last.good.clone() else {
            return Err(Error::Roots { path: self.first().map(Path::to_owned).unwrap_or_default(), reason });
        };
        last.unreadable(&good.path, reason, self.trouble.as_ref());
        Ok(good.store)
    }

    /// The roots to trust now.
    ///
    /// # Errors
    /// When there are none and never were.
    pub(super) fn read(&self) -> Result<Arc<Anchors>, Error> {
        let Some(chosen) = self.choose() else { return system() };
        let known = self.lock().good.clone();
        if let Some(good) = known
            && bounded::read(&good.path, MAX_FILE).is_ok_and(|pem| hash(&pem) == good.hash)
        {
            self.lock().readable(chosen, self.trouble.as_ref());
            return Ok(good.store);
        }
        let loaded = load(chosen);
        let mut last = self.lock();
        match loaded {
            Ok(good) => {
                last.readable(chosen, self.trouble.as_ref());
                let store = good.store.clone();
                last.good = Some(good);
                Ok(store)
            }
            Err(error) => match &last.good {
                Some(good) => {
                    let store = good.store.clone();
                    last.unreadable(chosen, error.to_string(), self.trouble.as_ref());
                    Ok(store)
                }
                None => Err(Error::Roots { path: chosen.to_owned(), reason: error.to_string() }),
            },
        }
    }
}

impl Last {
    fn readable(&mut self, path: &Path, trouble: Option<&Reporter>) {
        if self.warned.take().is_none() {
            return;
        }
        if let Some(trouble) = trouble {
            trouble.end();
        } else if let Some(more) = CHANGES.may() {
            tracing::info!(target: "security", "root certificates in {} are readable again{more}", path.display());
        }
    }

    fn unreadable(&mut self, path: &Path, reason: String, trouble: Option<&Reporter>) {
        if self.warned.as_ref() == Some(&reason) {
            return;
        }
        let shown = path.display().to_string();
        let said =
            format!("cannot read root certificates from {shown}: {reason}; the last good ones stay in use");
        if let Some(trouble) = trouble {
            let kind = Error::Roots { path: path.to_owned(), reason: reason.clone() }.report().kind;
            trouble.report(Report::new(kind, said).about(shown));
        } else if let Some(more) = CHANGES.may() {
            tracing::warn!(target: "security", "{said}{more}");
        }
        self.warned = Some(reason);
    }
}

fn system() -> Result<Arc<Anchors>, Error> {
    let store = client::system_roots();
    if store.is_empty() {
        let reason = "the system's pool holds no certificate".to_owned();
        return Err(Error::Roots { path: "SYSTEM".into(), reason });
    }
    Ok(Arc::new(store.into()))
}

fn load(path: &Path) -> std::io::Result<Good> {
    let pem = bounded::read(path, MAX_FILE)?;
    let store = client::roots_of(&pem);
    if store.is_empty() {
        return Err(std::io::Error::other("it holds no readable certificate"));
    }
    Ok(Good { path: path.to_owned(), hash: hash(&pem), store: Arc::new(store) })
}

fn hash(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(content);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trouble::Kind;

    fn root() -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
    }

    #[test]
    fn the_choice_is_made_anew_only_when_the_file_in_use_changes() {
        let dir = tempfile::tempdir().unwrap();
        let [first, other] = ["first.pem", "other.pem"].map(|name| dir.path().join(name));
        let troubles = crate::trouble::Troubles::default();
        let kinds = || troubles.snapshot().iter().map(|trouble| trouble.kind).collect::<Vec<_>>();
        let reader =
            Reader::new(Roots::FirstOf(first.clone(), other.clone()), Some(troubles.reporter("security")));
        assert!(reader.read().is_err(), "there are none, and never were");
        std::fs::write(&other, root()).unwrap();
        let old = reader.read().unwrap();
        assert!(Arc::ptr_eq(&old, &reader.read().unwrap()), "an unchanged file is not parsed again");
        std::fs::write(&first, root()).unwrap();
        assert!(Arc::ptr_eq(&old, &reader.read().unwrap()), "the file in use has not changed");
        std::fs::write(&other, root()).unwrap();
        reader.read().unwrap();
        assert_eq!(reader.file(), Some(first.clone()));
        std::fs::remove_file(&first).unwrap();
        reader.read().unwrap();
        assert_eq!(reader.file(), Some(other.clone()));
        let good = reader.read().unwrap();
        std::fs::write(&other, "no certificate").unwrap();
        assert!(Arc::ptr_eq(&good, &reader.read().unwrap()), "the last good roots stay");
        assert_eq!(kinds(), [Kind::RootBroken], "a start would fail now");
        std::fs::remove_file(&other).unwrap();
        assert!(Arc::ptr_eq(&good, &reader.read().unwrap()));
        assert_eq!(kinds(), [Kind::RootMissing]);
        std::fs::write(&other, root()).unwrap();
        reader.read().unwrap();
        assert_eq!(kinds(), []);
    }
}
