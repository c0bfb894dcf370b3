//! The task that owns every secret.
//!
//! One loop: requests come in by channel, the attempt to get a certificate runs beside it as a future of
//! the same task, files report through the watcher, and time is one timer. Nothing here waits inside a
//! step, so a CA that hangs holds up nobody but those who have no certificate at all.

mod asking;
mod mounted;
mod outlook;
mod renewal;
mod troubles;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;

use super::board::Board;
use super::early::Early;
use super::files::{Reply, Store};
use super::identity_status::{Certificate, IdentityStatus};
use super::metrics::Metrics;
use super::output::Writer;
use super::request::{Failure, FirstKey, Issued};
use super::workload::Workload;
use super::{Config, Error, Fetched, Kept, ResourceName, SecretSource};
use crate::base::clock::Clock;
use crate::base::error::chain;
use crate::base::pressure::Short;
use crate::base::tasks::{Stop, TaskResult};
use crate::ca::CaClient;
use crate::ca::csr::Key;
use asking::{Mount, Waiter};
use troubles::Troubles;

/// Requests that wait for the manager's turn. It answers in microseconds; the senders wait when it is
/// full, so nothing is lost.
const QUEUE: usize = 256;

/// Asks the manager. Cheap to clone. Dropping all handles does not end the manager; its stop token does.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    bundle: watch::Sender<Vec<String>>,
    mended: Arc<Notify>,
    status: Arc<Mutex<IdentityStatus>>,
    kept: Arc<Mutex<Option<Kept>>>,
}

#[derive(Debug)]
struct Command {
    name: ResourceName,
    reply: Reply,
}

impl Handle {
    /// Replaces the trust bundle of the mesh (`ProxyConfig.caCertificatesPem` as it came over xDS; empty
    /// takes it away). It is merged into every `ROOTCA`.
    pub(crate) fn update_trust_bundle(&self, pem: Vec<String>) {
        self.bundle.send_if_modified(|old| {
            let new = *old != pem;
            *old = pem;
            new
        });
    }

    /// What a request to the CA needs has changed, a token or a root: where requests fail, the next one need not wait as
    /// long as it would.
    pub(crate) fn mended(&self) {
        self.mended.notify_one();
    }

    /// The trust bundle as it came last.
    #[must_use]
    pub(crate) fn bundle(&self) -> Vec<String> {
        self.bundle.borrow().clone()
    }

    /// What a successor in this process goes on with; put down where one may come.
    #[must_use]
    pub(crate) fn kept(&self) -> Option<Kept> {
        self.kept.lock().expect("no panic holds this lock").clone()
    }

    /// The state now.
    #[must_use]
    pub(crate) fn status(&self) -> IdentityStatus {
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
pub(crate) struct Manager {
    config: Config,
    ca: Option<Arc<dyn CaClient>>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    commands: mpsc::Receiver<Command>,
    bundle_news: watch::Receiver<Vec<String>>,
    mended: Arc<Notify>,
    status: Arc<Mutex<IdentityStatus>>,
    kept: Arc<Mutex<Option<Kept>>>,
    board: Board,
    files: Store,
    /// Of `default` and of `ROOTCA`.
    mounts: [Mount; 2],
    /// What is mounted was looked at once.
    looked: bool,
    workload: Workload,
    bundle: Vec<String>,
    waiting: Vec<Waiter>,
    /// A key that no CA has heard of, for the next attempt.
    unused_key: Option<Key>,
    /// Somebody has asked for `default`: from then on it is renewed whoever listens.
    asked: bool,
    /// Somebody has asked for the CA's roots since the certificate that they came with was due: the next one brings new ones.
    roots_due: bool,
    output: Option<Writer>,
    /// `IDENTITY_PERSIST`.
    persist: Option<Writer>,
    /// The root as it goes into `OUTPUT_CERTS`: as the CA sent it, or merged.
    output_raw_root: bool,
    troubles: Troubles,
    /// `RENEWAL_EARLY`, and whether the attempt that runs is of its making.
    early: Option<Early>,
    asked_early: bool,
}

type Running = BoxFuture<'static, Result<Issued, Failure>>;

impl Manager {
    /// Without a CA client everything comes from files. Begins to make the first key if that was not
    /// done before.
    #[must_use]
    pub(crate) fn new(
        mut config: Config,
        ca: Option<Arc<dyn CaClient>>,
        metrics: &crate::base::metrics::Metrics,
        clock: Arc<dyn Clock>,
    ) -> (Handle, Self) {
        let (commands, queue) = mpsc::channel(QUEUE);
        let (bundle, bundle_news) = watch::channel(config.bundle.clone());
        let (known, _) = super::bundle::readable(std::mem::take(&mut config.bundle));
        let status = Arc::new(Mutex::new(IdentityStatus::default()));
        let mended = Arc::<Notify>::default();
        if config.eager && ca.is_some() && config.first_key.is_none() && config.kept.is_none() {
            config.first_key = Some(FirstKey::begin(config.key.clone()));
        }
        let manager = Self {
            metrics: Metrics::new(metrics, Arc::clone(&clock)),
            files: Store::new(config.file_debounce, &config.watches),
            mounts: Default::default(),
            looked: false,
            workload: Workload::new(config.grace_ratio, config.grace_jitter),
            commands: queue,
            bundle_news,
            mended: Arc::clone(&mended),
            status: Arc::clone(&status),
            board: Board::default(),
            bundle: known,
            kept: Arc::default(),
            waiting: Vec::new(),
            unused_key: None,
            asked: config.proxyless,
            roots_due: false,
            persist: config.persist.as_ref().map(|persist| {
                Writer::new(super::persist::output(persist), config.trouble.sibling())
                    .of(super::persist::SETTING)
                    .unawaited()
            }),
            output: config.output.take().map(|output| Writer::new(output, config.trouble.sibling())),
            output_raw_root: false,
            troubles: Troubles::new(&config.trouble),
            early: config.early.then(Early::default),
            asked_early: false,
            config,
            ca,
            clock,
        };
        (Handle { commands, bundle, mended, status, kept: manager.kept.clone() }, manager)
    }

    /// Runs until `stop`.
    ///
    /// # Errors
    /// When the certificate is about to expire and the agent was told to end then.
    pub(crate) async fn run(mut self, stop: Stop) -> TaskResult {
        let mut running: Option<Running> = None;
        // As in the Go agent, files are not read before somebody asks when there is no CA; without Envoy
        // nobody ever asks.
        let mut restoring = self.restore().await;
        self.keep();
        if self.ca.is_some() || self.config.proxyless {
            self.begin(ResourceName::Default).await;
            self.begin(ResourceName::RootCa).await;
        }
        self.output_restored();
        let mut short = Short::new();
        loop {
            if running.is_none() {
                running = self.attempt();
            }
            let wake = self.wake(running.is_some());
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                outcome = maybe(&mut running) => {
                    running = None;
                    // Files that have come meanwhile are served, not what was issued.
                    self.come_back_all().await;
                    self.finished(outcome);
                }
                () = short.told() => self.shed().await,
                Some(command) = self.commands.recv() => {
                    let commands = self.and_waiting(command);
                    self.fetch(commands).await;
                }
                Ok(()) = self.bundle_news.changed() => self.bundle_changed(),
                () = self.mended.notified() => self.workload.mended(Instant::now()),
                () = self.files.changed() => {
                    let events = self.files.look_all().await;
                    self.file_events(events).await;
                }
                read = maybe(&mut restoring) => {
                    restoring = None;
                    self.restored(read);
                    self.output_restored();
                }
                () = written(&mut self.output) => {}
                () = written(&mut self.persist) => {}
                () = tokio::time::sleep_until(wake) => self.tick().await,
            }
            self.report()?;
        }
    }

    // With it those that have come meanwhile.
    fn and_waiting(&mut self, command: Command) -> Vec<Command> {
        let more = std::iter::from_fn(|| self.commands.try_recv().ok());
        std::iter::once(command).chain(more).take(QUEUE).collect()
    }

    fn wake(&self, running: bool) -> Instant {
        let (now, mono) = (self.clock.now(), Instant::now());
        let workload = self.ca.as_ref().map(|_| self.workload.wake(now, mono, !running && self.wanted()));
        let waiting = self.waiting.iter().filter_map(|w| w.until);
        let output = [&self.output, &self.persist].into_iter().flatten().filter_map(Writer::wake).min();
        let all = waiting.chain(workload).chain(self.files.wake()).chain(output);
        let life = self.workload.current.as_ref().map(|c| c.issued.life(now).0);
        // Of files in its place nobody asks for another, and a moment that has gone by would be waited for without a pause.
        let early = self
            .early
            .as_ref()
            .filter(|_| !running && self.wanted())
            .zip(life)
            .map(|(early, life)| early.wake(life, mono));
        let all = all.chain(early.map(|at| at.max(self.workload.not_before())));
        all.min().unwrap_or_else(|| mono + Duration::from_secs(3600))
    }

    async fn tick(&mut self) {
        let mono = Instant::now();
        self.tell_expiry();
        self.answer_due(mono);
        self.come_back_all().await;
        let board = &self.board;
        let (events, refused) = self.files.tick(mono, |name| board.followers(name)).await;
        (0..refused).for_each(|_| self.metrics.file_failed());
        self.file_events(events).await;
        self.sweep();
        for output in [&mut self.output, &mut self.persist].into_iter().flatten() {
            output.tick(mono);
        }
    }

    // Memory is short.
    async fn shed(&mut self) {
        let board = &self.board;
        self.files.shed(|name| board.followers(name)).await;
        self.sweep();
    }

    // What is known of names goes with them.
    fn sweep(&mut self) {
        let files = &self.files;
        let configured = |n: &ResourceName| matches!(n, ResourceName::Default | ResourceName::RootCa);
        self.board.sweep(|name| configured(name) || files.holds(name));
        self.troubles.files_left(|name| configured(name) || files.holds(name));
    }

    async fn come_back_all(&mut self) {
        if self.ca.is_some() {
            self.come_back(ResourceName::RootCa).await;
            self.come_back(ResourceName::Default).await;
        }
    }

    fn report(&mut self) -> TaskResult {
        self.too_soon();
        self.chain_refused();
        self.missed();
        self.mounted_over();
        let unfit = self.unfit()?;
        let used = self.used();
        self.metrics.used(used);
        let status = IdentityStatus {
            asked: used,
            certificate: self.workload.current.as_ref().map(|c| Certificate {
                serial: c.issued.leaf.serial.clone(),
                identities: c.issued.leaf.names(),
                not_before: c.issued.leaf.not_before,
                not_after: c.issued.leaf.not_after,
                renewal: c.renewal,
            }),
            unfit,
            failures: self.workload.failures(),
            last_error: self.workload.last_error.as_ref().map(|e| chain(e.as_ref())).unwrap_or_default(),
            files: self.files.overview(),
            trust_bundle: self.bundle.len(),
            output_error: self.output.as_ref().map(|o| o.error().to_owned()).unwrap_or_default(),
        };
        *self.status.lock().expect("no panic holds this lock") = status;
        self.keep();
        Ok(())
    }
}

async fn maybe<T>(slot: &mut Option<BoxFuture<'static, T>>) -> T {
    match slot {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

async fn written(output: &mut Option<Writer>) {
    match output {
        Some(output) => output.progress().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
