//! What a process hands to the program that takes its place: descriptors, by name.
//!
//! The old program puts what must stay open into a [`Parcel`], and becomes the new one by `execve`: the same process
//! with the same children. Descriptors go through a socket pair, so none of them is ever open for a child that is
//! started meanwhile, and the receiver gets them from the kernel as descriptors, never as
//! numbers. The far end of the pair is the new program's standard input, the one descriptor that every program knows
//! by name; the input that was there before is in the parcel and is put back. Secrets go into memory that has no name
//! and cannot be changed ([`sealed`]).
//!
//! Whoever binds something that outlives the program [`offer`]s it under a key and asks [`take`] before; both do
//! nothing until [`switch_on`]. While a hand-over is under way ([`passing`]) nobody removes the files of what is
//! handed over, and nobody ends a child.
//!
//! Crates were looked at: those for systemd's `LISTEN_FDS` know no sockets of one's own making and need the
//! environment changed; `nix` blocks signals and executes without clearing that, which the standard library does.

mod exec;
mod parcel;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use exec::{become_program, block_signals, unblock_signals};
pub(crate) use parcel::{Parcel, is_left, pack, read_sealed, receive, sealed};

#[derive(Debug)]
struct Registry {
    /// What is open and would be handed over: key, then its detail and descriptor.
    open: BTreeMap<String, (String, OwnedFd)>,
    /// What was handed over and nobody has taken yet.
    given: BTreeMap<String, (String, OwnedFd)>,
}

static ON: AtomicBool = AtomicBool::new(false);
static PASSING: AtomicBool = AtomicBool::new(false);
// One process has one place to hand over.
static REGISTRY: Mutex<Registry> = Mutex::new(Registry { open: BTreeMap::new(), given: BTreeMap::new() });

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on what is offered is kept open.
pub(crate) fn switch_on() {
    ON.store(true, Relaxed);
}

/// Whether this process may be taken over.
#[must_use]
pub(crate) fn is_on() -> bool {
    ON.load(Relaxed)
}

/// The end has begun: nothing is handed over any more, and what was offered is closed with its owner.
pub(crate) fn switch_off() {
    ON.store(false, Relaxed);
    let mut registry = registry();
    registry.open.clear();
    registry.given.clear();
}

/// Says whether a hand-over is under way.
pub(crate) fn pass(now: bool) {
    PASSING.store(now, Relaxed);
}

/// Whether one is: files stay where they are, children live on.
#[must_use]
pub(crate) fn passing() -> bool {
    PASSING.load(Relaxed)
}

/// Keeps another descriptor of `fd` for a successor; takes the place of what had the same key.
pub(crate) fn offer(key: impl Into<String>, detail: impl Into<String>, fd: impl AsFd) {
    if !is_on() {
        return;
    }
    let key = key.into();
    match rustix::io::fcntl_dupfd_cloexec(fd, 3) {
        Ok(fd) => {
            registry().open.insert(key, (detail.into(), fd));
        }
        Err(error) => tracing::warn!("{key} cannot be handed over to the next program: {error}"),
    }
}

/// Withdraws an offer: a successor has no use for it.
pub(crate) fn withdraw(key: &str) {
    registry().open.remove(key);
}

/// What a predecessor has left under `key`, with what it said of it.
#[must_use]
pub(crate) fn take(key: &str) -> Option<(String, OwnedFd)> {
    registry().given.remove(key)
}

/// Whether a predecessor has left something under `key`.
#[must_use]
pub(crate) fn gives(key: &str) -> bool {
    registry().given.contains_key(key)
}

/// What a predecessor has left.
pub(crate) fn accept(parcel: Parcel) {
    registry().given.extend(parcel);
}

/// What nobody has taken is closed; gives its keys.
pub(crate) fn settle() -> Vec<String> {
    std::mem::take(&mut registry().given).into_keys().collect()
}

/// Everything that is open, or was handed over and is not open yet; another descriptor of each.
///
/// # Errors
/// The system's.
pub(crate) fn everything() -> std::io::Result<Parcel> {
    let registry = registry();
    let mut all = Parcel::new();
    for (key, (detail, fd)) in registry.given.iter().chain(&registry.open) {
        all.insert(key.clone(), (detail.clone(), fd.try_clone()?));
    }
    Ok(all)
}
