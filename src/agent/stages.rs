//! The groups of tasks, one for each stage of the shutdown.

use crate::base::handover;
use crate::base::tasks::{Group, Stop};

/// One group a stage. Clones share the groups.
#[derive(Clone)]
pub(super) struct Stages {
    closing: Stop,
    /// The relay.
    pub xds: Group,
    /// The DNS server.
    pub dns: Group,
    /// The SDS sockets.
    pub sds: Group,
    /// The secret manager and what feeds it.
    pub secrets: Group,
    /// The token service: Envoy may ask it for as long as it drains.
    pub sts: Group,
    /// The status server, last, so that it can tell what is going on.
    pub status: Group,
}

impl Stages {
    /// Empty groups.
    pub(super) fn new() -> Self {
        Self {
            closing: Stop::new(),
            xds: Group::new(),
            dns: Group::new(),
            sds: Group::new(),
            secrets: Group::new(),
            sts: Group::new(),
            status: Group::new(),
        }
    }

    /// The end begins: the status server takes no new connections, and what is offered to a successor, which would stay
    /// open, is closed.
    pub(super) fn close(&self) {
        handover::switch_off();
        self.closing.cancel();
    }

    /// Cancelled when the end begins.
    pub(super) fn closing(&self) -> Stop {
        self.closing.child_token()
    }

    /// Names of the tasks that run, in the order in which they are ended.
    pub(super) fn running(&self) -> Vec<String> {
        let groups = [&self.xds, &self.dns, &self.sds, &self.secrets, &self.sts, &self.status];
        groups.iter().flat_map(|group| group.running()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_offered_is_closed_when_the_end_begins() {
        let stages = Stages::new();
        let closing = stages.closing();
        let (offered, mut other) = UnixStream::pair().unwrap();
        other.set_nonblocking(true).unwrap();
        handover::switch_on();
        handover::offer("test of the end", "", &offered);
        drop(offered);
        assert_eq!(other.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        stages.close();
        assert!(closing.is_cancelled());
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
    }
}
