//! Modules that are there: found by name and checksum, stored whole or not at all, purged when unused.
//!
//! What is known is in memory only; files of an earlier process are not looked at. A module file appears
//! under its name by a rename, so Envoy never reads half of one.
//!
//! The disk is asked on threads only ([`Lane`]), and waited for no longer than [`PATIENCE`]: one that stands still costs
//! the module, not the agent. Whatever changes the folder goes through one thread, so a module that is stored and one
//! that is removed never meet; what is known is locked for moments only, never while the disk works.

use std::collections::HashMap;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use memchr::memmem;
use tokio::time::Instant;

use super::receive::{Beside, DOWNLOAD};
use crate::base::lane::Lane;
use crate::base::place;
use crate::base::seldom::Seldom;
use crate::base::sha256;

/// One for each download that a push usually brings.
static LOOKS: Lane = Lane::new("looking for modules", 4);
static CHANGES: Lane = Lane::new("folder of modules", 1);

/// A rename takes milliseconds; a disk that needs longer than this stands still.
const PATIENCE: Duration = Duration::from_secs(10);
/// Istiod can ask for modules without pause, and there may be thousands of them.
static GONE: Seldom = Seldom::new(30);
static STUCK: Seldom = Seldom::new(30);

/// So many resources of a URL are remembered; with one more all are forgotten, and each counts as one that has never asked.
const RESOURCES: usize = 1024;

/// What a module is found by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The URL; of an image its registry and repository.
    pub name: String,
    /// Of a module its own; of an image its manifest's.
    pub checksum: String,
}

/// On whose behalf it is looked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asker<'a> {
    /// The URL as it was given.
    pub url: &'a str,
    /// Name of the extension config.
    pub resource: &'a str,
    /// Version of the plugin's resource.
    pub version: &'a str,
    /// Whether the URL itself says which module it means, and need not be remembered.
    pub pinned: bool,
}

struct Module {
    // One of its own for each download that was stored.
    file: Arc<PathBuf>,
    used: Instant,
}

/// What a URL was last found to be.
#[derive(Default)]
struct Known {
    key: Option<Key>,
    /// By resource: its version when it last asked.
    versions: HashMap<String, String>,
}

impl Known {
    /// Remembers the resource's version; gives the one before.
    fn note(&mut self, asker: Asker<'_>) -> Option<String> {
        if self.versions.len() >= RESOURCES && !self.versions.contains_key(asker.resource) {
            self.versions.clear();
        }
        self.versions.insert(asker.resource.to_owned(), asker.version.to_owned())
    }
}

#[derive(Default)]
struct Contents {
    modules: HashMap<Key, Module>,
    urls: HashMap<String, Known>,
}

/// The modules of one folder.
#[derive(Clone)]
pub(super) struct Cache {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    expiry: Duration,
    state: Mutex<Contents>,
}

impl Cache {
    /// Nothing is known of what `dir` holds.
    #[must_use]
    pub(super) fn new(dir: PathBuf, expiry: Duration) -> Self {
        Self { inner: Arc::new(Inner { dir, expiry, state: Mutex::default() }) }
    }

    /// Where modules are.
    #[must_use]
    pub(super) fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// How many are known.
    #[must_use]
    pub(super) fn count(&self) -> usize {
        self.state().modules.len()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, Contents> {
        self.inner.state.lock().expect("no panic holds this lock")
    }

    /// The checksum that the URL was last found to have. `any_version`: also when the resource has changed
    /// since. The resource's version is remembered either way, but only for URLs that are known.
    pub(super) fn recall(&self, asker: Asker<'_>, any_version: bool) -> Option<String> {
        let mut state = self.state();
        let known = state.urls.get_mut(asker.url)?;
        let before = known.note(asker);
        // Who has never asked counts as one that asked without a version, as in the Go agent.
        let same = any_version || before.unwrap_or_default() == asker.version;
        known.key.as_ref().filter(|_| same).map(|key| key.checksum.clone())
    }

    /// The module's file. A file that somebody has removed is as good as none, and so is one on a disk that does not
    /// answer.
    pub(super) async fn find(&self, key: &Key, asker: Asker<'_>) -> Option<PathBuf> {
        let file = {
            let mut state = self.state();
            let module = state.modules.get_mut(key)?;
            // So that it is not removed now.
            module.used = Instant::now();
            Arc::clone(&module.file)
        };
        let looked_at = Arc::clone(&file);
        match LOOKS.within(PATIENCE, move || looked_at.is_file()).await {
            Ok(true) => {}
            Ok(false) => {
                if let Some(more) = GONE.may() {
                    tracing::warn!(target: "wasm", "{} is gone: fetching it again{more}", file.display());
                }
                self.forget(key, &file);
                return None;
            }
            Err(error) => {
                if let Some(more) = GONE.may() {
                    tracing::warn!(target: "wasm", "cannot check {}: {error}{more}", file.display());
                }
                return None;
            }
        }
        let mut state = self.state();
        let there = state.modules.contains_key(key);
        if there {
            state.remember(key, asker);
        }
        there.then(|| file.to_path_buf())
    }

    // Another task may have stored it anew since the file was looked at.
    fn forget(&self, key: &Key, file: &Arc<PathBuf>) {
        let mut state = self.state();
        if state.modules.get(key).is_some_and(|module| Arc::ptr_eq(&module.file, file)) {
            state.modules.remove(key);
        }
    }

    /// Puts a download in its place; one that another task has put there meanwhile stays.
    ///
    /// # Errors
    /// When it cannot be put there; nothing is left of it then.
    pub(super) async fn store(&self, key: &Key, asker: Asker<'_>, download: Beside) -> io::Result<PathBuf> {
        if let Some(file) = self.find(key, asker).await {
            return Ok(file);
        }
        let (cache, key) = (self.clone(), key.clone());
        let (url, resource, version) =
            (asker.url.to_owned(), asker.resource.to_owned(), asker.version.to_owned());
        // Of the caller's clock, which in a test is not the thread's.
        let (pinned, now) = (asker.pinned, Instant::now());
        let put = move || {
            let asker = Asker { url: &url, resource: &resource, version: &version, pinned };
            cache.put(&key, asker, download, now)
        };
        CHANGES.within(PATIENCE, put).await?
    }

    fn put(&self, key: &Key, asker: Asker<'_>, download: Beside, now: Instant) -> io::Result<PathBuf> {
        let folder = self.dir().join(sha256::of(key.name.as_bytes()));
        // One level only: the folder above belongs to whoever mounts it.
        match DirBuilder::new().mode(0o755).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let file = folder.join(format!("{}.wasm", key.checksum));
        let download = download.into_file()?;
        download.as_file().set_permissions(Permissions::from_mode(0o644))?;
        download.persist(&file)?;
        let mut state = self.state();
        state.modules.insert(key.clone(), Module { file: Arc::new(file.clone()), used: now });
        state.remember(key, asker);
        Ok(file)
    }

    /// Removes what nobody has asked for within the expiry, and none of the `configs` names that are kept elsewhere; what
    /// cannot be removed is tried again. If it is not known what they name, nothing is removed.
    pub(super) async fn purge(&self, configs: impl Future<Output = io::Result<Vec<Bytes>>>) {
        let (cache, now) = (self.clone(), Instant::now());
        if self.old(now).is_empty() {
            return;
        }
        let configs = tokio::time::timeout(PATIENCE, configs).await.unwrap_or_else(|late| Err(late.into()));
        let removed = match configs {
            Ok(configs) => CHANGES.within(PATIENCE, move || cache.remove_unused(now, &configs)).await,
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::error!(target: "wasm", "unused modules are not removed: {error}");
        }
    }

    /// Removes what processes that were killed have left of their downloads, if it was not written to for `age`.
    pub(super) async fn sweep(&self, age: Duration) {
        let dir = self.dir().to_owned();
        if let Err(error) = CHANGES.within(PATIENCE, move || place::sweep_older(&dir, &[DOWNLOAD], age)).await
        {
            tracing::debug!(target: "wasm", "what others have left of downloads stays: {error}");
        }
    }

    // Files of modules that nobody has asked for within the expiry.
    fn old(&self, now: Instant) -> Vec<PathBuf> {
        let is_old = |module: &&Module| now.saturating_duration_since(module.used) > self.inner.expiry;
        self.state().modules.values().filter(is_old).map(|module| module.file.to_path_buf()).collect()
    }

    fn remove_unused(&self, now: Instant, configs: &[Bytes]) {
        let expiry = self.inner.expiry;
        // A config has the path word for word, in whatever form it is.
        let is_named = |file: &PathBuf| {
            let path = memmem::Finder::new(file.as_os_str().as_bytes());
            configs.iter().any(|config| path.find(config).is_some())
        };
        let named: Vec<PathBuf> = self.old(now).into_iter().filter(is_named).collect();
        let old: Vec<_> = {
            let mut state = self.state();
            state.modules.values_mut().filter(|m| named.contains(&*m.file)).for_each(|m| m.used = now);
            let is_old = |module: &Module| now.saturating_duration_since(module.used) > expiry;
            state.modules.extract_if(|_, module| is_old(module)).collect()
        };
        for (key, module) in old {
            match std::fs::remove_file(&*module.file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    if let Some(more) = STUCK.may() {
                        tracing::error!(target: "wasm", "{} cannot be removed: {error}{more}", module.file.display());
                    }
                    self.state().modules.entry(key).or_insert(module);
                    continue;
                }
                _ => {}
            }
            tracing::debug!(target: "wasm", "{} was not used for {expiry:?} and is removed", module.file.display());
            // Every URL that led to it, not only the one it came from: else its old checksum would
            // make a new image look like a fraud.
            self.state().urls.retain(|_, known| known.key.as_ref() != Some(&key));
        }
    }
}

impl Contents {
    fn remember(&mut self, key: &Key, asker: Asker<'_>) {
        if asker.pinned {
            return;
        }
        let known = self.urls.entry(asker.url.to_owned()).or_default();
        known.key = Some(key.clone());
        known.note(asker);
    }
}

#[cfg(test)]
mod tests;
