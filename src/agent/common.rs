//! What every step of the start needs.

use std::sync::Arc;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tokio::time::Instant;

use super::said;
use super::stages::Stages;
use crate::base::clock::{Clock, System};
use crate::base::files::Watches;
use crate::base::handover;
use crate::base::metrics::Metrics;
use crate::config::Config;
use crate::config::parts::Error;
use crate::trouble::{Troubles, What};

/// Shared by all parts.
pub(super) struct Common {
    pub started: Instant,
    pub config: Arc<Config>,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
    pub troubles: Troubles,
    pub tasks: Stages,
    /// The one list of watched files.
    pub watches: Watches,
}

impl Common {
    /// Before there is a key: core dumps are switched off here, if at all.
    pub(super) fn new(config: Arc<Config>) -> Result<Self, Error> {
        let started = Instant::now();
        if config.upgrade.is_some() {
            handover::switch_on();
        }
        let clock: Arc<dyn Clock> = Arc::new(System);
        let metrics = Metrics::new();
        let troubles = Troubles::new(clock.clone());
        troubles.note(What::Started, "the agent");
        for counted in [
            crate::base::tasks::panics(),
            crate::net::accept::failures(),
            crate::net::paced::turns(),
            crate::base::pressure::shortages(),
        ] {
            metrics.register(Box::new(counted)).map_err(said)?;
        }
        crate::trouble::export(&troubles, &metrics);
        // Not by RLIMIT_CORE: Envoy would inherit it, and a core handler in a pipe does not care.
        if config.no_core_dumps
            && let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable)
        {
            tracing::warn!("NO_CORE_DUMPS has no effect: {error}");
        }
        let (tasks, watches) = (Stages::new(), Watches::default());
        Ok(Self { started, config, clock, metrics, troubles, tasks, watches })
    }
}
