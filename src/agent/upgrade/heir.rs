//! The new program: what it was left, and the way back to the old one until it serves.

use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::state::{self, Counts, HandoverState};
use super::{Error, say};
use crate::base::handover::{self, Parcel};
use crate::{envoy, secrets};

/// Why the start of this program is given up, in the words of whoever gave up last.
static WHY: Mutex<Option<String>> = Mutex::new(None);

/// What a predecessor in this process has left.
#[derive(Debug)]
pub(crate) struct Heir {
    state: HandoverState,
    parcel: Parcel,
}

impl Heir {
    // The sockets go where those who bind find them; the rest stays here.
    fn of(mut parcel: Parcel) -> io::Result<Self> {
        let state = HandoverState::of(&parcel)?;
        let own = [
            state::STATE,
            state::KEY,
            state::CHAIN,
            state::ROOT,
            state::NAMES,
            state::REPLAY,
            state::REPLY,
            state::PROGRAM,
        ];
        let mine = own.into_iter().filter_map(|key| parcel.remove_entry(key)).collect();
        handover::accept(parcel);
        Ok(Self { state, parcel: mine })
    }

    /// Envoys that run.
    pub(crate) fn envoys(&self) -> Option<envoy::Kept> {
        self.state.envoys.clone()
    }

    /// Whether a certificate is handed over.
    pub(crate) fn has_certificate(&self) -> bool {
        self.state.identity.is_some()
    }

    /// The certificate.
    pub(crate) fn secrets(&self) -> Option<secrets::Kept> {
        self.state.secrets(&self.parcel).unwrap_or_else(|error| {
            tracing::warn!("the certificate of the previous program cannot be read: {error}");
            None
        })
    }

    /// The mesh's trust bundle.
    pub(crate) fn bundle(&self) -> Vec<String> {
        self.state.bundle.clone()
    }

    /// The name table; empty: there was none.
    pub(crate) fn names(&self) -> Bytes {
        self.bytes(state::NAMES).unwrap_or_default()
    }

    /// The last good configuration.
    pub(crate) fn replay(&self) -> Option<Bytes> {
        self.bytes(state::REPLAY)
    }

    fn bytes(&self, key: &str) -> Option<Bytes> {
        state::bytes(&self.parcel, key).ok().flatten().map(|bytes| Bytes::copy_from_slice(&bytes))
    }

    /// How earlier upgrades have ended.
    pub(crate) fn counts(&self) -> Counts {
        self.state.counts
    }

    /// A signal that came while nobody listened.
    pub(crate) fn stop(&self) -> Option<&str> {
        self.state.stop.as_deref()
    }

    /// Whether all of it can be read.
    pub(super) fn readable(&self) -> io::Result<()> {
        self.state.secrets(&self.parcel)?;
        for key in [state::NAMES, state::REPLAY] {
            state::bytes(&self.parcel, key)?;
        }
        Ok(())
    }

    /// This program serves: there is no way back from here, and none is needed.
    pub(crate) fn settle(self) {
        for key in handover::settle() {
            tracing::info!("{key} of the previous program is no longer used and is closed");
        }
        *BACK.lock().unwrap_or_else(PoisonError::into_inner) = None;
        handover::pass(false);
        let took = state::millis(SystemTime::now()).saturating_sub(self.state.began);
        let took = Duration::from_millis(took);
        let version = crate::base::build_info::VERSION;
        let reply =
            self.parcel.get(state::REPLY).and_then(|(_, fd)| fd.try_clone().ok()).map(UnixStream::from);
        match &self.state.failed {
            None => {
                tracing::info!(
                    "version {version} has taken over from version {} in {took:.1?}; Envoy goes on",
                    self.state.version
                );
                say(
                    reply.as_ref(),
                    &format!(
                        "done: version {version} serves after {took:.1?}, in place of {}",
                        self.state.version
                    ),
                );
            }
            Some(why) => {
                tracing::error!("the upgrade failed, version {version} goes on as before: {why}");
                say(reply.as_ref(), &format!("failed: {why}; version {version} goes on"));
            }
        }
    }
}

/// Gives the reason for which a start is refused; it is told to whoever asked for the upgrade.
pub(crate) fn because(why: &str) {
    *WHY.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_owned());
}

/// All that was handed over, for the way back.
static BACK: Mutex<Option<Parcel>> = Mutex::new(None);

/// Starts the agent; if it was to take over and does not come to serve, the old program is executed again.
pub(crate) fn guarded(start: impl FnOnce(Option<Heir>) -> u8) -> u8 {
    let heir = match handover::receive() {
        None => return start(None),
        Some(heir) => heir.and_then(|parcel| {
            *BACK.lock().unwrap_or_else(PoisonError::into_inner) = Some(copied(&parcel)?);
            Heir::of(parcel)
        }),
    };
    // Executed by its descriptor, whose number would be its name; people look for the agent's.
    let _ = rustix::thread::set_name(c"pilot-agent");
    handover::pass(true);
    let status = match heir {
        Ok(heir) => match std::panic::catch_unwind(AssertUnwindSafe(|| start(Some(heir)))) {
            Ok(status) => status,
            Err(panic) if !handover::passing() => std::panic::resume_unwind(panic),
            Err(_) => {
                because("the new program panicked; its last lines say where");
                255
            }
        },
        Err(error) => {
            because(&format!("what was handed over cannot be read: {error}"));
            255
        }
    };
    if !handover::passing() {
        return status;
    }
    let why = WHY.lock().unwrap_or_else(PoisonError::into_inner).take();
    let why = why.unwrap_or_else(|| format!("it ended with status {status} before it served"));
    let back = BACK.lock().unwrap_or_else(PoisonError::into_inner).take();
    tracing::error!("this program cannot take over, going back to the old one: {why}");
    if let Some(Err(error)) = back.map(|mut back| again(&mut back, &why)) {
        tracing::error!("neither program can go on: {error}");
    }
    crate::base::logging::flush();
    status
}

fn copied(parcel: &Parcel) -> io::Result<Parcel> {
    parcel.iter().map(|(key, (detail, fd))| Ok((key.clone(), (detail.clone(), fd.try_clone()?)))).collect()
}

/// What is handed over to a trial.
///
/// # Errors
/// When there is nothing, or it cannot be read.
pub(crate) fn on_trial() -> Result<Heir, Error> {
    let parcel = handover::receive().ok_or(Error::NothingGiven)?;
    let _ = rustix::thread::set_name(c"pilot-agent");
    // Nothing of it is ours.
    handover::pass(true);
    parcel.and_then(Heir::of).map_err(Error::Unreadable)
}

/// Executes the program that hands over, with the reason.
pub(super) fn again(parcel: &mut Parcel, why: &str) -> io::Result<Infallible> {
    let mut state = HandoverState::of(parcel)?;
    if state.failed.is_some() {
        return Err(io::Error::other("it is the old program that failed"));
    }
    state.failed = Some(why.to_owned());
    state.counts.fell_back += 1;
    state.counts.done = state.counts.done.saturating_sub(1);
    state.put_alone(parcel)?;
    let Some((_, program)) = parcel.remove(state::PROGRAM) else {
        return Err(io::Error::other("the old program is not there"));
    };
    handover::block_signals();
    crate::base::logging::flush();
    Err(handover::become_program(&program, state.words.into_iter().map(Into::into), parcel))
}
