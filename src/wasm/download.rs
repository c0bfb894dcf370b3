//! Modules over HTTP: attempts with pauses, each with a limit, all within the caller's.
//!
//! What may be temporary is tried again: a connection that fails or breaks off, and what a server says of
//! itself (5xx). What the server says of the request is final.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use rustls::crypto::CryptoProvider;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Config;
use super::receive::{Error, Form, Received, Receiver};
use crate::base::backoff::{Jitter, Policy};
use crate::base::error::chain;
use crate::base::lane::Lane;
use crate::fetch::url::{Url, shown};
use crate::fetch::{Dialer, Get, Reply, Tls, Trust};

/// Unpacking, hashing and writing; as many as there are downloads that a push usually brings.
static STORE: Lane = Lane::new("storing modules", 4);

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

/// What became of one attempt.
enum Failed {
    /// May be different the next time.
    Passing(String),
    /// Would be the same again.
    Final(String),
}

impl Web {
    pub(super) fn new(config: Config, crypto: Arc<CryptoProvider>) -> Self {
        let proxies = &config.proxies;
        let dialer = |trust| Dialer {
            source: None,
            tls: Some(Arc::new(Tls::new(crypto.clone(), false, trust))),
            proxies: proxies.clone(),
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
    pub(super) async fn receiver(&self, form: Form) -> Result<Receiver, String> {
        let (dir, most) = (self.config.dir.clone(), self.config.max_size);
        let made = STORE.run(move || Receiver::new(&dir, most, form)).await.and_then(|made| made);
        made.map_err(|e| {
            format!("no file for the download can be made in {}: {e}", self.config.dir.display())
        })
    }

    /// The module at `url`.
    pub(super) async fn module(&self, url: &str, until: Instant) -> Result<Received, String> {
        let host = Url::parse(url).map(|url| url.authority()).unwrap_or_default();
        let dialer = self.dialer(&host);
        let limit = if self.config.http_timeout.is_zero() { ATTEMPT } else { self.config.http_timeout };
        let mut last = "none: WASM_HTTP_REQUEST_MAX_RETRIES is 0".to_owned();
        let mut attempts = 0;
        while attempts < self.config.http_attempts {
            attempts += 1;
            let now = Instant::now();
            if now >= until {
                let before = if attempts > 1 { format!(" (before that: {last})") } else { String::new() };
                last = format!("context deadline exceeded{before}");
                break;
            }
            match timeout_at(until.min(now + limit), self.attempt(url, dialer)).await {
                Ok(Ok(received)) => return Ok(received),
                Ok(Err(Failed::Final(why))) => {
                    last = why;
                    break;
                }
                Ok(Err(Failed::Passing(why))) => last = why,
                Err(_) => last = format!("no whole answer within {:?}", until.min(now + limit) - now),
            }
            tracing::debug!(target: "wasm", "attempt {attempts} to download {} failed: {last}", shown(url));
            if attempts < self.config.http_attempts {
                sleep_until(until.min(Instant::now() + self.pauses.delay(attempts - 1))).await;
            }
        }
        Err(format!("wasm module download failed after {attempts} attempts, last error: {last}"))
    }

    async fn attempt(&self, url: &str, dialer: &Dialer) -> Result<Received, Failed> {
        let get = Get::new(url).map_err(|e| Failed::Final(e.to_string()))?;
        let reply = get.dialer(dialer).keep(None).send().await;
        let reply = reply.map_err(|e| Failed::Passing(chain(&e)))?;
        let status = reply.status();
        if status != StatusCode::OK {
            let why = format!("wasm module download request failed: status code {}", status.as_u16());
            return Err(if passing(status) { Failed::Passing(why) } else { Failed::Final(why) });
        }
        let receiver = self.receiver(Form::Any).await.map_err(Failed::Final)?;
        receive(reply, receiver).await
    }
}

/// Takes the whole body.
async fn receive(mut reply: Reply, mut receiver: Receiver) -> Result<Received, Failed> {
    loop {
        match reply.piece().await {
            Ok(Some(piece)) => {
                let taken = STORE.run(move || receiver.push(&piece).map(|()| receiver)).await;
                receiver = stored(taken)?;
            }
            Ok(None) => break,
            Err(error) => return Err(Failed::Passing(chain(&error))),
        }
        // Bytes that are there already come without waiting, and others want to go on too.
        tokio::task::yield_now().await;
    }
    stored(STORE.run(move || receiver.end()).await)
}

fn stored<T>(outcome: io::Result<Result<T, Error>>) -> Result<T, Failed> {
    let outcome = outcome.map_err(|e| Failed::Final(e.to_string()))?;
    outcome.map_err(|e| Failed::Final(chain(&e)))
}

/// As [`receive`], where nothing is tried again.
pub(super) async fn receive_once(reply: Reply, receiver: Receiver) -> Result<Received, String> {
    receive(reply, receiver).await.map_err(|failed| match failed {
        Failed::Passing(why) | Failed::Final(why) => why,
    })
}

fn passing(status: StatusCode) -> bool {
    let code = status.as_u16();
    code >= 500 && !matches!(code, 501 | 505 | 511)
}
