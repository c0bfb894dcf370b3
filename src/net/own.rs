//! Which clients of unix sockets are the agent's own Envoy: what it needs is not given to others.
//!
//! Any process that can open a socket's file can take places, streams and memory behind it, and a flood of many
//! processes stays below every share of one. So `envoy` says here which processes it runs, and the bounds of a socket
//! (`places`, `streams`, `grpc::messages`) never end what is theirs for somebody else. An Envoy behind a wrapper script
//! is known by its ancestors; one that somebody else has started (`ENVOY_EXTERNAL`) is a client as any other.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::base::process;

/// A wrapper script that starts a script that starts Envoy.
const GENERATIONS: usize = 4;

/// Processes, and how often each was named.
static RUNNING: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

/// A process that is the agent's own until this is dropped.
#[derive(Debug)]
pub(crate) struct Own(i32);

impl Own {
    /// This process, and what it starts.
    pub(crate) fn process(pid: i32) -> Self {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner).entry(pid).or_default() += 1;
        Self(pid)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(times) = running.get_mut(&self.0) {
            *times -= 1;
            if *times == 0 {
                running.remove(&self.0);
            }
        }
    }
}

/// Whether this process, or one that has started it, is ours.
pub(super) fn is(pid: i32) -> bool {
    let mut at = Some(pid);
    for _ in 0..GENERATIONS {
        let Some(pid) = at.filter(|pid| *pid > 1) else { return false };
        if RUNNING.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&pid) {
            return true;
        }
        at = process::parent(pid);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_started_by_an_own_process_is_own() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let parent = process::parent(pid).unwrap();
        assert!(!is(pid) && !is(0) && !is(1));
        let again = Own::process(parent);
        drop(Own::process(parent));
        assert!(is(parent) && is(pid));
        drop(again);
        assert!(!is(parent) && !is(pid));
    }
}
