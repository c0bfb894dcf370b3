//! One Envoy process: started, waited for, killed; and its configuration file, gone with it.

use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{adopted, kernel, kin, launch};
use crate::base::handover;
use crate::base::lane;
use crate::base::place::{self, Mode};

/// How an Envoy ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this status.
    Status(i32),
    /// By a signal.
    Signal {
        /// The signal's number.
        signal: i32,
        /// The kernel's count of processes killed for lack of memory rose meanwhile.
        out_of_memory: bool,
    },
    /// It was never executed: what could not be, and why.
    NotStarted(String),
}

impl Exit {
    /// The exit status that says this in a shell's terms: the status itself, 128 + signal, and 1 when
    /// nothing was executed.
    ///
    /// SIGTERM and SIGINT count as 0: they are how anybody asks an Envoy to end in order, and an Envoy
    /// that already handles them ends with 0 itself.
    #[must_use]
    pub fn code(&self) -> u8 {
        match self {
            Self::Status(status) => u8::try_from(*status & 0xff).unwrap_or(1),
            Self::Signal { .. } if self.asked_for() => 0,
            Self::Signal { signal, .. } => u8::try_from(128 + signal).unwrap_or(255),
            Self::NotStarted(_) => 1,
        }
    }

    /// It ended well, or as somebody asked it to.
    #[must_use]
    pub(crate) fn orderly(&self) -> bool {
        *self == Self::Status(0) || self.asked_for()
    }

    /// Killed with SIGKILL, which is what the kernel does when memory runs out.
    #[must_use]
    pub fn killed(&self) -> bool {
        matches!(self, Self::Signal { signal: 9, .. })
    }

    fn asked_for(&self) -> bool {
        matches!(self, Self::Signal { signal: 2 | 15, .. })
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "exit status {status}"),
            Self::Signal { signal, out_of_memory } => {
                match Signal::from_named_raw(*signal) {
                    Some(named) => write!(f, "signal: {}", describe(named))?,
                    None => write!(f, "signal: {signal}")?,
                }
                f.write_str(if *out_of_memory { " (out of memory)" } else { "" })
            }
            Self::NotStarted(why) => write!(f, "it could not be executed: {why}"),
        }
    }
}

// As Go words them, since people search logs for these.
fn describe(signal: Signal) -> String {
    let text = match signal {
        Signal::HUP => "hangup",
        Signal::INT => "interrupt",
        Signal::QUIT => "quit",
        Signal::ILL => "illegal instruction",
        Signal::TRAP => "trace/breakpoint trap",
        Signal::ABORT => "aborted",
        Signal::BUS => "bus error",
        Signal::FPE => "floating point exception",
        Signal::KILL => "killed",
        Signal::SEGV => "segmentation fault",
        Signal::PIPE => "broken pipe",
        Signal::TERM => "terminated",
        other => return format!("signal {}", other.as_raw()),
    };
    text.to_owned()
}

/// What to start.
#[derive(Debug)]
pub(crate) struct Spec<'a> {
    /// The program that becomes Envoy.
    pub launcher: &'a Path,
    /// Envoy's binary.
    pub binary: &'a str,
    /// Its arguments.
    pub args: &'a [OsString],
    /// Variables beside the agent's own.
    pub extra_env: &'a [(String, String)],
    /// User and group instead of the agent's.
    pub user: Option<(u32, u32)>,
    /// Whether it leads a process group of its own.
    pub own_group: bool,
    /// Whether a guard ends it when the agent dies.
    pub guarded: bool,
}

/// A running Envoy, by its id; [`spawn`] gives it together with the future of its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pid: Pid,
    own_group: bool,
}

impl Process {
    /// Its process id.
    #[must_use]
    pub(crate) fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Whether it leads a process group.
    pub(super) fn own_group(&self) -> bool {
        self.own_group
    }

    /// SIGKILL to it and to what it started. Only while its end has not been seen: the id is its own
    /// until then.
    pub(crate) fn kill(&self) {
        // Envoy starts nothing, but a wrapper script in its place does.
        let children = kin::descendants(self.id());
        let done = if self.own_group {
            rustix::process::kill_process_group(self.pid, Signal::KILL)
        } else {
            rustix::process::kill_process(self.pid, Signal::KILL)
        };
        if let Err(error) = done {
            tracing::debug!("SIGKILL to Envoy {}: {error}", self.id());
        }
        for child in children {
            let _ = rustix::process::pidfd_send_signal(&child, Signal::KILL);
        }
    }
}

/// An Envoy that was started.
pub(crate) struct Started {
    pub(crate) process: Process,
    /// Gives its end; dropping this kills it.
    pub(crate) end: Pin<Box<dyn Future<Output = Exit> + Send>>,
    /// Ends when the process has read Envoy's binary: whether it is Envoy now. It is not where that failed.
    pub(crate) executed: Pin<Box<dyn Future<Output = bool> + Send>>,
}

/// Starts an Envoy.
///
/// Call it on the process's main thread: the parent-death signal is tied to the calling thread
/// (see [`launch`]). That thread waits for no disk meanwhile: what is executed here is the launcher, which is the
/// program that runs already; Envoy's binary is looked for, read and executed by the child. `tell` is given the child's id
/// before a guarded one goes on.
pub(crate) fn spawn(spec: &Spec<'_>, tell: impl FnOnce(i32)) -> io::Result<Started> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    #[expect(deprecated, reason = "its unsafe successor is for descriptors that somebody else may close")]
    let ours = Arc::new(AsyncFd::with_interest(ours, Interest::READABLE)?);
    let mut command = tokio::process::Command::new(spec.launcher);
    command
        .args(launch::arguments(std::process::id(), spec.user, spec.guarded, spec.binary, spec.args))
        .envs(spec.extra_env.iter().map(|(k, v)| (k, v)))
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .kill_on_drop(true);
    if spec.own_group {
        command.process_group(0);
    }
    let memory = OutOfMemory::now();
    let mut child = command.spawn()?;
    drop(command);
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("the child has no id"))?;
    tell(pid.as_raw_nonzero().get());
    if spec.guarded
        && let Err(error) = Write::write_all(&mut ours.get_ref(), b"+")
    {
        tracing::debug!("the child that becomes Envoy is gone: {error}");
    }
    let words = ours.clone();
    let executed = async move {
        let _readable = words.readable().await;
        // Closed without a word.
        rustix::net::recv(words.get_ref(), &mut [0_u8; 1], RecvFlags::PEEK).is_ok_and(|(_, n)| n == 0)
    };
    let end = async move {
        let status = child.wait().await;
        // What the launcher wrote, if anything, is there once it has ended.
        let mut why = Vec::new();
        let _ = Read::take(ours.get_ref(), 4096).read_to_end(&mut why);
        if !why.is_empty() {
            return Exit::NotStarted(String::from_utf8_lossy(&why).into_owned());
        }
        match status {
            Ok(status) => match status.signal() {
                Some(signal) => Exit::Signal { signal, out_of_memory: signal == 9 && memory.rose() },
                None => Exit::Status(status.code().unwrap_or(1)),
            },
            Err(error) => Exit::NotStarted(format!("its end could not be learnt: {error}")),
        }
    };
    let process = Process { pid, own_group: spec.own_group };
    Ok(Started { process, end: Box::pin(end), executed: Box::pin(executed) })
}

/// An Envoy that the program before us in this process has started.
///
/// # Errors
/// When it is no child of ours (any more).
pub(crate) fn adopt(
    pid: i32,
    own_group: bool,
) -> io::Result<(Process, impl Future<Output = Exit> + Send + use<>)> {
    let memory = OutOfMemory::now();
    let child = adopted::Child::of(pid)?;
    let process = Process { pid: child.pid(), own_group };
    let end = async move {
        match child.ended().await {
            Ok(adopted::End::Status(status)) => Exit::Status(status),
            Ok(adopted::End::Signal(signal)) => {
                Exit::Signal { signal, out_of_memory: signal == 9 && memory.rose() }
            }
            Err(error) => Exit::NotStarted(format!("its end could not be learnt: {error}")),
        }
    };
    Ok((process, end))
}

/// The kernel's count of processes of our control group that it killed for lack of memory.
struct OutOfMemory(Option<(PathBuf, u64)>);

impl OutOfMemory {
    fn now() -> Self {
        let group = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = kernel::control_group(&group);
        // In a container the root of the mounted tree is its own group.
        let files =
            [format!("/sys/fs/cgroup/{group}/memory.events"), "/sys/fs/cgroup/memory.events".to_owned()];
        Self(files.into_iter().find_map(|f| Self::count(Path::new(&f)).map(|n| (f.into(), n))))
    }

    fn count(file: &Path) -> Option<u64> {
        let text = std::fs::read_to_string(file).ok()?;
        kernel::oom_kills(&text)
    }

    fn rose(&self) -> bool {
        self.0.as_ref().is_some_and(|(file, before)| Self::count(file).is_some_and(|now| now > *before))
    }
}

const REMOVING: &str = "removing Envoy's configuration";
/// How long the removal of a file is waited for.
const REMOVED: Duration = Duration::from_secs(1);

/// A configuration file that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Written {
    path: PathBuf,
}

impl Written {
    /// Puts `text` at `path`; mode 0666 less the umask, folders 0700, as the Go agent
    /// has them. Where the folder allows no new file (a mounted file), the file is written over.
    ///
    /// # Errors
    /// With the path that could not be made or written.
    pub(crate) fn new(path: &Path, text: &[u8]) -> Result<Self, (PathBuf, io::Error)> {
        match place::put(path, text, Mode::Masked(0o666)) {
            Ok(()) => {}
            // A disk that is full must not cost the old file as well.
            Err(error) if error.path == path && closed(&error.source) => {
                place::over(path, text).map_err(|_| (error.path, error.source))?;
            }
            Err(error) => return Err((error.path, error.source)),
        }
        Ok(Self { path: path.to_owned() })
    }

    /// One that is there already.
    #[must_use]
    pub(crate) fn adopt(path: PathBuf) -> Self {
        Self { path }
    }

    /// Removes it, on a thread, and waits no longer than a disk may take.
    pub(crate) async fn remove(self) {
        if let Ok(removed) = lane::begin(REMOVING, move || self.removed()) {
            // It goes on where this gives up.
            let _ = tokio::time::timeout(REMOVED, removed).await;
        }
    }

    fn removed(mut self) {
        // A successor has the Envoy that was started with it.
        if !handover::passing() {
            remove(&std::mem::take(&mut self.path));
        }
    }

    /// Where it is.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

// The folder takes no new file, or none in the place of this one.
fn closed(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, ResourceBusy};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem | ResourceBusy)
}

impl Drop for Written {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        if path.as_os_str().is_empty() || handover::passing() {
            return;
        }
        lane::briefly(REMOVING, REMOVED, move || remove(&path));
    }
}

fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("Failed to delete config file {}: {error}", path.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_has_a_status_and_a_text() {
        let signal = |signal| Exit::Signal { signal, out_of_memory: false };
        for (exit, code, text) in [
            (Exit::Status(0), 0, "exit status 0"),
            (Exit::Status(1), 1, "exit status 1"),
            (Exit::Status(255), 255, "exit status 255"),
            (signal(9), 137, "signal: killed"),
            (signal(11), 139, "signal: segmentation fault"),
            (signal(15), 0, "signal: terminated"),
            (signal(2), 0, "signal: interrupt"),
            (
                Exit::NotStarted("x: permission denied".into()),
                1,
                "it could not be executed: x: permission denied",
            ),
        ] {
            assert_eq!((exit.code(), exit.to_string().as_str()), (code, text));
            assert_eq!(exit.orderly(), code == 0);
        }
    }

    #[test]
    fn a_file_is_there_until_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/envoy-rev.json");
        let file = Written::new(&path, b"{}").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{}");
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1,
            "nothing is left beside it"
        );
        drop(file);
        assert!(!path.exists());
        std::fs::write(dir.path().join("file"), "").unwrap();
        let (named, _) = Written::new(&dir.path().join("file/x.json"), b"").unwrap_err();
        assert!(named.starts_with(dir.path()));
    }
}
