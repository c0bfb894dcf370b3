//! The sockets and the connections on them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::metadata::MetadataMap;
use tonic::{Response, Status, Streaming};
use tower::util::MapResponse;
use zeroize::Zeroizing;

use super::Config;
use super::encode::Encoder;
use super::metrics::Metrics;
use super::stream::{Delta, Responses, Shared, Sotw, fetch, serve};
use crate::base::backoff::{Backoff, Jitter, Policy};
use crate::base::error::chain;
use crate::base::grpc;
use crate::base::tasks::{Set, Stop};
use crate::base::uds::{self, Bound, SocketFile};
use crate::net::accept::{Acceptor, Came};
use crate::secrets::{SecretSource, probe};
use crate::trouble::{Kind, Report, Reporter};

/// Streams on one connection; the Go agent's limit.
const MAX_STREAMS: u32 = 100_000;

/// How often the socket's file is looked at. One stat; a client that finds it gone retries about as
/// often.
const LOOK: Duration = Duration::from_secs(2);

/// How long connections may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

/// Makes a source of secrets for each caller, from the token that it brings.
pub trait Callers: Send + Sync + std::fmt::Debug + 'static {
    /// The secrets of whoever has this token; the source lives as long as the caller's stream.
    fn source(&self, token: Zeroizing<String>) -> BoxFuture<'_, Result<Arc<dyn SecretSource>, String>>;
}

/// Whose secrets a server serves.
#[derive(Debug, Clone)]
enum Whose {
    One(Arc<dyn SecretSource>),
    Callers(Arc<dyn Callers>),
}

impl Whose {
    async fn source(&self, metadata: &MetadataMap) -> Result<Arc<dyn SecretSource>, Status> {
        match self {
            Self::One(source) => Ok(Arc::clone(source)),
            Self::Callers(callers) => {
                let token = token_in(metadata)?;
                callers.source(token).await.map_err(Status::unavailable)
            }
        }
    }
}

/// The metadata that brings a caller's token; before `authorization`.
const CREDENTIALS: &str = "istio_sds_credentials_header-bin";

fn token_in(metadata: &MetadataMap) -> Result<Zeroizing<String>, Status> {
    let wrong =
        |name: &str, why: &str| Status::unauthenticated(format!("the caller's metadata {name} {why}"));
    let binary: Vec<_> = metadata.get_all_bin(CREDENTIALS).iter().collect();
    let plain: Vec<_> = metadata.get_all("authorization").iter().collect();
    let (name, count, token) = if let Some(first) = binary.first() {
        let bytes = first.to_bytes().map_err(|_| wrong(CREDENTIALS, "is no base64"))?;
        (
            CREDENTIALS,
            binary.len(),
            String::from_utf8(bytes.to_vec()).map_err(|_| wrong(CREDENTIALS, "is no text"))?,
        )
    } else if let Some(first) = plain.first() {
        let text = first.to_str().map_err(|_| wrong("authorization", "is no text"))?;
        ("authorization", plain.len(), text.to_owned())
    } else {
        return Err(Status::unauthenticated(format!(
            "no token was brought: this socket wants one in metadata {CREDENTIALS} or authorization"
        )));
    };
    let token = Zeroizing::new(token);
    if count > 1 {
        return Err(wrong(name, "is there more than once"));
    }
    if token.trim().is_empty() {
        return Err(wrong(name, "is empty"));
    }
    Ok(token)
}

/// Bound sockets, ready to be served.
#[derive(Debug)]
pub struct Server {
    sockets: Vec<(PathBuf, Option<Bound>)>,
    whose: Whose,
    shared: Arc<Shared>,
    trouble: Reporter,
}

impl Server {
    /// Binds every socket of the configuration now. One that cannot be bound is tried again by
    /// [`Server::run`] until it can, as the rest of the agent is of use without it.
    #[must_use]
    pub fn bind(
        config: Config,
        source: Arc<dyn SecretSource>,
        metrics: &crate::base::metrics::Metrics,
    ) -> Self {
        let encoder = Encoder { private_key_provider: config.private_key_provider, crl: config.crl };
        Self::with(config.sockets, Whose::One(source), encoder, Metrics::new(metrics))
    }

    /// A second server with secrets of another kind, whose streams are counted with this one's.
    #[must_use]
    pub fn beside(&self, socket: PathBuf, source: Arc<dyn SecretSource>) -> Self {
        Self::with(vec![socket], Whose::One(source), Encoder::default(), self.shared.metrics.clone())
            .with_trouble(self.trouble.sibling())
    }

    /// A second server on which each caller brings its own token.
    #[must_use]
    pub fn for_callers(&self, socket: PathBuf, callers: Arc<dyn Callers>) -> Self {
        Self::with(vec![socket], Whose::Callers(callers), Encoder::default(), self.shared.metrics.clone())
            .with_trouble(self.trouble.sibling())
    }

    fn with(sockets: Vec<PathBuf>, whose: Whose, encoder: Encoder, metrics: Metrics) -> Self {
        let sockets = sockets.into_iter().map(|path| {
            let bound = uds::bind(&path);
            if let Err(error) = &bound {
                tracing::debug!(target: "sds", "{}; trying again", chain(error));
            }
            (path, bound.ok())
        });
        let shared = Shared { encoder, metrics, stop: Stop::new() };
        Self { sockets: sockets.collect(), whose, shared: Arc::new(shared), trouble: Reporter::default() }
    }

    /// Tells `trouble` of sockets that cannot be bound.
    #[must_use]
    pub fn with_trouble(mut self, trouble: Reporter) -> Self {
        self.trouble = trouble;
        self
    }

    /// Sockets that accept.
    pub fn bound(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().filter(|(_, b)| b.is_some()).map(|(p, _)| p.as_path())
    }

    /// Serves until `stop`; then streams end with code 14 and the sockets are gone.
    pub async fn run(self, stop: Stop) {
        self.run_with(stop, |stream| stream).await;
    }

    /// Like [`Server::run`], with each accepted connection passed through `wrap`.
    pub async fn run_with<W, IO>(self, stop: Stop, wrap: W)
    where
        W: Fn(UnixStream) -> IO + Clone + Send + Sync + 'static,
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut sockets = Vec::new();
        for (path, bound) in self.sockets {
            let connections = Set::new("sds connection");
            let (whose, shared) = (self.whose.clone(), Arc::clone(&self.shared));
            let trouble = self.trouble.sibling();
            let socket = Socket { path, whose, shared, connections, trouble };
            sockets.push(socket.run(bound, wrap.clone()));
        }
        let stopping = async {
            stop.cancelled().await;
            self.shared.stop.cancel();
        };
        // In the task of the caller, so that a panic is the caller's end.
        futures_util::future::join(stopping, futures_util::future::join_all(sockets)).await;
    }
}

struct Socket {
    path: PathBuf,
    whose: Whose,
    shared: Arc<Shared>,
    connections: Set,
    trouble: Reporter,
}

impl Socket {
    async fn run<W, IO>(mut self, mut bound: Option<Bound>, wrap: W)
    where
        W: Fn(UnixStream) -> IO + Sync,
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let stop = self.shared.stop.clone();
        let policy = Policy::new(Duration::from_secs(1), Duration::from_secs(16), 2.0, Jitter::None);
        let mut backoff = Backoff::new(policy.expect("bounds are in order"));
        while !stop.is_cancelled() {
            let Some(ready) = bound.take() else {
                match uds::bind(&self.path) {
                    Ok(ready) => {
                        tracing::info!(target: "sds", "listening on {}", self.path.display());
                        backoff.reset();
                        self.trouble.end();
                        bound = Some(ready);
                    }
                    Err(error) => {
                        let delay = backoff.next_delay();
                        let kind = Kind::of_chain(&error).unwrap_or(Kind::SocketFolder);
                        let detail = format!("SDS grpc server could not be started: {}", chain(&error));
                        self.trouble.report(Report::new(kind, detail).about(self.path.display().to_string()));
                        tokio::select! { () = stop.cancelled() => {}, () = tokio::time::sleep(delay) => {} }
                    }
                }
                continue;
            };
            self.accept(ready, &wrap, &stop).await;
        }
        // The file is gone by now; streams have seen the stop and end by themselves.
        if tokio::time::timeout(GOODBYE, self.connections.all_ended()).await.is_err() {
            tracing::debug!(target: "sds", "connections on {} did not end in time and are cut", self.path.display());
        }
    }

    /// Accepts until the stop, or until the socket must be bound again.
    async fn accept<W, IO>(&mut self, bound: Bound, wrap: &W, stop: &Stop)
    where
        W: Fn(UnixStream) -> IO + Sync,
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (listener, file) = bound.into_parts();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut replaced = false;
        let mut acceptor = Acceptor::new("sds");
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                came = acceptor.next(&listener) => match came {
                    Ok(Came::In(stream, _)) => {
                        let connection = connection(wrap(stream), self.whose.clone(), Arc::clone(&self.shared));
                        self.connections.spawn(connection);
                    }
                    Ok(Came::Last(stream)) => drop(stream),
                    Err(error) => {
                        tracing::warn!(target: "sds", "{} has failed and is bound again: {error}", self.path.display());
                        return;
                    }
                },
                () = self.connections.ended() => {}
                _ = look.tick() => match state(&file).await {
                    State::Ours => replaced = false,
                    State::Gone => {
                        tracing::warn!(target: "sds", "{} was removed by somebody; binding it again", self.path.display());
                        return;
                    }
                    State::Replaced if !replaced => {
                        replaced = true;
                        tracing::warn!(target: "sds", "{} now belongs to another server; keeping away from it", self.path.display());
                    }
                    State::Replaced => {}
                },
            }
        }
    }
}

enum State {
    Ours,
    Gone,
    Replaced,
}

async fn state(file: &SocketFile) -> State {
    if file.still_ours() {
        return State::Ours;
    }
    match std::fs::symlink_metadata(file.path()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => State::Ours,
        // Two agents must not take the socket from each other for ever.
        Ok(_) if probe::live(file.path()).await => State::Replaced,
        _ => State::Gone,
    }
}

async fn connection<IO>(io: IO, whose: Whose, shared: Arc<Shared>)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stop = shared.stop.clone();
    let service = SecretDiscoveryServiceServer::new(Service(whose, shared));
    let service = TowerToHyperService::new(MapResponse::new(service, readable));
    let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(MAX_STREAMS)
        .serve_connection(TokioIo::new(io), service);
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(target: "sds", "a connection ended: {}", chain(&error));
    }
}

// The library encodes more of a status' text than it must, and Envoy logs it as it comes.
fn readable(
    answer: http::Response<tonic::body::Body>,
) -> http::Response<impl http_body::Body<Data = bytes::Bytes, Error = Status> + Send + 'static> {
    let (mut head, body) = answer.into_parts();
    grpc::readable(&mut head.headers);
    let body = body.map_frame(|frame| match frame.into_trailers() {
        Ok(mut trailers) => {
            grpc::readable(&mut trailers);
            http_body::Frame::trailers(trailers)
        }
        Err(frame) => frame,
    });
    http::Response::from_parts(head, body)
}

struct Service(Whose, Arc<Shared>);

#[tonic::async_trait]
impl SecretDiscoveryService for Service {
    type StreamSecretsStream = Responses<DiscoveryResponse>;
    type DeltaSecretsStream = Responses<DeltaDiscoveryResponse>;

    async fn stream_secrets(
        &self,
        request: tonic::Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamSecretsStream>, Status> {
        let source = self.0.source(request.metadata()).await?;
        Ok(Response::new(serve::<Sotw>(Arc::clone(&self.1), source, request.into_inner())))
    }

    async fn delta_secrets(
        &self,
        request: tonic::Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        let source = self.0.source(request.metadata()).await?;
        Ok(Response::new(serve::<Delta>(Arc::clone(&self.1), source, request.into_inner())))
    }

    async fn fetch_secrets(
        &self,
        request: tonic::Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        let source = self.0.source(request.metadata()).await?;
        fetch(&self.1, &*source, request.into_inner()).await.map(Response::new)
    }
}

#[cfg(test)]
mod tests;
