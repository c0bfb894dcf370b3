//! Runs one program to its end, whatever it does: never longer than allowed, and nothing of it stays.
//!
//! - The program leads a process group of its own, so that a signal to ours cuts no change in two. When its time is
//!   up the whole group is killed: what a wrapper script has started too.
//! - Its output is read until it has ended, and `DRAIN` longer: a process that it left behind may hold the pipe for
//!   as long as it likes.
//! - Asked to end ([`Ending`]), we let it finish within `PATIENCE`: half a change is worse than a late end.

use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::program::{Output, Program};

/// No program takes longer: legacy ones wait 30 s for the lock (`--wait=30`), the work itself takes
/// milliseconds.
const LIMIT: Duration = Duration::from_secs(60);

/// What a program still gets after we were asked to end: a restore under way takes milliseconds, and a container
/// has 30 s between SIGTERM and SIGKILL.
const PATIENCE: Duration = Duration::from_secs(5);

/// What each program after that gets, so that a family can still be put back.
const HURRIED: Duration = Duration::from_secs(2);

/// How long what was printed is read after the program has ended.
const DRAIN: Duration = Duration::from_secs(1);

/// How soon a request to end is seen.
const LOOK: Duration = Duration::from_millis(100);

/// More of what a program prints is read and thrown away; a node's rules are a few hundred kilobytes.
const MOST: usize = 64 << 20;

/// Whether somebody asked us to end, and since when.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending(Arc<AtomicBool>, Option<Instant>);

impl Ending {
    /// Set by what asks for an end ([`super::hold::signals`]) from now on.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn watched() -> io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in super::hold::signals() {
            signal_hook::flag::register(signal, Arc::clone(&asked))?;
        }
        Ok(Self(asked, None))
    }

    /// Nobody asks: for looks that change nothing and may be cut short by the signals' own effect.
    #[must_use]
    pub(crate) fn unwatched() -> Self {
        Self(Arc::new(AtomicBool::new(false)), None)
    }

    /// Somebody has asked.
    #[cfg(test)]
    pub(super) fn at_once() -> Self {
        Self(Arc::new(AtomicBool::new(true)), None)
    }

    /// Whether we were asked.
    #[must_use]
    pub(crate) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    // When what runs since `start` must be over.
    fn deadline(&mut self, start: Instant) -> Instant {
        if self.1.is_none() && self.asked() {
            self.1 = Some(Instant::now());
        }
        let asked = self.1.map(|at| (at + PATIENCE).max(start + HURRIED));
        asked.map_or(start + LIMIT, |at| at.min(start + LIMIT))
    }
}

type Shared = Arc<Mutex<Vec<u8>>>;

/// Runs `program`, found by `path` (empty: by our own `PATH`); `lock` is the lock file it is told to use.
///
/// # Errors
/// The system's.
pub(super) fn execute(
    program: &Program,
    path: &str,
    lock: Option<&str>,
    ending: &mut Ending,
) -> io::Result<Output> {
    let start = Instant::now();
    let mut child = Command::new(&program.name)
        .args(&program.args)
        .envs((!path.is_empty()).then_some(("PATH", path)))
        .envs(lock.map(|path| ("XTABLES_LOCKFILE", path)))
        .stdin(if program.stdin.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let group = group.ok_or_else(|| io::Error::other("the program has no id"))?;
    let (stdout, stderr) = (Shared::default(), Shared::default());
    // One message from each: the end of the program and of its two outputs.
    let (done, news) = mpsc::sync_channel(3);
    begin(&mut child, program, group, [&stdout, &stderr], &done);
    let mut ended = 0;
    let mut drained_by = None;
    let killed = loop {
        let until = drained_by.unwrap_or_else(|| ending.deadline(start));
        match news.recv_timeout(LOOK.min(until.saturating_duration_since(Instant::now()))) {
            Ok(what) => {
                ended += 1;
                if what == What::Program {
                    drained_by = Some(Instant::now() + DRAIN);
                }
            }
            Err(_) if Instant::now() < until => continue,
            Err(_) => break drained_by.is_none(),
        }
        if ended == 3 {
            break false;
        }
    };
    let after = start.elapsed();
    if ended < 3 {
        // It has not been waited for: the number is its own.
        let _ = kill_process_group(group, Signal::KILL);
        if killed {
            tracing::error!("{} did not end within {} s and is killed", program.name, after.as_secs());
        } else {
            tracing::warn!(
                "{} has ended, but a process that it started keeps its output open and is killed",
                program.name
            );
        }
        // What is in the pipes by now.
        let _ = news.recv_timeout(LOOK);
    }
    let status = child.wait()?;
    let text =
        |of: &Shared| String::from_utf8_lossy(&of.lock().expect("no panic holds this lock")).into_owned();
    let mut stderr = text(&stderr);
    if killed {
        stderr.push_str(&format!("killed, since it did not end within {} s", after.as_secs()));
    }
    let signal = status.signal();
    Ok(Output {
        status: status.code().or(signal.map(|s| 128 + s)).unwrap_or(-1),
        stdout: text(&stdout),
        stderr,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Program,
    Output,
}

// Threads that nobody joins: each ends with the pipe or the program it waits for, at the latest with our process,
// which does not live longer than its few programs.
fn begin(
    child: &mut Child,
    program: &Program,
    group: Pid,
    texts: [&Shared; 2],
    done: &mpsc::SyncSender<What>,
) {
    if let (Some(mut pipe), Some(text)) = (child.stdin.take(), program.stdin.clone()) {
        thread::spawn(move || pipe.write_all(text.as_bytes()));
    }
    let (output, complaints) = (child.stdout.take(), child.stderr.take());
    reader(output, texts[0], done);
    reader(complaints, texts[1], done);
    let done = done.clone();
    thread::spawn(move || {
        // Seen, not waited for: its number stays its own until we are ready.
        let _ = waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let _ = done.send(What::Program);
    });
}

fn reader(pipe: Option<impl Read + Send + 'static>, into: &Shared, done: &mpsc::SyncSender<What>) {
    let (into, done) = (Arc::clone(into), done.clone());
    thread::spawn(move || {
        let mut piece = [0; 8192];
        let mut pipe = pipe;
        while let Some(read) = pipe.as_mut().map(|p| p.read(&mut piece)) {
            match read {
                Ok(n) if n > 0 => {
                    let mut all = into.lock().expect("no panic holds this lock");
                    if all.len() < MOST {
                        all.extend_from_slice(&piece[..n]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        let _ = done.send(What::Output);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Program {
        Program::new("sh", &["-c", script])
    }

    fn ends(pid: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        while !(state().is_empty() || state().contains(") Z ")) {
            assert!(Instant::now() < until, "{pid} lives on");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_it_prints_and_how_it_ends() {
        let mut program = sh("cat; echo no >&2; exit 3");
        program.stdin = Some("x".repeat(200_000));
        let out = execute(&program, "", None, &mut Ending::default()).unwrap();
        assert_eq!((out.status, out.stdout.len(), out.stderr.as_str()), (3, 200_000, "no\n"));
        assert!(execute(&Program::new("no-such-program", &[]), "", None, &mut Ending::default()).is_err());
    }

    #[test]
    fn it_is_found_by_the_path_that_is_given() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("a-program");
        std::fs::write(&place, "#!/bin/sh\necho \"$PATH\"\n").unwrap();
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = dir.path().to_str().unwrap();
        let out = execute(&Program::new("a-program", &[]), path, None, &mut Ending::default()).unwrap();
        assert_eq!(out.stdout.trim(), path);
    }

    #[test]
    fn what_it_leaves_behind_holds_nobody_up() {
        let out = execute(&sh("sleep 1000 & echo $!"), "", None, &mut Ending::default()).unwrap();
        assert_eq!(out.status, 0);
        ends(&out.stdout);
    }

    #[test]
    fn asked_to_end_the_program_and_what_it_started_are_killed() {
        let mut ending = Ending(Arc::new(AtomicBool::new(true)), Some(Instant::now() - PATIENCE));
        let out = execute(&sh("sleep 1000 & echo $!; wait"), "", None, &mut ending).unwrap();
        assert_eq!(out.status, 137);
        assert!(out.complaint().contains("killed, since it did not end"), "{}", out.complaint());
        ends(&out.stdout);
    }
}
