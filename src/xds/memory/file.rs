//! The file of the last good configuration: what is read of it at the start, and when it is written.

use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::{Disk, Memory, unix};
use crate::base::backoff::{Backoff, Jitter, Policy};
use crate::base::bounded;
use crate::base::error::chain;
use crate::base::lane::Lane;
use crate::base::place::{self, Mode as FileMode};
use crate::replay::disk;
use crate::trouble::{Kind, Report};
use crate::xds::types;

/// Reading comes at the start and before modules are removed, writing one by one: a disk that does not answer holds up two
/// threads at most.
static DISK: Lane = Lane::new("file of the last good configuration", 2);
/// After a change the file is written so much later, that a burst of pushes is written once.
const SETTLE: Duration = Duration::from_secs(2);
/// A file that could not be written is tried again after [`SETTLE`], then after twice as long, up to this.
const AGAIN: Duration = Duration::from_secs(300);
/// How long the file may take to be read: a disk at the boot of a busy machine, not one that is gone.
const LOAD: Duration = Duration::from_secs(30);
/// How often the clock is looked at while the file is of a moment to come: no timer fires when it is set.
const CLOCK: Duration = Duration::from_secs(2);
/// While istiod is there, the file is told so as often as its age allows mistakes of a twenty-fourth.
const CONFIRM: u32 = 24;

impl Memory {
    /// Reads the file, if there is a good one. Where it is of a moment to come by the clock of now, that moment is given, in
    /// seconds since 1970: a machine's clock may be set only after its boot.
    pub(super) async fn load(self: &Arc<Self>, owner: &Arc<str>) -> Option<u64> {
        if self.take_over(owner).await {
            return None;
        }
        let Disk { file, max_age } = self.config.disk.clone()?;
        let (memory, owner, shown) = (self.clone(), owner.clone(), file.display().to_string());
        let later = Arc::new(AtomicU64::new(0));
        let ahead = later.clone();
        let read = DISK.within(LOAD, move || {
            // As large as the file itself, each.
            place::sweep(file.parent().unwrap_or(Path::new("")), &[place::name(&file).as_str()]);
            let bytes = match bounded::read(&file, memory.config.largest_file()) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                bytes => bytes.map_err(|e| e.to_string())?,
            };
            let now = unix(memory.clock.now());
            let read = disk::read(&bytes, &owner, now, max_age.as_secs(), memory.config.most);
            if let Err(disk::Refused::Ahead(by)) = read {
                ahead.store(now.saturating_add(by), Relaxed);
            }
            read.map(Some).map_err(|refused| refused.to_string())
        });
        match read.await.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(Some((store, at))) => {
                let (_, resources) = store.raw();
                tracing::info!(target: "xdsproxy",
                    "the last good configuration of {resources} resources was read from {shown}");
                self.begin_with(store, at);
            }
            Ok(None) => {}
            Err(why) => {
                let later = Some(later.load(Relaxed)).filter(|at| *at > 0);
                let more = if later.is_some() { "; it is when the clock has come that far" } else { "" };
                tracing::warn!(target: "xdsproxy", "the last good configuration in {shown} is not used: {why}{more}");
                return later;
            }
        }
        None
    }

    /// Reads the file again when it is the moment that [`Self::load`] gave, by the machine's clock, or later.
    pub(super) async fn load_at(self: &Arc<Self>, mut later: Option<u64>, owner: &Arc<str>) {
        while let Some(at) = later {
            while unix(self.clock.now()) < at {
                tokio::time::sleep(CLOCK).await;
            }
            later = self.load(owner).await;
        }
    }

    /// Whether the store has changed since the file was written.
    pub(super) fn is_behind(&self) -> bool {
        self.config.disk.is_some() && self.glance().changes != self.saved.load(Relaxed)
    }

    /// The extension configs in the file, however old it is by the clock of now. None where it is no use to anybody.
    ///
    /// # Errors
    /// When that cannot be told.
    pub(super) async fn in_file(&self) -> std::io::Result<Vec<Bytes>> {
        let Some(Disk { file, .. }) = self.config.disk.clone() else { return Ok(Vec::new()) };
        let owner = self.owner.get().cloned();
        let owner =
            owner.ok_or_else(|| std::io::Error::other("the last good configuration was not read yet"))?;
        let (most, largest) = (self.config.most, self.config.largest_file());
        let read = move || {
            let bytes = match bounded::read(&file, largest) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
                bytes => bytes?,
            };
            match disk::read(&bytes, &owner, u64::MAX, u64::MAX, most) {
                Ok((store, _)) => store.all(types::ECDS),
                Err(_) => Ok(Vec::new()),
            }
        };
        DISK.run(read).await?
    }

    /// Writes the file, if istiod has ever stood behind what is in the store; gives how often that has changed, if it could.
    pub(super) async fn save(self: Arc<Self>, owner: Arc<str>) -> Option<u64> {
        let file = self.config.disk.as_ref()?.file.clone();
        let memory = self.clone();
        let written = DISK.run(move || {
            if memory.live.load(Relaxed) > 0 {
                memory.good.store(unix(memory.clock.now()), Relaxed);
            }
            let good = memory.good.load(Relaxed);
            let (changes, whole) = {
                let store = memory.store();
                (store.changes(), (good > 0 && store.is_whole()).then(|| store.shared()))
            };
            let Some(store) = whole else { return Ok(changes) };
            let written = place::put_by(&file, FileMode::Exact(0o600), |file| {
                let mut file = BufWriter::new(file);
                disk::write_to(&mut file, &store, &owner, good, false)?;
                file.flush()?;
                // It is for the day on which the power fails: no name may lead to bytes that are not there.
                place::settle(file.get_ref().as_file())
            });
            written.map_err(|e| chain(&e)).map(|()| changes)
        });
        let written = written.await.unwrap_or_else(|error| Err(error.to_string()));
        let trouble = self.disk_trouble.lock().expect("no panic holds this lock");
        match &written {
            Ok(_) => trouble.end(),
            Err(why) => trouble.report(Report::new(Kind::ReplayNotWritten, why.clone())),
        }
        written.ok()
    }
}

/// When the file is written. One writing at a time, and nobody waits for it: a disk may not answer at all.
pub(super) struct File {
    memory: Arc<Memory>,
    owner: Arc<str>,
    /// How often a file is written while nothing changes; `None`: there is none.
    confirm: Option<Duration>,
    due: Option<Instant>,
    writing: Option<BoxFuture<'static, Option<u64>>>,
    failures: Backoff,
    /// After a failure nothing is tried sooner than this.
    pause: Duration,
}

impl File {
    /// Of a store that was just read.
    pub(super) fn new(memory: Arc<Memory>, owner: Arc<str>) -> Self {
        let confirm = memory
            .config
            .disk
            .as_ref()
            .map(|disk| (disk.max_age / CONFIRM).max(SETTLE.min(disk.max_age / 2)));
        let again = Policy::new(SETTLE, AGAIN, 2.0, Jitter::None).expect("constants make sense");
        let failures = Backoff::new(again);
        Self { memory, owner, confirm, due: None, writing: None, failures, pause: SETTLE }
    }

    /// The store may have changed. The first change of a burst decides.
    pub(super) fn changed(&mut self) {
        let soon = Instant::now() + self.pause;
        if self.memory.is_behind() && self.due.is_none_or(|at| at > soon) {
            self.due = Some(soon);
        }
    }

    fn save(&self) -> BoxFuture<'static, Option<u64>> {
        Box::pin(self.memory.clone().save(self.owner.clone()))
    }

    /// Waits until a writing is due, begins it, and returns when it has ended. What was begun goes on when this is dropped.
    pub(super) async fn written(&mut self) {
        if self.writing.is_none() {
            match self.due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
            (self.due, self.writing) = (None, Some(self.save()));
        }
        let Some(writing) = &mut self.writing else { return };
        let done = writing.await;
        self.writing = None;
        self.ended(done);
    }

    // The file has this many of the store's changes, or could not be written.
    fn ended(&mut self, done: Option<u64>) {
        match done {
            Some(changes) => {
                self.memory.saved.store(changes, Relaxed);
                self.failures.reset();
                self.pause = SETTLE;
            }
            None => self.pause = self.failures.next_delay(),
        }
        let wait = if done.is_none() || self.memory.is_behind() { Some(self.pause) } else { self.confirm };
        self.due = wait.map(|wait| Instant::now() + wait);
    }

    /// What is under way ends, and what is not in the file yet is written for the last time.
    pub(super) async fn close(&mut self) {
        if self.writing.is_some() {
            self.written().await;
        }
        if self.due.is_some() {
            self.save().await;
        }
    }
}
