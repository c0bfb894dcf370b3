//! The socket on which an upgrade is asked for: a line of JSON there, lines of text back.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::{Asked, Error, say};
use crate::base::seldom::Seldom;
use crate::base::tasks::{Stop, TaskResult};
use crate::base::uds::{self, Bound};
use crate::net::accept::{Acceptor, Came};

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

/// The socket, bound.
pub(crate) struct Door(Bound);

impl Door {
    /// Only for the agent's user; root passes everywhere.
    ///
    /// # Errors
    /// When it cannot be bound.
    pub(crate) fn bind(path: &std::path::Path) -> Result<Self, uds::Error> {
        uds::bind_with(path, 0o600).map(Self)
    }

    pub(super) async fn serve(self, ask: mpsc::Sender<Asked>, stop: Stop) -> TaskResult {
        let (listener, _file) = self.0.into_parts();
        let mut acceptor = Acceptor::new("upgrade");
        loop {
            let came = tokio::select! {
                () = stop.cancelled() => return Ok(()),
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
            let asked = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                asked = tokio::time::timeout(WITHIN, read(stream)) => asked,
            };
            if let Ok(Some(asked)) = asked
                && ask.send(asked).await.is_err()
            {
                return Ok(());
            }
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
