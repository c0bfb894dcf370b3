//! From a connection's requests to streams: a request that is no gRPC call is refused as on the XDS socket; a call
//! gets the source of secrets that its socket, or the caller's own token, stands for.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use tokio::time::Instant;
use tonic::Status;
use tonic::metadata::MetadataMap;
use zeroize::Zeroizing;

use super::answers::Answers;
use super::protocol::{Delta, Sotw};
use super::stream::{Call, Shared, fetch, serve};
use crate::base::error::BoxError;
use crate::net::clients::Client;
use crate::net::grpc::{self, Refused};
use crate::secrets::SecretSource;

const SERVICE: &str = "envoy.service.secret.v3.SecretDiscoveryService";

/// Makes a source of secrets for each caller, from the token that it brings.
pub(crate) trait Callers: Send + Sync + std::fmt::Debug + 'static {
    /// The secrets of whoever has this token; the source lives as long as the caller's stream.
    fn source(&self, token: Zeroizing<String>) -> BoxFuture<'_, Result<Arc<dyn SecretSource>, BoxError>>;
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
                callers.source(token).await.map_err(|why| Status::unavailable(why.to_string()))
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
pub(super) struct Door(Arc<Calls>);

struct Calls {
    whose: Whose,
    shared: Arc<Shared>,
    client: Arc<Client>,
}

#[derive(Clone, Copy)]
enum Method {
    Stream,
    Delta,
    Fetch,
}

impl Method {
    fn of(path: &str) -> Option<Self> {
        let (service, method) = path.strip_prefix('/')?.rsplit_once('/')?;
        match method {
            _ if service != SERVICE => None,
            "StreamSecrets" => Some(Self::Stream),
            "DeltaSecrets" => Some(Self::Delta),
            "FetchSecrets" => Some(Self::Fetch),
            _ => None,
        }
    }
}

impl Door {
    pub(super) fn new(whose: Whose, shared: Arc<Shared>, client: Arc<Client>) -> Self {
        Self(Arc::new(Calls { whose, shared, client }))
    }
}

impl hyper::service::Service<http::Request<Incoming>> for Door {
    type Response = http::Response<Answers>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let refused = match grpc::admitted(request.method(), request.headers()) {
            Ok(until) => {
                let path = request.uri().path();
                if let Some(method) = Method::of(path) {
                    let calls = self.0.clone();
                    return Box::pin(async move {
                        let answers = calls.serve(method, until, request).await;
                        Ok(answers.map_or_else(|status| refusal(&status), grpc::answer))
                    });
                }
                refusal(&grpc::unknown(path, |service| service == SERVICE))
            }
            Err(Refused::Grpc(status)) => refusal(&status),
            Err(Refused::Http(status)) => {
                let mut response = http::Response::new(Answers::nothing());
                *response.status_mut() = status;
                response
            }
        };
        Box::pin(std::future::ready(Ok(refused)))
    }
}

// Told in headers alone.
fn refusal(status: &Status) -> http::Response<Answers> {
    let mut response = grpc::answer(Answers::nothing());
    response.headers_mut().extend(grpc::trailers(status));
    response
}

impl Calls {
    async fn serve(
        &self,
        method: Method,
        until: Option<Instant>,
        request: http::Request<Incoming>,
    ) -> Result<Answers, Status> {
        grpc::uncompressed(request.headers())?;
        // A path may have a query of 64 kB, and a body may never come.
        let (http::request::Parts { headers, .. }, body) = request.into_parts();
        let (call, source) = self.begin(until, &MetadataMap::from_headers(headers)).await?;
        let shared = self.shared.clone();
        match method {
            Method::Stream => Ok(serve::<Sotw>(shared, source, body, call)),
            Method::Delta => Ok(serve::<Delta>(shared, source, body, call)),
            Method::Fetch => tokio::select! {
                fetched = fetch(&shared, &*source, body, &call) => fetched.map(Answers::one),
                () = grpc::over(until) => Err(grpc::exceeded()),
            },
        }
    }

    async fn begin(
        &self,
        until: Option<Instant>,
        metadata: &MetadataMap,
    ) -> Result<(Call, Arc<dyn SecretSource>), Status> {
        let call = Call { until, using: self.client.stream()? };
        let source = tokio::select! {
            source = self.whose.source(metadata) => source?,
            () = grpc::over(until) => return Err(grpc::exceeded()),
        };
        Ok((call, source))
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
