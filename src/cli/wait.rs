//! `wait`: asks until the answer is 200, for hooks that hold the application back.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use super::{endpoint, http};
use crate::base::error::BoxError;
use crate::base::logging;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::go;

/// Waits for it.
pub(super) fn run(parsed: &Parsed, env: &Env) -> Result<(), BoxError> {
    let number = |name: &str| go::integer(parsed.or_default(super::WAIT, name), 64);
    let seconds = number("timeoutSeconds")?;
    let millis = |name: &str| number(name).map(|n| Duration::from_millis(u64::try_from(n).unwrap_or(0)));
    let (period, request) = (millis("periodMillis")?, millis("requestTimeoutMillis")?);
    let url = parsed.or_default(super::WAIT, "url").to_owned();
    logging::init(&logging::Options::default())?;
    tracing::info!("Waiting for Envoy proxy to be ready (timeout: {seconds} seconds)...");
    let total = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    let own = (url == OWN).then(|| format!("http://localhost:{}/healthz/ready", endpoint::of(env)));
    http::block_on(async move { Ok(until_ready(&url, own.as_deref(), total, period, request).await?) })?;
    tracing::info!("Envoy is ready!");
    Ok(())
}

/// The time is over; why the last request was not enough.
#[derive(Debug, thiserror::Error)]
#[error("timeout waiting for Envoy proxy to become ready. Last error: {0}")]
pub(super) struct NeverReady(String);

/// Asks until the answer is 200, for `total` at most. A request that may take no time may take any.
// The period comes before every request, the first too; only the pause looks at the limit, so that a
// request on its way may overrun it.
pub(super) async fn until_ready(
    url: &str,
    own: Option<&str>,
    total: Duration,
    period: Duration,
    request: Duration,
) -> Result<(), NeverReady> {
    let limit = Instant::now().checked_add(total);
    let mut last = "<nil>".to_owned();
    loop {
        let next = Instant::now().checked_add(period);
        if limit.is_some_and(|limit| next.is_none_or(|next| next >= limit)) {
            if let Some(limit) = limit {
                sleep_until(limit).await;
            }
            return Err(NeverReady(last));
        }
        if let Some(next) = next {
            sleep_until(next).await;
        }
        match ask(url, request).await {
            Ok(()) => return Ok(()),
            Err(error) => {
                let error = match own.filter(|_| !error.verdict) {
                    Some(own) => error.explained(own).await,
                    None => error,
                };
                if error.verdict && kind(&error.text) != kind(&last) {
                    tracing::info!("Not ready yet: {}", error.text);
                } else {
                    tracing::debug!("Not ready yet: {}", error.text);
                }
                last = error.text;
            }
        }
    }
}

/// Where Envoy answers for the agent.
const OWN: &str = "http://localhost:15021/healthz/ready";
/// Limit of the question to the agent itself, why Envoy does not answer: it may ask an Envoy that hangs, for 1 s.
const WHY: Duration = Duration::from_secs(2);

/// Why it is not ready.
struct NotReady {
    text: String,
    /// It holds the agent's verdict.
    verdict: bool,
}

impl NotReady {
    // Envoy does not answer, or not with a reason: the agent itself knows why.
    async fn explained(self, own: &str) -> Self {
        match ask(own, WHY).await {
            Err(why) if why.verdict => {
                let why = why.text.split_once(": ").map_or(why.text.as_str(), |(_, why)| why).to_owned();
                Self { text: format!("{}: {why}", self.text), verdict: true }
            }
            _ => self,
        }
    }
}

// The verdict's kind: what changes seldom of a reason.
fn kind(text: &str) -> Option<&str> {
    text.split(": ").find(|part| crate::trouble::Kind::from_name(part).is_some())
}

async fn ask(url: &str, limit: Duration) -> Result<(), NotReady> {
    let plain = |text: String| NotReady { text, verdict: false };
    let exchange = http::exchange("GET", url, "");
    let reply = if limit.is_zero() {
        exchange.await
    } else {
        let late =
            || plain(format!("Get {}: no whole answer within {} ms", http::shown(url), limit.as_millis()));
        timeout(limit, exchange).await.map_err(|_| late())?
    }
    .map_err(|e| plain(e.to_string()))?;
    if reply.status == 200 {
        return Ok(());
    }
    let text = format!("HTTP status code {}", reply.status);
    Err(match reply.why {
        Some(why) => NotReady { text: format!("{text}: {why}"), verdict: true },
        None => plain(text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_request_fits() {
        for (total, period) in [(0, 0), (1, 2000), (0, 500)] {
            let start = Instant::now();
            let period = Duration::from_millis(period);
            let error =
                until_ready("http://localhost:1/", None, Duration::from_secs(total), period, Duration::ZERO)
                    .await;
            assert_eq!(
                error.unwrap_err().to_string(),
                "timeout waiting for Envoy proxy to become ready. Last error: <nil>"
            );
            assert_eq!(start.elapsed().as_secs(), total);
        }
    }
}
