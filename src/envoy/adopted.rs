//! Child processes that an earlier version of the agent has started in this process. They are known by process ID, which is
//! not given to another process until we have waited for them.

use std::io;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::signal::unix::{SignalKind, signal};

use crate::base::{handover, process};

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Status(i32),
    Signal(i32),
}

/// A child. Dropping it before its end kills it, unless a successor has it.
#[derive(Debug)]
pub(super) struct Child {
    pid: Pid,
    over: bool,
}

impl Child {
    /// The child with this number, which may have ended by now.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn of(pid: i32) -> io::Result<Self> {
        let own = i32::try_from(std::process::id()).ok();
        let known = Some(pid).filter(|pid| *pid > 0 && process::parent(*pid) == own).and_then(Pid::from_raw);
        let pid =
            known.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it is no child of this process"))?;
        Ok(Self { pid, over: false })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for its end.
    pub(super) async fn ended(mut self) -> io::Result<End> {
        let end = self.wait().await;
        self.over = true;
        end
    }

    /// As [`Child::ended`], to be asked again when it was not waited for to the end.
    pub(super) async fn wait(&self) -> io::Result<End> {
        // As the runtime waits for children of its own; listened for before the first look.
        let mut ended = signal(SignalKind::child())?;
        loop {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            if let Some(status) = waitid(WaitId::Pid(self.pid), options)? {
                let signal = status.terminating_signal().map(End::Signal);
                return Ok(signal.unwrap_or(End::Status(status.exit_status().unwrap_or(1))));
            }
            ended.recv().await;
        }
    }

    /// Its end was seen by [`Child::wait`].
    pub(super) fn forget(mut self) {
        self.over = true;
    }

    /// SIGKILL.
    pub(super) fn kill(&self) {
        // The number is its own until its end was waited for.
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.over && !handover::passing() {
            self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    #[expect(clippy::zombie_processes, reason = "who waits for them is what is tested")]
    async fn a_child_is_known_by_its_number_and_others_are_not() {
        assert!(Child::of(1).is_err() && Child::of(0).is_err() && Child::of(-1).is_err());
        let start = |script: &str| {
            let child = std::process::Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
            Child::of(i32::try_from(child.id()).unwrap()).unwrap()
        };
        assert_eq!(start("exit 7").ended().await.unwrap(), End::Status(7));
        let asleep = start("exec sleep 600");
        asleep.kill();
        assert_eq!(asleep.ended().await.unwrap(), End::Signal(9));
        let pid = start("exec sleep 600").pid();
        // It was dropped, and so is dead.
        let status = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED).unwrap().unwrap();
        assert_eq!(status.terminating_signal(), Some(9));
    }
}
