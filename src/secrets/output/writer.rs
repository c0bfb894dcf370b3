//! Writes the files beside the manager's loop.
//!
//! A disk can stand still for as long as it likes, so each write runs on a thread of its
//! own. One at a time: what comes meanwhile replaces what waits, since only the newest
//! certificate is of use, and a file system that hangs holds one thread and never more. A write that
//! fails is tried again every [`RETRY`]; one that does not end within [`OVERDUE`] is told.
//!
//! As with the Go agent the files are there before anybody is told of the certificate in them, unless the
//! disk needs more than [`GRACE`] for that.

use std::fmt;
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use tokio::sync::oneshot::{Receiver, error::RecvError};
use tokio::time::{Instant, sleep_until};

use super::{Config, Error, Files};
use crate::base::error::chain;
use crate::base::lane;
use crate::secrets::{Identity, Roots};
use crate::trouble::{Kind, Report, Reporter};

/// Pause between tries.
const RETRY: Duration = Duration::from_secs(10);

/// A write of three small files that takes longer belongs in the log.
const OVERDUE: Duration = Duration::from_secs(10);

/// Least time from one look at the files to the next, however many ask: three small files are read then.
const PAUSE: Duration = Duration::from_millis(100);

/// How long the caller waits for a write: hundreds of times what a healthy disk needs, and nothing that a
/// stream would notice.
const GRACE: Duration = Duration::from_millis(50);

/// How long the end of the agent waits for a write: its thread goes with the process, and would leave files that are
/// on their way.
const LAST: Duration = Duration::from_secs(1);

/// What is to stand in the files; `None` leaves them alone.
#[derive(Debug, Clone, Default)]
pub(in crate::secrets) struct Content {
    /// Key and chain.
    pub(in crate::secrets) identity: Option<Arc<Identity>>,
    /// Roots.
    pub(in crate::secrets) roots: Option<Arc<Roots>>,
}

/// See the module.
pub(in crate::secrets) struct Writer {
    config: Arc<Config>,
    running: Option<Receiver<Result<(), Error>>>,
    /// Its other side is dropped when the write under way has ended.
    ended: Mutex<Option<mpsc::Receiver<()>>>,
    /// When the write under way is told to be late; `None` once it was.
    overdue: Option<Instant>,
    /// What the files should hold.
    latest: Content,
    /// Whether `latest` waits for the write under way to end.
    waits: bool,
    retry: Option<Instant>,
    error: String,
    trouble: Reporter,
    /// How long the caller waits.
    grace: Duration,
    /// What asks for the files.
    setting: &'static str,
    /// When the last write, or look, was begun, and when a look that was put off is due.
    begun: Option<Instant>,
    look: Option<Instant>,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("config", &self.config)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(ended) = ended.take() {
            let _ = ended.recv_timeout(LAST);
        }
    }
}

impl Writer {
    pub(in crate::secrets) fn new(config: Config, trouble: Reporter) -> Self {
        Self {
            config: Arc::new(config),
            running: None,
            ended: Mutex::default(),
            overdue: None,
            latest: Content::default(),
            waits: false,
            retry: None,
            error: String::new(),
            trouble,
            grace: GRACE,
            setting: "OUTPUT_CERTS",
            begun: None,
            look: None,
        }
    }

    /// Of this setting.
    pub(in crate::secrets) fn of(mut self, setting: &'static str) -> Self {
        self.setting = setting;
        self
    }

    /// Nobody looks for the files before the next start, so nobody waits for them.
    pub(in crate::secrets) fn unawaited(mut self) -> Self {
        self.grace = Duration::ZERO;
        self
    }

    pub(in crate::secrets) fn config(&self) -> &Config {
        &self.config
    }

    /// Why the files are not as they should be; empty when they are.
    pub(in crate::secrets) fn error(&self) -> &str {
        &self.error
    }

    /// Brings the files to `content`, now or when the write under way has ended.
    pub(in crate::secrets) fn write(&mut self, content: Content) {
        self.latest = content;
        self.waits = true;
        self.begin(self.grace);
    }

    /// Brings back what somebody has taken away or changed: who asks for a secret may read it there. Nobody waits for
    /// this, and nothing is written where the files hold `content`.
    pub(in crate::secrets) fn look(&mut self, content: Content) {
        self.latest = content;
        if self.retry.is_none() {
            self.look = Some(self.begun.map_or_else(Instant::now, |at| at + PAUSE));
            self.tick(Instant::now());
        }
    }

    /// When to call [`Writer::tick`].
    pub(in crate::secrets) fn wake(&self) -> Option<Instant> {
        [self.retry, self.look].into_iter().flatten().min()
    }

    /// Tries again, or looks, if that is due.
    pub(in crate::secrets) fn tick(&mut self, now: Instant) {
        if self.retry.is_some_and(|at| at <= now) {
            self.waits = true;
            self.begin(self.grace);
        } else if self.look.is_some_and(|at| at <= now) {
            self.look = None;
            self.waits = true;
            self.begin(Duration::ZERO);
        }
    }

    /// Waits for the write under way and says what became of it. Nothing is lost when the future is
    /// dropped.
    pub(in crate::secrets) async fn progress(&mut self) {
        let Some(running) = &mut self.running else { return pending().await };
        let overdue = self.overdue;
        let late = async move {
            match overdue {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            outcome = running => self.ended(outcome),
            () = late => {
                self.overdue = None;
                self.told(Kind::OutputCertsFailed, format!("writing to {} has not ended within {OVERDUE:?}: does its file system answer?",
                    self.config.dir.display()));
            }
        }
    }

    fn begin(&mut self, grace: Duration) {
        if self.running.is_some() || !std::mem::take(&mut self.waits) {
            return;
        }
        self.look = None;
        let (config, content) = (Arc::clone(&self.config), self.latest.clone());
        self.retry = None;
        self.begun = Some(Instant::now());
        self.overdue = Some(Instant::now() + OVERDUE);
        let (done, ended) = mpsc::sync_channel::<()>(1);
        let begun = lane::begin(self.setting, move || {
            let _done = done;
            config.write(Files {
                key: content.identity.as_ref().map(|i| i.key.as_slice()),
                chain: content.identity.as_ref().map(|i| i.chain.as_slice()),
                root: content.roots.as_ref().map(|r| r.pem.as_slice()),
            })
        });
        match begun {
            Ok(running) => self.running = Some(running),
            Err(error) => {
                let kind = Kind::of_io(&error).unwrap_or(Kind::OutputCertsFailed);
                return self.failed(kind, error.to_string());
            }
        }
        // Nothing is ever sent.
        if !grace.is_zero() {
            let _ = ended.recv_timeout(grace);
        }
        self.ended = Mutex::new(Some(ended));
    }

    fn ended(&mut self, outcome: Result<Result<(), Error>, RecvError>) {
        self.running = None;
        self.overdue = None;
        match outcome {
            Ok(Ok(())) => {
                if !std::mem::take(&mut self.error).is_empty() {
                    tracing::info!(target: "cache", "certificates are written to {} again", self.config.dir.display());
                    self.trouble.end();
                }
            }
            Ok(Err(error)) => {
                let kind = Kind::of_chain(&error).unwrap_or(Kind::OutputCertsFailed);
                self.failed(kind, chain(&error));
            }
            Err(_) => self.failed(
                Kind::OutputCertsFailed,
                format!("writing to {} broke off: its thread panicked", self.config.dir.display()),
            ),
        }
        self.begin(self.grace);
    }

    fn failed(&mut self, kind: Kind, text: String) {
        self.told(kind, text);
        self.retry = Some(Instant::now() + RETRY);
    }

    fn told(&mut self, kind: Kind, text: String) {
        let said = format!(
            "{setting}: {text}; SDS goes on, the files are tried again every {RETRY:?}",
            setting = self.setting
        );
        self.trouble.report(Report::new(kind, said).about(self.config.dir.display().to_string()));
        self.error = text;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::lane::scarce::NoThreads;
    use crate::trouble::Troubles;

    #[tokio::test]
    async fn a_look_that_was_put_off_outlives_the_end_of_the_write_before_it() {
        let (troubles, dir) = (Troubles::default(), tempfile::tempdir().unwrap());
        let config = Config { dir: dir.path().to_owned(), mode: 0o600, seal: None };
        let mut writer = Writer::new(config, troubles.reporter("cache"));
        writer.grace = Duration::from_secs(30);
        let roots = Some(Arc::new(Roots { pem: b"roots".to_vec() }));
        let content = Content { identity: None, roots };
        writer.write(content.clone());
        // It has ended, which is not heard before somebody has taken the file away and asked again.
        let written = dir.path().join("root-cert.pem");
        std::fs::remove_file(&written).unwrap();
        writer.look(content);
        writer.progress().await;
        let due = writer.wake().expect("the look is still to come");
        writer.tick(due);
        writer.progress().await;
        assert!(written.exists());
    }

    #[tokio::test]
    async fn no_thread_to_write_on_is_not_the_folders_fault() {
        let (troubles, dir) = (Troubles::default(), tempfile::tempdir().unwrap());
        let config = Config { dir: dir.path().to_owned(), mode: 0o600, seal: None };
        let mut writer = Writer::new(config, troubles.reporter("cache"));
        let none = NoThreads::from_now_on();
        writer.write(Content::default());
        assert_eq!(troubles.verdict().map(|told| told.kind), Some(Kind::Processes));
        drop(none);
    }
}
