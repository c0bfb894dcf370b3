//! What is done before the certificate is due, and when it is about to expire.

use tokio::time::Instant;

use super::Manager;
use crate::base::error::chain;
use crate::secrets::{Error, NearExpiryAction, rotation};
use crate::trouble::{Kind, Report};

/// The agent ends because its certificate does.
#[derive(Debug, thiserror::Error)]
#[error(
    "the workload certificate ends in {left} and this proxy itself is why it is not renewed \
     (IDENTITY_NEAR_EXPIRY=exit): {cause}"
)]
struct NearExpiry {
    left: String,
    cause: String,
}

impl Manager {
    /// Whether to ask for a certificate that is not due.
    pub(super) fn early(&mut self, mono: Instant) -> bool {
        let now = self.clock.now();
        let Some(early) = &mut self.early else { return false };
        let Some(current) = self.workload.valid(now) else { return false };
        let (life, age) = current.issued.life(now);
        let was = early.next();
        let trouble = self.config.trouble.list().any(Kind::is_upstream);
        let due = early.due(life, age, mono, trouble, rotation::draw().abs());
        if was.is_none() && early.next().is_some() {
            let left = rotation::span(life.saturating_sub(age));
            tracing::info!(target: "cache",
                "the way to istiod has trouble, so the certificate is renewed early; it is valid for another {left}");
        }
        due
    }

    /// Those who follow the certificate hear nothing: it is good, and not due.
    pub(super) fn early_failed(&mut self, error: &Error, mono: Instant) {
        tracing::debug!(target: "cache", "early renewal failed: {}", chain(error));
        let now = self.clock.now();
        let life = self.workload.current.as_ref().map(|c| c.issued.life(now).0).unwrap_or_default();
        if let Some(early) = &mut self.early {
            early.failed(life, mono, rotation::draw().abs());
        }
    }

    /// Why the proxy should get no more traffic, or the error with which it should end.
    pub(super) fn unfit(&mut self) -> Result<Option<String>, Box<dyn std::error::Error + Send + Sync>> {
        let config = &self.config.near_expiry;
        if config.action == NearExpiryAction::Ignore {
            return Ok(None);
        }
        let now = self.clock.now();
        let missed = self.workload.failures() > 0 && self.used();
        // While istiod is away for everybody, a token that is no good besides changes nothing.
        let list = self.config.trouble.list();
        let away = list.any(Kind::is_way);
        let verdict = list.verdict().filter(|verdict| !(away && verdict.kind.is_token()));
        let current = self.workload.current.as_ref().filter(|_| missed);
        let near = current.and_then(|current| {
            let not_after = current.issued.leaf.not_after;
            let cause = config.cause(not_after, now, current.near_draw, verdict.as_ref())?;
            Some((rotation::span(not_after.duration_since(now).unwrap_or_default()), cause.line()))
        });
        let Some((left, cause)) = near else {
            self.troubles.near_expiry.end();
            return Ok(None);
        };
        if config.action == NearExpiryAction::Exit {
            return Err(Box::new(NearExpiry { left, cause }));
        }
        let text = format!("the workload certificate ends in {left}: {cause}");
        if self.troubles.near_expiry.kind().is_none() {
            self.troubles.near_expiry.report(Report::new(Kind::IdentityNearExpiry, text.clone()));
        }
        Ok(Some(text))
    }
}
