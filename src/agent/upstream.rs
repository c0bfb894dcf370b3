//! Who signs, with whose token, and the way to istiod. Nothing is bound here, and nothing waits for a server.

use std::sync::Arc;

use super::common::Common;
use super::tokens::{self, Tokens};
use super::upgrade::Heir;
use super::{ca, said};
use crate::ca::CaClient;
use crate::config::parts::Error;
use crate::istiod::{Connector, RootFiles};
use crate::secrets::FirstKey;
use crate::secrets::probe::{self, Mode};
use crate::trouble::Reporter;

/// The way to those who sign and configure.
pub(super) struct Upstream {
    /// Who owns the workload's socket.
    pub mode: Mode,
    /// The workload's tokens.
    pub tokens: Tokens,
    /// Who signs; none where nobody is to.
    pub ca: Option<Arc<dyn CaClient>>,
    /// The way to istiod.
    pub connector: Connector,
    /// The roots that it and the CA's client trust.
    pub roots: RootFiles,
    /// What is told of certificates.
    pub trouble: Arc<Reporter>,
    /// A key that is being made for the first certificate.
    pub first_key: Option<FirstKey>,
}

/// Makes the clients.
///
/// # Errors
/// Another server that was demanded and is not there, roots that hold no certificate.
pub(super) async fn prepare(common: &Common, heir: Option<&Heir>) -> Result<Upstream, Error> {
    let Common { config, clock, metrics, troubles, .. } = common;
    let identity = &config.identity;
    let signs = !identity.file_mounted;
    // An RSA key takes longest of all, so it is begun at once; whoever goes on with a certificate needs none now.
    let needed = signs && !heir.is_some_and(Heir::has_certificate);
    let first_key = needed.then(|| FirstKey::begin(identity.key.clone()));
    let mode = if identity.owns_socket_already() {
        // Nobody but ourselves is at the other end.
        Mode::Own
    } else {
        probe::workload(&identity.socket).await.map_err(said)?
    };
    let tokens = tokens::source(identity, clock);
    let trouble = Arc::new(troubles.reporter("citadelclient"));
    let roots = RootFiles::telling(troubles.reporter("security"));
    let ca = match (signs && mode == Mode::Own).then(|| config.ca.clone()).transpose()?.flatten() {
        Some(signer) => ca::client(&signer, tokens.source.clone(), metrics, clock, &roots, &trouble).await?,
        None => None,
    };
    let connector = Connector::sharing(config.istiod.connection.clone(), clock.clone(), &roots)
        .map_err(|e| said(e).after("failed to start xds proxy"))?;
    let first_key = first_key.filter(|_| ca.is_some());
    Ok(Upstream { mode, tokens, ca, connector, roots, trouble, first_key })
}
