//! The published resources: one slot for each that was subscribed to.

use std::collections::HashMap;
use std::sync::Arc;

use super::slot::Slot;
use super::{Error, Fetched, ResourceName, Secret};

/// All slots.
#[derive(Debug, Default)]
pub(super) struct Board(HashMap<ResourceName, Slot>);

impl Board {
    /// Publishes a value if it differs from the last; gives whether it did.
    pub(super) fn publish(&mut self, name: &ResourceName, secret: Secret) -> bool {
        let slot = self.0.entry(name.clone()).or_default();
        let same = match (slot.value(), &secret) {
            (Some(Secret::Roots(old)), Secret::Roots(new)) => old == *new,
            (Some(Secret::Identity(old)), Secret::Identity(new)) => {
                Arc::ptr_eq(&old, new) || (old.chain == new.chain && old.key == new.key)
            }
            _ => false,
        };
        if !same {
            slot.publish(secret);
        }
        !same
    }

    /// Announces the value once more, unchanged.
    pub(super) fn announce_again(&self, name: &ResourceName) {
        if let Some(slot) = self.0.get(name)
            && let Some(value) = slot.value()
        {
            slot.publish(value);
        }
    }

    /// Tells followers that a new value could not be had.
    pub(super) fn fail(&self, name: &ResourceName, error: &Arc<Error>) {
        if let Some(slot) = self.0.get(name) {
            slot.fail(Arc::clone(error));
        }
    }

    pub(super) fn value(&self, name: &ResourceName) -> Option<Secret> {
        self.0.get(name)?.value()
    }

    /// The value, and a follower that knows it already.
    pub(super) fn fetched(&self, name: &ResourceName) -> Option<Fetched> {
        self.0.get(name)?.fetched()
    }

    /// How often it was announced.
    pub(super) fn changes(&self, name: &ResourceName) -> u64 {
        self.0.get(name).map_or(0, Slot::changes)
    }

    pub(super) fn followers(&self, name: &ResourceName) -> usize {
        self.0.get(name).map_or(0, Slot::followers)
    }

    /// Forgets slots that nobody follows, except those that `kept` names.
    pub(super) fn sweep(&mut self, kept: impl Fn(&ResourceName) -> bool) {
        self.0.retain(|name, slot| kept(name) || slot.followers() > 0);
    }
}
