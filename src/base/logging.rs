//! The agent's log: scopes with levels, lines that existing parsers read, several targets.
//!
//! A scope is the `target` of a tracing event where it is one of the registered names; events of our
//! modules without one belong to `default`, those of libraries to `grpc`, which is silent unless asked
//! for (it stands for the transport library in the Go agent too). Lines are the Go agent's: tabs between
//! time, level, scope, caller and message, or JSON with the keys in that agent's order. Each line is one
//! write to each target; the agent does not wait for a reader that stands still (`target`). Uses no other
//! module.

mod format;
mod levels;
mod target;

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use rustix::fs::Access;
use tokio::sync::Notify;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

pub(crate) use levels::{Level, Levels};
use target::{Sink, Target};

/// Every scope that a level can be set for; those without a user here exist in the Go agent.
pub(crate) const SCOPES: [&str; 20] = [
    "ads",
    "ca",
    "cache",
    "citadelclient",
    "default",
    "dns",
    "gcecred",
    "grpc",
    "health",
    "healthcheck",
    "klog",
    "mockcred",
    "monitoring",
    "probes",
    "sds",
    "security",
    "spiffe",
    "validation",
    "wasm",
    "xdsproxy",
];

/// What the logging flags say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// `--log_output_level`: added to `default:info,grpc:none`.
    pub output_level: String,
    /// `--log_stacktrace_level`: checked, without effect: there are no stack traces to attach.
    pub stacktrace_level: String,
    /// `--log_caller`: scopes whose lines carry file and line.
    pub caller: String,
    /// `--log_as_json`.
    pub as_json: bool,
    /// `--log_target`: `stdout`, `stderr` or files to append to.
    pub targets: Vec<String>,
    /// Whether a line waits for a reader that stands still, as is right for a command; the agent does not,
    /// and has [`attend`] run.
    pub patient: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            output_level: String::new(),
            stacktrace_level: "default:none".to_owned(),
            caller: String::new(),
            as_json: false,
            targets: vec!["stdout".to_owned()],
            patient: true,
        }
    }
}

/// Why logging cannot be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No level of this name.
    #[error("invalid output level '{0}': it is debug, info, warn, error, fatal or none")]
    Level(String),
    /// More than one colon.
    #[error("invalid output level format '{0}': it is level or scope:level")]
    Format(String),
    /// A target cannot be opened.
    #[error("cannot open log target {path}: is the folder there and writable?")]
    Target {
        /// As given.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No scope of this name.
    #[error("there is no scope {0:?}; GET /logging lists them")]
    Scope(String),
    /// Nothing has set up logging.
    #[error("there is no log")]
    NoLog,
    /// Something has set up logging before.
    #[error("logging is set up already")]
    Twice,
}

/// The targets, and the buffer for a line, which is kept so that a line costs no allocation.
#[derive(Default)]
struct Out(Mutex<(Vec<u8>, Vec<Target>)>);

impl Out {
    // A panic while a line was written leaves at worst half a line in the buffer, which is cleared.
    fn lock(&self) -> MutexGuard<'_, (Vec<u8>, Vec<Target>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what was kept; whether nothing is left.
    fn drain(&self) -> bool {
        let mut all = true;
        for target in &mut self.lock().1 {
            all &= target.drain();
        }
        all
    }
}

/// The process's log, once it is set up.
static GLOBAL: OnceLock<Arc<Out>> = OnceLock::new();
/// The levels of the process's log.
static LEVELS: OnceLock<Arc<RwLock<Levels>>> = OnceLock::new();
/// Lines begin to be kept.
static STALLED: Notify = Notify::const_new();
/// The number of the error with which lines are lost at the moment; 0: none.
static ERROR: AtomicI32 = AtomicI32::new(0);
/// It has become another.
static ERROR_NEWS: Notify = Notify::const_new();
/// Lines that were dropped.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Whoever writes lines. Nobody wants spans: a registry of them would cost 32 KB of anonymous memory, for one pointer for each of
/// 4,096 threads.
struct Lines {
    levels: Arc<RwLock<Levels>>,
    callers: Callers,
    as_json: bool,
    out: Arc<Out>,
}

struct Callers {
    all: bool,
    scopes: Vec<&'static str>,
}

/// Sets up the process's log.
///
/// # Errors
/// When a level or a target is invalid; nothing is set up then.
pub(crate) fn init(options: &Options) -> Result<(), Error> {
    let lines = Lines::new(options)?;
    let (out, levels) = (lines.out.clone(), lines.levels.clone());
    tracing::subscriber::set_global_default(lines).map_err(|_| Error::Twice)?;
    let _ = GLOBAL.set(out);
    let _ = LEVELS.set(levels);
    Ok(())
}

/// What [`init`] would refuse, by a process in `folder`; whether a target can be opened is seen without opening it.
///
/// # Errors
/// The same.
pub(crate) fn check(options: &Options, folder: &Path) -> Result<(), Error> {
    leveled(options)?;
    let files = options.targets.iter().filter(|target| !["stdout", "stderr"].contains(&target.as_str()));
    for path in files {
        if let Err(source) = may_append(&folder.join(path)) {
            return Err(Error::Target { path: path.clone(), source });
        }
    }
    Ok(())
}

fn may_append(place: &Path) -> io::Result<()> {
    match std::fs::metadata(place) {
        Ok(about) if about.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => Ok(rustix::fs::access(place, Access::WRITE_OK)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let above = place.parent().filter(|above| !above.as_os_str().is_empty());
            Ok(rustix::fs::access(above.unwrap_or(Path::new(".")), Access::WRITE_OK | Access::EXEC_OK)?)
        }
        Err(error) => Err(error),
    }
}

fn leveled(options: &Options) -> Result<Levels, Error> {
    let levels = Levels::parse(&options.output_level)?;
    Levels::parse(&options.stacktrace_level)?;
    // The other list may be empty, since it is added to a built-in one.
    if options.stacktrace_level.is_empty() {
        return Err(Error::Level(String::new()));
    }
    Ok(levels)
}

/// Does `work`, whose lines of the process's log are written with one call: each call would wake whoever reads the log.
/// For a few lines that are made without waiting for anything; should `work` panic, they are written all the same.
pub(crate) fn together<T>(work: impl FnOnce() -> T) -> T {
    let out = GLOBAL.get().map(Arc::clone);
    let _held = out.map(Together::of);
    work()
}

/// Lines are kept as long as it lives.
struct Together(Arc<Out>);

impl Together {
    fn of(out: Arc<Out>) -> Self {
        out.lock().1.iter_mut().for_each(|target| target.hold(true));
        Self(out)
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        for target in &mut self.0.lock().1 {
            target.hold(false);
            if target.stalled() {
                STALLED.notify_one();
            }
        }
    }
}

/// Each scope with the name of its level now.
#[must_use]
pub(crate) fn levels() -> Vec<(&'static str, &'static str)> {
    let levels = LEVELS.get().map(|l| l.read().unwrap_or_else(PoisonError::into_inner).clone());
    levels.iter().flat_map(Levels::all).map(|(scope, level)| (scope, level.name())).collect()
}

/// Changes levels while the process runs: pairs of a scope (or `all`) and a level. All of them or none.
///
/// # Errors
/// Names what is unknown.
pub(crate) fn change(pairs: &[(&str, &str)]) -> Result<(), Error> {
    let Some(shared) = LEVELS.get() else { return Err(Error::NoLog) };
    let mut levels = shared.write().unwrap_or_else(PoisonError::into_inner);
    let mut changed = levels.clone();
    for (scope, level) in pairs {
        changed.change(scope, level)?;
    }
    *levels = changed;
    drop(levels);
    // What a call site was told about being shown is remembered.
    tracing::callsite::rebuild_interest_cache();
    Ok(())
}

/// Lines dropped so far because their reader stood still.
#[must_use]
pub(crate) fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Looks after a log that is not [`Options::patient`]: writes what was kept once its reader moves again, and
/// says what was lost. Never ends.
pub(crate) async fn attend() {
    let mut told = 0;
    loop {
        STALLED.notified().await;
        while !GLOBAL.get().is_none_or(|out| out.drain()) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let lost = dropped() - told;
        if lost > 0 {
            told += lost;
            tracing::warn!("{lost} lines of this log were lost: nobody read it for a while");
        }
    }
}

/// Waits until lines are lost for another reason than before; gives it, or `None` when they are written again.
pub(crate) async fn failure() -> Option<io::Error> {
    ERROR_NEWS.notified().await;
    let number = ERROR.load(Ordering::Relaxed);
    (number != 0).then(|| io::Error::from_raw_os_error(number))
}

/// Gives the last lines of a process up to half a second to be read.
pub(crate) fn flush() {
    let until = Instant::now() + Duration::from_millis(500);
    if let Some(out) = GLOBAL.get() {
        out.lock().1.iter_mut().for_each(|target| target.flush(until));
    }
}

impl Lines {
    fn new(options: &Options) -> Result<Self, Error> {
        let levels = leveled(options)?;
        let named: Vec<&str> = options.caller.split(',').collect();
        let callers = Callers {
            all: named.contains(&"all"),
            scopes: SCOPES.into_iter().filter(|s| named.contains(s)).collect(),
        };
        let target = |text: &String| Ok(Target::new(open(text)?, options.patient));
        let targets = options.targets.iter().map(target).collect::<Result<Vec<_>, Error>>()?;
        let out = Arc::new(Out(Mutex::new((Vec::new(), targets))));
        Ok(Self { levels: Arc::new(RwLock::new(levels)), callers, as_json: options.as_json, out })
    }
}

impl Lines {
    fn levels(&self) -> RwLockReadGuard<'_, Levels> {
        self.levels.read().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open(target: &str) -> Result<Sink, Error> {
    match target {
        "stdout" => Ok(Sink::Stdout(io::stdout())),
        "stderr" => Ok(Sink::Stderr(io::stderr())),
        path => {
            // To open a pipe's end for writing means to wait for whoever reads, without an end and without a word. The
            // other end with it, lines wait in the pipe, and those that do not fit as for any reader that stands still.
            let pipe = std::fs::metadata(path).is_ok_and(|there| there.file_type().is_fifo());
            let open = |read| OpenOptions::new().read(read).append(true).create(true).open(path);
            // One that may only be written to has its reader waited for.
            let opened = if pipe { open(true).or_else(|_| open(false)) } else { open(false) };
            opened.map(Sink::File).map_err(|source| Error::Target { path: path.to_owned(), source })
        }
    }
}

fn scope_of(target: &str) -> &'static str {
    if let Some(scope) = SCOPES.into_iter().find(|s| *s == target) {
        return scope;
    }
    if target.starts_with("pilot_agent") { "default" } else { "grpc" }
}

fn level_of(level: tracing::Level) -> Level {
    match level {
        tracing::Level::ERROR => Level::Error,
        tracing::Level::WARN => Level::Warn,
        tracing::Level::INFO => Level::Info,
        _ => Level::Debug,
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Traces are for people with a debugger; the flag has no level for them.
        metadata.is_event()
            && *metadata.level() != tracing::Level::TRACE
            && self.levels().shows(scope_of(metadata.target()), level_of(*metadata.level()))
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(self.levels().most_verbose().into())
    }

    // No span is enabled, so none of the next five is called for one of the libraries'.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let scope = scope_of(metadata.target());
        let caller = self.callers.all || self.callers.scopes.contains(&scope);
        let line = format::Line {
            level: level_of(*metadata.level()).name(),
            scope,
            caller: caller.then(|| (metadata.file().unwrap_or("?"), metadata.line().unwrap_or(0))),
        };
        let mut out = self.out.lock();
        let (buffer, targets) = &mut *out;
        buffer.clear();
        format::write(buffer, &line, event, self.as_json);
        for target in &mut *targets {
            let taken = target.line(buffer);
            if !taken {
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
            if target.stalled() {
                STALLED.notify_one();
            }
        }
        let error = targets.iter().find_map(Target::error).map_or(0, rustix::io::Errno::raw_os_error);
        if ERROR.swap(error, Ordering::Relaxed) != error {
            ERROR_NEWS.notify_one();
        }
        if buffer.capacity() > 64 << 10 {
            *buffer = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests;
