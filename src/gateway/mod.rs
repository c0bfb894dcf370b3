//! TLS secrets of gateways: what a `Gateway` server names by `credentialName`, without a mount and a restart.
//!
//! A second SDS socket serves them. They come from the API server ([`Origin::Api`], the agents of 1.1 to 1.5 had
//! it) or from a folder ([`Origin::Folder`], ours, for gateways on VMs).
//!
//! Promises:
//! - What is held is bound by the names that Envoy asks for, not by what the namespace holds: each name is
//!   listed and watched by itself. A name that nobody follows any more is forgotten.
//! - A pair whose key does not fit its certificate is never served, nor is one that cannot be read: it is reported,
//!   and the last good one stays, also when its secret is deleted.
//! - A name without a secret waits; the fallback is served under it until the right one comes.
//! - A watch that has gone stale, a token that was rotated and an API server that was away heal by themselves.
//!
//! | file | is about |
//! |---|---|
//! | `read` | from the fields of a secret to what is served; no IO |
//! | `follow` | one name: its secret, its fallback, what is published |
//! | `kube`, `kube/keep` | the API server: how it is asked, and one secret listed and then watched |
//! | `answer` | what it sends |
//! | `folder` | the folder |
//!
//! Uses `secrets` (the seam and its values), `fetch` and `tls`.
//!
//! Why not the `kube` crate (measured, `benches/README.md`): for one list and one watch it adds 3.2 MB to a release
//! binary that has `hyper`, `rustls` and `tonic` already, and twice the resident memory; the line was 1 MB. It would also
//! be a second HTTP stack beside `fetch`. Why not the types of `k8s-openapi`: three fields are read, and what is read of a
//! secret is wiped when it is dropped, which those types do not do. So this needs no cargo feature of its own.

mod answer;
mod folder;
mod follow;
mod kube;
mod read;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::Notify;

/// What bytes reach first.
#[cfg(debug_assertions)]
pub mod fuzz {
    use super::{answer, read};

    /// What the API server sent: a secret of it is served whole or not at all.
    pub fn answer(bytes: &[u8]) {
        answer::fuzz(bytes, |object| {
            for name in ["a", "a-cacert"] {
                let _ = read::resource(name, "a", &|field| object.field(field));
            }
        });
    }
}

pub(crate) use self::kube::Api;

use self::read::BadSecret;
use crate::base::files::Watches;
use crate::base::quote::shown;
use crate::base::seldom::Seldom;
use crate::base::tasks::Group;
use crate::secrets::slot::Slot;
use crate::secrets::{Error, Fetched, ResourceName, Secret, SecretSource, name};
use crate::trouble::{Kind, Report, Reporter};

/// Different names that may be followed at a time; a gateway has one for each of its hosts at most.
const NAMES: usize = 1000;
/// What is served of all of them, in bytes: as much as of clients' files.
const MOST: usize = 32 << 20;
/// Secrets may change as often as they like.
static SERVED: Seldom = Seldom::new(60);
/// How often it is looked whether somebody still follows a name.
const LOOK: Duration = Duration::from_secs(30);

/// Where secrets come from.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// The API server.
    Api(Arc<Api>),
    /// A folder with one folder for each secret.
    Folder(PathBuf),
}

/// What the source is told.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Where secrets come from.
    pub origin: Origin,
    /// Served in place of a pair that is not there; empty: nothing is.
    pub fallback: String,
}

/// The source of gateways' secrets, and what can be told about it. Clones share it.
#[derive(Clone)]
pub(crate) struct Secrets(Arc<Inner>);

struct Inner {
    config: Config,
    group: Group,
    slots: Mutex<HashMap<String, Arc<Asked>>>,
    /// The set of names has changed.
    asked: Notify,
    errors: Mutex<HashMap<String, (String, Reporter)>>,
    trouble: Reporter,
}

/// A name that somebody asked for.
#[derive(Default)]
struct Asked {
    slot: Slot,
    /// A secret of its own was served once: the fallback never takes that one's place.
    own: AtomicBool,
}

impl Asked {
    fn has_own(&self) -> bool {
        self.own.load(Ordering::Relaxed)
    }

    fn has_any(&self) -> bool {
        self.slot.value().is_some()
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secrets").field("config", &self.0.config).finish_non_exhaustive()
    }
}

impl Secrets {
    /// A source whose tasks run in `group`.
    #[must_use]
    pub(crate) fn new(config: Config, watches: &Watches, group: Group, trouble: Reporter) -> Self {
        let folder = match &config.origin {
            Origin::Folder(path) => Some(path.clone()),
            Origin::Api(_) => None,
        };
        let (slots, asked, errors) = (Mutex::default(), Notify::new(), Mutex::default());
        let secrets = Self(Arc::new(Inner { config, group: group.clone(), slots, asked, errors, trouble }));
        if let Some(path) = folder {
            let (task, watches, stop) = (secrets.clone(), watches.clone(), group.token());
            group.lasting("gateway secrets", async move { folder::run(task, path, &watches, stop).await });
        }
        secrets
    }

    /// For the status document: names, never contents.
    #[must_use]
    pub(crate) fn status(&self) -> Value {
        let slots = lock(&self.0.slots);
        let mut waiting: Vec<&String> =
            slots.iter().filter(|(_, asked)| !asked.has_any()).map(|(name, _)| name).collect();
        waiting.sort();
        let errors = lock(&self.0.errors);
        let errors: HashMap<&String, &String> = errors.iter().map(|(name, (why, _))| (name, why)).collect();
        json!({ "asked": slots.len(), "waiting": waiting, "errors": errors })
    }

    /// What is wrong at the moment.
    #[must_use]
    pub(crate) fn troubles(&self) -> Vec<Report> {
        let report = |(name, (why, _)): (&String, &(String, Reporter))| {
            Report::new(kind_of(why), format!("gateway secret {name}: {why}"))
        };
        lock(&self.0.errors).iter().map(report).collect()
    }

    /// Notes and logs a change of what is wrong with a name.
    fn note(&self, name: &str, error: Option<String>) {
        let mut errors = lock(&self.0.errors);
        if errors.get(name).map(|(why, _)| why) == error.as_ref() {
            return;
        }
        let Some(why) = error else {
            if let Some((_, trouble)) = errors.remove(name) {
                trouble.end();
            }
            return;
        };
        tracing::debug!(target: "sds", "gateway secret {name}: {why}");
        let report = Report::new(kind_of(&why), format!("gateway secret {name}: {why}")).about(name);
        let trouble = errors.remove(name).map_or_else(|| self.0.trouble.sibling(), |(_, trouble)| trouble);
        trouble.report(report);
        errors.insert(name.to_owned(), (why, trouble));
    }

    /// Publishes a value if it differs from the last; `spare`: it is the fallback's.
    fn publish(&self, name: &str, asked: &Asked, secret: Secret, spare: bool) {
        if !spare {
            asked.own.store(true, Ordering::Relaxed);
        }
        let same = match (asked.slot.value(), &secret) {
            (Some(Secret::Roots(old)), Secret::Roots(new)) => old == *new,
            (Some(Secret::Identity(old)), Secret::Identity(new)) => {
                old.chain == new.chain && old.key == new.key
            }
            _ => false,
        };
        if !same {
            if let Some(more) = SERVED.may() {
                tracing::info!(target: "sds", "gateway secret {} is served{more}", shown(name));
            }
            asked.slot.publish(secret);
        }
    }

    /// What there is of a name in a secret, if there is room for it.
    fn resource(
        &self,
        name: &str,
        under: &str,
        secret: &str,
        field: read::Field<'_>,
    ) -> Result<Option<Secret>, BadSecret> {
        let found = read::resource(under, secret, field)?;
        match &found {
            Some(value) if !self.has_room(name, value) => Err(BadSecret::Room),
            _ => Ok(found),
        }
    }

    fn has_room(&self, name: &str, fresh: &Secret) -> bool {
        let slots = lock(&self.0.slots);
        let old = slots.get(name).and_then(|asked| asked.slot.value());
        // It takes no more than before: nobody else has to be asked.
        if old.is_some_and(|old| size(fresh) <= size(&old)) {
            return true;
        }
        let others = slots.iter().filter(|(other, _)| *other != name);
        let held: usize = others.filter_map(|(_, asked)| asked.slot.value()).map(|value| size(&value)).sum();
        held + size(fresh) <= MOST
    }

    fn slots(&self) -> Vec<(String, Arc<Asked>)> {
        lock(&self.0.slots).iter().map(|(name, asked)| (name.clone(), asked.clone())).collect()
    }

    /// Forgets a name that nobody follows; gives whether it did.
    fn forget(&self, name: &str) -> bool {
        let mut slots = lock(&self.0.slots);
        // The map has one, the task that looks another: a third is somebody who is about to follow.
        let unused =
            slots.get(name).is_none_or(|asked| asked.slot.followers() == 0 && Arc::strong_count(asked) <= 2);
        if unused {
            slots.remove(name);
            lock(&self.0.errors).remove(name);
        }
        unused
    }

    fn slot(&self, name: &str) -> Result<Arc<Asked>, Error> {
        let mut slots = lock(&self.0.slots);
        if let Some(slot) = slots.get(name) {
            return Ok(slot.clone());
        }
        if slots.len() >= NAMES {
            return Err(Error::TooMany(NAMES));
        }
        let slot = Arc::new(Asked::default());
        slots.insert(name.to_owned(), slot.clone());
        drop(slots);
        self.0.asked.notify_one();
        if let Origin::Api(api) = &self.0.config.origin {
            let (task, name, api, stop) = (self.clone(), name.to_owned(), api.clone(), self.0.group.token());
            let slot = slot.clone();
            self.0.group.run("gateway secret", async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = follow::run(&task, &api, &name, &slot) => {}
                }
            });
        }
        Ok(slot)
    }
}

impl SecretSource for Secrets {
    fn name(&self, text: &str) -> Result<ResourceName, name::Error> {
        if !is_name(text) {
            return Err(name::Error::NoSecret(shown(text).into_owned()));
        }
        Ok(ResourceName::Gateway(text.to_owned()))
    }

    fn fetch(&self, name: ResourceName) -> BoxFuture<'static, Result<Fetched, Arc<Error>>> {
        let (secrets, stop) = (self.clone(), self.0.group.token());
        Box::pin(async move {
            let name = name.to_string();
            let asked = secrets.slot(&name).map_err(Arc::new)?;
            // As long as the asker waits: the secret may be made tomorrow.
            tokio::select! {
                () = stop.cancelled() => Err(Arc::new(Error::Stopped)),
                fetched = asked.slot.wait() => fetched.ok_or_else(|| Arc::new(Error::Stopped)),
            }
        })
    }
}

fn size(secret: &Secret) -> usize {
    match secret {
        Secret::Identity(pair) => pair.chain.len() + pair.key.len(),
        Secret::Roots(roots) => roots.pem.len(),
    }
}

/// A secret's trouble, unless it is this machine's.
fn kind_of(why: &str) -> Kind {
    Kind::of_start(why).unwrap_or(Kind::GatewaySecret)
}

/// Whether a secret can have this name: as Kubernetes has them, and nothing that could be a path.
#[must_use]
pub(crate) fn is_name(text: &str) -> bool {
    let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
    let fits = !text.is_empty() && text.len() <= 253;
    fits && text.bytes().all(letter) && !text.starts_with('.') && !text.contains("..")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
