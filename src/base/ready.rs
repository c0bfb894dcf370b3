//! Guards instead of flags: a part that is not yet able to serve holds a named [`Guard`].
//!
//! `/healthz/ready` lists the names still held; dropping a guard is the only way to become ready, so a
//! part that dies early cannot be forgotten in a "ready" state, and none can be set ready twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The set of parts that are not ready yet.
#[derive(Debug, Clone, Default)]
pub struct Ready(Arc<Mutex<BTreeMap<u64, String>>>);

/// Held by a part until it can serve.
#[derive(Debug)]
#[must_use = "dropping the guard at once means: ready"]
pub struct Guard {
    set: Ready,
    id: u64,
}

impl Ready {
    /// Registers a part that is not ready; it is once the guard is dropped.
    pub fn guard(&self, name: impl Into<String>) -> Guard {
        let mut set = self.0.lock().expect("no panic holds this lock");
        let id = set.keys().next_back().map_or(0, |k| k + 1);
        set.insert(id, name.into());
        Guard { set: self.clone(), id }
    }

    /// Names of the parts still not ready, in order of registration.
    #[must_use]
    pub fn pending(&self) -> Vec<String> {
        self.0.lock().expect("no panic holds this lock").values().cloned().collect()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Ok(mut set) = self.set.0.lock() {
            set.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_listed_until_dropped() {
        let ready = Ready::default();
        let sds = ready.guard("sds");
        let xds = ready.guard("xds");
        assert_eq!(ready.pending(), ["sds", "xds"]);
        drop(sds);
        assert_eq!(ready.pending(), ["xds"]);
        drop(xds);
        assert!(ready.pending().is_empty());
    }
}
