//! Secrets from a folder: `<name>/tls.crt`, `tls.key`, `ca.crt`, watched as mounted certificates are.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::follow::wanted;
use super::read::{BadSecret, CACERT};
use super::{Asked, Secrets};
use crate::base::files::{Watcher, Watches};
use crate::base::lane::Lane;
use crate::base::tasks::Stop;

static FOLDER: Lane = Lane::new("the folder of gateway secrets", 1);
/// A burst of events counts once; a pair is written in two steps.
const QUIET: Duration = Duration::from_millis(100);
/// Looked at even without an event: not every file system reports, and a pair may match a moment later.
const LOOK: Duration = Duration::from_secs(5);
/// A file longer than this is no certificate.
const LONGEST: u64 = 1 << 20;
const FIELDS: [&str; 3] = ["tls.crt", "tls.key", "ca.crt"];

/// Serves what is asked for until `stop`. A folder that does not answer holds up this task and one thread.
pub(super) async fn run(secrets: Secrets, folder: PathBuf, watches: &Watches, stop: Stop) {
    let mut watcher = Watcher::new(watches, QUIET);
    let mut refresh = false;
    // Not put off by what happens meanwhile: a folder may change without a pause.
    let mut due = Instant::now() + LOOK;
    loop {
        let slots = secrets.slots();
        let watched = {
            let (secrets, folder, slots) = (secrets.clone(), folder.clone(), slots.clone());
            FOLDER.run(move || {
                if refresh {
                    watcher.refresh();
                }
                watcher.set(look(&secrets, &folder, &slots));
                watcher
            })
        };
        watcher = tokio::select! {
            () = stop.cancelled() => return,
            watched = watched => match watched {
                Ok(watcher) => watcher,
                Err(error) => {
                    tracing::error!(target: "sds", "{error}");
                    Watcher::new(watches, QUIET)
                }
            },
        };
        refresh = false;
        if slots.is_empty() {
            due = Instant::now() + LOOK;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = secrets.0.asked.notified() => {}
            () = watcher.news(), if !slots.is_empty() => refresh = true,
            () = tokio::time::sleep_until(due), if !slots.is_empty() => {
                due = Instant::now() + LOOK;
                refresh = true;
                for (name, asked) in &slots {
                    if asked.slot.followers() == 0 {
                        secrets.forget(name);
                    }
                }
            }
        }
    }
}

// Reads what is asked for; gives the files it depends on.
fn look(secrets: &Secrets, folder: &Path, slots: &[(String, Arc<Asked>)]) -> BTreeSet<PathBuf> {
    let mut paths = BTreeSet::new();
    for (name, asked) in slots {
        let (wanted, own) = wanted(name, &secrets.0.config.fallback);
        for secret in &wanted {
            paths.extend(FIELDS.iter().map(|field| folder.join(secret).join(field)));
        }
        settle(secrets, folder, name, &wanted, own, asked);
    }
    paths
}

fn settle(secrets: &Secrets, folder: &Path, name: &str, wanted: &[&str], own: usize, asked: &Asked) {
    // What is wrong with the first one that is there.
    let mut why = None;
    for (at, secret) in wanted.iter().enumerate() {
        let path = folder.join(secret);
        let spare = at >= own;
        if spare && asked.has_own() {
            continue;
        }
        match std::fs::metadata(&path) {
            Ok(about) if about.is_dir() => {}
            Ok(_) => {
                why = why.or_else(|| Some(format!("{}: this is no folder", path.display())));
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                why = why.or_else(|| Some(format!("{}: {error}", path.display())));
                continue;
            }
        }
        // In a folder a name of trust anchors is that of its secret: <name>/ca.crt.
        let under = if spare { secret } else { name };
        match secrets.resource(name, under, secret, &|field| read(&path, field)) {
            Ok(Some(value)) => {
                secrets.publish(name, asked, value, spare);
                if !spare {
                    return secrets.note(name, None);
                }
            }
            Ok(None) => why = why.or_else(|| unreadable(&path, &["ca.crt"])),
            Err(error) => {
                let unread = match error {
                    BadSecret::Missing(field) => unreadable(&path, &[field]),
                    BadSecret::NoAnchors => unreadable(&path, &["ca.crt", "tls.crt"]),
                    _ => None,
                };
                let of =
                    if spare { format!("{secret}, which is to stand in for it: ") } else { String::new() };
                why = why.or_else(|| Some(format!("{of}{}", unread.unwrap_or_else(|| error.to_string()))));
            }
        }
    }
    let why = why.unwrap_or_else(|| {
        let of = name.strip_suffix(CACERT).unwrap_or(name);
        format!("there is nothing of it in {}", folder.join(of).display())
    });
    let rest =
        if asked.has_any() { "what was served before, or the fallback, stays" } else { "Envoy waits for it" };
    secrets.note(name, Some(format!("{why}; {rest}")));
}

// What is wrong with the first of these files that is there, whose field then looks as if it were missing.
fn unreadable(folder: &Path, fields: &[&str]) -> Option<String> {
    fields.iter().find_map(|field| {
        let path = folder.join(field);
        let why = opened(&path).err().filter(|error| error.kind() != io::ErrorKind::NotFound)?;
        Some(format!("{}: {why}", path.display()))
    })
}

fn opened(path: &Path) -> io::Result<(File, u64)> {
    // What it is may change at any time: a pipe is not waited for, and only what was opened is looked at.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    match about.len() {
        _ if !about.is_file() => Err(io::Error::other("this is no regular file")),
        length @ 0..=LONGEST => Ok((file, length)),
        _ => Err(io::Error::other("it is longer than 1 MiB")),
    }
}

fn read(folder: &Path, field: &str) -> Option<Zeroizing<Vec<u8>>> {
    let (file, length) = opened(&folder.join(FIELDS.iter().find(|known| **known == field)?)).ok()?;
    // Room for all of it at once: of a buffer that grows parts of a key would stay.
    let mut text = Zeroizing::new(Vec::with_capacity(usize::try_from(length).ok()? + 1));
    let read = file.take(length).read_to_end(&mut text);
    read.ok().map(|_| text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::tasks::Group;
    use crate::gateway::{Config, Origin};
    use crate::trouble::Reporter;

    #[tokio::test]
    async fn a_file_that_cannot_be_read_is_not_told_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        let origin = Origin::Folder(dir.path().to_owned());
        let config = Config { origin, fallback: String::new() };
        let secrets = Secrets::new(config, &Watches::default(), Group::new(), Reporter::default());
        let pair = dir.path().join("pair");
        std::fs::create_dir_all(pair.join("tls.key")).unwrap();
        std::fs::write(pair.join("tls.crt"), "chain").unwrap();
        let told = || {
            look(&secrets, dir.path(), &[("pair".to_owned(), Arc::default())]);
            secrets.troubles().iter().map(|report| report.detail.clone()).collect::<String>()
        };
        assert!(told().contains("pair/tls.key: this is no regular file"), "{}", told());
        std::fs::remove_dir(pair.join("tls.key")).unwrap();
        assert!(told().contains("its field tls.key is missing"), "{}", told());
        // Nor one that nobody needs here as the cause, nor the other way round.
        std::fs::create_dir(pair.join("ca.crt")).unwrap();
        assert!(told().contains("its field tls.key is missing"), "{}", told());
        let anchors = || {
            look(&secrets, dir.path(), &[("pair-cacert".to_owned(), Arc::default())]);
            secrets.troubles().iter().map(|report| report.detail.clone()).collect::<String>()
        };
        assert!(anchors().contains("pair/ca.crt: this is no regular file"), "{}", anchors());
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_looked_at_is_not_told_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        let origin = Origin::Folder(dir.path().to_owned());
        let config = Config { origin, fallback: String::new() };
        let secrets = Secrets::new(config, &Watches::default(), Group::new(), Reporter::default());
        let pair = dir.path().join("pair");
        let told = || {
            look(&secrets, dir.path(), &[("pair".to_owned(), Arc::default())]);
            secrets.troubles().iter().map(|report| report.detail.clone()).collect::<String>()
        };
        assert!(told().contains("there is nothing of it in"), "{}", told());
        std::os::unix::fs::symlink("pair", &pair).unwrap();
        assert!(told().contains("pair: Too many levels of symbolic links"), "{}", told());
        std::fs::remove_file(&pair).unwrap();
        std::fs::write(&pair, "").unwrap();
        assert!(told().contains("pair: this is no folder"), "{}", told());
    }

    #[tokio::test]
    async fn what_all_names_hold_together_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let origin = Origin::Folder(dir.path().to_owned());
        let config = Config { origin, fallback: String::new() };
        let secrets = Secrets::new(config, &Watches::default(), Group::new(), Reporter::default());
        let root = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap().cert.pem();
        let names: Vec<_> = (0..40).map(|n| format!("n{n}-cacert")).collect();
        let slots: Vec<_> = names.iter().map(|name| (name.clone(), Arc::<Asked>::default())).collect();
        *crate::gateway::lock(&secrets.0.slots) = slots.iter().cloned().collect();
        for name in &names {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join("ca.crt"), root.repeat((1 << 20) / root.len()))
                .unwrap();
        }
        look(&secrets, dir.path(), &slots);
        let served = slots.iter().filter(|(_, asked)| asked.has_any()).count();
        assert_eq!(served, 32);
        let told = secrets.troubles();
        assert!(told.iter().all(|report| report.detail.contains("more than 32 MB")) && told.len() == 8);
        // Whoever shrinks makes room, and whoever is served stays so.
        std::fs::write(dir.path().join("n0-cacert/ca.crt"), &root).unwrap();
        look(&secrets, dir.path(), &slots);
        assert_eq!(slots.iter().filter(|(_, asked)| asked.has_any()).count(), 33);
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_nobody_follows_is_forgotten_however_often_something_happens() {
        let dir = tempfile::tempdir().unwrap();
        let origin = Origin::Folder(dir.path().to_owned());
        let config = Config { origin, fallback: String::new() };
        let secrets = Secrets::new(config, &Watches::default(), Group::new(), Reporter::default());
        drop(secrets.slot("gone").unwrap());
        let mut looks = 0;
        while secrets.slots().iter().any(|(name, _)| name == "gone") {
            secrets.0.asked.notify_one();
            crate::base::lane::under_way::but(0).await;
            tokio::time::advance(LOOK * 2 / 5).await;
            looks += 1;
            assert!(looks < 20, "it is never forgotten");
        }
        assert!(looks >= 2, "not before its time");
    }

    #[tokio::test]
    async fn what_is_wrong_with_the_fallback_is_not_told_of_the_secret() {
        let dir = tempfile::tempdir().unwrap();
        let origin = Origin::Folder(dir.path().to_owned());
        let config = Config { origin, fallback: "spare".to_owned() };
        let secrets = Secrets::new(config, &Watches::default(), Group::new(), Reporter::default());
        std::fs::create_dir_all(dir.path().join("spare/tls.key")).unwrap();
        std::fs::write(dir.path().join("spare/tls.crt"), "chain").unwrap();
        let told = || {
            look(&secrets, dir.path(), &[("pair".to_owned(), Arc::default())]);
            secrets.troubles().iter().map(|report| report.detail.clone()).collect::<String>()
        };
        assert!(told().contains("spare, which is to stand in for it: "), "{}", told());
        std::fs::create_dir(dir.path().join("pair")).unwrap();
        assert!(told().contains("pair: its field tls.crt is missing"), "{}", told());
    }
}
