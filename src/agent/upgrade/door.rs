//! The socket on which an upgrade is asked for: a line of JSON there, lines of text back. Where somebody has removed it,
//! it is bound again.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::{Asked, Error, say};
use crate::base::files::Watches;
use crate::base::seldom::Seldom;
use crate::base::tasks::{Stop, TaskResult};
use crate::base::uds::{self, Bound};
use crate::net::accept::{Acceptor, Came};
use crate::net::kept::Keeper;
use crate::net::served::News;

/// A request is one path.
const LONGEST: u64 = 8 * 1024;
/// Whoever connects says what it wants at once.
const WITHIN: Duration = Duration::from_secs(2);
/// Whoever is refused may come again at once.
static REFUSED: Seldom = Seldom::new(10);

/// What is asked for.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    /// The new agent; without it the file from which the agent was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binary: Option<PathBuf>,
    /// Another Envoy, which is to take the place of the one that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envoy: Option<PathBuf>,
}

/// A disk that takes no socket may do so for long.
static UNBOUND: Seldom = Seldom::new(1);

/// The socket, bound.
pub(crate) struct Door {
    path: PathBuf,
    bound: Bound,
}

impl Door {
    /// Only for the agent's user; root passes everywhere.
    ///
    /// # Errors
    /// When it cannot be bound.
    pub(crate) fn bind(path: &Path) -> Result<Self, uds::Error> {
        Ok(Self { path: path.to_owned(), bound: uds::bind_with(path, uds::PRIVATE)? })
    }

    pub(super) async fn serve(self, ask: mpsc::Sender<Asked>, watches: Watches, stop: Stop) -> TaskResult {
        let Self { path, mut bound } = self;
        let mut keeper = Keeper::new(path.clone(), uds::PRIVATE, &watches).unspoken();
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                served = serve(&path, bound, &mut keeper, &ask) => served?,
            }
            if ask.is_closed() {
                return Ok(());
            }
            bound = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                bound = bound_again(&path, &mut keeper) => bound,
            };
        }
    }
}

async fn bound_again(path: &Path, keeper: &mut Keeper) -> Bound {
    loop {
        match keeper.bind().await {
            Ok(bound) => {
                tracing::info!("{}", News::Listening.of(path));
                return bound;
            }
            Err((error, delay)) => {
                if let Some(more) = UNBOUND.may() {
                    tracing::warn!("{}{more}", crate::base::error::chain(&error));
                }
                tokio::time::sleep(delay).await;
            }
        }
    }
}

// Until its file is gone, or nobody wants to know any more.
async fn serve(path: &Path, bound: Bound, keeper: &mut Keeper, ask: &mpsc::Sender<Asked>) -> TaskResult {
    let (listener, file) = bound.into_parts();
    let place = file.place();
    let mut missed = pin!(keeper.missed(&place, |path| tracing::warn!("{}", News::Taken.of(path))));
    let mut acceptor = Acceptor::new("upgrade");
    loop {
        let came = tokio::select! {
            biased;
            () = &mut missed => {
                tracing::warn!("{}", News::Removed.of(path));
                return Ok(());
            }
            came = acceptor.next(&listener) => came,
        };
        let stream = match came {
            Ok(Came::In(stream, _) | Came::Last(stream)) => stream,
            Err(error) => return Err(format!("the upgrade socket failed: {error}").into()),
        };
        if let Err(why) = admitted(&stream) {
            if let Some(more) = REFUSED.may() {
                tracing::warn!("a request for an upgrade is refused: {why}{more}");
            }
            continue;
        }
        if let Ok(Some(asked)) = tokio::time::timeout(WITHIN, read(stream)).await
            && ask.send(asked).await.is_err()
        {
            return Ok(());
        }
    }
}

// The mode of the file keeps others out; this does so where somebody has changed it.
fn admitted(stream: &UnixStream) -> Result<(), Error> {
    let peer = stream.peer_cred().map_err(Error::PeerUnknown)?;
    let own = rustix::process::geteuid().as_raw();
    if peer.uid() == 0 || peer.uid() == own {
        return Ok(());
    }
    Err(Error::NotAllowed { user: peer.uid(), process: peer.pid().unwrap_or_default() })
}

async fn read(stream: UnixStream) -> Option<Asked> {
    let mut line = String::new();
    let mut reader = BufReader::new(stream);
    (&mut reader).take(LONGEST).read_line(&mut line).await.ok()?;
    let reply = reader.into_inner().into_std().ok()?;
    match serde_json::from_str::<Request>(&line) {
        Ok(request) => Some(Asked { binary: request.binary, envoy: request.envoy, reply: Some(reply) }),
        Err(error) => {
            say(Some(&reply), &format!("failed: the request cannot be read: {error}"));
            None
        }
    }
}
