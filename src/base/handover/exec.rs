//! Becoming another program.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;

use nix::sys::signal::{SigSet, Signal};

use super::parcel::{Parcel, pack};
use crate::base::open_files;

// Those that end an agent, or are passed over by it, and end a program that has not installed its handlers yet.
fn signals() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2]
        .into_iter()
        .collect()
}

/// Signals that come from now on wait for [`unblock_signals`], which may be the next program's.
pub(crate) fn block_signals() {
    if let Err(error) = signals().thread_block() {
        tracing::warn!("signals cannot be blocked: {error}");
    }
}

/// Unblocks them.
pub(crate) fn unblock_signals() {
    if let Err(error) = signals().thread_unblock() {
        tracing::warn!("signals cannot be unblocked: {error}");
    }
}

/// Becomes `program` with these words and the parcel on standard input. Only on the main thread: the parent-death
/// signal of Envoy belongs to it.
///
/// # Errors
/// Returns only when it failed; standard input is as it was.
pub(crate) fn become_program(
    program: &OwnedFd,
    words: impl IntoIterator<Item = OsString>,
    parcel: &Parcel,
) -> io::Error {
    match attempt(program, words, parcel) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn attempt(
    program: &OwnedFd,
    words: impl IntoIterator<Item = OsString>,
    parcel: &Parcel,
) -> io::Result<std::convert::Infallible> {
    let text = |text: OsString| CString::new(text.into_vec()).map_err(io::Error::other);
    let words: Vec<CString> = words.into_iter().map(text).collect::<Result<_, _>>()?;
    #[expect(
        clippy::disallowed_methods,
        reason = "the environment as this program was given it, for the next"
    )]
    let environment = std::env::vars_os().map(|(mut name, value)| {
        name.push("=");
        name.push(value);
        text(name)
    });
    let environment: Vec<CString> = environment.collect::<Result<_, _>>()?;
    // The file that was tried, whatever lies at its path by now.
    let path = text(format!("/proc/self/fd/{}", program.as_raw_fd()).into())?;
    let socket = pack(parcel)?;
    let before = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3);
    rustix::stdio::dup2_stdin(&socket)?;
    drop(socket);
    if let Some(soft) = open_files::given() {
        open_files::set(soft);
    }
    let failed = nix::unistd::execve(&path, &words, &environment);
    open_files::raise();
    if let Ok(before) = before {
        rustix::stdio::dup2_stdin(&before)?;
    }
    Ok(failed?)
}
