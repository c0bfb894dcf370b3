//! A unix socket that stays where its clients look for it: when its file is removed, or something else is put in its
//! place, it is bound again. Connections that are open know nothing of that.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::base::backoff::{Backoff, Jitter, Policy};
use crate::base::disk::{Looks, Watching};
use crate::base::files::Watches;
use crate::base::slack;
use crate::base::uds::{self, Bound, Found, Place, Unpolled};

/// A removal and what follows it are one report.
const QUIET: Duration = Duration::from_millis(25);

/// How often the socket's file is looked at without a report: while it is another server's, which may end without one;
/// where nothing is reported; and elsewhere, for what is mounted over the folders above, of which nobody is told.
const LOOKS: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(20), Duration::from_secs(300)];

/// How long a bind is waited for before the folder counts as one that does not answer.
const BINDS: Duration = Duration::from_secs(5);

/// How long a server may take until its HTTP/2 settings arrive; the Go agent's bound.
const HEALTHY_WITHIN: Duration = Duration::from_secs(1);
/// Pause before a socket is asked again whose queue of callers is full.
const FULL: Duration = Duration::from_millis(20);

/// What looks after one socket.
#[derive(Debug)]
pub(crate) struct Keeper {
    path: PathBuf,
    mode: u32,
    looks: Looks<Found>,
    binds: Looks<Result<Unpolled, uds::Error>>,
    watching: Watching,
    backoff: Backoff,
    spoken: bool,
}

impl Keeper {
    /// Of the socket at `path`, which need not be bound yet; `mode` is that of its file.
    #[must_use]
    pub(crate) fn new(path: PathBuf, mode: u32, watches: &Watches) -> Self {
        let (looks, binds) = (Looks::default(), Looks::patient(BINDS));
        let policy = Policy::new(Duration::from_secs(1), Duration::from_secs(16), 2.0, Jitter::None);
        let backoff = Backoff::new(policy.expect("bounds are in order"));
        let watching = Watching::new(watches, QUIET).with_above();
        Self { path, mode, looks, binds, watching, backoff, spoken: true }
    }

    /// Of a socket on which no HTTP is spoken: whoever listens there lives.
    #[must_use]
    pub(crate) fn unspoken(self) -> Self {
        Self { spoken: false, ..self }
    }

    /// Where the socket is.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Binds the socket.
    ///
    /// # Errors
    /// When it cannot be bound now, with the pause before the next attempt.
    pub(crate) async fn bind(&mut self) -> Result<Bound, (uds::Error, Duration)> {
        let bound = uds::bind_beside(&self.path, self.mode, &mut self.binds).await;
        match bound.unwrap_or_else(|| Err(silent(&self.path))) {
            Ok(bound) => {
                self.backoff.reset();
                Ok(bound)
            }
            Err(error) => Err((error, self.backoff.next_delay())),
        }
    }

    /// Waits until the socket must be bound again. `taken` is called when a live server of somebody else's has its place,
    /// which is left alone for as long as that lives: two agents must not take the socket from each other for ever.
    pub(crate) async fn missed(&mut self, place: &Place, taken: impl Fn(&Path)) {
        self.watching.set(BTreeSet::from([self.path.clone()])).await;
        // It may have gone before it was watched.
        let mut look = pin!(tokio::time::sleep(Duration::ZERO));
        let mut others = false;
        loop {
            tokio::select! {
                biased;
                () = self.watching.news() => look.as_mut().reset(Instant::now()),
                () = &mut look => {
                    self.watching.refresh().await;
                    let place = place.clone();
                    let found = self.looks.run(move || place.look()).await;
                    let before = std::mem::take(&mut others);
                    match found {
                        Some(Found::Other) if is_served(&self.path, self.spoken).await => others = true,
                        Some(Found::Other | Found::Gone) => return,
                        // A folder that does not answer says nothing of the socket in it.
                        Some(Found::Ours) | None => {}
                    }
                    if others && !before {
                        taken(&self.path);
                    }
                    let [theirs, unseen, seen] = LOOKS;
                    let next = match () {
                        () if others => theirs,
                        () if self.watching.blind() || self.looks.stuck() => unseen,
                        () => seen,
                    };
                    look.set(tokio::time::sleep_until(slack::until(Instant::now() + next)));
                }
            }
        }
    }
}

fn silent(path: &Path) -> uds::Error {
    let source = io::Error::new(io::ErrorKind::TimedOut, "its folder does not answer");
    uds::Error::Bind { path: path.to_owned(), source }
}

async fn is_served(path: &Path, spoken: bool) -> bool {
    if spoken {
        return live(path).await;
    }
    // Whoever has too many callers lives, too.
    UnixStream::connect(path).await.map_or_else(|e| e.kind() == io::ErrorKind::WouldBlock, |_| true)
}

/// Whether an HTTP/2 server answers on the socket within [`HEALTHY_WITHIN`].
pub(crate) async fn live(path: &Path) -> bool {
    matches!(tokio::time::timeout(HEALTHY_WITHIN, settings(path)).await, Ok(Ok(true)))
}

// A server that lives makes room in its queue.
async fn connected(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(full) if full.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(FULL).await,
            done => return done,
        }
    }
}

// Connection preface and an empty SETTINGS frame (RFC 9113 §3.4); the server's first frame must be
// SETTINGS as well, and not an acknowledgement.
async fn settings(path: &Path) -> io::Result<bool> {
    let mut stream = connected(path).await?;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00").await?;
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    Ok(head[3] == 4 && head[4] & 1 == 0 && head[5..] == [0; 4])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::base::tasks::Group;

    #[tokio::test]
    async fn a_server_whose_queue_is_full_for_a_moment_lives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("full");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        rustix::net::listen(listener.as_fd(), 0).unwrap();
        let _waits = UnixStream::connect(&path).await.unwrap();
        let full = UnixStream::connect(&path).await.unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert!(!live(&path).await, "it does not take them");
        let group = Group::new();
        let server = async move {
            while let Ok((mut caller, _)) = listener.accept().await {
                caller.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
            }
        };
        let asks = live(&path);
        tokio::pin!(asks);
        assert!(futures_util::poll!(&mut asks).is_pending(), "it was told that the queue is full");
        group.run("server", server);
        assert!(asks.await);
    }
}
