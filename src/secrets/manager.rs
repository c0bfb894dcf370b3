//! The task that owns every secret.
//!
//! One loop: requests come in by channel, the attempt to get a certificate runs beside it as a future of
//! the same task, files report through the watcher, and time is one timer. Nothing here waits inside a
//! step, so a CA that hangs holds up nobody but those who have no certificate at all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::files::{Event, Loaded, Reply, Source, Store};
use super::metrics::Metrics;
use super::name::SYSTEM;
use super::request::{Attempt, FirstKey, Issued};
use super::slot::Slot;
use super::status::{Certificate, Status};
use super::workload::Workload;
use super::{
    Config, Error, Fetched, Identity, ResourceName, Roots, Secret, SecretSource, bundle, output, rotation,
};
use crate::base::clock::Clock;
use crate::base::error::chain;
use crate::base::tasks::Stop;
use crate::ca::CaClient;

/// Requests that wait for the manager's turn. It answers in microseconds; the senders wait when it is
/// full, so nothing is lost.
const QUEUE: usize = 256;

/// A certificate that is due, but good, is held back this long in favour of the new one.
const SOFT_WAIT: Duration = Duration::from_secs(2);

/// Pause between tries to write `OUTPUT_CERTS`.
const OUTPUT_RETRY: Duration = Duration::from_secs(10);

/// Asks the manager. Cheap to clone; the manager outlives no need of it: it ends by its stop token.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
    bundle: watch::Sender<Vec<String>>,
    status: Arc<Mutex<Status>>,
}

#[derive(Debug)]
struct Command {
    name: ResourceName,
    reply: Reply,
}

impl Handle {
    /// Replaces the trust bundle of the mesh (`ProxyConfig.caCertificatesPem` as it came over xDS; empty
    /// takes it away). It is merged into every `ROOTCA`.
    pub fn update_trust_bundle(&self, pem: Vec<String>) {
        self.bundle.send_if_modified(|old| {
            let new = *old != pem;
            *old = pem;
            new
        });
    }

    /// The state now.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.lock().expect("no panic holds this lock").clone()
    }
}

impl SecretSource for Handle {
    fn fetch(&self, name: ResourceName) -> BoxFuture<'static, Result<Fetched, Arc<Error>>> {
        let commands = self.commands.clone();
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            commands.send(Command { name, reply }).await.map_err(|_| Arc::new(Error::Stopped))?;
            answer.await.unwrap_or_else(|_| Err(Arc::new(Error::Stopped)))
        })
    }
}

/// The task; see the module.
#[derive(Debug)]
pub struct Manager {
    config: Config,
    ca: Option<Arc<dyn CaClient>>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    commands: mpsc::Receiver<Command>,
    bundle_news: watch::Receiver<Vec<String>>,
    status: Arc<Mutex<Status>>,
    slots: HashMap<ResourceName, Slot>,
    files: Store,
    workload: Workload,
    bundle: Vec<String>,
    waiting: Vec<Waiter>,
    /// Somebody has asked for `default`: from then on it is renewed whoever listens.
    asked: bool,
    output_due: Option<Instant>,
    output_error: String,
    /// The root as it goes into `OUTPUT_CERTS`: as the CA sent it, or merged.
    output_raw_root: bool,
}

#[derive(Debug)]
struct Waiter {
    name: ResourceName,
    reply: Reply,
    /// For those who can be given the old certificate: when.
    until: Option<Instant>,
}

/// Who provides `default` or `ROOTCA` at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Provider {
    Files(Source),
    Ca,
    Nobody,
}

type Running = BoxFuture<'static, Result<Issued, Error>>;

impl Manager {
    /// Without a CA client everything comes from files. Begins to make the first key if that was not
    /// done before.
    #[must_use]
    pub fn new(
        mut config: Config,
        ca: Option<Arc<dyn CaClient>>,
        metrics: &crate::base::metrics::Metrics,
        clock: Arc<dyn Clock>,
    ) -> (Handle, Self) {
        let (commands, queue) = mpsc::channel(QUEUE);
        let (bundle, bundle_news) = watch::channel(Vec::new());
        let status = Arc::new(Mutex::new(Status::default()));
        if ca.is_some() && config.first_key.is_none() {
            config.first_key = Some(FirstKey::begin(config.key.clone()));
        }
        let manager = Self {
            metrics: Metrics::new(metrics, Arc::clone(&clock)),
            files: Store::new(config.file_debounce),
            workload: Workload::new(config.grace_ratio, config.grace_jitter),
            commands: queue,
            bundle_news,
            status: Arc::clone(&status),
            slots: HashMap::new(),
            bundle: Vec::new(),
            waiting: Vec::new(),
            asked: config.proxyless,
            output_due: None,
            output_error: String::new(),
            output_raw_root: false,
            config,
            ca,
            clock,
        };
        (Handle { commands, bundle, status }, manager)
    }

    /// Runs until `stop`.
    pub async fn run(mut self, stop: Stop) {
        let mut running: Option<Running> = None;
        // As in the Go agent, files are not read before somebody asks when there is no CA; without Envoy
        // nobody ever asks.
        if self.ca.is_some() || self.config.proxyless {
            self.begin(ResourceName::Default);
            self.begin(ResourceName::RootCa);
        }
        loop {
            if running.is_none() {
                running = self.attempt();
            }
            let wake = self.wake(running.is_some());
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                outcome = poll(&mut running) => {
                    running = None;
                    self.finished(outcome);
                }
                Some(command) = self.commands.recv() => self.fetch(command),
                Ok(()) = self.bundle_news.changed() => self.bundle_changed(),
                () = self.files.changed() => {
                    let events = self.files.look_all();
                    self.file_events(events);
                }
                () = tokio::time::sleep_until(wake) => self.tick(),
            }
            self.report();
        }
    }

    // ---- which way

    fn provider(&self, name: &ResourceName) -> Provider {
        let own = self.config.output.as_ref().is_some_and(|o| o.holds(&self.config.mounted.cert));
        let source = self.mounted(name);
        // Files that are gone for a moment are not given up: what was read of them is still good.
        if !own && (source.usable() || self.files.loaded(name).is_some()) {
            Provider::Files(source)
        } else if self.ca.is_some() {
            Provider::Ca
        } else {
            Provider::Nobody
        }
    }

    fn mounted(&self, name: &ResourceName) -> Source {
        let mounted = &self.config.mounted;
        match name {
            ResourceName::Default => Source::Pair { cert: mounted.cert.clone(), key: mounted.key.clone() },
            _ => Source::Roots(mounted.root.clone()),
        }
    }

    /// Whether a certificate is worth a request now.
    fn wanted(&self) -> bool {
        let certificate = self.provider(&ResourceName::Default) == Provider::Ca;
        if self.workload.current.is_none() {
            return certificate || self.provider(&ResourceName::RootCa) == Provider::Ca;
        }
        certificate && (self.asked || self.config.output.is_some())
    }

    fn attempt(&mut self) -> Option<Running> {
        let ca = self.ca.clone()?;
        let mono = Instant::now();
        if mono < self.workload.not_before() || !self.workload.due(self.clock.now(), mono) || !self.wanted() {
            return None;
        }
        let attempt = Attempt {
            ca,
            key: self.config.key.clone(),
            first_key: self.config.first_key.take(),
            identity: self.config.identity.clone(),
            ttl: self.config.ttl,
            clock: Arc::clone(&self.clock),
            metrics: self.metrics.clone(),
        };
        Some(Box::pin(attempt.run()))
    }

    // ---- requests

    /// Makes a configured file resource known before anybody asks for it.
    fn begin(&mut self, name: ResourceName) {
        let source = match self.provider(&name) {
            Provider::Files(source) => source,
            Provider::Nobody => self.mounted(&name),
            Provider::Ca => return,
        };
        if let Ok(event) = self.files.follow(&name, source) {
            self.file_events(event);
        }
    }

    fn fetch(&mut self, Command { name, reply }: Command) {
        let source = match &name {
            ResourceName::FileCert { cert, key } => Source::Pair { cert: cert.into(), key: key.into() },
            ResourceName::FileRoot(path) if path == SYSTEM => match &self.config.system_bundle {
                Some(bundle) => Source::Roots(bundle.clone()),
                None => {
                    let reason = "no bundle of the operating system was found at start".to_owned();
                    let _ = reply.send(Err(Arc::new(Error::File { name: name.to_string(), reason })));
                    return;
                }
            },
            ResourceName::FileRoot(path) => Source::Roots(path.into()),
            ResourceName::Default | ResourceName::RootCa => match self.provider(&name) {
                Provider::Files(source) => source,
                Provider::Ca => return self.fetch_from_ca(name, reply),
                Provider::Nobody => {
                    let _ = reply.send(Err(Arc::new(Error::NoCa(self.config.mounted.clone()))));
                    return;
                }
            },
        };
        self.asked |= name == ResourceName::Default;
        match self.files.follow(&name, source) {
            Ok(event) => self.file_events(event),
            Err(error) => {
                let _ = reply.send(Err(Arc::new(error)));
                return;
            }
        }
        match self.files.loaded(&name).and_then(|_| self.slots.get(&name)?.fetched()) {
            Some(fetched) => drop(reply.send(Ok(fetched))),
            None => self.files.wait(&name, reply),
        }
    }

    fn fetch_from_ca(&mut self, name: ResourceName, reply: Reply) {
        let (now, mono) = (self.clock.now(), Instant::now());
        let root = name == ResourceName::RootCa;
        self.asked |= !root;
        let until = if root && self.workload.current.is_some() {
            Some(mono)
        } else if self.workload.valid(now).is_none() {
            self.workload.hurry(mono);
            None
        } else if self.workload.due(now, mono) && self.workload.failures() == 0 {
            // Nobody had asked, so it was not renewed: the new one is a moment away.
            Some(mono + SOFT_WAIT)
        } else {
            Some(mono)
        };
        if until == Some(mono) {
            self.answer(&name, reply);
        } else {
            self.waiting.push(Waiter { name, reply, until });
        }
    }

    fn answer(&mut self, name: &ResourceName, reply: Reply) {
        // A resource that came from files until now may not have been published from the CA's answer.
        if self.slots.get(name).is_none_or(|s| s.value().is_none()) {
            self.publish_workload(name);
        }
        let answer = self.slots.get(name).and_then(Slot::fetched).ok_or_else(|| Arc::new(Error::Stopped));
        let _ = reply.send(answer);
    }

    // ---- the CA's answers

    fn finished(&mut self, outcome: Result<Issued, Error>) {
        let mono = Instant::now();
        match outcome {
            Ok(issued) => self.renewed(issued, mono),
            Err(error) => self.refused(Arc::new(error), mono),
        }
    }

    fn renewed(&mut self, issued: Issued, mono: Instant) {
        let now = self.clock.now();
        let leaf = &issued.leaf;
        let left = rotation::span(leaf.not_after.duration_since(now).unwrap_or_default());
        let names = leaf.uris.join(", ");
        tracing::info!(target: "cache", "generated new workload certificate: latency {:?}, ttl {left}, serial {}, identity {names}",
            issued.took, leaf.serial);
        if !leaf.uris.contains(&self.config.identity) {
            tracing::warn!(target: "cache",
                "asked for identity {}, the CA issued {names}: the CA decides, peers will see the latter; \
                 check TRUST_DOMAIN, POD_NAMESPACE and SERVICE_ACCOUNT if that is not meant",
                self.config.identity);
        }
        self.metrics.issued(now, leaf.not_after);
        let failures = self.workload.failures();
        if failures > 0 {
            tracing::info!(target: "cache", "the CA answers again after {failures} failed attempts");
        }
        let first = self.workload.current.is_none();
        self.workload.succeeded(issued, mono);
        // The root goes first: a peer's new certificate must not arrive before its anchor.
        let mut new_root = false;
        if self.provider(&ResourceName::RootCa) == Provider::Ca {
            new_root = self.publish_workload(&ResourceName::RootCa) && !first;
        }
        if self.provider(&ResourceName::Default) == Provider::Ca {
            self.publish_workload(&ResourceName::Default);
        }
        if new_root {
            tracing::info!(target: "cache", "root cert has changed");
        }
        // The Go agent's file follows what it served last: the merged set after ROOTCA was generated, the
        // CA's own text after default alone.
        let root_followed = self.slots.get(&ResourceName::RootCa).is_some_and(|s| s.followers() > 0);
        let merged = first || self.config.proxyless || (new_root && root_followed);
        self.output_raw_root = !merged && self.bundle.is_empty();
        self.write_output();
        for waiter in std::mem::take(&mut self.waiting) {
            self.answer(&waiter.name, waiter.reply);
        }
    }

    fn refused(&mut self, error: Arc<Error>, mono: Instant) {
        self.metrics.renewal_failed(label(&error));
        let now = self.clock.now();
        let failed = self.workload.failed(&error, mono);
        let left = self
            .workload
            .valid(now)
            .map(|c| rotation::span(c.issued.leaf.not_after.duration_since(now).unwrap_or_default()));
        if failed.tell {
            let kept = match &left {
                Some(left) => format!("the current certificate stays in use, it is valid for another {left}"),
                None => "there is no valid workload certificate".to_owned(),
            };
            tracing::warn!(target: "cache", "{}; {kept}; next attempt in {:.1?} (failure {})",
                chain(error.as_ref()), failed.next, self.workload.failures());
        }
        if failed.first
            && self.workload.current.is_some()
            && let Some(slot) = self.slots.get(&ResourceName::Default)
        {
            // Followers hear of it once, as with the Go agent: their streams end, Envoy keeps what it has,
            // comes back and is given the certificate that is still good.
            slot.fail(Arc::clone(&error));
        }
        for waiter in std::mem::take(&mut self.waiting) {
            if left.is_some() {
                self.answer(&waiter.name, waiter.reply);
            } else {
                let _ = waiter.reply.send(Err(Arc::clone(&error)));
            }
        }
    }

    /// Publishes one of the two resources from the CA's answer if it differs; gives whether it did.
    fn publish_workload(&mut self, name: &ResourceName) -> bool {
        let Some(current) = &self.workload.current else { return false };
        match name {
            ResourceName::Default => {
                let identity = Arc::clone(&current.issued.identity);
                self.publish(name, Secret::Identity(identity))
            }
            _ => {
                let merged = self.merged(&current.issued.root);
                self.publish(name, Secret::Roots(Arc::new(Roots { pem: merged.into_bytes() })))
            }
        }
    }

    fn publish(&mut self, name: &ResourceName, secret: Secret) -> bool {
        let slot = self.slots.entry(name.clone()).or_default();
        let same = match (slot.value(), &secret) {
            (Some(Secret::Roots(old)), Secret::Roots(new)) => old == *new,
            (Some(Secret::Identity(old)), Secret::Identity(new)) => {
                Arc::ptr_eq(&old, new) || (old.chain == new.chain && old.key == new.key)
            }
            _ => false,
        };
        if !same {
            slot.publish(secret);
        }
        !same
    }

    fn merged(&self, root: &str) -> String {
        bundle::merge(std::iter::once(root).chain(self.bundle.iter().map(String::as_str)))
    }

    // ---- files

    fn file_events(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            match event {
                Event::Loaded(name, loaded) => self.file_loaded(&name, loaded),
                Event::Troubled(name, error) => self.file_troubled(&name, error),
            }
        }
        self.metrics.watches_failed(self.files.new_watch_failures());
    }

    fn file_loaded(&mut self, name: &ResourceName, loaded: Loaded) {
        let secret = match loaded {
            Loaded::Pair(identity) => Secret::Identity(identity),
            Loaded::Roots(pem) => {
                let pem = if *name == ResourceName::RootCa { self.merged(&pem) } else { pem };
                Secret::Roots(Arc::new(Roots { pem: pem.into_bytes() }))
            }
        };
        if self.publish(name, secret) {
            tracing::info!(target: "cache", "read {name} from file");
        }
        if matches!(name, ResourceName::Default | ResourceName::RootCa) {
            self.output_raw_root = false;
            self.write_output();
        }
        for reply in self.files.take_waiting(name) {
            if let Some(fetched) = self.slots.get(name).and_then(Slot::fetched) {
                let _ = reply.send(Ok(fetched));
            }
        }
    }

    fn file_troubled(&mut self, name: &ResourceName, error: Arc<Error>) {
        let text = chain(error.as_ref());
        let had = self.files.loaded(name).is_some();
        for reply in self.files.take_waiting(name) {
            self.metrics.file_failed();
            let _ = reply.send(Err(Arc::clone(&error)));
        }
        let configured = matches!(name, ResourceName::Default | ResourceName::RootCa);
        let gone = configured && !self.mounted(name).usable();
        if gone && self.ca.is_some() {
            tracing::warn!(target: "cache", "{text}; the CA takes over");
            self.files.forget(name);
            if self.workload.current.is_some() {
                self.publish_workload(name);
            }
            return;
        }
        if had {
            tracing::warn!(target: "cache", "{text}; the last good content stays in use, the file is read again when it changes");
            if let Some(slot) = self.slots.get(name).filter(|s| s.followers() > 0) {
                self.metrics.file_failed();
                slot.fail(error);
            }
        } else {
            tracing::warn!(target: "cache", "{text}");
        }
    }

    fn bundle_changed(&mut self) {
        let given = self.bundle_news.borrow_and_update().clone();
        let (good, dropped) = bundle::readable(given);
        if dropped > 0 {
            tracing::warn!(target: "cache", "{dropped} entries of the trust bundle are no certificates and are left out");
        }
        if good == self.bundle {
            return;
        }
        tracing::info!(target: "cache", "trust bundle updated: {} entries", good.len());
        self.bundle = good;
        if let Some(Loaded::Roots(pem)) = self.files.loaded(&ResourceName::RootCa).cloned() {
            self.file_loaded(&ResourceName::RootCa, Loaded::Roots(pem));
            // As the Go agent: with mounted files both names are announced.
            let pair = self.files.loaded(&ResourceName::Default).is_some();
            if let Some(slot) = self.slots.get(&ResourceName::Default).filter(|_| pair)
                && let Some(identity) = slot.value()
            {
                slot.publish(identity);
            }
        } else if self.workload.current.is_some() {
            self.publish_workload(&ResourceName::RootCa);
            self.output_raw_root = false;
            self.write_output();
        }
    }

    // ---- time

    fn wake(&self, running: bool) -> Instant {
        let (now, mono) = (self.clock.now(), Instant::now());
        let workload = self.ca.as_ref().map(|_| self.workload.wake(now, mono, !running && self.wanted()));
        let waiting = self.waiting.iter().filter_map(|w| w.until);
        let all = waiting.chain(workload).chain(self.files.wake()).chain(self.output_due);
        all.min().unwrap_or_else(|| mono + Duration::from_secs(3600))
    }

    fn tick(&mut self) {
        let (now, mono) = (self.clock.now(), Instant::now());
        if self.workload.expired_now(now) {
            let why = self
                .workload
                .last_error
                .as_ref()
                .map_or("it was not renewed".to_owned(), |e| chain(e.as_ref()));
            tracing::error!(target: "cache", "the workload certificate has expired: {why}");
        }
        for waiter in std::mem::take(&mut self.waiting) {
            if waiter.until.is_some_and(|until| until <= mono) {
                self.answer(&waiter.name, waiter.reply);
            } else if !waiter.reply.is_closed() {
                self.waiting.push(waiter);
            }
        }
        let slots = &self.slots;
        let (events, refused) = self.files.tick(mono, |name| slots.get(name).map_or(0, Slot::followers));
        (0..refused).for_each(|_| self.metrics.file_failed());
        self.file_events(events);
        let files = &self.files;
        let configured = |n: &ResourceName| matches!(n, ResourceName::Default | ResourceName::RootCa);
        self.slots.retain(|name, slot| configured(name) || files.holds(name) || slot.followers() > 0);
        if self.output_due.is_some_and(|due| due <= mono) {
            self.write_output();
        }
    }

    // ---- what is shown and written

    fn write_output(&mut self) {
        let Some(config) = &self.config.output else { return };
        let secret = |name| self.slots.get(name).and_then(Slot::value);
        let identity: Option<Arc<Identity>> = match secret(&ResourceName::Default) {
            Some(Secret::Identity(identity)) => Some(identity),
            _ => None,
        };
        let merged = match secret(&ResourceName::RootCa) {
            Some(Secret::Roots(roots)) => Some(roots),
            _ => None,
        };
        let raw =
            self.workload.current.as_ref().filter(|_| self.output_raw_root).map(|c| c.issued.root.as_bytes());
        let files = output::Files {
            key: identity.as_ref().map(|i| i.key.as_slice()),
            chain: identity.as_ref().map(|i| i.chain.as_slice()),
            root: raw.or(merged.as_ref().map(|r| r.pem.as_slice())),
        };
        match config.write(files) {
            Ok(()) => {
                if !self.output_error.is_empty() {
                    tracing::info!(target: "cache", "certificates are written to {} again", config.dir.display());
                }
                self.output_due = None;
                self.output_error.clear();
            }
            Err(error) => {
                let text = chain(&error);
                if text != self.output_error {
                    tracing::warn!(target: "cache", "OUTPUT_CERTS: {text}; SDS goes on, the files are tried again every {OUTPUT_RETRY:?}");
                }
                self.output_error = text;
                self.output_due = Some(Instant::now() + OUTPUT_RETRY);
            }
        }
    }

    fn report(&self) {
        let status = Status {
            certificate: self.workload.current.as_ref().map(|c| Certificate {
                serial: c.issued.leaf.serial.clone(),
                identities: c.issued.leaf.uris.clone(),
                not_before: c.issued.leaf.not_before,
                not_after: c.issued.leaf.not_after,
                renewal: c.renewal,
            }),
            failures: self.workload.failures(),
            last_error: self.workload.last_error.as_ref().map(|e| chain(e.as_ref())).unwrap_or_default(),
            next_attempt: (self.workload.failures() > 0).then(|| self.workload.not_before()),
            files: self.files.overview(),
            trust_bundle: self.bundle.len(),
            output_error: self.output_error.clone(),
        };
        *self.status.lock().expect("no panic holds this lock") = status;
    }
}

async fn poll(running: &mut Option<Running>) -> Result<Issued, Error> {
    match running {
        Some(attempt) => attempt.await,
        None => std::future::pending().await,
    }
}

fn label(error: &Error) -> &'static str {
    match error {
        Error::Ca(error) => error.label(),
        Error::Refused(_) => "answer",
        Error::Hung(_) => "deadline",
        _ => "key",
    }
}

#[cfg(test)]
mod tests;
