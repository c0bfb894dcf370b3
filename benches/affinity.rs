//! An agent and this process, which plays everybody else, held to one core.
//!
//! Where the two have a core each, whoever is woken is woken by an interrupt between processors, and on a virtual machine
//! that costs tens of µs of the waker's time: the agent's for each answer. Beside each other on one core there is none.
//! A busy node is between the two.

use std::io;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Until dropped.
#[derive(Debug)]
pub(crate) struct OneCore {
    /// Processes, and where they may run otherwise.
    held: Vec<(u32, CpuSet)>,
}

impl OneCore {
    /// Holds every thread of both, and those that they start, to the last core that this process may use.
    pub(crate) fn with(agent: u32) -> io::Result<Self> {
        let all = sched_getaffinity(None)?;
        let last =
            (0..CpuSet::MAX_CPU).rev().find(|core| all.is_set(*core)).ok_or(io::ErrorKind::NotFound)?;
        let mut one = CpuSet::new();
        one.set(last);
        let before = sched_getaffinity(pid(agent))?;
        let held = Self { held: vec![(std::process::id(), all), (agent, before)] };
        held.held.iter().try_for_each(|(process, _)| put(*process, &one))?;
        Ok(held)
    }
}

impl Drop for OneCore {
    fn drop(&mut self) {
        for (process, cores) in &self.held {
            let _ = put(*process, cores);
        }
    }
}

fn pid(id: u32) -> Option<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw)
}

fn put(process: u32, cores: &CpuSet) -> io::Result<()> {
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let id = task?.file_name().to_str().and_then(|name| name.parse().ok());
        match sched_setaffinity(id.and_then(pid), cores) {
            // A thread that has ended meanwhile.
            Err(rustix::io::Errno::SRCH) => {}
            done => done?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_and_let_go() {
        let cores =
            |id| (0..CpuSet::MAX_CPU).filter(|n| sched_getaffinity(pid(id)).unwrap().is_set(*n)).count();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let before = (cores(std::process::id()), cores(other.id()));
        let held = OneCore::with(other.id()).unwrap();
        assert_eq!((cores(std::process::id()), cores(other.id())), (1, 1));
        drop(held);
        assert_eq!((cores(std::process::id()), cores(other.id())), before);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
