//! The groups of tasks, one for each stage of the shutdown.

use crate::base::tasks::{Group, Stop};

/// One group a stage. Clones share the groups.
#[derive(Clone)]
pub(super) struct Stages {
    /// Cancelled when the end begins: the status server takes no new connections.
    pub closing: Stop,
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

    /// Names of the tasks that run, in the order in which they are ended.
    pub(super) fn running(&self) -> Vec<String> {
        let groups = [&self.xds, &self.dns, &self.sds, &self.secrets, &self.sts, &self.status];
        groups.iter().flat_map(|group| group.running()).collect()
    }
}
