//! One attempt to get a certificate: key, request, answer, and whether the answer can be served.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

use super::metrics::Metrics;
use super::{Error, Identity};
use crate::base::clock::{Clock, rfc3339};
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
        // The request has left, though this one may not.
        let bundle = self.ca.root_bundle().await.map_err(crate::ca::Error::once_sent)?;
        Ok((entries, bundle))
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
    #[error(
        "its certificate has expired already, {} ago by this machine's clock: check both clocks",
        super::rotation::span(*.0)
    )]
    Expired(Duration),
    #[error("its certificate ends ({}) before it begins ({})", rfc3339(*ends), rfc3339(*begins))]
    Never { begins: SystemTime, ends: SystemTime },
    #[error(
        "its certificate is valid only from {} on, and by this machine's clock it is {}: check both clocks",
        rfc3339(*begins), rfc3339(*now)
    )]
    NotYet { begins: SystemTime, now: SystemTime },
}

/// Reads a CA's answer, and refuses what Envoy or a peer would refuse: garbage, a certificate for
/// another key, one that has expired or is never valid, no root.
///
/// The order of what follows the leaf is not looked at: Envoy's library, as others, looks for issuers in all that a
/// peer has sent. Whether there is a way to a root at all is told where it is served (`manager/troubles.rs`). Text in which there is no certificate is passed over by every reader of PEM.
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
    let mut roots = false;
    for (index, entry) in entries.iter().enumerate() {
        let (number, count) = (index + 1, entries.len());
        let read = match cert::parse_chain(entry.as_bytes()) {
            Err(cert::Error::Empty) => Vec::new(),
            read => read.map_err(|source| BadAnswer::Entry { number, count, source })?,
        };
        // Only the last one counts.
        roots = index > 0 && !read.is_empty();
        certs.extend(read);
    }
    let Some(leaf) = certs.first().cloned() else { return Err(BadAnswer::Empty) };
    let root = if bundle.iter().any(|b| !b.trim().is_empty()) {
        let root = joined(bundle);
        cert::parse_chain(root.as_bytes()).map_err(BadAnswer::Bundle)?;
        root
    } else {
        entries.last().filter(|_| roots).ok_or(BadAnswer::NoRoot)?.clone()
    };
    if leaf.spki != spki {
        return Err(match certs.iter().position(|c| c.spki == spki) {
            Some(at) => BadAnswer::LeafLater(at + 1),
            None => BadAnswer::OtherKey,
        });
    }
    if leaf.not_after < leaf.not_before {
        return Err(BadAnswer::Never { begins: leaf.not_before, ends: leaf.not_after });
    }
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
    fn what_follows_the_leaf_may_stand_in_any_order() {
        let (pair, intermediate, root, other) = cast();
        let leaf = &pair.chain[..pair.chain.len() - intermediate.len()];
        assert_eq!(format!("{leaf}{intermediate}"), pair.chain);
        let (roots, turned) = (format!("{root}{other}"), format!("{other}{root}"));
        for entries in [
            vec![leaf, &intermediate, &roots],
            vec![&pair.chain, &turned],
            vec![leaf, &root, &intermediate],
            vec![leaf, &other, &intermediate, &root],
            vec![leaf, &intermediate, &intermediate, &root],
        ] {
            let answer = read(&pair, &entries).unwrap();
            assert_eq!(
                (answer.chain.as_str(), answer.root.as_str()),
                (&*entries.concat(), *entries.last().unwrap())
            );
        }
        let wrong = read(&pair, &[&intermediate, leaf, &root]).unwrap_err();
        assert!(matches!(wrong, BadAnswer::LeafLater(2)), "{wrong}");
    }

    #[test]
    fn what_is_never_valid_is_refused() {
        let authority = Authority::new("cluster.local", 0);
        let mut leaf = Leaf::workload("spiffe://cluster.local/ns/a/sa/b", DAY);
        leaf.not_before = leaf.not_after + DAY;
        let pair = authority.pair(&leaf);
        let wrong = read(&pair, &[&pair.chain, authority.root_pem()]).unwrap_err();
        assert!(matches!(wrong, BadAnswer::Never { .. }), "{wrong}");
    }

    #[test]
    fn text_without_a_certificate_is_passed_over_but_is_no_root() {
        let (pair, _, root, _) = cast();
        let leaf = pair.chain.trim_end();
        assert_eq!(
            read(&pair, &["# ours", leaf, "# theirs", &root]).unwrap().chain,
            format!("# ours\n{leaf}\n# theirs\n{root}")
        );
        for entries in [vec![leaf, "# none"], vec![leaf, &root, ""], vec![leaf], vec!["# ours", leaf, "\n"]] {
            let wrong = read(&pair, &entries).unwrap_err();
            assert!(matches!(wrong, BadAnswer::NoRoot), "{entries:?}: {wrong}");
        }
        let wrong = read(&pair, &["# ours", &root]).unwrap_err();
        assert!(matches!(wrong, BadAnswer::OtherKey), "{wrong}");
        let torn = read(&pair, &[leaf, "-----BEGIN CERTIFICATE-----\nAAAA\n", &root]).unwrap_err();
        assert!(matches!(torn, BadAnswer::Entry { number: 2, .. }), "{torn}");
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
