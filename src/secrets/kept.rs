//! The certificate over an upgrade of the agent in one process: what the new version must know to go on with it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Identity;
use super::persist::Unfit;
use super::request::Issued;
use crate::tls::cert;

/// The certificate, and its place in time. Handed over in memory only.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    /// Key and chain.
    pub identity: Arc<Identity>,
    /// The CA's root as it came.
    pub root: String,
    /// When it was issued.
    pub created: SystemTime,
    /// When it is to be renewed.
    pub renewal: SystemTime,
    /// Whether somebody has asked for it.
    pub asked: bool,
}

impl Kept {
    /// As it came from the CA.
    ///
    /// # Errors
    /// Why it is of no use.
    pub(super) fn issued(&self, now: SystemTime) -> Result<Issued, Unfit> {
        cert::check_pair(&self.identity.chain, &self.identity.key)?;
        let leaf = cert::parse_chain(&self.identity.chain)?.swap_remove(0);
        if leaf.not_after <= now {
            return Err(Unfit::Expired);
        }
        cert::parse_chain(self.root.as_bytes()).map_err(Unfit::Root)?;
        Ok(Issued {
            identity: self.identity.clone(),
            root: self.root.clone(),
            created: self.created,
            leaf,
            took: Duration::ZERO,
        })
    }
}
