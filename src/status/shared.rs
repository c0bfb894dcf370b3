//! What all connections of the status server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{CONNECTIONS, Config, Handles, own, probes, ready, stats};
use crate::net::accept::bound;

/// What all connections share.
pub(super) struct Shared {
    pub(super) handles: Handles,
    pub(super) profiling: bool,
    pub(super) ready: ready::Readiness,
    pub(super) probes: probes::Prober,
    pub(super) stats: Arc<stats::Merger>,
    /// For readers of pages.
    pub(super) pages: stats::Turns,
    pub(super) connections: AtomicUsize,
}

impl Shared {
    /// `port` is the status port as it is really bound.
    pub(super) fn new(
        config: Config,
        port: u16,
        handles: Handles,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let own = own::Own::new(&handles.metrics)?;
        Ok(Self {
            ready: ready::Readiness::new(
                config.ready,
                own.startup.clone(),
                handles.started,
                handles.agent.troubles().reporter("default"),
            ),
            probes: probes::Prober::new(
                config.probes,
                bound(CONNECTIONS),
                port,
                handles.crypto.clone(),
                handles.agent.troubles().reporter("probes"),
            ),
            stats: Arc::new(stats::Merger::new(config.stats, port, own, handles.metrics.clone())),
            profiling: config.profiling,
            handles,
            pages: stats::Turns::pages(),
            connections: AtomicUsize::new(0),
        })
    }

    /// The most connections there have been at a time.
    pub(super) fn most_connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}
