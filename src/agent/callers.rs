//! Callers' tokens: one SDS socket for the proxies of many pods, each with the token that it brings.
//!
//! Each stream has a secret manager of its own, whose only token is that of its caller: nothing is shared by two
//! of them, and key, certificate and token are gone with the stream. Streams and first signatures at a time are
//! bounded. What goes wrong for a caller is told ([`Told`]) and never takes readiness away: anybody who reaches the
//! socket can bring a bad token.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use zeroize::Zeroizing;

use crate::base::clock::Clock;
use crate::base::error::{BoxError, chain};
use crate::base::metrics::Metrics;
use crate::base::tasks::{Group, Stop, caught};
use crate::ca::csr::spiffe_id;
use crate::config::{Config, parts};
use crate::istiod::RootFiles;
use crate::istiod::auth::{Error, Token, TokenSource, claims};
use crate::sds::Callers;
use crate::secrets::{self, Fetched, Manager, Mounted, ResourceName, SecretSource, name};
use crate::trouble::{Kind, Report, Reporter};

/// Streams at a time: a node has some hundred pods, and each of their proxies two streams or three.
const STREAMS: usize = 4096;
/// First certificates that are asked for at a time; an RSA key takes a processor for 60 ms.
const FIRST: usize = 8;

/// A caller that was not served and has not come again for so long says nothing of others.
const LASTS: Duration = Duration::from_secs(300);

/// What can be told about callers, never who they are or what they brought. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Told(Arc<Noted>);

#[derive(Debug)]
struct Noted {
    streams: Arc<Semaphore>,
    trouble: Reporter,
    outcomes: Mutex<Outcomes>,
}

#[derive(Debug, Default)]
struct Outcomes {
    served: u64,
    failed: u64,
    last_error: Option<String>,
}

impl Told {
    fn new(trouble: Reporter) -> Self {
        let streams = Arc::new(Semaphore::new(STREAMS));
        Self(Arc::new(Noted { streams, trouble, outcomes: Mutex::default() }))
    }

    /// For the status document.
    #[must_use]
    pub(super) fn status(&self) -> Value {
        let outcomes = self.0.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        json!({
            "streams": STREAMS - self.0.streams.available_permits(),
            "served": outcomes.served,
            "failed": outcomes.failed,
            "lastError": outcomes.last_error,
        })
    }

    fn note(&self, error: Option<String>) {
        let mut outcomes = self.0.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        match &error {
            None => {
                outcomes.served += 1;
                self.0.trouble.end();
            }
            Some(why) => {
                outcomes.failed += 1;
                let report = Report::new(Kind::CallerNotServed, format!("a caller is not served: {why}"));
                self.0.trouble.report_for(LASTS, report);
            }
        }
        outcomes.last_error = error;
    }
}

/// Why a caller gets no secrets.
#[derive(Debug, thiserror::Error)]
enum Unserved {
    #[error("more than {STREAMS} streams with callers' tokens are open")]
    TooMany,
    #[error("the token is empty")]
    NoToken,
    #[error("no CA signs in this mode")]
    NoCa,
    #[error(transparent)]
    Ca(#[from] parts::Error),
}

/// Makes sources of secrets for callers.
pub(super) struct ByToken {
    config: Arc<Config>,
    clock: Arc<dyn Clock>,
    group: Group,
    told: Told,
    first: Arc<Semaphore>,
}

impl fmt::Debug for ByToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ByToken(..)")
    }
}

impl ByToken {
    /// Managers run in `group`; `trouble` is told of callers that get nothing.
    pub(super) fn new(config: Arc<Config>, clock: Arc<dyn Clock>, group: Group, trouble: Reporter) -> Self {
        let (told, first) = (Told::new(trouble), Arc::new(Semaphore::new(FIRST)));
        Self { config, clock, group, told, first }
    }

    /// What can be told about its callers.
    pub(super) fn told(&self) -> Told {
        self.told.clone()
    }

    async fn make(&self, token: &str) -> Result<Arc<dyn SecretSource>, Unserved> {
        let Ok(stream) = self.told.0.streams.clone().try_acquire_owned() else {
            return Err(Unserved::TooMany);
        };
        // The prefix is put before it again where it is sent.
        let token = Token::new(token.strip_prefix("Bearer ").unwrap_or(token)).ok_or(Unserved::NoToken)?;
        let identity = self.identity(&token);
        let tokens = Arc::new(Brought(token));
        let metrics = Metrics::new();
        let signer = self.config.ca.as_ref().map_err(|e| Unserved::Ca(e.clone()))?;
        let signer = signer.as_ref().ok_or(Unserved::NoCa)?;
        let ca =
            super::ca::client(signer, tokens, &metrics, &self.clock, &RootFiles::default(), &Arc::default())
                .await;
        let ca = ca?.ok_or(Unserved::NoCa)?;
        let (whole, clock) = (self.config.clone(), self.clock.clone());
        let make = Box::new(move || {
            let mut config = whole.identity.secrets();
            config.identity.clone_from(&identity);
            // Files are the node's, not the caller's.
            config.mounted = Mounted { cert: PathBuf::new(), key: PathBuf::new(), root: PathBuf::new() };
            config.output = None;
            config.eager = false;
            config.early = false;
            config.persist = None;
            config.near_expiry = secrets::NearExpiry::default();
            // A registry of its own: families of a second manager would have the same names.
            Manager::new(config, Some(ca.clone()), &Metrics::new(), clock.clone())
        });
        Ok(Arc::new(OfCaller {
            make,
            running: Mutex::default(),
            group: self.group.clone(),
            stop: self.group.token().child_token(),
            first: self.first.clone(),
            told: self.told.clone(),
            _stream: stream,
        }))
    }

    // The CA decides; this is what is asked for.
    fn identity(&self, token: &Token) -> String {
        let claims = claims::payload(token.expose()).unwrap_or_default();
        let text = |name: &str| claims.get(name).and_then(|v| v.as_str()).filter(|t| !t.is_empty());
        let account = text("sub").and_then(|sub| sub.strip_prefix("system:serviceaccount:"));
        match account.and_then(|account| account.split_once(':')) {
            Some((namespace, account)) => spiffe_id(&self.config.identity.trust_domain, namespace, account),
            None => text("email").unwrap_or("default").to_owned(),
        }
    }
}

impl Callers for ByToken {
    fn source(&self, token: Zeroizing<String>) -> BoxFuture<'_, Result<Arc<dyn SecretSource>, BoxError>> {
        Box::pin(async move {
            let made = self.make(&token).await;
            if let Err(why) = &made {
                self.told.note(Some(why.to_string()));
            }
            Ok(made?)
        })
    }
}

/// The caller's token.
#[derive(Debug)]
struct Brought(Token);

impl TokenSource for Brought {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async { Ok(Some(self.0.clone())) })
    }
}

/// Makes a manager, and its handle.
type Make = Box<dyn Fn() -> (secrets::Handle, Manager) + Send + Sync>;

/// Secrets of one stream; its end is the manager's.
struct OfCaller {
    make: Make,
    running: Mutex<Option<Running>>,
    group: Group,
    stop: Stop,
    first: Arc<Semaphore>,
    told: Told,
    _stream: OwnedSemaphorePermit,
}

/// A manager that runs, or waits for its turn.
struct Running {
    handle: secrets::Handle,
    stop: Stop,
    /// It is told what became of its first certificate.
    noted: Stop,
}

impl fmt::Debug for OfCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfCaller(..)")
    }
}

impl Drop for OfCaller {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl OfCaller {
    /// The manager's handle, and what ends once it is told what became of its first certificate.
    fn running(&self, name: &ResourceName) -> (secrets::Handle, Stop) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let running = match running.take().filter(|one| !one.stop.is_cancelled()) {
            Some(one) => running.insert(one),
            None => running.insert(self.begin(name.clone())),
        };
        (running.handle.clone(), running.noted.clone())
    }

    // A task of its own: what the CA is asked it is asked, whether its caller waits or has left the name meanwhile, and until
    // there is an answer it is one of those that are asked for at a time.
    fn begin(&self, name: ResourceName) -> Running {
        let (handle, manager) = (self.make)();
        let (stop, noted) = (self.stop.child_token(), Stop::new());
        let (own, ended, told, first) = (handle.clone(), stop.clone(), self.told.clone(), self.first.clone());
        let noted_at_last = noted.clone().drop_guard();
        self.group.spawn("caller's secrets", async move {
            let Some(permit) = ended.run_until_cancelled(first.acquire_owned()).await else { return Ok(()) };
            let asking = async {
                let fetched = own.fetch(name).await;
                drop((permit, own));
                // Of who is gone there is nothing to tell.
                if !ended.is_cancelled() {
                    told.note(fetched.as_ref().err().map(|error| chain(error.as_ref())));
                }
                if fetched.is_err() {
                    // Who asks again gets another one; until then the CA is not asked.
                    ended.cancel();
                }
                drop(noted_at_last);
            };
            // For one stream: a defect ends that one.
            let run = caught("caller", manager.run(ended.clone()));
            tokio::join!(run, asking).0.unwrap_or(Ok(()))
        });
        Running { handle, stop, noted }
    }
}

impl SecretSource for OfCaller {
    fn name(&self, text: &str) -> Result<ResourceName, name::Error> {
        match text.parse()? {
            own @ (ResourceName::Default | ResourceName::RootCa) => Ok(own),
            _ => Err(name::Error::Unknown(text.to_owned())),
        }
    }

    fn fetch(&self, name: ResourceName) -> BoxFuture<'static, Result<Fetched, Arc<secrets::Error>>> {
        let (handle, noted) = self.running(&name);
        Box::pin(async move {
            let fetched = handle.fetch(name).await;
            noted.cancelled().await;
            fetched
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_never_comes_again_is_no_trouble_for_ever() {
        let troubles = crate::trouble::Troubles::default();
        let told = Told::new(troubles.reporter("sds"));
        for _ in 0..3 {
            told.note(Some("a bad token".to_owned()));
            tokio::time::advance(LASTS - Duration::from_secs(1)).await;
            assert_eq!(troubles.verdict().map(|trouble| trouble.kind), Some(Kind::CallerNotServed));
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(troubles.verdict(), None);
        assert_eq!(told.status()["failed"], 3);
    }
}
