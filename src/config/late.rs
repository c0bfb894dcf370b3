//! What ends a start only once it is under way, seen before it: by commands that look, and by `vm run`, which makes rules
//! that nobody would serve. Whoever asks needs a runtime; nothing is changed or bound for good.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use super::env::var;
use super::parts::{self, Error};
use super::sources::Sources;
use crate::base::error::chain;
use crate::dns;
use crate::secrets::probe;
use crate::trouble::Kind;

/// A resolver or a metadata server that stays silent is not waited for any longer. What does not answer refuses nothing.
const PATIENCE: Duration = Duration::from_secs(4);

/// All of it that is known, of a configuration that [`super::Config::new`] takes.
pub(crate) async fn refusals(sources: &Arc<Sources>) -> Vec<Error> {
    let (identity, dns) = tokio::join!(identity(sources), dns(sources));
    [identity, grpc(sources), dns].into_iter().flatten().collect()
}

// Who owns the workload's socket, and, where that is this agent, for whom its token is exchanged.
async fn identity(sources: &Sources) -> Option<Error> {
    let socket = parts::identity::workload_socket(sources);
    match probe::look(&socket).await {
        Ok(probe::Mode::Own) => {}
        Ok(probe::Mode::External) => return None,
        // A start waits for its server.
        Err(probe::Error::Absent { .. }) if !socket.wait.is_zero() => return None,
        Err(error @ probe::Error::Name(_)) => return Some(Error::new(chain(&error))),
        Err(error) => return Some(Error::new(chain(&error)).of(Kind::SocketFolder)),
    }
    let mounted = parts::identity::plan(sources).ok()?.file_mounted;
    let exchange = parts::ca::signer(sources, mounted).ok()??.exchange?;
    tokio::time::timeout(PATIENCE, exchange.settle()).await.ok()?.err()
}

// A folder that is missing is made by the start, and whose it is shows then.
fn grpc(sources: &Sources) -> Option<Error> {
    let path = sources.path(sources.settings.some_text(var::GRPC_XDS_BOOTSTRAP)?);
    let above = path.ancestors().skip(1).find(|at| at.exists() && !at.as_os_str().is_empty());
    let why = if path.is_dir() {
        ErrorKind::IsADirectory
    } else if above.is_some_and(|at| !at.is_dir()) {
        ErrorKind::NotADirectory
    } else {
        return None;
    };
    let said = format!("failed to write the gRPC bootstrap: {} (GRPC_XDS_BOOTSTRAP): {why}", path.display());
    Some(Error::new(said).of(Kind::GrpcBootstrapMissing))
}

async fn dns(sources: &Sources) -> Option<Error> {
    let address = parts::dns::address(sources, rustix::process::getuid().is_root())?;
    let looked = tokio::time::timeout(PATIENCE, dns::resolves(address)).await;
    looked.ok()?.err().map(|why| Error::new(chain(&why)))
}
