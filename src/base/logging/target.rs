//! Where lines go, without the agent ever waiting for whoever reads them.
//!
//! A reader that stands still (a container runtime that is stuck, a terminal that was stopped) fills its
//! pipe, and a plain write would then hold up certificates, configuration and probes. So the agent asks
//! first whether there is room, keeps what does not fit, up to [`KEPT`], and drops whole lines beyond; how
//! many is counted and said in the log when it moves again. Commands, which have nothing else to do, wait.
//!
//! Why not a thread with a queue, as `tracing-appender` has it: an agent's log is a few lines a minute, for
//! which a thread, its stack and a wake-up per line are more than a question to the kernel; and lines written
//! in place are with the kernel when the process ends, however it ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Bytes kept for a reader that stands still.
const KEPT: usize = 256 * 1024;
/// A pipe that has room at all takes so much without waiting (`PIPE_BUF` in limits.h).
const PIECE: usize = 4096;

/// What is written to.
pub(super) enum Sink {
    Stdout(io::Stdout),
    Stderr(io::Stderr),
    File(File),
}

impl Sink {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Stdout(out) => out.as_fd(),
            Self::Stderr(out) => out.as_fd(),
            Self::File(file) => file.as_fd(),
        }
    }

    /// Whether a write would not have to wait, or will not have to before `wait` is over.
    fn has_room(&self, wait: Duration) -> bool {
        let fd = self.fd();
        let wait = Timespec::try_from(wait).unwrap_or_default();
        let mut asked = [PollFd::new(&fd, PollFlags::OUT)];
        // An error shows in the write.
        poll(&mut asked, Some(&wait)).is_ok_and(|ready| ready > 0)
    }

    /// Writes as much as there is room for; how much that was. What cannot be written for another reason is
    /// given up, and the reason kept in `state`: somebody else has to say so.
    fn write(&self, bytes: &[u8], patient: bool, state: &mut State) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            if !patient && !self.has_room(Duration::ZERO) {
                break;
            }
            let piece = &bytes[done..bytes.len().min(done + PIECE)];
            match rustix::io::write(self.fd(), piece) {
                Ok(n) => {
                    done += n;
                    *state = State { error: None, open: piece.get(..n).is_some_and(|p| !p.ends_with(b"\n")) };
                }
                Err(Errno::INTR) => {}
                // Somebody has made it non-blocking for all who share it.
                Err(Errno::AGAIN) if patient => drop(self.has_room(Duration::from_secs(1))),
                Err(Errno::AGAIN) => break,
                Err(why) => {
                    state.error = Some(why);
                    return bytes.len();
                }
            }
        }
        done
    }
}

/// What has become of the last write.
#[derive(Default)]
struct State {
    error: Option<Errno>,
    /// It ended within a line.
    open: bool,
}

/// A sink and what waits for it.
pub(super) struct Target {
    sink: Sink,
    patient: bool,
    kept: Vec<u8>,
    /// Lines are kept until they may be written together.
    held: bool,
    state: State,
}

impl Target {
    pub(super) fn new(sink: Sink, patient: bool) -> Self {
        Self { sink, patient, kept: Vec::new(), held: false, state: State::default() }
    }

    /// Keeps the lines that come from now on, as long as there are no more than [`KEPT`]; or no longer.
    pub(super) fn hold(&mut self, held: bool) {
        self.held = held;
        if !held {
            self.drain();
        }
    }

    /// Takes a whole line; whether it was written or kept, and not dropped.
    pub(super) fn line(&mut self, line: &[u8]) -> bool {
        if self.held && self.kept.len() + line.len() <= KEPT {
            self.kept.extend_from_slice(line);
            return true;
        }
        if self.state.open && self.state.error.is_some() && self.drained() {
            // The rest of the line before was given up, as on a disk that was full.
            self.kept.push(b'\n');
        }
        if !self.drain() {
            let room = self.kept.len() + line.len() <= KEPT;
            if room {
                self.kept.extend_from_slice(line);
            }
            return room;
        }
        let done = self.sink.write(line, self.patient, &mut self.state);
        // A line that was begun is ended, however long it is.
        self.kept.extend_from_slice(&line[done..]);
        true
    }

    /// Why the last write failed; `None`: it did not.
    pub(super) fn error(&self) -> Option<Errno> {
        self.state.error
    }

    /// Whether nothing is kept.
    fn drained(&self) -> bool {
        self.kept.is_empty()
    }

    /// Whether something is kept because the reader stands still.
    pub(super) fn stalled(&self) -> bool {
        !self.held && !self.drained()
    }

    /// Writes what was kept, as far as there is room; whether nothing is left.
    pub(super) fn drain(&mut self) -> bool {
        if !self.kept.is_empty() {
            let done = self.sink.write(&self.kept, self.patient, &mut self.state);
            self.kept.drain(..done);
            if self.drained() {
                self.kept = Vec::new();
            }
        }
        self.drained()
    }

    /// Waits for room until `until`, for the last lines of a process.
    pub(super) fn flush(&mut self, until: Instant) {
        while !self.drain() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.sink.has_room(left) {
                return;
            }
        }
    }
}
