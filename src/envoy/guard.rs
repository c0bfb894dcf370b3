//! A tiny process that ends Envoy when the agent dies and the kernel does not.
//!
//! The parent-death signal that [`super::launch`] sets is lost where Envoy's binary is set-uid or set-gid or has
//! capabilities (Istio's deb and rpm make it 2755), and reaches a wrapper script but not what the script started.
//! For those, and for nothing else, the agent starts itself again as a guard. Both share a socket: the agent tells
//! the ids of its Envoys (`+<pid>`, `-<pid>`, a line each); its end, however it dies, is the end of the stream. The
//! guard then kills what is left of those Envoys with all they have started, and what `super::stale` finds.
//!
//! It leads a process group of its own and ignores what asks a process to end, so that neither Ctrl-C nor a service
//! manager's signal to everybody ends it before the agent. An idle guard sleeps in `read`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::process::{Child, Command};

use super::kept::GUARD;
use super::{adopted, kin, launch, stale};
use crate::base::{handover, process};

/// The first argument that selects this.
pub(crate) const ARGUMENT: &str = "__guard-envoy";

/// Looks for what escaped the tree, until one finds nothing: a killed parent's children take a moment to be orphans.
const LOOKS: usize = 10;
const BETWEEN: Duration = Duration::from_millis(50);

/// What an end in order waits for the guard's own; it has nothing to do then.
const LEAVE: Duration = Duration::from_secs(2);

/// What was seen of the binary that becomes Envoy.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Program {
    /// Whether the parent-death signal is not enough for it. What cannot be looked at is guarded.
    pub(super) needs_guard: bool,
    /// Whether it is a program of machine code.
    pub(super) is_binary: bool,
}

impl Program {
    /// One that was not looked at.
    pub(super) const UNKNOWN: Self = Self { needs_guard: true, is_binary: false };

    /// Looks at the disk, on a thread. One that does not answer is said; then a guard stands by.
    pub(super) async fn look_beside(program: &str) -> Self {
        let name = program.to_owned();
        launch::beside(move || Ok(Self::look(&name))).await.unwrap_or_else(|error| {
            tracing::warn!("Envoy's binary {program} cannot be looked at (does its disk hang?): {error}");
            Self::UNKNOWN
        })
    }

    fn look(program: &str) -> Self {
        // Nothing will run.
        let Ok(path) = launch::look_up(program) else { return Self::default() };
        let is_binary = launch::is_binary(&path);
        let Ok(meta) = std::fs::metadata(&path) else { return Self { needs_guard: true, is_binary } };
        let mut capabilities = [0_u8; 64];
        let capable =
            rustix::fs::getxattr(&path, "security.capability", &mut capabilities[..]).is_ok_and(|n| n > 0);
        let needs_guard = meta.permissions().mode() & 0o6000 != 0 || capable || !is_binary;
        Self { needs_guard, is_binary }
    }
}

/// The agent's side. Dropping it makes the guard end what it was told of.
#[derive(Debug)]
pub(super) struct Guard {
    body: Body,
    line: UnixStream,
}

#[derive(Debug)]
enum Body {
    Own(Child),
    Adopted(i32, Option<adopted::Child>),
}

impl Guard {
    /// Starts one for the Envoys of `config`.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(launcher: &Path, config: &Path) -> io::Result<Self> {
        let (line, theirs) = UnixStream::pair()?;
        // A guard that does not read (stopped by somebody) must not hold up the agent.
        line.set_nonblocking(true)?;
        let child = Command::new(launcher)
            .arg0("pilot-agent")
            .arg(ARGUMENT)
            .arg(config)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()?;
        handover::offer(GUARD, "", &line);
        Ok(Self { body: Body::Own(child), line })
    }

    /// The one that the program before us in this process has started; `None`: it is gone.
    pub(super) fn adopt(pid: i32) -> Option<Self> {
        let (_, line) = handover::take(GUARD)?;
        let line = UnixStream::from(line);
        handover::offer(GUARD, "", &line);
        let child = adopted::Child::of(pid).ok()?;
        Some(Self { body: Body::Adopted(pid, Some(child)), line })
    }

    /// Its process.
    pub(super) fn id(&self) -> Option<i32> {
        match &self.body {
            Body::Own(child) => child.id().and_then(|id| i32::try_from(id).ok()),
            Body::Adopted(pid, _) => Some(*pid),
        }
    }

    /// An Envoy runs.
    pub(super) fn watch(&mut self, pid: i32) {
        self.tell(&format!("+{pid}\n"));
    }

    /// An Envoy has ended.
    pub(super) fn release(&mut self, pid: i32) {
        self.tell(&format!("-{pid}\n"));
    }

    fn tell(&mut self, words: &str) {
        if let Err(error) = self.line.write_all(words.as_bytes()) {
            tracing::debug!("the guard of Envoy does not listen: {error}");
        }
    }

    /// Waits for its end, which nobody wants.
    pub(super) async fn ended(&mut self) -> String {
        self.body.ended().await
    }

    /// No Envoy is left: it may go.
    pub(super) async fn leave(self) {
        let Self { mut body, line } = self;
        handover::withdraw(GUARD);
        drop(line);
        if tokio::time::timeout(LEAVE, body.ended()).await.is_err() {
            tracing::warn!("the guard of Envoy has not ended within {LEAVE:?} and is killed");
            match &mut body {
                Body::Own(child) => drop(child.start_kill()),
                Body::Adopted(_, child) => drop(child.take()),
            }
        }
    }
}

impl Body {
    async fn ended(&mut self) -> String {
        match self {
            Self::Own(child) => match child.wait().await {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            },
            Self::Adopted(_, child) => {
                let end = match child {
                    Some(child) => child.wait().await,
                    None => return "it ended before".to_owned(),
                };
                // Whatever it was, there is nobody left to kill.
                if let Some(child) = child.take() {
                    child.forget();
                }
                end.map_or_else(|e| e.to_string(), |end| format!("{end:?}"))
            }
        }
    }
}

/// Is the guard if the arguments say so; returns its exit status, and `None` when they mean something else.
pub(crate) fn intercept(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let _ = args.next();
    if args.next()? != ARGUMENT {
        return None;
    }
    let config = PathBuf::from(args.next()?);
    // Started as /proc/self/exe; people look for the agent's name.
    let _ = rustix::thread::set_name(c"pilot-agent");
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let parent = || rustix::process::getppid().map(|p| p.as_raw_nonzero().get());
    let agent = parent();
    let mut envoys: BTreeMap<i32, OwnedFd> = BTreeMap::new();
    for line in BufReader::new(io::stdin()).lines() {
        let Ok(line) = line else { break };
        let Some((sign, pid)) = line.split_at_checked(1) else { continue };
        let Ok(pid) = pid.parse::<i32>() else { continue };
        if sign != "+" {
            envoys.remove(&pid);
        } else if let Some(handle) = kin::handle(pid)
            // One that has ended meanwhile has given its number away. Where the agent has died before this line was read,
            // its Envoy and this process have the same new parent.
            && let of = process::parent(pid)
            && (of == agent || of == parent() || agent.is_none())
        {
            envoys.insert(pid, handle);
        }
    }
    if envoys.is_empty() {
        return Some(0);
    }
    for (pid, handle) in &envoys {
        eprintln!("the agent is gone: its Envoy {pid} is ended");
        kin::kill_tree(*pid, handle);
    }
    for _ in 0..LOOKS {
        let left = stale::find(&config);
        if left.is_empty() && envoys.values().all(|e| kin::gone(e, std::time::Instant::now())) {
            break;
        }
        stale::end(&left);
        std::thread::sleep(BETWEEN);
    }
    Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_binaries_need_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::copy("/proc/self/exe", &path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let needed = |program: &str| Program::look(program).needs_guard;
        assert!(!needed(&file("plain", 0o755)));
        assert!(needed(&file("setgid", 0o2755)));
        assert!(needed(&file("setuid", 0o4755)));
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(needed(script.to_str().unwrap()));
        assert!(!needed("/no/such/program"), "nothing will run");
    }
}
