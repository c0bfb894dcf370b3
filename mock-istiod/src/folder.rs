//! A folder of resources: read whole, and again whenever something in it changes.
//!
//! Files directly in it are for everybody; a folder in it is for the workload of that name (`<pod>.<namespace>`,
//! the third part of the node ID). `.json`, `.yaml` and `.yml` hold resources in protobuf JSON; `.pb` holds one
//! serialised `google.protobuf.Any`, passed on byte for byte. A set that does not read leaves the old one in place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{Config, PollWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

use crate::json;
use crate::resources::{Resource, Set, Store};

/// Changes that come closer together than this are read once; editors and copies write in several steps.
const SETTLE: Duration = Duration::from_millis(50);
/// How often is looked where the system has no watch left: it has few for each user, and a herd of agents takes them all.
const LOOK: Duration = Duration::from_millis(200);

/// Why a folder was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not readable.
    #[error("{path}: {source}")]
    Read {
        /// What.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not understood.
    #[error("{path}: {source}")]
    Parse {
        /// What.
        path: PathBuf,
        /// Why.
        source: json::Error,
    },
    /// Not watchable.
    #[error("{path} cannot be watched: {source}")]
    Watch {
        /// What.
        path: PathBuf,
        /// Why.
        source: notify::Error,
    },
}

/// Reads the folder.
///
/// # Errors
/// When a file is not readable or not understood; hidden files and other endings are passed over.
pub fn load(folder: &Path) -> Result<Set, Error> {
    let mut set = Set::default();
    for path in sorted(folder)? {
        if path.is_dir() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut own = Vec::new();
            for file in sorted(&path)? {
                own.extend(file_resources(&file)?);
            }
            set.workloads.insert(name, own);
        } else {
            set.common.extend(file_resources(&path)?);
        }
    }
    Ok(set)
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = |source| Error::Read { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if !hidden {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn file_resources(path: &Path) -> Result<Vec<Resource>, Error> {
    let parse = |source| Error::Parse { path: path.to_owned(), source };
    let bytes = || std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source });
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("pb") => Ok(vec![json::from_any(&bytes()?).map_err(parse)?]),
        Some("json" | "yaml" | "yml") => json::parse(&String::from_utf8_lossy(&bytes()?)).map_err(parse),
        _ => Ok(Vec::new()),
    }
}

/// Loads the folder into `store` now and after every change, until the returned future is dropped.
///
/// # Errors
/// When the folder cannot be read or watched at the beginning.
pub fn follow(folder: &Path, store: Store) -> Result<impl Future<Output = ()> + Send + 'static, Error> {
    // Told before what would be wrong with a watch of it.
    sorted(folder)?;
    let (changed, mut changes) = mpsc::channel(1);
    // One waiting note is enough, so a full channel is no loss.
    let note = move |_: notify::Result<notify::Event>| {
        let _ = changed.try_send(());
    };
    let mut watcher = watch(folder, notify::recommended_watcher(note.clone())).or_else(|error| {
        tracing::warn!(%error, "no watch of {} is to be had: it is looked at every {LOOK:?}", folder.display());
        polled(folder, note)
    })?;
    store.replace(load(folder)?);
    let folder = folder.to_owned();
    Ok(async move {
        while changes.recv().await.is_some() {
            tokio::time::sleep(SETTLE).await;
            let _ = changes.try_recv();
            match load(&folder) {
                Ok(set) => store.replace(set),
                Err(error) => tracing::error!(%error, "the resources stay as they were"),
            }
        }
        let _ = watcher.unwatch(&folder);
    })
}

fn watch<W>(folder: &Path, made: notify::Result<W>) -> Result<Box<dyn Watcher + Send>, Error>
where
    W: Watcher + Send + 'static,
{
    made.and_then(|mut watcher| watcher.watch(folder, RecursiveMode::Recursive).map(|()| watcher))
        .map(|watcher| -> Box<dyn Watcher + Send> { Box::new(watcher) })
        .map_err(|source| Error::Watch { path: folder.to_owned(), source })
}

fn polled(folder: &Path, note: impl notify::EventHandler) -> Result<Box<dyn Watcher + Send>, Error> {
    let config = Config::default().with_poll_interval(LOOK).with_compare_contents(true);
    watch(folder, PollWatcher::new(note, config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::CLUSTER;

    #[tokio::test]
    async fn a_folder_that_the_system_does_not_watch_is_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let (changed, mut changes) = mpsc::unbounded_channel();
        let watcher = polled(folder.path(), move |_: notify::Result<notify::Event>| {
            let _ = changed.send(());
        })
        .unwrap();
        std::fs::write(folder.path().join("one.yaml"), "").unwrap();
        tokio::time::timeout(Duration::from_secs(30), changes.recv()).await.unwrap().unwrap();
        drop(watcher);
    }

    #[tokio::test]
    async fn a_change_is_served_and_a_broken_file_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("clusters.yaml");
        let write =
            |name: &str| std::fs::write(&file, format!("\"@type\": {CLUSTER}\nname: {name}\n")).unwrap();
        write("one");
        std::fs::create_dir(folder.path().join("pod.ns")).unwrap();
        std::fs::write(
            folder.path().join("pod.ns/own.json"),
            format!("[{{\"@type\":\"{CLUSTER}\",\"name\":\"own\"}}]"),
        )
        .unwrap();
        let store = Store::default();
        let mut changes = store.subscribe();
        let following = follow(folder.path(), store.clone()).unwrap();
        let names = |id: &str| {
            store.current().view(id).all(CLUSTER).map(|resource| resource.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            (names("other"), names("pod.ns")),
            (vec!["one".to_owned()], vec!["one".into(), "own".into()])
        );
        changes.borrow_and_update();
        let test = async {
            std::fs::write(folder.path().join("broken.yaml"), "name: x").unwrap();
            write("two");
            std::fs::remove_file(folder.path().join("broken.yaml")).unwrap();
            changes.changed().await.unwrap();
            assert_eq!(names("other"), ["two"]);
        };
        tokio::select! {
            () = following => panic!("stopped following"),
            result = tokio::time::timeout(Duration::from_secs(10), test) => result.unwrap(),
        }
    }
}
