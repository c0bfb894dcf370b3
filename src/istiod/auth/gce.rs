//! `CREDENTIAL_FETCHER_TYPE=GoogleComputeEngine`: identity tokens of the metadata server.
//!
//! Every call asks the server anew and leaves the answer in the token file, as the Go agent does; a
//! background task keeps that file fresh between calls. Plain HTTP on a link-local address, by design
//! of the platform.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::http::{Request, StatusCode};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

use super::{Error, Token, TokenSource, claims};
use crate::base::clock::{Clock, Until};
use crate::base::error::chain;
use crate::base::lane::Lane;
use crate::base::place::{self, Mode};
use crate::base::tasks::Stop;
use crate::net::{http, percent};

/// Bound of one request to the metadata server; it answers in milliseconds or is not there.
const DEADLINE: Duration = Duration::from_secs(10);
/// How often the background task looks at the token (Go agent: 5 min).
const PERIOD: Duration = Duration::from_secs(5 * 60);
/// A token with less life than this is renewed in the background (Go agent: 25 min; they live an hour).
const GRACE: Duration = Duration::from_secs(25 * 60);
static FILES: Lane = Lane::new("the metadata server's token", 1);
/// How long a disk may take to write it: milliseconds, where it is in order.
const WRITE: Duration = Duration::from_secs(10);
/// Above this an answer is no token.
const MAX_ANSWER: usize = 64 << 10;

/// Where the metadata server is.
#[derive(Debug, Clone)]
pub(crate) struct MetadataServer {
    /// `host` or `host:port`: `GCE_METADATA_HOST`, or the link-local address.
    pub host: String,
}

impl Default for MetadataServer {
    fn default() -> Self {
        Self { host: "169.254.169.254".to_owned() }
    }
}

impl MetadataServer {
    /// GET of `path` below `/computeMetadata/v1/`.
    ///
    /// # Errors
    /// Why there is no answer, with the server's name.
    pub(crate) async fn get(&self, path: &str) -> Result<Zeroizing<Vec<u8>>, NoAnswer> {
        let fetched = tokio::time::timeout(DEADLINE, self.fetch(path)).await;
        let cause = match fetched {
            Ok(Ok(body)) => return Ok(body),
            Ok(Err(cause)) => cause,
            Err(_) => Cause::Late,
        };
        Err(NoAnswer { host: self.host.clone(), cause })
    }

    async fn fetch(&self, path: &str) -> Result<Zeroizing<Vec<u8>>, Cause> {
        let request = Request::get(format!("/computeMetadata/v1/{path}"))
            .header("host", &self.host)
            .header("metadata-flavor", "Google")
            .header("user-agent", "pilot-agent")
            .body(Bytes::new())?;
        let io = http::reach(&self.host).await?;
        let answer = http::exchange(io, request, MAX_ANSWER).await?;
        if answer.status() != StatusCode::OK {
            return Err(Cause::Status(answer.status()));
        }
        Ok(Zeroizing::new(answer.into_body().to_vec()))
    }
}

/// The metadata server has given nothing. Bodies are not repeated, they may be tokens.
#[derive(Debug, thiserror::Error)]
#[error("metadata server {host}: {}", chain(.cause))]
pub(crate) struct NoAnswer {
    host: String,
    #[source]
    cause: Cause,
}

/// What became of one request to it.
#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("no answer within {DEADLINE:?}")]
    Late,
    #[error(transparent)]
    Connect(#[from] std::io::Error),
    #[error(transparent)]
    Request(#[from] ::http::Error),
    #[error(transparent)]
    Exchange(#[from] http::Error),
    #[error("status {0}")]
    Status(StatusCode),
}

/// Why there is no token of this machine.
#[derive(Debug, thiserror::Error)]
enum NoToken {
    #[error("jwtPath is unset")]
    NoFile,
    #[error(transparent)]
    Server(#[from] NoAnswer),
    #[error("cannot write the token to {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    // What is no token is not repeated, it may be one after all.
    #[error("the metadata server's answer is not text")]
    NotText,
    #[error("the metadata server's access token is not JSON")]
    NotJson,
    #[error("the metadata server's answer holds no access_token")]
    NoMember,
}

impl From<NoToken> for Error {
    fn from(why: NoToken) -> Self {
        Self::new(why)
    }
}

/// Fetches identity tokens; calls and the background task take turns.
pub(crate) struct GoogleComputeEngine {
    server: MetadataServer,
    /// Path with query of the identity endpoint.
    path: String,
    file: PathBuf,
    clock: Arc<dyn Clock>,
    cached: tokio::sync::Mutex<Option<Token>>,
}

impl fmt::Debug for GoogleComputeEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GoogleComputeEngine")
            .field("server", &self.server)
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl GoogleComputeEngine {
    /// Tokens for `audience` (the trust domain), left in `file`.
    #[must_use]
    pub(crate) fn new(server: MetadataServer, audience: &str, file: PathBuf, clock: Arc<dyn Clock>) -> Self {
        let path = format!(
            "instance/service-accounts/default/identity?audience={}&format=full",
            percent::encode(audience)
        );
        Self { server, path, file, clock, cached: tokio::sync::Mutex::default() }
    }

    async fn fetch(&self, cached: &mut Option<Token>) -> Result<Option<Token>, NoToken> {
        if self.file.as_os_str().is_empty() {
            return Err(NoToken::NoFile);
        }
        let body = self.server.get(&self.path).await?;
        let (file, text) = (self.file.clone(), body.clone());
        // The mode is the Go agent's.
        let written = FILES.within(WRITE, move || place::replace(&file, &text, Mode::Masked(0o640))).await;
        written.flatten().map_err(|source| NoToken::Write { path: self.file.clone(), source })?;
        let text = std::str::from_utf8(&body).map_err(|_| NoToken::NotText)?;
        cached.clone_from(&Token::new(text));
        Ok(cached.clone())
    }

    /// Whether the background task has to fetch.
    fn due(&self, cached: Option<&Token>) -> bool {
        let expires = cached.and_then(|t| claims::read(t.expose())).and_then(|c| c.expires);
        expires.is_none_or(|at| at <= self.clock.now() + GRACE)
    }

    /// Keeps the token fresh until `stop`.
    pub(crate) async fn refresh(&self, stop: Stop) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick is immediate; the first call fetches by itself.
        ticks.tick().await;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let mut cached = self.cached.lock().await;
            if !self.due(cached.as_ref()) {
                continue;
            }
            let fetched = tokio::select! {
                () = stop.cancelled() => return,
                fetched = self.fetch(&mut cached) => fetched,
            };
            match fetched {
                Ok(_) => tracing::info!(target: "gcecred", "fetched a fresh token"),
                Err(e) => tracing::error!(target: "gcecred",
                    "cannot refresh the token: {e}; trying again in {} s", PERIOD.as_secs()),
            }
        }
    }
}

impl TokenSource for GoogleComputeEngine {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async {
            let mut cached = self.cached.lock().await;
            Ok(self.fetch(&mut cached).await?)
        })
    }
}

/// Access tokens of the machine's service account, for Google's own services. Kept until a minute before
/// they end.
pub(crate) struct AccessToken {
    server: MetadataServer,
    clock: Arc<dyn Clock>,
    cached: tokio::sync::Mutex<Option<(Token, Until)>>,
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessToken").field("server", &self.server).finish_non_exhaustive()
    }
}

impl AccessToken {
    /// Tokens from `server`.
    #[must_use]
    pub(crate) fn new(server: MetadataServer, clock: Arc<dyn Clock>) -> Self {
        Self { server, clock, cached: tokio::sync::Mutex::default() }
    }

    async fn fetch(&self) -> Result<(Token, Until), NoToken> {
        let body = self.server.get("instance/service-accounts/default/token").await?;
        let answer: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&body).map_err(|_| NoToken::NotJson)?;
        let text = answer.get("access_token").and_then(serde_json::Value::as_str).unwrap_or_default();
        let token = Token::new(text).ok_or(NoToken::NoMember)?;
        let life = answer.get("expires_in").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let now = self.clock.now();
        let until = now + Duration::from_secs(life.min(86_400).saturating_sub(60));
        Ok((token, Until::new(until, now)))
    }
}

impl TokenSource for AccessToken {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async {
            let mut cached = self.cached.lock().await;
            if let Some((token, until)) = &*cached
                && !until.left(self.clock.now()).is_zero()
            {
                return Ok(Some(token.clone()));
            }
            let fresh = self.fetch().await?;
            let token = fresh.0.clone();
            *cached = Some(fresh);
            Ok(Some(token))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::clock::Fixed;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use std::time::UNIX_EPOCH;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn answer(listener: &TcpListener, with: &str) -> String {
        asked(listener, with).await.0
    }

    async fn asked(listener: &TcpListener, with: &str) -> (String, TcpStream) {
        let (mut io, _) = listener.accept().await.unwrap();
        let request = crate::net::http::head(&mut io).await.unwrap();
        io.write_all(with.as_bytes()).await.unwrap();
        (request, io)
    }

    #[tokio::test]
    async fn every_call_asks_the_server_and_leaves_the_answer_in_the_file() {
        use std::os::unix::fs::PermissionsExt;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        let server = MetadataServer { host: listener.local_addr().unwrap().to_string() };
        let clock = Fixed::at(UNIX_EPOCH + Duration::from_secs(10_000));
        let gce = GoogleComputeEngine::new(server, "a/b", path.clone(), Arc::new(clock));

        let jwt = |exp: u64| format!("e30.{}.s", URL_SAFE_NO_PAD.encode(format!(r#"{{"exp":{exp}}}"#)));
        for token in [jwt(10_100), jwt(13_600)] {
            let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{token}\n", token.len() + 1);
            let (got, request) = tokio::join!(gce.token(), answer(&listener, &reply));
            assert_eq!(got.unwrap().unwrap().expose(), token);
            assert!(request.starts_with(
                "GET /computeMetadata/v1/instance/service-accounts/default/identity?audience=a%2Fb&format=full "
            ));
            assert!(request.contains("Metadata-Flavor: Google\r\n"));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{token}\n"));
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
            let soon = token == jwt(10_100);
            assert_eq!(gce.due(gce.cached.lock().await.as_ref()), soon);
        }
        assert!(gce.due(None) && gce.due(Token::new("no jwt").as_ref()));

        let (got, _) =
            tokio::join!(gce.token(), answer(&listener, "HTTP/1.1 503 Gone\r\ncontent-length: 0\r\n\r\n"));
        let error = got.unwrap_err().to_string();
        assert!(
            error.starts_with("transport: per-RPC creds failed due to error: metadata server 127.0.0.1"),
            "{error}"
        );
        assert!(error.contains("503"), "{error}");
        drop(listener);
        assert!(gce.token().await.is_err(), "nobody listens");
    }

    #[tokio::test]
    async fn a_disk_that_stands_still_holds_up_only_the_call() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("istio-token");
        let server = MetadataServer { host: listener.local_addr().unwrap().to_string() };
        let gce = GoogleComputeEngine::new(server, "td", path.clone(), Arc::new(crate::base::clock::System));
        let (let_go, hold) = std::sync::mpsc::channel::<()>();
        let mut standing = Box::pin(FILES.run(move || {
            let _ = hold.recv();
        }));
        assert!(futures_util::poll!(&mut standing).is_pending());
        let others = async {
            let (_, mut io) = asked(&listener, "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\ntoken").await;
            // The answer was read to its end.
            assert!(matches!(io.read(&mut [0]).await, Ok(0) | Err(_)));
            assert!(!path.exists(), "it was not written by this thread");
            drop(let_go);
        };
        let (got, ()) = tokio::join!(gce.token(), others);
        assert_eq!(got.unwrap().unwrap().expose(), "token");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "token");
    }

    #[tokio::test]
    async fn access_tokens_are_kept_until_shortly_before_their_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = MetadataServer { host: listener.local_addr().unwrap().to_string() };
        let clock = Fixed::at(UNIX_EPOCH + Duration::from_secs(10_000));
        let source = AccessToken::new(server, Arc::new(clock.clone()));
        let body = r#"{"access_token":"one","expires_in":3600,"token_type":"Bearer"}"#;
        let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let (got, _) = tokio::join!(source.token(), answer(&listener, &reply));
        assert_eq!(got.unwrap().unwrap().expose(), "one");
        clock.advance(Duration::from_secs(3539));
        assert_eq!(source.token().await.unwrap().unwrap().expose(), "one");
        clock.advance(Duration::from_secs(1));
        let reply = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        let (got, _) = tokio::join!(source.token(), answer(&listener, reply));
        assert!(got.unwrap_err().to_string().contains("no access_token"));
    }

    #[tokio::test]
    async fn a_server_with_a_name_is_looked_for_where_no_thread_is_left_without_a_panic() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = format!("localhost:{}", listener.local_addr().unwrap().port());
        let server = MetadataServer { host };
        let (got, _) =
            tokio::join!(server.get("a"), answer(&listener, "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"));
        assert_eq!(got.unwrap().as_slice(), b"a");
        let _none = crate::base::lane::scarce::NoThreads::from_now_on();
        let error = server.get("a").await.unwrap_err().to_string();
        assert!(error.contains("no thread for name look-ups"), "{error}");
    }

    #[tokio::test]
    async fn no_path_is_an_error() {
        let clock = Arc::new(crate::base::clock::System);
        let gce = GoogleComputeEngine::new(MetadataServer::default(), "td", PathBuf::new(), clock);
        assert!(gce.token().await.unwrap_err().to_string().ends_with("jwtPath is unset"));
    }
}
