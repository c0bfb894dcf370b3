//! Modules over HTTP: attempts with pauses, each with a limit, all within the caller's.
//!
//! What may be temporary is tried again: a connection that fails or breaks off, and what a server says of
//! itself (5xx). What the server says of the request is final.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use rustls::crypto::CryptoProvider;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout_at};
use zeroize::Zeroizing;

use super::Config;
use super::receive::{self, Form, Received, Receiver};
use crate::base::backoff::{Jitter, Policy};
use crate::base::error::chain;
use crate::base::lane::Lane;
use crate::fetch::url::{Url, shown};
use crate::fetch::{self, Dialer, Get, Reply, Tls, Trust};

/// Unpacking, hashing and writing; as many as there are downloads that a push usually brings.
pub(super) static STORE: Lane = Lane::new("storing modules", 4);

/// Manifests and answers with tokens are a few kB; they may be 4 MB.
const USUAL: usize = 64 << 10;
static LARGE: Semaphore = Semaphore::const_new(2);

/// Pauses between attempts, the Go agent's: 500 ms, growing by half to a minute, ±50 %.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const GROWTH: f64 = 1.5;
const SPREAD: f64 = 0.5;
/// An attempt's limit where it is configured as zero; the Go agent's.
const ATTEMPT: Duration = Duration::from_secs(5);

/// The way to servers of modules and images.
pub(super) struct Web {
    config: Config,
    verified: Dialer,
    trusting: Dialer,
    pauses: Policy,
}

/// Why nothing was downloaded. Each shows as one line that holds its cause.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("no file for the download can be made in {dir}: {source}")]
    File { dir: String, source: io::Error },
    #[error("{}", chain(.0))]
    Fetch(#[from] fetch::Error),
    #[error("{0}")]
    Url(fetch::Error),
    #[error("wasm module download request failed: status code {}", .0.as_u16())]
    Status(StatusCode),
    #[error("{}", chain(.0))]
    Received(#[from] receive::Error),
    /// No thread takes what has come.
    #[error("{0}")]
    Thread(io::Error),
    #[error("no whole answer within {0:?}")]
    Slow(Duration),
    #[error("context deadline exceeded{}", .0.as_ref().map(|e| format!(" (before that: {e})")).unwrap_or_default())]
    Late(Option<Box<Error>>),
    #[error("none: WASM_HTTP_REQUEST_MAX_RETRIES is 0")]
    NotTried,
    #[error("wasm module download failed after {attempts} attempts, last error: {last}")]
    Attempts { attempts: u32, last: Box<Error> },
}

impl Error {
    /// Whether the next attempt may do better.
    fn is_passing(&self) -> bool {
        match self {
            // What a server packs wrongly it packs so again.
            Self::Fetch(error) => !matches!(error, fetch::Error::Gzip(_)),
            Self::Slow(_) => true,
            Self::Status(status) => passing(*status),
            _ => false,
        }
    }
}

impl Web {
    pub(super) fn new(config: Config, crypto: Arc<CryptoProvider>) -> Self {
        let proxies = &config.proxies;
        let dialer = |trust| Dialer {
            tls: Some(Arc::new(Tls::new(crypto.clone(), false, trust))),
            proxies: proxies.clone(),
            ..Dialer::default()
        };
        Self {
            verified: dialer(Trust::System),
            trusting: dialer(Trust::Anybody),
            config,
            pauses: Policy::new(FIRST_PAUSE, LONGEST_PAUSE, GROWTH, Jitter::PlusMinus(SPREAD))
                .expect("constants that can be meant"),
        }
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    /// How to connect for what is asked of `host` (`host[:port]`, as written).
    pub(super) fn dialer(&self, host: &str) -> &Dialer {
        if self.config.insecure.iter().any(|h| h == "*" || h == host) {
            &self.trusting
        } else {
            &self.verified
        }
    }

    /// A receiver for one download.
    pub(super) async fn receiver(&self, form: Form) -> Result<Receiver, Error> {
        let (dir, most) = (self.config.dir.clone(), self.config.max_size);
        let made = STORE.run(move || Receiver::new(&dir, most, form)).await.and_then(|made| made);
        made.map_err(|source| Error::File { dir: self.config.dir.display().to_string(), source })
    }

    /// A whole document. Those that are longer than usual are read two at a time.
    pub(super) async fn document(
        &self,
        reply: &mut Reply,
        limit: usize,
    ) -> Result<Zeroizing<Vec<u8>>, fetch::Error> {
        reply.in_turn(limit, USUAL, &LARGE).await.map(|(all, _)| all)
    }

    /// The module at `url`.
    pub(super) async fn module(&self, url: &str, until: Instant) -> Result<Received, Error> {
        let host = Url::parse(url).map(|url| url.authority()).unwrap_or_default();
        let dialer = self.dialer(&host);
        let limit = if self.config.http_timeout.is_zero() { ATTEMPT } else { self.config.http_timeout };
        let mut last = Error::NotTried;
        let mut attempts = 0;
        while attempts < self.config.http_attempts {
            let now = Instant::now();
            if now >= until {
                last = Error::Late((attempts > 0).then(|| Box::new(last)));
                attempts = attempts.max(1);
                break;
            }
            attempts += 1;
            let end = until.min(now + limit);
            last = match timeout_at(end, self.attempt(url, dialer)).await {
                Ok(Ok(received)) => return Ok(received),
                Ok(Err(error)) => error,
                Err(_) => Error::Slow(to_the_millisecond(end - now)),
            };
            if !last.is_passing() {
                break;
            }
            tracing::debug!(target: "wasm", "attempt {attempts} to download {} failed: {last}", shown(url));
            if attempts < self.config.http_attempts {
                sleep_until(until.min(Instant::now() + self.pauses.delay(attempts - 1))).await;
            }
        }
        Err(Error::Attempts { attempts, last: Box::new(last) })
    }

    async fn attempt(&self, url: &str, dialer: &Dialer) -> Result<Received, Error> {
        let get = Get::new(url).map_err(Error::Url)?;
        let reply = get.dialer(dialer).keep(None).send().await?;
        if reply.status() != StatusCode::OK {
            return Err(Error::Status(reply.status()));
        }
        receive(reply, self.receiver(Form::Any).await?).await
    }
}

/// Takes the whole body.
pub(super) async fn receive(mut reply: Reply, mut receiver: Receiver) -> Result<Received, Error> {
    loop {
        match reply.piece().await {
            Ok(Some(piece)) => {
                let taken = STORE.run(move || receiver.push(&piece).map(|()| receiver)).await;
                receiver = stored(taken)?;
            }
            Ok(None) => break,
            Err(error) => return Err(error.into()),
        }
        // Bytes that are there already come without waiting, and others want to go on too.
        tokio::task::yield_now().await;
    }
    stored(STORE.run(move || receiver.end()).await)
}

fn to_the_millisecond(time: Duration) -> Duration {
    let rounded = (time + Duration::from_micros(500)).as_millis();
    Duration::from_millis(u64::try_from(rounded).unwrap_or(u64::MAX))
}

fn stored<T>(outcome: io::Result<Result<T, receive::Error>>) -> Result<T, Error> {
    Ok(outcome.map_err(Error::Thread)??)
}

fn passing(status: StatusCode) -> bool {
    let code = status.as_u16();
    code >= 500 && !matches!(code, 501 | 505 | 511)
}
