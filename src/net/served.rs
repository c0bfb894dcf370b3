//! A unix socket and the connections on it: bound, accepted from, and bound again when its file is gone or it fails.
//!
//! What is spoken there is its server's business ([`Serve`]), and so is the word for the log.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;

use super::accept::{Acceptor, Came};
use super::clients::{Client, Clients};
use super::kept::Keeper;
use super::paced::Paced;
use super::unix;
use crate::base::files::Watches;
use crate::base::pressure::Short;
use crate::base::tasks::{Set, Stop};
use crate::base::uds::{self, Bound};

/// Who speaks with those who come.
pub(crate) trait Serve: Sync {
    /// Whether somebody is let in at all.
    fn admits(&self, _: &UnixStream) -> bool {
        true
    }

    /// The whole life of a connection.
    fn connection(&self, io: unix::Stream, client: Arc<Client>) -> impl Future<Output = ()> + Send + 'static;

    /// Something has become of the socket at `path`.
    fn tell(&self, path: &Path, news: &News);
}

/// What becomes of a socket. All but [`News::Unbound`] have a line for the log.
#[derive(Debug)]
pub(crate) enum News {
    /// It is bound, after it was not.
    Listening,
    /// It cannot be bound now; it is tried again.
    Unbound(uds::Error),
    /// A live server of somebody else's has its place, which is left alone for as long as that lives.
    Taken,
    /// Somebody has removed it; it is bound again.
    Removed,
    /// It gives no more connections; it is bound again.
    Failed(io::Error),
}

impl News {
    /// As a line.
    pub(crate) fn of<'a>(&'a self, path: &'a Path) -> impl fmt::Display + 'a {
        let path = path.display();
        fmt::from_fn(move |f| match self {
            Self::Listening => write!(f, "listening on {path}"),
            Self::Unbound(error) => write!(f, "{error}"),
            Self::Taken => write!(f, "{path} now belongs to another server; leaving it alone"),
            Self::Removed => write!(f, "{path} was removed by somebody; binding it again"),
            Self::Failed(error) => write!(f, "{path} has failed and is bound again: {error}"),
        })
    }
}

/// See the module.
pub(crate) struct Socket<S> {
    server: S,
    label: &'static str,
    keeper: Keeper,
    clients: Clients,
    /// Of all but the own Envoy.
    strangers: Paced,
    connections: Set,
}

impl<S: Serve> Socket<S> {
    /// Of `server` at a path, whose file gets that mode, where there may be so many `streams`; `label` is the one of its
    /// metrics, and `connection` what a task there is called.
    pub(crate) fn new(
        server: S,
        (path, mode): (PathBuf, u32),
        watches: &Watches,
        streams: usize,
        [label, connection]: [&'static str; 2],
    ) -> Self {
        let (keeper, clients) = (Keeper::new(path, mode, watches), Clients::new(streams));
        let (strangers, connections) = (Paced::new(label), Set::new(connection));
        Self { server, label, keeper, clients, strangers, connections }
    }

    /// Serves until `stop`, and gives connections so long to end after it. `bound` is the socket where it is bound
    /// already. Whether all have ended in time: those that have not are cut.
    pub(crate) async fn run(mut self, mut bound: Option<Bound>, stop: &Stop, goodbye: Duration) -> bool {
        while !stop.is_cancelled() {
            match bound.take() {
                Some(bound) => self.accept(bound, stop).await,
                None => bound = self.bind(stop).await,
            }
        }
        // The file is gone by now; streams have seen the stop and end by themselves.
        tokio::time::timeout(goodbye, self.connections.all_ended()).await.is_ok()
    }

    /// `None`: not now, or the agent stops.
    async fn bind(&mut self, stop: &Stop) -> Option<Bound> {
        let ready = tokio::select! {
            () = stop.cancelled() => return None,
            ready = self.keeper.bind() => ready,
        };
        match ready {
            Ok(bound) => {
                self.server.tell(self.keeper.path(), &News::Listening);
                Some(bound)
            }
            Err((error, delay)) => {
                self.server.tell(self.keeper.path(), &News::Unbound(error));
                tokio::select! { () = stop.cancelled() => {}, () = tokio::time::sleep(delay) => {} }
                None
            }
        }
    }

    /// Accepts until the stop, or until the socket must be bound again.
    async fn accept(&mut self, bound: Bound, stop: &Stop) {
        let (listener, file) = bound.into_parts();
        let (place, path) = (file.place(), self.keeper.path().to_owned());
        let mut missed = pin!(self.keeper.missed(&place, |path| self.server.tell(path, &News::Taken)));
        let (mut acceptor, mut short) = (Acceptor::new(self.label), Short::new());
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.connections.ended() => {}
                () = &mut missed => return self.server.tell(&path, &News::Removed),
                () = short.told() => self.clients.shed(),
                // The last: there may always be another client.
                came = acceptor.next(&listener) => match came {
                    Ok(Came::In(socket, _)) if !self.server.admits(&socket) => drop(socket),
                    Ok(Came::In(socket, _)) => {
                        let Some(client) = self.clients.welcome(&socket) else { continue };
                        match unix::Stream::new(socket) {
                            Ok(io) => {
                                let work = self.server.connection(io, client.clone());
                                let paced = (!client.is_own).then(|| self.strangers.clone());
                                client.progress.served_by(self.connections.spawn(Paced::work(paced, work)));
                            }
                            Err(error) => tracing::debug!("a connection to {} is given up: {error}", path.display()),
                        }
                    }
                    Ok(Came::Last(socket)) => self.clients.refuse(socket),
                    Err(error) => return self.server.tell(&path, &News::Failed(error)),
                },
            }
        }
    }
}
