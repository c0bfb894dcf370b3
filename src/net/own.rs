//! Which clients of unix sockets are the agent's own Envoy: what it needs is not given to others.
//!
//! Any process that can open a socket's file can take places, streams and memory behind it, and a flood of many
//! processes stays below every share of one. So `envoy` says here which processes it runs, and the bounds of a socket
//! (`places`, `streams`, `grpc::messages`) never end what is theirs for somebody else. An Envoy behind a wrapper script
//! is known by its ancestors; one that somebody else has started (`ENVOY_EXTERNAL`) is a client as any other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::base::process;

/// A wrapper script that starts a script that starts Envoy.
const GENERATIONS: usize = 4;

/// Processes: how often each was named, and which of all it was.
static RUNNING: Mutex<BTreeMap<i32, (usize, u64)>> = Mutex::new(BTreeMap::new());
static NAMED: AtomicU64 = AtomicU64::new(0);

/// A process that is the agent's own until this is dropped.
#[derive(Debug)]
pub(crate) struct Own(i32);

impl Own {
    /// This process, and what it starts.
    pub(crate) fn process(pid: i32) -> Self {
        let first = || (0, NAMED.fetch_add(1, Relaxed));
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).entry(pid).or_insert_with(first).0 += 1;
        Self(pid)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((times, _)) = running.get_mut(&self.0) {
            *times -= 1;
            if *times == 0 {
                running.remove(&self.0);
            }
        }
    }
}

/// Which of our Envoys this process, or one that has started it, is: a later one has a higher number. `None`: it is none.
pub(crate) fn which(pid: i32) -> Option<u64> {
    let mut at = Some(pid);
    for _ in 0..GENERATIONS {
        let pid = at.filter(|pid| *pid > 1)?;
        if let Some((_, number)) = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).get(&pid) {
            return Some(*number);
        }
        at = process::parent(pid);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_started_by_an_own_process_is_own() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let parent = process::parent(pid).unwrap();
        assert_eq!([which(pid), which(0), which(1)], [None; 3]);
        let again = Own::process(parent);
        drop(Own::process(parent));
        assert!(which(parent).is_some() && which(parent) == which(pid));
        let later = Own::process(pid);
        assert!(which(pid) > which(parent), "the one that was named later");
        drop((again, later));
        assert_eq!([which(parent), which(pid)], [None; 2]);
    }
}
