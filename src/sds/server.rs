//! The sockets and the connections on them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;

use super::calls::{Callers, Door, Whose};
use super::encode::Encoder;
use super::metrics::Metrics;
use super::peers::Peers;
use super::revoked::Revoked;
use super::stream::Shared;
use super::{Address, Config};
use crate::base::error::chain;
use crate::base::files::Watches;
use crate::base::seldom::Seldom;
use crate::base::tasks::Stop;
use crate::base::uds::{self, Bound};
use crate::net::authority_rewriter::AuthorityRewriter;
use crate::net::clients::{Client, HANDSHAKE};
use crate::net::io::tracked;
use crate::net::progress::Phase;
use crate::net::served::{News, Serve, Socket};
use crate::net::timer::Slack;
use crate::net::unix;
use crate::secrets::SecretSource;
use crate::trouble::{Kind, Report, Reporter};

/// Streams on one socket. Each costs 2 to 3 KB, so all of them stay below 32 MB, whoever has them; Envoy opens one for
/// each secret, and without a circuit breaker of its own no more than 1,024 at a time.
const STREAMS: usize = 11_264;
/// Streams on one connection; a client that wants more opens another one. The Go agent's limit is 100,000, with which
/// one connection could hold all memory of the pod.
const MAX_STREAMS: u32 = 5632;
/// Flow-control windows: requests are small, and what a client sends and nobody reads is held. The XDS socket's figure.
const WINDOW: u32 = 64 * 1024;

/// Largest header list accepted; a larger one ends its stream.
const HEADER_LIST: u32 = 384 * 1024;

/// A ping after so long without a read, and the time for its answer; those of the other socket.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// How long connections may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);
/// Whoever may remove a socket may do so without pause.
static SOCKET: Seldom = Seldom::new(60);

/// Bound sockets, ready to be served.
#[derive(Debug)]
pub(crate) struct Server {
    sockets: Vec<(Address, Option<Bound>)>,
    whose: Whose,
    shared: Arc<Shared>,
    trouble: Reporter,
    watches: Watches,
}

impl Server {
    /// Binds every socket of the configuration now. One that cannot be bound is tried again by
    /// [`Server::run`] until it can, as the rest of the agent is of use without it.
    #[must_use]
    pub(crate) fn bind(
        config: Config,
        source: Arc<dyn SecretSource>,
        metrics: &crate::base::metrics::Metrics,
    ) -> Self {
        let encoder =
            Encoder { private_key_provider: config.private_key_provider, crl: Revoked::new(config.crl) };
        let shared = Shared {
            encoder,
            metrics: Metrics::new(metrics),
            keepalive: config.keepalive.unwrap_or(KEEPALIVE),
            peers: Peers::new(config.allowed),
            stop: Stop::new(),
        };
        Self::with(config.sockets, Whose::One(source), shared, config.watches)
    }

    /// A second server with secrets of another kind, whose streams are counted with this one's.
    #[must_use]
    pub(crate) fn beside(&self, socket: PathBuf, source: Arc<dyn SecretSource>) -> Self {
        Self::with(vec![socket.into()], Whose::One(source), self.sharing(), self.watches.clone())
            .with_trouble(self.trouble.sibling())
    }

    /// A second server on which each caller brings its own token.
    #[must_use]
    pub(crate) fn for_callers(&self, socket: PathBuf, callers: Arc<dyn Callers>) -> Self {
        // Callers are of any user; their tokens tell who they are.
        let shared = Shared { peers: Peers::default(), ..self.sharing() };
        Self::with(vec![socket.into()], Whose::Callers(callers), shared, self.watches.clone())
            .with_trouble(self.trouble.sibling())
    }

    // What a server beside this one has in common with it.
    fn sharing(&self) -> Shared {
        Shared {
            encoder: Encoder::default(),
            metrics: self.shared.metrics.clone(),
            keepalive: self.shared.keepalive,
            peers: self.shared.peers.clone(),
            stop: Stop::new(),
        }
    }

    fn with(sockets: Vec<Address>, whose: Whose, shared: Shared, watches: Watches) -> Self {
        let sockets = sockets.into_iter().map(|address| {
            let bound = uds::bind_with(&address.path, address.mode);
            if let Err(error) = &bound {
                tracing::debug!(target: "sds", "{}; trying again", chain(error));
            }
            (address, bound.ok())
        });
        let (sockets, shared) = (sockets.collect(), Arc::new(shared));
        Self { sockets, whose, shared, trouble: Reporter::default(), watches }
    }

    /// Tells `trouble` of sockets that cannot be bound.
    #[must_use]
    pub(crate) fn with_trouble(mut self, trouble: Reporter) -> Self {
        self.trouble = trouble;
        self
    }

    /// Sockets that accept.
    #[cfg(test)]
    pub(crate) fn bound(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().filter(|(_, b)| b.is_some()).map(|(a, _)| a.path.as_path())
    }

    /// Serves until `stop`; then streams end with code 14 and the sockets are gone.
    pub(crate) async fn run(self, stop: Stop) {
        let sockets = self.sockets.into_iter().map(|(Address { path, mode }, bound)| {
            let (whose, shared, trouble) = (self.whose.clone(), self.shared.clone(), self.trouble.sibling());
            let one = One { whose, shared: shared.clone(), trouble: Mutex::new(trouble) };
            let socket = Socket::new(one, (path.clone(), mode), &self.watches, STREAMS, ["sds", "sds connection"]);
            async move {
                if !socket.run(bound, &shared.stop, GOODBYE).await {
                    tracing::debug!(target: "sds", "connections on {} did not end in time and are cut", path.display());
                }
            }
        });
        let sockets = futures_util::future::join_all(sockets);
        let stopping = async {
            stop.cancelled().await;
            self.shared.stop.cancel();
        };
        // In the task of the caller, so that a panic is the caller's end.
        futures_util::future::join(stopping, sockets).await;
    }
}

struct One {
    whose: Whose,
    shared: Arc<Shared>,
    trouble: Mutex<Reporter>,
}

impl Serve for One {
    fn admits(&self, socket: &UnixStream) -> bool {
        self.shared.peers.admit(socket, &self.shared.metrics)
    }

    fn connection(&self, io: unix::Stream, client: Arc<Client>) -> impl Future<Output = ()> + Send + 'static {
        let door = Door::new(self.whose.clone(), self.shared.clone(), client.clone());
        connection(AuthorityRewriter::new(io), door, client, self.shared.clone())
    }

    fn tell(&self, path: &Path, news: &News) {
        let trouble = || self.trouble.lock().expect("no panic holds this lock");
        match news {
            News::Unbound(error) => {
                let kind = Kind::of_chain(error).unwrap_or(Kind::SocketFolder);
                let detail = format!("SDS grpc server could not be started: {}", chain(error));
                trouble().report(Report::new(kind, detail).about(path.display().to_string()));
            }
            News::Listening => {
                if let Some(more) = SOCKET.may() {
                    tracing::info!(target: "sds", "{}{more}", news.of(path));
                }
                trouble().end();
            }
            _ => {
                if let Some(more) = SOCKET.may() {
                    tracing::warn!(target: "sds", "{}{more}", news.of(path));
                }
            }
        }
    }
}

async fn connection(
    io: AuthorityRewriter<unix::Stream>,
    door: Door,
    client: Arc<Client>,
    shared: Arc<Shared>,
) {
    let stop = shared.stop.clone();
    let (io, reads) = tracked(io);
    let keepalive = shared.keepalive;
    let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(Slack::default())
        .keep_alive_interval(Some(keepalive.0))
        .keep_alive_timeout(keepalive.1)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(HEADER_LIST)
        .serve_connection(TokioIo::new(io), door);
    tokio::pin!(serving);
    // Its opening, a preface and the settings, may come in two pieces.
    let opening = async {
        tokio::time::sleep(HANDSHAKE).await;
        if reads.count() >= 2 || client.progress.phase() != Phase::New {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = opening => return,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(target: "sds", "a connection ended: {}", chain(&error));
    }
}

#[cfg(test)]
mod tests;
