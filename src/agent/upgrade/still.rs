//! The moment between two programs: what is under way comes to its end, nothing new is begun.

use std::time::Duration;

use crate::agent::stages::Stages;

/// Streams are told, answers go out. New clients wait in the kernel's queues meanwhile, so it is short; what has not
/// ended then is cut, as a stream that Envoy opens again.
const STILL: Duration = Duration::from_millis(300);

/// Ends all parts. Their sockets stay open in the registry of what is handed over, and their files where they are.
pub(super) async fn keep(stages: &Stages) {
    let (xds, dns, sds, sts, status) = tokio::join!(
        stages.xds.stop(STILL),
        stages.dns.stop(STILL),
        stages.sds.stop(STILL),
        stages.sts.stop(STILL),
        stages.status.stop(STILL),
    );
    let secrets = stages.secrets.stop(STILL).await;
    let cut = [xds, dns, sds, sts, status, secrets].concat();
    if !cut.is_empty() {
        tracing::debug!("stopped for the upgrade: {}", cut.join(", "));
    }
}
