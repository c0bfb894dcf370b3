//! What stands between a connection and its streams: what is no call is refused as on the other socket, and a
//! call is given the secrets of whoever brings it.

use std::convert::Infallible;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::service::TowerToHyperService;
use tonic::body::Body;
use tonic::metadata::MetadataMap;
use tonic::{Response, Status, Streaming};
use zeroize::Zeroizing;

use super::stream::{Call, Delta, Responses, Shared, Sotw, fetch, serve};
use crate::net::clients::Client;
use crate::net::grpc::{self, Refused};
use crate::secrets::SecretSource;

const SERVICE: &str = "envoy.service.secret.v3.SecretDiscoveryService";
const METHODS: &[&str] = &["StreamSecrets", "DeltaSecrets", "FetchSecrets"];

/// Makes a source of secrets for each caller, from the token that it brings.
pub trait Callers: Send + Sync + std::fmt::Debug + 'static {
    /// The secrets of whoever has this token; the source lives as long as the caller's stream.
    fn source(&self, token: Zeroizing<String>) -> BoxFuture<'_, Result<Arc<dyn SecretSource>, String>>;
}

/// Whose secrets a server serves.
#[derive(Debug, Clone)]
pub(super) enum Whose {
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

/// The calls of one connection.
pub(super) struct Door(TowerToHyperService<SecretDiscoveryServiceServer<Service>>);

/// The time until which a call may last.
#[derive(Debug, Clone, Copy)]
struct Until(Option<tokio::time::Instant>);

impl Door {
    pub(super) fn new(whose: Whose, shared: Arc<Shared>, client: Arc<Client>) -> Self {
        let service = SecretDiscoveryServiceServer::new(Service { whose, shared, client });
        Self(TowerToHyperService::new(service))
    }
}

impl hyper::service::Service<http::Request<Incoming>> for Door {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, mut request: http::Request<Incoming>) -> Self::Future {
        let refused = match grpc::admitted(request.method(), request.headers()) {
            Ok(until) => {
                request.extensions_mut().insert(Until(until));
                let path = request.uri().path();
                let served = path.strip_prefix('/').and_then(|p| p.rsplit_once('/'));
                if served.is_some_and(|(service, method)| service == SERVICE && METHODS.contains(&method)) {
                    let answer = self.0.call(request);
                    return Box::pin(async { answer.await.map(readable) });
                }
                grpc::unknown(path, |service| service == SERVICE).into_http()
            }
            Err(Refused::Grpc(status)) => status.into_http(),
            Err(Refused::Http(status)) => {
                let mut response = http::Response::new(Body::empty());
                *response.status_mut() = status;
                response
            }
        };
        Box::pin(std::future::ready(Ok(readable(refused))))
    }
}

// The library encodes more of a status' text than it must, and Envoy logs it as it comes.
fn readable(answer: http::Response<Body>) -> http::Response<Body> {
    let (mut head, body) = answer.into_parts();
    grpc::readable(&mut head.headers);
    let body = body.map_frame(|frame| match frame.into_trailers() {
        Ok(mut trailers) => {
            grpc::readable(&mut trailers);
            http_body::Frame::trailers(trailers)
        }
        Err(frame) => frame,
    });
    http::Response::from_parts(head, Body::new(body))
}

struct Service {
    whose: Whose,
    shared: Arc<Shared>,
    client: Arc<Client>,
}

impl Service {
    async fn call<T>(&self, request: &tonic::Request<T>) -> Result<(Call, Arc<dyn SecretSource>), Status> {
        let until = request.extensions().get::<Until>().and_then(|until| until.0);
        let call = Call { until, _using: self.client.stream() };
        let source = tokio::select! {
            source = self.whose.source(request.metadata()) => source?,
            () = grpc::over(until) => return Err(grpc::exceeded()),
        };
        Ok((call, source))
    }
}

#[tonic::async_trait]
impl SecretDiscoveryService for Service {
    type StreamSecretsStream = Responses<DiscoveryResponse>;
    type DeltaSecretsStream = Responses<DeltaDiscoveryResponse>;

    async fn stream_secrets(
        &self,
        request: tonic::Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamSecretsStream>, Status> {
        let (call, source) = self.call(&request).await?;
        Ok(Response::new(serve::<Sotw>(Arc::clone(&self.shared), source, request.into_inner(), call)))
    }

    async fn delta_secrets(
        &self,
        request: tonic::Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        let (call, source) = self.call(&request).await?;
        Ok(Response::new(serve::<Delta>(Arc::clone(&self.shared), source, request.into_inner(), call)))
    }

    async fn fetch_secrets(
        &self,
        request: tonic::Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        let (call, source) = self.call(&request).await?;
        tokio::select! {
            fetched = fetch(&self.shared, &*source, request.into_inner()) => fetched.map(Response::new),
            () = grpc::over(call.until) => Err(grpc::exceeded()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataValue;

    use super::*;

    #[test]
    fn a_node_agents_caller_brings_its_token_in_either_field() {
        let mut metadata = MetadataMap::new();
        metadata.insert("authorization", "Bearer plain".parse().unwrap());
        assert_eq!(token_in(&metadata).unwrap().as_str(), "Bearer plain");
        let value = |bytes: &[u8]| MetadataValue::from_bytes(bytes);
        metadata.insert_bin(CREDENTIALS, value(b"Bearer binary"));
        assert_eq!(token_in(&metadata).unwrap().as_str(), "Bearer binary", "this one first");
        for (bad, why) in [(&[0xff, 0xfe][..], "is no text"), (b" ", "is empty")] {
            metadata.insert_bin(CREDENTIALS, value(bad));
            let status = token_in(&metadata).unwrap_err();
            assert!(status.message().contains(CREDENTIALS) && status.message().contains(why), "{status:?}");
        }
        metadata.insert_bin(CREDENTIALS, value(b"a"));
        metadata.append_bin(CREDENTIALS, value(b"b"));
        assert!(token_in(&metadata).unwrap_err().message().contains("more than once"));
    }
}
