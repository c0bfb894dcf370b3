//! What ends a start only once it is under way, seen before it: by commands that look, and by `vm run`, which makes rules
//! that nobody would serve. Whoever asks needs a runtime; nothing is changed or bound for good.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::env::var;
use super::parts::{self, Error};
use super::sources::Sources;
use crate::base::error::chain;
use crate::base::lane;
use crate::dns;
use crate::secrets::probe;
use crate::trouble::Kind;

/// Nothing that stays silent is waited for any longer. A folder that does is told; a resolver or a metadata server refuses nothing
/// by that.
const PATIENCE: Duration = Duration::from_secs(4);

/// All of it that is known, of a configuration that [`super::Config::new`] takes. `root`: whether the agent will be.
pub(crate) async fn refusals(sources: &Arc<Sources>, root: bool) -> Vec<Error> {
    let (identity, grpc, dns) =
        tokio::join!(identity(sources.clone()), grpc(sources.clone()), timeout(PATIENCE, dns(sources, root)));
    [identity, grpc, dns.ok().flatten()].into_iter().flatten().collect()
}

// On a thread: a folder may not answer, and whoever looks is not to hang with it. `of`: what is looked at, and what is wrong
// then.
async fn beside<T: Send + 'static>(
    (of, kind): (&Path, Kind),
    look: impl FnOnce() -> Option<T> + Send + 'static,
) -> Result<Option<T>, Error> {
    let Ok(looked) = lane::begin("configuration", look) else { return Ok(None) };
    let late = |_| Error::new(format!("{}: its folder does not answer", of.display())).of(kind);
    timeout(PATIENCE, looked).await.map(|looked| looked.ok().flatten()).map_err(late)
}

// Who owns the workload's socket, and, where that is this agent, for whom its token is exchanged.
async fn identity(sources: Arc<Sources>) -> Option<Error> {
    let socket = parts::identity::workload_socket(&sources);
    let there = socket.dir.join(&socket.file);
    // The look itself touches it, too, and would hold up everybody.
    let touched = there.clone();
    if let Err(silent) = beside((&there, Kind::SocketFolder), move || Some(touched.exists())).await {
        return Some(silent);
    }
    match probe::look(&socket).await {
        Ok(probe::Mode::Own) => {}
        Ok(probe::Mode::External) => return None,
        // A start waits for its server.
        Err(probe::Error::Absent { .. }) if !socket.wait.is_zero() => return None,
        Err(error @ probe::Error::Name(_)) => return Some(Error::new(chain(&error))),
        Err(error) => return Some(Error::new(chain(&error)).of(Kind::SocketFolder)),
    }
    let exchange = beside((&there, Kind::SocketFolder), move || {
        let mounted = parts::identity::plan(&sources).ok()?.file_mounted;
        parts::ca::signer(&sources, mounted).ok()??.exchange
    });
    match exchange.await {
        Ok(exchange) => timeout(PATIENCE, exchange?.settle()).await.ok()?.err(),
        Err(silent) => Some(silent),
    }
}

/// What is in the place of the workload's socket.
#[derive(Debug)]
pub(crate) struct Taken {
    /// The place.
    pub path: PathBuf,
    /// A live SDS server is there, for whoever has looked.
    pub answers: bool,
    /// No other server will do: the agent does not serve under this name.
    pub demanded: bool,
}

/// Something that this agent's own socket would have to be in the place of, for who is not the agent's user: that one may see
/// less. None where a start waits for what comes. What did not answer [`refusals`] in time must not be asked again.
pub(crate) async fn taken(sources: &Sources) -> Option<Taken> {
    let socket = parts::identity::workload_socket(sources);
    let path = socket.dir.join(&socket.file);
    if !socket.wait.is_zero() || std::fs::metadata(&path).ok()?.is_file() {
        return None;
    }
    let answers = probe::answers(&path).await;
    Some(Taken { path, answers, demanded: socket.file != probe::DEFAULT_SOCKET })
}

// A folder that is missing is made by the start, and whose it is shows then.
async fn grpc(sources: Arc<Sources>) -> Option<Error> {
    let path = sources.path(sources.settings.some_text(var::GRPC_XDS_BOOTSTRAP)?);
    let place = path.clone();
    beside((&path, Kind::GrpcBootstrapMissing), move || misplaced(&place)).await.unwrap_or_else(Some)
}

fn misplaced(path: &Path) -> Option<Error> {
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

async fn dns(sources: &Sources, root: bool) -> Option<Error> {
    let address = parts::dns::address(sources, root)?;
    dns::resolves(address).await.err().map(|why| Error::new(chain(&why)))
}
