//! Secrets from a folder: `<name>/tls.crt`, `tls.key`, `ca.crt`, watched as mounted certificates are.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use zeroize::Zeroizing;

use super::follow::wanted;
use super::read::{CACERT, resource};
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
        tokio::select! {
            () = stop.cancelled() => return,
            () = secrets.0.asked.notified() => {}
            () = watcher.news(), if !slots.is_empty() => refresh = true,
            () = tokio::time::sleep(LOOK), if !slots.is_empty() => {
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
    let mut why = None;
    for (at, secret) in wanted.iter().enumerate() {
        let path = folder.join(secret);
        let spare = at >= own;
        if !path.is_dir() || (spare && asked.has_own()) {
            continue;
        }
        // In a folder a name of trust anchors is that of its secret: <name>/ca.crt.
        let under = if spare { secret } else { name };
        match resource(under, secret, &|field| read(&path, field)) {
            Ok(Some(value)) => {
                secrets.publish(name, asked, value, spare);
                if !spare {
                    return secrets.note(name, None);
                }
            }
            Ok(None) => {}
            Err(error) => why = Some(error.to_string()),
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

fn read(folder: &Path, field: &str) -> Option<Zeroizing<Vec<u8>>> {
    let path = folder.join(FIELDS.iter().find(|known| **known == field)?);
    // What it is may change at any time: a pipe is not waited for, and only what was opened is looked at.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let length = file.metadata().ok().filter(|m| m.is_file() && m.len() <= LONGEST)?.len();
    // Room for all of it at once: of a buffer that grows parts of a key would stay.
    let mut text = Zeroizing::new(Vec::with_capacity(usize::try_from(length).ok()? + 1));
    let read = file.take(length).read_to_end(&mut text);
    read.ok().map(|_| text)
}
