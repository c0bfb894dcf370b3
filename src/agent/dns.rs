//! Name tables on their way from the relay to the DNS server.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::watch;

use crate::base::error::BoxError;
use crate::base::handover;
use crate::base::lane::Lane;
use crate::dns::{Current, Scope, Table};
use crate::xds::{Tap, types};

/// A large one takes a second to be read.
static KNOWN: Lane = Lane::new("the name table of the previous program", 1);

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
    /// The tap, where the current table can be read, and where its bytes are.
    pub(super) fn tap(scope: Scope) -> (Arc<Self>, Current, Last) {
        let (current, table) = watch::channel(None);
        let last = Last::default();
        (Arc::new(Self { scope, current, last: last.clone() }), table, last)
    }

    /// Takes the last table of a predecessor, if there was one, beside everything else; to be called before istiod is asked
    /// for a newer one.
    pub(super) async fn take_over(self: Arc<Self>, known: Bytes) {
        if known.is_empty() {
            return;
        }
        let (tap, bytes) = (self.clone(), known.clone());
        let applied = match KNOWN.run(move || tap.apply(bytes)).await {
            Ok(applied) => applied,
            // There is no thread.
            Err(_) => self.apply(known),
        };
        if let Err(error) = applied {
            tracing::warn!(target: "dns", "the name table of the previous program cannot be read: {error}");
        }
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

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// One host, as in istiod's `NameTable`.
    #[derive(Clone, PartialEq, Message)]
    struct Table {
        #[prost(map = "string, message", tag = "1")]
        table: std::collections::HashMap<String, Info>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Info {
        #[prost(string, repeated, tag = "1")]
        ips: Vec<String>,
    }

    #[tokio::test]
    async fn a_table_that_was_left_holds_up_nobody_else() {
        let info = Info { ips: vec!["10.0.0.1".to_owned()] };
        let table = Table { table: [("a.example".to_owned(), info)].into() };
        let known: Bytes = table.encode_to_vec().into();
        let scope = || Scope::new("ns", "ns.svc.cluster.local");
        // As while a large one is read.
        let (let_go, hold) = std::sync::mpsc::channel::<()>();
        let mut large = Box::pin(KNOWN.run(move || {
            let _ = hold.recv();
        }));
        assert!(futures_util::poll!(&mut large).is_pending());
        let (tap, current, _) = NameTables::tap(scope());
        let others = async {
            assert!(current.borrow().is_none());
            drop(let_go);
        };
        tokio::join!(tap.take_over(known.clone()), others);
        assert!(current.borrow().is_some());

        let (tap, current, _) = NameTables::tap(scope());
        let _none = crate::base::lane::scarce::NoThreads::from_now_on();
        tap.clone().take_over(Bytes::from_static(b"\xff")).await;
        assert!(current.borrow().is_none(), "what cannot be read is none");
        tap.take_over(known).await;
        assert!(current.borrow().is_some());
    }
}
