//! Name tables on their way from the relay to the DNS server.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::watch;

use crate::base::error::BoxError;
use crate::base::handover;
use crate::dns::{Current, Scope, Table};
use crate::xds::{Tap, types};

/// The table as it came, for a successor; empty where none may come.
#[derive(Debug, Clone, Default)]
pub(super) struct Last(Arc<Mutex<Bytes>>);

impl Last {
    /// Its bytes; empty: there is none.
    pub(super) fn bytes(&self) -> Bytes {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Takes the tables that istiod sends.
#[derive(Debug)]
pub(super) struct NameTables {
    scope: Scope,
    current: watch::Sender<Option<Arc<Table>>>,
    last: Last,
}

impl NameTables {
    /// The tap, where the current table can be read, and where its bytes are; `known` is the last one of a predecessor.
    pub(super) fn tap(scope: Scope, known: Bytes) -> (Arc<dyn Tap>, Current, Last) {
        let (current, table) = watch::channel(None);
        let last = Last::default();
        let tap = Self { scope, current, last: last.clone() };
        if !known.is_empty()
            && let Err(error) = tap.apply(known)
        {
            tracing::warn!(target: "dns", "the name table of the previous program cannot be read: {error}");
        }
        (Arc::new(tap), table, last)
    }
}

impl Tap for NameTables {
    fn type_url(&self) -> &'static str {
        types::NAME_TABLE
    }

    fn apply(&self, body: Bytes) -> Result<(), BoxError> {
        let table = Table::decode(body.clone(), &self.scope)?;
        if handover::is_on() {
            // A copy of its own: the message it came in is larger.
            let copy = Bytes::copy_from_slice(&body);
            *self.last.0.lock().unwrap_or_else(PoisonError::into_inner) = copy;
        }
        self.current.send_replace(Some(Arc::new(table)));
        Ok(())
    }

    // On the thread of everything else 50,000 hosts (3 MiB) would take 0.2 s of it, 300,000 (22 MiB) 1.3 s.
    fn is_heavy(&self) -> bool {
        true
    }
}
