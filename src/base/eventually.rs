//! For tests: waits, in real time, until something holds.

use std::time::Duration;

/// Only a defect waits so long.
const LIMIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);

/// Looks until it holds.
///
/// # Panics
/// With `what` after [`LIMIT`].
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let looked = async {
        while !holds().await {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(LIMIT, looked).await.unwrap_or_else(|_| panic!("never came true: {what}"));
}
