//! One attempt to get a certificate: key, request, answer, and whether the answer can be served.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

use super::metrics::Metrics;
use super::{Error, Identity};
use crate::base::clock::Clock;
use crate::ca::CaClient;
use crate::ca::csr::{self, Effort, Key, KeyOptions};
use crate::tls::cert::{self, Cert};

type Made = Result<Key, csr::Error>;

/// The first key, begun beside the rest of the start: an RSA key is the slowest step of it.
#[derive(Clone)]
pub struct FirstKey(Arc<Mutex<Option<BoxFuture<'static, Made>>>>);

impl fmt::Debug for FirstKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FirstKey(..)")
    }
}

impl FirstKey {
    /// Begins to make a key on threads that end with it. May be called before there is a runtime.
    #[must_use]
    pub fn begin(options: KeyOptions) -> Self {
        let mut making: BoxFuture<'static, Made> =
            Box::pin(async move { Ok(csr::generate_off_runtime(&options, Effort::Race).await?) });
        // One look starts the threads; the waiting comes later.
        let key = match (&mut making).now_or_never() {
            Some(made) => Box::pin(std::future::ready(made)),
            None => making,
        };
        Self(Arc::new(Mutex::new(Some(key))))
    }

    fn take(&self) -> Option<BoxFuture<'static, Made>> {
        self.0.lock().ok()?.take()
    }
}

/// What is needed for one attempt.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) ca: Arc<dyn CaClient>,
    pub(super) key: KeyOptions,
    pub(super) first_key: Option<FirstKey>,
    /// The key of an attempt whose request never left.
    pub(super) unused: Option<Key>,
    pub(super) identity: String,
    pub(super) ttl: Duration,
    pub(super) bound: Duration,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) metrics: Metrics,
}

/// A certificate that can be served.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) identity: Arc<Identity>,
    /// The CA's root as it came: the explicit bundle, or the last entry.
    pub(super) root: String,
    /// When it arrived. Not the start of validity, which istiod back-dates by two minutes.
    pub(super) created: SystemTime,
    pub(super) leaf: Cert,
    /// How long the CA took.
    pub(super) took: Duration,
}

impl Issued {
    /// How long it lasts, and how much of that has gone by.
    pub(super) fn life(&self, now: SystemTime) -> (Duration, Duration) {
        let since = |to: SystemTime| to.duration_since(self.created).unwrap_or_default();
        (since(self.leaf.not_after), since(now))
    }
}

/// Why there is no certificate.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// The key, where no CA has seen a request for it. An outage so costs one key and not one for each
    /// attempt (60 ms of CPU for RSA). Once a request may have left, whatever the answer, the next one is for
    /// a fresh key, as in the Go agent.
    pub(super) unused: Option<Key>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, unused: None }
    }
}

impl Attempt {
    /// Makes a key, has it signed, reads the answer.
    pub(super) async fn run(mut self) -> Result<Issued, Failure> {
        let key = self.key().await.map_err(Error::Request)?;
        let request = csr::request(&key, &self.identity).map_err(Error::Request)?;

        let started = Instant::now();
        self.metrics.call_started();
        let answer = tokio::time::timeout(self.bound, self.sign(&request)).await;
        let took = started.elapsed();
        self.metrics.call_ended(took);
        let (entries, bundle) = match answer {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                self.metrics.call_failed();
                let unused = matches!(error, crate::ca::Error::Unsent(_)).then_some(key);
                return Err(Failure { error: Error::Ca(error), unused });
            }
            Err(_) => {
                self.metrics.call_failed();
                return Err(Error::Hung(self.bound).into());
            }
        };
        let now = self.clock.now();
        let read = read_answer(&entries, &bundle, &key.spki(), now).map_err(Error::Refused)?;
        let pem = key.to_pem().map_err(|e| Error::Request(e.into()))?;
        let identity =
            Identity { chain: read.chain.into_bytes(), key: Zeroizing::new(pem.as_bytes().to_vec()) };
        Ok(Issued { identity: Arc::new(identity), root: read.root, created: now, leaf: read.leaf, took })
    }

    async fn key(&mut self) -> Made {
        if let Some(unused) = self.unused.take() {
            return Ok(unused);
        }
        match self.first_key.as_ref().and_then(FirstKey::take) {
            Some(making) => making.await,
            None => Ok(csr::generate_off_runtime(&self.key, Effort::Single).await?),
        }
    }

    async fn sign(&self, request: &str) -> Result<(Vec<String>, Vec<String>), crate::ca::Error> {
        let entries = self.ca.sign(request, self.ttl).await?;
        Ok((entries, self.ca.root_bundle().await?))
    }
}

/// An answer taken apart.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) chain: String,
    pub(super) root: String,
    pub(super) leaf: Cert,
}

/// Why a CA's answer is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadAnswer {
    #[error("entry {number} of {count}: {source}")]
    Entry { number: usize, count: usize, source: cert::Error },
    #[error("it holds no certificate")]
    Empty,
    #[error("its trust bundle: {0}")]
    Bundle(#[source] cert::Error),
    #[error("it holds no root: at least a leaf and a root are needed")]
    NoRoot,
    #[error("its chain is out of order: our certificate is number {0}, not the first")]
    LeafLater(usize),
    #[error("its first certificate is not for the key in our request")]
    OtherKey,
    #[error("its chain is out of order: certificate {0} is not followed by its issuer")]
    Order(usize),
    #[error(
        "its certificate has expired already, {} ago by this machine's clock: check both clocks",
        super::rotation::span(*.0)
    )]
    Expired(Duration),
}

/// Reads a CA's answer, and refuses what Envoy or a peer would refuse: garbage, a certificate for
/// another key, an order that does not lead from the leaf upwards, an expired certificate, no root.
///
/// The identity is not compared: istiod decides it (its trust domain may differ from `TRUST_DOMAIN`);
/// the caller says so in the log.
pub(super) fn read_answer(
    entries: &[String],
    bundle: &[String],
    spki: &[u8],
    now: SystemTime,
) -> Result<Answer, BadAnswer> {
    let chain = joined(entries);
    let mut certs = Vec::new();
    // Where the certificates of the last entry begin.
    let mut last = 0;
    for (index, entry) in entries.iter().enumerate() {
        last = certs.len();
        // An empty entry in between adds nothing and harms nobody.
        if entry.trim().is_empty() {
            continue;
        }
        let read = cert::parse_chain(entry.as_bytes()).map_err(|source| BadAnswer::Entry {
            number: index + 1,
            count: entries.len(),
            source,
        })?;
        certs.extend(read);
    }
    let Some(leaf) = certs.first().cloned() else { return Err(BadAnswer::Empty) };
    let (root, path) = if bundle.iter().any(|b| !b.trim().is_empty()) {
        let root = joined(bundle);
        cert::parse_chain(root.as_bytes()).map_err(BadAnswer::Bundle)?;
        (root, certs.len())
    } else {
        match entries.last() {
            Some(root) if entries.len() > 1 && !root.trim().is_empty() => (root.clone(), last),
            _ => return Err(BadAnswer::NoRoot),
        }
    };
    if leaf.spki != spki {
        return Err(match certs.iter().position(|c| c.spki == spki) {
            Some(at) => BadAnswer::LeafLater(at + 1),
            None => BadAnswer::OtherKey,
        });
    }
    let (path, roots) = certs.split_at(path);
    order(path, roots)?;
    if leaf.not_after <= now {
        let since = now.duration_since(leaf.not_after).unwrap_or_default();
        return Err(BadAnswer::Expired(since));
    }
    Ok(Answer { chain, root, leaf })
}

/// The entries as one text, each on a line of its own. The bytes are those of the Go agent, which ends with a newline
/// whatever is not the last and does not end with one, an empty entry too.
fn joined(entries: &[String]) -> String {
    let mut text = String::with_capacity(entries.iter().map(|e| e.len() + 1).sum());
    for (index, entry) in entries.iter().enumerate() {
        text.push_str(entry);
        if index + 1 < entries.len() && !entry.ends_with('\n') {
            text.push('\n');
        }
    }
    text
}

/// Each certificate from the leaf upwards is followed by its issuer, as far as the issuer is there at all. A chain whose
/// root is elsewhere is left to the peers to judge. `roots` is a set: while roots change it holds several, and the one
/// that has signed may stand anywhere in it.
fn order(path: &[Cert], roots: &[Cert]) -> Result<(), BadAnswer> {
    for (at, cert) in path.iter().enumerate() {
        if cert.subject == cert.issuer {
            return Ok(());
        }
        let issues = |other: &Cert| other.subject == cert.issuer;
        match path.get(at + 1) {
            Some(next) if issues(next) || next.der == cert.der => {}
            Some(_) if path.iter().chain(roots).any(issues) => return Err(BadAnswer::Order(at + 1)),
            None if path.iter().any(issues) && !roots.iter().any(issues) => {
                return Err(BadAnswer::Order(at + 1));
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mock_istiod::pki::{Authority, Leaf, Pair};

    const DAY: Duration = Duration::from_secs(86_400);

    /// A certificate for a key, one intermediate, its root; and another root.
    fn cast() -> (Pair, String, String, String) {
        let authority = Authority::new("cluster.local", 1);
        let pair = authority.pair(&Leaf::workload("spiffe://cluster.local/ns/a/sa/b", DAY));
        let intermediate = authority.intermediates().next().unwrap().to_owned();
        let other = Authority::new("elsewhere", 0).root_pem().to_owned();
        (pair, intermediate, authority.root_pem().to_owned(), other)
    }

    fn read(pair: &Pair, entries: &[&str]) -> Result<Answer, BadAnswer> {
        let leaf = cert::parse_chain(pair.chain.as_bytes()).unwrap().swap_remove(0);
        let entries: Vec<String> = entries.iter().map(|e| (*e).to_owned()).collect();
        read_answer(&entries, &[], &leaf.spki, SystemTime::now())
    }

    #[test]
    fn the_root_that_has_signed_may_stand_anywhere_among_the_roots() {
        let (pair, intermediate, root, other) = cast();
        let leaf = &pair.chain[..pair.chain.len() - intermediate.len()];
        assert_eq!(format!("{leaf}{intermediate}"), pair.chain);
        for roots in [format!("{root}{other}"), format!("{other}{root}")] {
            for entries in [vec![leaf, &intermediate, &roots], vec![&pair.chain, &roots]] {
                let answer = read(&pair, &entries).unwrap();
                assert_eq!((answer.chain, answer.root), (entries.concat(), roots.clone()));
            }
        }
        // The order of what leads to them counts.
        let wrong = read(&pair, &[leaf, &root, &intermediate]).unwrap_err();
        assert!(matches!(wrong, BadAnswer::Order(1)), "{wrong}");
        let wrong = read(&pair, &[leaf, &other, &intermediate, &root]).unwrap_err();
        assert!(matches!(wrong, BadAnswer::Order(1)), "{wrong}");
        read(&pair, &[leaf, &intermediate, &intermediate, &root]).unwrap();
    }

    #[test]
    fn entries_are_joined_as_by_the_go_agent() {
        let (pair, _, root, _) = cast();
        let (leaf, root) = (pair.chain.trim_end(), root.trim_end());
        assert_eq!(read(&pair, &[leaf, root]).unwrap().chain, format!("{leaf}\n{root}"));
        assert_eq!(read(&pair, &[leaf, "", root]).unwrap().chain, format!("{leaf}\n\n{root}"));
        assert_eq!(read(&pair, &["", leaf, root]).unwrap().chain, format!("\n{leaf}\n{root}"));
    }
}
