//! The limit of open files. Go's runtime raises the soft one to the hard one when a program starts (since 1.19) and gives
//! what was there before to the programs that it starts, which may count on it (`select` knows 1,024); so does the agent.

use std::sync::OnceLock;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// What there was before it was raised.
static GIVEN: OnceLock<Rlimit> = OnceLock::new();

/// Raises the soft limit to the hard one. Where the system refuses, it stays.
pub(crate) fn raise() {
    let given = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: given.maximum, maximum: given.maximum };
    if given.current != given.maximum && setrlimit(Resource::Nofile, raised).is_ok() {
        let _ = GIVEN.set(given);
    }
}

/// How many files this process, and a program that it starts, may have open.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// The soft limit for a program that is started, if it differs from this one's.
pub(crate) fn given() -> Option<u64> {
    GIVEN.get().and_then(|given| given.current)
}

/// Sets this process's soft limit, before it becomes another program. Where the system refuses, it stays.
pub(crate) fn set(soft: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum });
}

/// Gives a program that was just started the limit for it. One under another user keeps this one's, unless the system
/// lets us.
pub(crate) fn give_back(child: Option<u32>) {
    let child = child.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some((child, given)) = child.zip(GIVEN.get()) {
        let _ = prlimit(Some(child), Resource::Nofile, *given);
    }
}
