//! Modules that are there: found by name and checksum, stored whole or not at all, purged when unused.
//!
//! What is known is in memory only; files of an earlier process are not looked at. A module file appears
//! under its name by a rename, so Envoy never reads half of one.

use std::collections::HashMap;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use tempfile::NamedTempFile;
use tokio::time::Instant;

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
    file: PathBuf,
    used: Instant,
}

/// What a URL was last found to be.
#[derive(Default)]
struct Known {
    key: Option<Key>,
    /// By resource: its version when it last asked.
    versions: HashMap<String, String>,
}

#[derive(Default)]
struct State {
    modules: HashMap<Key, Module>,
    urls: HashMap<String, Known>,
}

/// The modules of one folder.
pub(super) struct Cache {
    dir: PathBuf,
    expiry: Duration,
    state: Mutex<State>,
}

impl Cache {
    /// Nothing is known of what `dir` holds.
    #[must_use]
    pub(super) fn new(dir: PathBuf, expiry: Duration) -> Self {
        Self { dir, expiry, state: Mutex::default() }
    }

    /// Where modules are.
    #[must_use]
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// How many are known.
    #[must_use]
    pub(super) fn count(&self) -> usize {
        self.state().modules.len()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic holds this lock")
    }

    /// The checksum that the URL was last found to have. `any_version`: also when the resource has changed
    /// since. The resource's version is remembered either way, but only for URLs that are known.
    pub(super) fn recall(&self, asker: Asker<'_>, any_version: bool) -> Option<String> {
        let mut state = self.state();
        let known = state.urls.get_mut(asker.url)?;
        let before = known.versions.insert(asker.resource.to_owned(), asker.version.to_owned());
        let same = any_version || before.as_deref() == Some(asker.version);
        known.key.as_ref().filter(|_| same).map(|key| key.checksum.clone())
    }

    /// The module's file. A file that somebody has removed is as good as none.
    pub(super) fn find(&self, key: &Key, asker: Asker<'_>) -> Option<PathBuf> {
        let mut state = self.state();
        let module = state.modules.get_mut(key)?;
        if !module.file.is_file() {
            tracing::warn!(target: "wasm", "{} is gone: it is fetched again", module.file.display());
            state.modules.remove(key);
            return None;
        }
        module.used = Instant::now();
        let file = module.file.clone();
        state.remember(key, asker);
        Some(file)
    }

    /// Puts a download in its place; one that another task has put there meanwhile stays.
    ///
    /// # Errors
    /// When it cannot be put there; nothing is left of it then.
    pub(super) fn store(&self, key: &Key, asker: Asker<'_>, download: NamedTempFile) -> io::Result<PathBuf> {
        if let Some(file) = self.find(key, asker) {
            return Ok(file);
        }
        let folder = self.dir.join(super::sha256_hex(key.name.as_bytes()));
        // One level only: the folder above belongs to whoever mounts it.
        match DirBuilder::new().mode(0o755).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let file = folder.join(format!("{}.wasm", key.checksum));
        download.as_file().set_permissions(Permissions::from_mode(0o644))?;
        download.persist(&file)?;
        let mut state = self.state();
        state.modules.insert(key.clone(), Module { file: file.clone(), used: Instant::now() });
        state.remember(key, asker);
        Ok(file)
    }

    /// Removes what nobody has asked for within the expiry; what cannot be removed is tried again.
    pub(super) fn purge(&self) {
        let mut state = self.state();
        let State { modules, urls } = &mut *state;
        modules.retain(|key, module| {
            if module.used.elapsed() <= self.expiry {
                return true;
            }
            match std::fs::remove_file(&module.file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(target: "wasm", "{} cannot be removed: {error}", module.file.display());
                    return true;
                }
                _ => {}
            }
            tracing::debug!(target: "wasm", "{} was not used for {:?} and is removed", module.file.display(), self.expiry);
            // Every URL that led to it, not only the one it came from: else its old checksum would
            // make a new image look like a fraud.
            urls.retain(|_, known| known.key.as_ref() != Some(key));
            false
        });
    }
}

impl State {
    fn remember(&mut self, key: &Key, asker: Asker<'_>) {
        if asker.pinned {
            return;
        }
        let known = self.urls.entry(asker.url.to_owned()).or_default();
        known.key = Some(key.clone());
        known.versions.insert(asker.resource.to_owned(), asker.version.to_owned());
    }
}

#[cfg(test)]
mod tests;
