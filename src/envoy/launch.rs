//! The last steps in the child before it becomes Envoy.
//!
//! `pilot-agent __exec-envoy <parent> <uid:gid or -> <signal or guard> <files or -> <program> <args…>` is this binary
//! started as the agent's child. It sets the parent-death signal and the soft limit of open files that the agent was
//! given, changes user and becomes Envoy by `exec`, so Envoy has the agent as its parent and nothing of this step remains. Why not `pre_exec`: it is unsafe code,
//! for good reason in a program with threads; here everything runs in a fresh process.
//!
//! Standard input is a socket to the agent when this starts and the null device for Envoy. It is kept
//! aside close-on-exec: closed without a word means that Envoy was executed, text says why it was not. Where a guard stands
//! by, the child goes on only with a byte from the agent: until the guard has been told of it nobody would end it.
//!
//! The kernel ties the signal to the *thread* that made the child, not to its process: the agent starts
//! Envoy from its main thread (one-threaded runtime), which lives as long as the process. The signal
//! survives `exec`, but not a change of user, which therefore comes first, nor a set-uid or set-gid binary: for
//! those there is a [`super::guard`]. A script does not get it where a guard stands by: the kernel would end the
//! script alone, and what it started would be nobody's. So no thread that ends before the agent may make the child,
//! whatever the child waits for: only the child itself reads Envoy's binary, and a disk that does not answer holds up
//! nobody else.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Gid, Signal, Uid};

use crate::base::error::in_words;
use crate::base::lane::Lane;
use crate::base::open_files;

/// The first argument that selects this step; `main` looks for it before anything else.
pub const ARGUMENT: &str = "__exec-envoy";

/// Exit status of the child when Envoy could not be executed; the reason goes over the socket.
const NOT_EXECUTED: u8 = 127;

/// Becomes Envoy if the arguments say so; returns the exit status when that failed and `None` when the
/// arguments mean something else.
pub(crate) fn intercept(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let _ = args.next();
    if args.next()? != ARGUMENT {
        return None;
    }
    let Ok(mut report) = set_aside() else { return Some(NOT_EXECUTED) };
    let why = match become_envoy(args, &mut report) {
        Ok(never) => match never {},
        Err(why) => why.to_string(),
    };
    let _ = report.write_all(why.as_bytes());
    Some(NOT_EXECUTED)
}

/// The arguments for [`intercept`], after the program's name.
pub(super) fn arguments(
    parent: u32,
    user: Option<(u32, u32)>,
    guarded: bool,
    program: &str,
    args: &[OsString],
) -> Vec<OsString> {
    let user = user.map_or_else(|| "-".to_owned(), |(uid, gid)| format!("{uid}:{gid}"));
    let death = if guarded { "guard" } else { "signal" };
    let files = open_files::given().map_or_else(|| "-".to_owned(), |soft| soft.to_string());
    let mut all: Vec<OsString> =
        [ARGUMENT, &parent.to_string(), &user, death, &files, program].map(OsString::from).into();
    all.extend(args.iter().cloned());
    all
}

// Moves the socket away from descriptor 0 and puts the null device there.
fn set_aside() -> io::Result<std::fs::File> {
    let report = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
    let null = std::fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    Ok(report.into())
}

enum Never {}

/// Why the child has not become Envoy.
#[derive(Debug, thiserror::Error)]
enum NotEnvoy {
    #[error("{0}")]
    Arguments(&'static str),
    #[error("{program}: {}", in_words(.source))]
    Program { program: String, source: io::Error },
    #[error("cannot run as user {uid}:{gid}: {source}")]
    User { uid: u32, gid: u32, source: rustix::io::Errno },
    #[error("the parent-death signal cannot be set: {0}")]
    DeathSignal(#[from] rustix::io::Errno),
    #[error("the agent is gone")]
    AgentGone,
}

fn become_envoy(mut args: impl Iterator<Item = OsString>, agent: &mut impl Read) -> Result<Never, NotEnvoy> {
    let wrong = NotEnvoy::Arguments;
    let mut text = || args.next().and_then(|a| a.into_string().ok()).ok_or(wrong("an argument is missing"));
    let parent: i32 = text()?.parse().map_err(|_| wrong("the parent's id is no number"))?;
    let user = text()?;
    let guarded = text()? == "guard";
    if let Ok(soft) = text()?.parse() {
        open_files::set(soft);
    }
    let program = text()?;
    // Once the guard knows of this process the agent says so. Where it dies before, this is an end of the stream.
    if guarded && agent.read_exact(&mut [0]).is_err() {
        return Err(NotEnvoy::AgentGone);
    }
    if user != "-" {
        switch_user(&user)?;
    }
    let failed = |source| NotEnvoy::Program { program: program.clone(), source };
    // First of all: from here on a disk may not answer.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let path = look_up(&program).map_err(failed)?;
    if guarded && !is_binary(&path) {
        rustix::process::set_parent_process_death_signal(None)?;
    }
    // The agent may have died before the line above; nobody would send the signal any more.
    if rustix::process::getppid().is_none_or(|p| p.as_raw_nonzero().get() != parent) {
        return Err(NotEnvoy::AgentGone);
    }
    check_format(&path).map_err(failed)?;
    // `exec` gives SIGPIPE its default action back and clears the signal mask.
    Err(failed(std::process::Command::new(&path).arg0(&program).args(args).exec()))
}

fn switch_user(user: &str) -> Result<(), NotEnvoy> {
    let wrong = NotEnvoy::Arguments;
    let (uid, gid) = user.split_once(':').ok_or(wrong("user is not uid:gid"))?;
    let uid: u32 = uid.parse().map_err(|_| wrong("uid is no number"))?;
    let gid: u32 = gid.parse().map_err(|_| wrong("gid is no number"))?;
    // These change the calling thread only; this process has no other.
    rustix::thread::set_thread_groups(&[])
        .and_then(|()| rustix::thread::set_thread_gid(Gid::from_raw(gid)))
        .and_then(|()| rustix::thread::set_thread_uid(Uid::from_raw(uid)))
        .map_err(|source| NotEnvoy::User { uid, gid, source })
}

/// A bare name is looked for along PATH, anything else is a path.
pub(super) fn look_up(program: &str) -> io::Result<PathBuf> {
    if program.contains('/') {
        executable(Path::new(program))?;
        return Ok(program.into());
    }
    #[expect(
        clippy::disallowed_methods,
        reason = "the environment that Envoy gets; PATH means the same to exec"
    )]
    let path = std::env::var_os("PATH").unwrap_or_default();
    for folder in path.as_bytes().split(|b| *b == b':') {
        let folder = if folder.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(folder)) };
        let candidate = folder.join(program);
        if executable(&candidate).is_ok() {
            return Ok(candidate);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "executable file not found in $PATH"))
}

fn executable(path: &Path) -> io::Result<()> {
    if std::fs::metadata(path)?.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK)?;
    Ok(())
}

/// Looks at programs that may lie on a disk which does not answer.
static LOOKS: Lane = Lane::new("programs", 2);
/// How long a look is waited for; hundreds of times what a healthy disk needs.
const LOOK: Duration = Duration::from_secs(5);

/// Does `look` on a thread, and waits for it no longer than a disk may take.
///
/// # Errors
/// Those of `look`; that the disk does not answer.
pub(crate) async fn beside<T: Send + 'static>(
    look: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    LOOKS.within(LOOK, look).await?
}

/// Whether it is a program of machine code, and not a script or unreadable.
pub(super) fn is_binary(path: &Path) -> bool {
    header(path).is_some_and(|h| h.starts_with(b"\x7fELF"))
}

/// Refuses what this machine cannot execute as a program of its own: scripts, too.
///
/// # Errors
/// Why it cannot.
pub(crate) fn check_program(path: &Path) -> io::Result<()> {
    runnable(path)?;
    if !is_binary(path) {
        return Err(io::Error::other("it is no program for this machine"));
    }
    Ok(())
}

/// Refuses what this machine cannot start, scripts apart.
///
/// # Errors
/// Why it cannot.
pub(crate) fn runnable(path: &Path) -> io::Result<()> {
    executable(path)?;
    check_format(path)
}

/// Refuses what the kernel would: glibc's `execvp`, which the standard library calls, would hand such a
/// file to a shell instead. A file that cannot be read is left for the kernel to judge.
fn check_format(path: &Path) -> io::Result<()> {
    let (Some(theirs), Some(ours)) = (header(path), header(Path::new("/proc/self/exe"))) else {
        return Ok(());
    };
    let runs = theirs.starts_with(b"#!")
        || (theirs.len() == 20 && theirs[..6] == ours[..6] && theirs[18..] == ours[18..]);
    if runs {
        return Ok(());
    }
    let other = theirs.starts_with(b"\x7fELF");
    let why = if other {
        "exec format error: it is made for another processor"
    } else {
        "exec format error: it is no program"
    };
    Err(io::Error::other(why))
}

// The magic, class, byte order and machine of an ELF file are in its first 20 bytes.
fn header(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(20);
    std::fs::File::open(path).ok()?.take(20).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_arguments_are_left_alone() {
        let args = |list: &[&str]| list.iter().map(OsString::from).collect::<Vec<_>>().into_iter();
        assert_eq!(intercept(args(&["pilot-agent", "proxy", "sidecar"])), None);
        assert_eq!(intercept(args(&["pilot-agent"])), None);
        assert_eq!(intercept(args(&[])), None);
    }

    #[test]
    fn a_guarded_one_goes_on_only_when_the_guard_knows_of_it() {
        // It would go on to an error, and no further.
        let why = |death: &str, mut from_agent: &[u8]| {
            let args = arguments(0, None, death == "guard", "/bin/true", &[]);
            let args = args.into_iter().skip(1).map(|word| if word == "-" { "nobody".into() } else { word });
            become_envoy(args, &mut from_agent).map(|_| ()).unwrap_err()
        };
        assert!(matches!(why("guard", b""), NotEnvoy::AgentGone));
        assert!(matches!(why("guard", b"+"), NotEnvoy::Arguments(_)));
        assert!(matches!(why("signal", b""), NotEnvoy::Arguments(_)));
    }

    #[test]
    fn what_the_kernel_refuses_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        assert!(check_format(Path::new("/proc/self/exe")).is_ok());
        assert!(check_format(&file("script", b"#!/bin/sh\n")).is_ok());
        assert!(check_format(&file("empty", b"")).unwrap_err().to_string().contains("no program"));
        assert!(check_format(&file("text", b"echo hello from a text file\n")).is_err());
        let mut elf = header(Path::new("/proc/self/exe")).unwrap();
        elf[18] ^= 0xff;
        assert!(check_format(&file("elf", &elf)).unwrap_err().to_string().contains("another processor"));
    }

    #[test]
    fn programs_are_found_as_exec_would() {
        assert!(look_up("sh").is_ok());
        assert!(look_up("no-such-program-anywhere").unwrap_err().to_string().contains("$PATH"));
        assert_eq!(in_words(&look_up("./no/such").unwrap_err()), "no such file or directory");
        assert!(look_up("/tmp").unwrap_err().to_string().contains("directory"));
    }
}
