//! The security token service, where a port is set for it.
//!
//! A metadata server may come up some seconds after its pod. So a service that lacks only the project's number
//! does not hold up the start: Envoy runs meanwhile, and the agent ends when there is still none.

use std::sync::Arc;
use std::time::Duration;

use super::stages::Stages;
use crate::base::clock::Clock;
use crate::base::metrics::Metrics;
use crate::config::Config;
use crate::config::parts::Error;
use crate::config::parts::sts::Service;
use crate::sts::{Bound, Handle, bind};
use crate::trouble::Troubles;

/// How long a metadata server is waited for. GKE's needs "a few seconds" after the start of a pod.
const WAIT: Duration = Duration::from_secs(8);
/// Between two questions.
const PAUSE: Duration = Duration::from_secs(1);

/// A service that is to be started.
pub(super) struct Pending {
    service: Service,
    bound: Option<Bound>,
}

/// Opens the port, where all is known that the service needs.
///
/// # Errors
/// When the service can never work: its port is its user's address, so without it there is no start.
pub(super) async fn prepare(config: &Config) -> Result<Option<Pending>, Error> {
    let Some(service) = config.sts.clone() else { return Ok(None) };
    let bound = match service.config().await {
        Ok(config) => Some(bind(config).map_err(super::said)?),
        Err(_) => None,
    };
    Ok(Some(Pending { service, bound }))
}

impl Pending {
    /// Starts it.
    pub(super) fn spawn(
        self,
        stages: &Stages,
        metrics: &Metrics,
        clock: &Arc<dyn Clock>,
        troubles: &Troubles,
    ) -> Handle {
        let Self { service, bound } = self;
        let handle = service.handle(troubles.reporter("security"));
        if let Some(bound) = bound {
            bound.spawn(&stages.sts, metrics, clock.clone(), handle.clone());
            return handle;
        }
        let (metrics, clock, told) = (metrics.clone(), clock.clone(), handle.clone());
        let (group, stop) = (stages.sts.clone(), stages.sts.token());
        stages.sts.spawn("token service", async move {
            let until = tokio::time::Instant::now() + WAIT;
            let config = loop {
                tokio::select! {
                    () = stop.cancelled() => return Ok(()),
                    () = tokio::time::sleep(PAUSE) => {}
                }
                match service.config().await {
                    Ok(config) => break config,
                    Err(error) if tokio::time::Instant::now() >= until => return Err(error.into()),
                    Err(_) => {}
                }
            };
            bind(config)?.spawn(&group, &metrics, clock, told);
            Ok(())
        });
        handle
    }
}
