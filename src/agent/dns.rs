//! Name tables on their way from the relay to the DNS server.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::watch;

use crate::dns::{Current, Scope, Table};
use crate::xds::{Tap, types};

/// Takes the tables that istiod sends.
#[derive(Debug)]
pub(super) struct NameTables {
    scope: Scope,
    current: watch::Sender<Option<Arc<Table>>>,
}

impl NameTables {
    /// The tap, and where the current table can be read.
    pub(super) fn tap(scope: Scope) -> (Arc<dyn Tap>, Current) {
        let (current, table) = watch::channel(None);
        (Arc::new(Self { scope, current }), table)
    }
}

impl Tap for NameTables {
    fn type_url(&self) -> &'static str {
        types::NAME_TABLE
    }

    fn apply(&self, body: Bytes) -> Result<(), String> {
        let table = Table::decode(body, &self.scope)?;
        self.current.send_replace(Some(Arc::new(table)));
        Ok(())
    }
}
