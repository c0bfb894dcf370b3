//! Wasm modules: the agent fetches them, so that Envoy loads a local file.
//!
//! An extension config names its module by URL. Envoy could fetch plain HTTP itself, but not images, not
//! with credentials, and without a bound or a cache of its own that survives a push. So the relay hands
//! each response with extension configs to this part before Envoy sees it:
//!
//! ```text
//! resource ─► filter::judge ─► untouched
//!                           ─► cache: there? ────────────────────────────► local file ─► filter::local
//!                                └ no: download ─► receive ─► cache: store ┘
//!                                      http, oci    unpack, hash, bound     failed ───► filter::replaced
//! ```
//!
//! * A module that cannot be had never refuses the response: its filter is replaced by one that lets
//!   everything pass or nothing, as its failure policy says, and the reason is logged. Only a config that
//!   cannot be read refuses.
//! * Resources of a response are worked on side by side. How a slow response and a newer one are put in
//!   order is the relay's business (`xds/ecds.rs`); nothing here holds up other types.
//! * Bytes that need not be read stay as they came (`base::wire`).
//! * A download is never in memory as a whole: it is unpacked, hashed and bounded on its way to a file
//!   beside its place, and renamed when it is good (`receive`, `cache`).
//! * Pull secrets reach the registry and nobody else: not Envoy, not the log, not an error. Of a URL neither
//!   user nor query is shown.
//!
//! | file | is about |
//! |---|---|
//! | `filter`, `typed_struct` | what a filter asks for, and what Envoy is given instead; pure |
//! | `cache` | which modules are there |
//! | `source` | what a URL means: a module or an image |
//! | `download` | modules over HTTP, with retries |
//! | `oci` | modules in images: registries, manifests, credentials |
//! | `receive`, `tar` | from bytes to a file |
//! | `failure` | why a module cannot be had |
//!
//! Why not the crate `oci-client`: it brings `reqwest` and its pools for three kinds of GET; with `fetch`,
//! which readiness and probes need anyway, an image costs what stands in `oci`.
//!
//! Uses `fetch`.

mod cache;
mod download;
mod failure;
pub(crate) mod filter;
mod meters;
mod oci;
mod receive;
mod source;
pub(crate) mod tar;
#[cfg(test)]
mod tests;
mod typed_struct;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustls::crypto::CryptoProvider;
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::base::metrics::Metrics;
use crate::base::quote::cut;
use crate::base::seldom::Seldom;
use crate::base::tasks::Stop;
use crate::fetch::Proxies;
use crate::fetch::url::shown;
use crate::net::accept::bound;
use crate::trouble::{Kind, Report, Reporter};
use cache::{Asker, Cache, Key};
use download::Web;
use failure::{Failure, Refusal, Refused};
use filter::{Decision, Filter, Policy, Secret, Unreadable, Wanted};
use meters::Meters;
use receive::Received;
use source::{BadUrl, Source};

#[cfg(debug_assertions)]
pub use oci::fuzz;

/// Where modules go and how they are fetched.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The folder of all modules; it must exist. `/var/lib/istio/data`.
    pub dir: PathBuf,
    /// Unused for so long, a module is removed (`WASM_MODULE_EXPIRY`, 24 h).
    pub expiry: Duration,
    /// Between two looks for such modules (`WASM_PURGE_INTERVAL`, 1 h); not zero.
    pub purge_interval: Duration,
    /// Limit of one attempt over HTTP (`WASM_HTTP_REQUEST_TIMEOUT`, 15 s).
    pub http_timeout: Duration,
    /// Attempts over HTTP in all (`WASM_HTTP_REQUEST_MAX_RETRIES`, 5); 0: none is made.
    pub http_attempts: u32,
    /// `host[:port]` whose certificates are not verified (`WASM_INSECURE_REGISTRIES`); `*`: all.
    pub insecure: Vec<String>,
    /// Longest module, packed or not, in bytes (`ISTIO_WASM_MAX_BINARY_SIZE_BYTES`, 256 MiB).
    pub max_size: u64,
    /// Files with registry credentials, of which the first that exists counts.
    pub credentials: Vec<PathBuf>,
    /// The way to module servers and registries.
    pub proxies: Proxies,
}

/// Converts extension configs.
pub(crate) struct Converter {
    cache: Cache,
    purge_interval: Duration,
    web: Web,
    meters: Meters,
    trouble: Reporter,
    failing: Mutex<Failing>,
    /// Turns of downloads.
    fetches: Semaphore,
}

/// The resources whose module cannot be had; at most [`TROUBLES`] are told apart.
#[derive(Default)]
struct Failing {
    /// Each with the conversion that has told it.
    told: BTreeMap<String, (u64, Reporter)>,
    /// Conversions that were begun, and removals.
    begun: u64,
    /// Those that have not ended.
    under_way: BTreeSet<u64>,
    /// The newest that brought all there is and has ended: what an older one tells is past.
    whole: u64,
    /// The newest that brought a resource's module, or removed it, as long as an older one is under way.
    settled: BTreeMap<String, u64>,
}

impl Failing {
    fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// Nothing is wrong with it, as of conversion `by`.
    fn settle(&mut self, name: &str, by: u64) {
        self.keep(|other, told| other != name || told > by);
        if self.under_way.first().is_some_and(|oldest| *oldest < by) {
            let settled = self.settled.entry(name.to_owned()).or_default();
            *settled = by.max(*settled);
        }
    }

    /// Nothing is wrong with any but what conversion `by`, or a newer one, has told.
    fn whole(&mut self, by: u64) {
        self.whole = self.whole.max(by);
        self.keep(|_, told| told >= by);
    }

    fn ended(&mut self, by: u64) {
        self.under_way.remove(&by);
        let oldest = self.under_way.first().copied().unwrap_or(u64::MAX);
        self.settled.retain(|_, settled| *settled > oldest);
    }

    fn keep(&mut self, kept: impl Fn(&str, u64) -> bool) {
        for (_, (_, reporter)) in self.told.extract_if(.., |name, (by, _)| !kept(name, *by)) {
            reporter.end();
        }
    }
}

/// A conversion, by its number, until it is dropped: it may be given up.
struct UnderWay<'a>(u64, &'a Mutex<Failing>);

impl<'a> UnderWay<'a> {
    fn begun(failing: &'a Mutex<Failing>) -> Self {
        let mut all = failing.lock().expect("no panic holds this lock");
        let by = all.begin();
        all.under_way.insert(by);
        Self(by, failing)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.1.lock().expect("no panic holds this lock").ended(self.0);
    }
}

/// Istiod can cause these as fast as it can send.
static REFUSED: Seldom = Seldom::new(60);
static STORED: Seldom = Seldom::new(60);
/// Longest cause in a line.
const CAUSE: usize = 1024;
/// What to do where this machine is what keeps a module from being had.
const MACHINE: &str = "free what the line names; the module is fetched when istiod sends its filter again, which a change of the WasmPlugin or a restart brings about";

/// A file that was not written to for so long when the agent starts belongs to none that runs.
const FRESH: Duration = Duration::from_secs(60);
/// And this at any time: a filter's module may take an hour at most.
const ABANDONED: Duration = Duration::from_secs(2 * 3600);
/// So many are read before others have their turn: half a millisecond.
const TURN: usize = 256;
/// Modules of one response that are looked after at a time, about 10 kB each ...
const TOGETHER: usize = 32;
/// ... and those that are fetched at a time, whoever wants them; fewer where few descriptors are allowed. A head may have
/// a megabyte, and each has a socket and a file.
const FETCHES: usize = 32;
/// So many resources in trouble are told apart.
const TROUBLES: usize = 32;

impl std::fmt::Debug for Converter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Converter").field("dir", &self.cache.dir()).finish_non_exhaustive()
    }
}

impl Converter {
    /// Nothing is read or written yet. `crypto`: for HTTPS.
    #[must_use]
    pub(crate) fn new(config: Config, crypto: Arc<CryptoProvider>, metrics: &Metrics) -> Self {
        Self {
            cache: Cache::new(config.dir.clone(), config.expiry),
            purge_interval: config.purge_interval,
            web: Web::new(config, crypto),
            meters: Meters::new(metrics),
            trouble: Reporter::default(),
            failing: Mutex::default(),
            fetches: Semaphore::new(bound(FETCHES)),
        }
    }

    /// Tells `trouble` of modules that cannot be had.
    #[must_use]
    pub(crate) fn with_trouble(mut self, trouble: Reporter) -> Self {
        self.trouble = trouble;
        self
    }

    fn failing(&self) -> MutexGuard<'_, Failing> {
        self.failing.lock().expect("no panic holds this lock")
    }

    fn failed(&self, name: &str, by: u64, report: Report) {
        let mut failing = self.failing();
        let known = failing.told.contains_key(name);
        let past = failing.settled.get(name).copied().max(Some(failing.whole));
        if Some(by) < past || (failing.told.len() >= TROUBLES && !known) {
            return;
        }
        let told = failing.told.entry(name.to_owned()).or_insert_with(|| (by, self.trouble.sibling()));
        told.0 = told.0.max(by);
        told.1.report(report.about(name));
    }

    /// These extensions are no more, and what was wrong with them neither.
    pub(crate) fn removed(&self, names: &[String]) {
        let mut failing = self.failing();
        let by = failing.begin();
        names.iter().for_each(|gone| failing.settle(gone, by));
    }

    /// There are no extensions any more.
    pub(crate) fn dropped(&self) {
        let mut failing = self.failing();
        let by = failing.begin();
        failing.whole(by);
    }

    /// Removes unused modules from time to time, until `stop`. `kept` tells which extension configs are kept for a later
    /// Envoy; their modules are in use.
    pub(crate) async fn purge<F: Future<Output = io::Result<Vec<Bytes>>>>(
        &self,
        stop: Stop,
        kept: impl Fn() -> F,
    ) {
        let mut ticks = interval(self.purge_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first is at once. Nothing of ours is older yet than a moment.
        ticks.tick().await;
        self.cache.sweep(FRESH).await;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            self.cache.purge(kept()).await;
            self.cache.sweep(ABANDONED).await;
            self.meters.entries(self.cache.count());
        }
    }

    /// Converts the resources of one response, each an encoded `Any`; their order stays. `whole`: there are no others, so
    /// that the trouble of those is over.
    ///
    /// # Errors
    /// When one of them cannot be read: the reasons of such, for istiod.
    pub(crate) async fn convert(&self, resources: Vec<Bytes>, whole: bool) -> Result<Vec<Bytes>, Refused> {
        let begun = Instant::now();
        let conversion = UnderWay::begun(&self.failing);
        let by = conversion.0;
        let (mut converted, mut remote, mut refused) = (resources, Vec::new(), Refused::default());
        for (at, resource) in converted.iter().enumerate() {
            match self.judged(resource) {
                Ok(filter) => remote.extend(filter.map(|filter| (at, filter))),
                Err(why) => refused.add(why.into()),
            }
            // Others want to go on, too.
            if at % TURN == TURN - 1 {
                tokio::task::yield_now().await;
            }
        }
        let (mut waiting, mut made) = (remote.into_iter(), FuturesUnordered::new());
        loop {
            while made.len() < TOGETHER
                && let Some((at, filter)) = waiting.next()
            {
                made.push(async move { (at, self.remote(&filter, by).await) });
            }
            match made.next().await {
                Some((at, Ok(resource))) => converted[at] = resource,
                Some((_, Err(why))) => refused.add(why),
                None => break,
            }
        }
        self.meters.took(begun.elapsed());
        if refused.count > 0 {
            return Err(refused);
        }
        if whole {
            self.failing().whole(by);
        }
        Ok(converted)
    }

    // The filter, if its code is remote.
    fn judged(&self, resource: &Bytes) -> Result<Option<Box<Filter>>, Unreadable> {
        match filter::judge(resource) {
            Ok(Decision::Untouched) => {
                self.meters.conversion("no_remote_load");
                Ok(None)
            }
            Ok(Decision::Remote(filter)) => Ok(Some(filter)),
            Err(why) => {
                self.meters.conversion("unmarshal_failure");
                let text = why.to_string();
                let text = cut(&text, CAUSE);
                if let Some(more) = REFUSED.may_hold(text.len()) {
                    tracing::warn!(target: "wasm", "an extension config is refused: {text}{more}");
                }
                Err(why)
            }
        }
    }

    async fn remote(&self, filter: &Filter, by: u64) -> Result<Bytes, Refusal> {
        let (made, label) = self.rewritten(filter, by).await;
        match made {
            Ok(resource) => {
                self.meters.conversion(label);
                Ok(resource)
            }
            Err(error) => {
                self.meters.conversion("marshal_failure");
                Err(Refusal::Rewrite(filter.wanted.resource.clone(), error))
            }
        }
    }

    async fn rewritten(&self, filter: &Filter, by: u64) -> (Result<Bytes, prost::DecodeError>, &'static str) {
        let wanted = &filter.wanted;
        let label = match self.module(wanted).await {
            Ok(file) => {
                self.failing().settle(&wanted.resource, by);
                return (filter.local(&file.to_string_lossy()), "success");
            }
            Err(failure) => {
                if let Some(label) = failure.label() {
                    self.meters.fetch(label);
                }
                let stand_in = if filter.open { "lets all traffic pass" } else { "denies all traffic" };
                let name = &wanted.resource;
                let why = failure.to_string();
                // A registry's words may be in it, and each resource's is kept.
                let why = cut(&why, CAUSE);
                let detail = format!(
                    "Wasm module of {name:?} cannot be had, so a filter in its place {stand_in}: {why}"
                );
                let report = match Kind::of_start(&why) {
                    // Nothing is tried again before istiod sends the filter anew.
                    Some(kind) => Report::new(kind, detail).hint(MACHINE),
                    None => Report::new(Kind::WasmFailed, detail),
                };
                self.failed(name, by, report);
                failure.conversion()
            }
        };
        (filter.replaced(), label)
    }

    /// The module's file, fetched if need be.
    async fn module(&self, wanted: &Wanted) -> Result<PathBuf, Failure> {
        if matches!(wanted.secret, Secret::Missing) {
            return Err(Failure::NoSecret(wanted.resource.clone()));
        }
        let url = wanted.url.as_deref().ok_or(Failure::NoUri)?;
        let source = Source::parse(url).inspect_err(|bad| {
            // What is a URL is looked for before it turns out to be none of a module.
            if !matches!(bad, BadUrl::Url { .. }) {
                self.meters.lookup(false);
            }
        })?;
        let asker =
            Asker { url, resource: &wanted.resource, version: &wanted.version, pinned: source.is_pinned() };
        let any_version = match wanted.policy {
            Policy::IfNotPresent => true,
            Policy::Always => false,
            Policy::Unspecified => !source.is_latest(),
        };
        let given = Some(wanted.checksum.clone()).filter(|sum| !sum.is_empty());
        let wanted_sum = given.or_else(|| source.digest().map(ToOwned::to_owned));
        // What the URL once led to says where to look, and nothing of what it leads to now.
        let expected = wanted_sum.clone().or_else(|| self.cache.recall(asker, any_version));
        let key = |checksum: &str| Key { name: source.name(), checksum: checksum.to_owned() };
        if let Some(file) = self.look(expected.as_deref().map(&key), asker).await {
            return Ok(file);
        }
        let _turn = self.fetches.acquire().await.expect("it is never closed");
        let until = Instant::now() + wanted.timeout;
        match &source {
            Source::Module(_) => {
                let received = self.web.module(url, until).await?;
                let actual = received.checksum.clone();
                if expected.is_none()
                    && let Some(file) = self.look(Some(key(&actual)), asker).await
                {
                    return Ok(file);
                }
                self.check(url, wanted_sum.as_deref(), &[&actual])?;
                self.keep(&key(&actual), asker, received).await
            }
            Source::Image(reference) => {
                let mut registry = oci::Registry::new(&self.web, reference, &wanted.secret, until).await?;
                let manifest = registry.manifest().await.map_err(Failure::Manifest)?;
                if expected.is_none()
                    && let Some(file) = self.look(Some(key(&manifest.digest)), asker).await
                {
                    return Ok(file);
                }
                // Whoever pins an index means what it leads to.
                let known_as = self.check(url, wanted_sum.as_deref(), &manifest.digests())?;
                let received = registry.module(manifest).await.map_err(Failure::Image)?;
                self.keep(&key(&known_as), asker, received).await
            }
        }
    }

    async fn look(&self, key: Option<Key>, asker: Asker<'_>) -> Option<PathBuf> {
        let file = match key {
            Some(key) => self.cache.find(&key, asker).await,
            None => None,
        };
        self.meters.lookup(file.is_some());
        file
    }

    // The checksum by which the module is known from now on.
    fn check(&self, url: &str, expected: Option<&str>, actual: &[&str]) -> Result<String, Failure> {
        match expected {
            None => Ok(actual[0].to_owned()),
            Some(sum) if actual.contains(&sum) => Ok(sum.to_owned()),
            Some(sum) => Err(Failure::Checksum {
                url: shown(url),
                found: actual[0].to_owned(),
                wanted: sum.to_owned(),
            }),
        }
    }

    async fn keep(&self, key: &Key, asker: Asker<'_>, received: Received) -> Result<PathBuf, Failure> {
        let url = shown(asker.url);
        if !received.module {
            return Err(Failure::NoModule { url, source: received.entry.err() });
        }
        self.meters.fetch("success");
        let file = match self.cache.store(key, asker, received.file).await {
            Ok(file) => file,
            Err(source) => {
                let dir = self.cache.dir().display().to_string();
                return Err(Failure::Store { url, dir, source });
            }
        };
        self.meters.entries(self.cache.count());
        if let Some(more) = STORED.may_hold(url.len()) {
            tracing::info!(target: "wasm", "module from {url} is stored as {}{more}", file.display());
        }
        Ok(file)
    }
}
