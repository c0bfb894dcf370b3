//! What happens to the proxy when its certificate is about to expire (`IDENTITY_NEAR_EXPIRY`). Pure.
//!
//! It acts only where the failure is this proxy's own (its token, its disk, its clock, what the CA says of it): then
//! another place may serve better. While istiod is away for everybody nothing is done, since a mesh of proxies that
//! end themselves is worse than one with old certificates.

use std::time::{Duration, SystemTime};

use crate::trouble::Trouble;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Action {
    /// Nothing, as the Go agent.
    #[default]
    Ignore,
    /// `/healthz/ready` says no.
    Unready,
    /// The agent ends in order, with a status other than 0, so that whoever started it starts it anew.
    Exit,
}

/// When to do it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Config {
    /// `IDENTITY_NEAR_EXPIRY`.
    pub action: Action,
    /// So long before the end of validity (`IDENTITY_NEAR_EXPIRY_BEFORE`, 5 min).
    pub before: Duration,
    /// And a random part of this earlier (`IDENTITY_NEAR_EXPIRY_JITTER`, 1 min).
    pub jitter: Duration,
}

/// Nothing that could be done.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("IDENTITY_NEAR_EXPIRY is {0:?}: it is ignore, unready or exit")]
pub(crate) struct UnknownAction(String);

impl std::str::FromStr for Action {
    type Err = UnknownAction;

    fn from_str(text: &str) -> Result<Self, UnknownAction> {
        match text {
            "" | "ignore" => Ok(Self::Ignore),
            "unready" => Ok(Self::Unready),
            "exit" => Ok(Self::Exit),
            other => Err(UnknownAction(other.to_owned())),
        }
    }
}

impl Config {
    /// The cause, where it is time to act: the certificate ends soon, and the topmost of what is wrong is our own.
    /// `draw` is in `0.0..=1.0` and stays the same for a certificate.
    pub(super) fn cause<'a>(
        &self,
        not_after: SystemTime,
        now: SystemTime,
        draw: f64,
        verdict: Option<&'a Trouble>,
    ) -> Option<&'a Trouble> {
        if self.action == Action::Ignore {
            return None;
        }
        let left = not_after.duration_since(now).unwrap_or_default();
        let near = left <= self.before + self.jitter.mul_f64(draw.clamp(0.0, 1.0));
        verdict.filter(|trouble| near && trouble.kind.is_own())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trouble::{Kind, Troubles};

    #[test]
    fn only_near_the_end_and_only_for_failures_of_our_own() {
        let minute = Duration::from_secs(60);
        let config = Config { action: Action::Exit, before: 5 * minute, jitter: minute };
        let now = SystemTime::now();
        let cause = |kind: Option<Kind>, left: Duration, draw| {
            let list = Troubles::default();
            let reporter = list.reporter("citadelclient");
            if let Some(kind) = kind {
                reporter.report((kind, "it is so"));
            }
            config.cause(now + left, now, draw, list.verdict().as_ref()).map(|t| t.kind)
        };
        assert_eq!(cause(Some(Kind::TokenExpired), 5 * minute, 0.0), Some(Kind::TokenExpired));
        assert_eq!(cause(Some(Kind::TokenExpired), 6 * minute, 0.0), None);
        assert_eq!(cause(Some(Kind::TokenExpired), 6 * minute, 1.0), Some(Kind::TokenExpired));
        assert_eq!(cause(Some(Kind::ConnectionRefused), minute, 0.0), None, "istiod is away for everybody");
        assert_eq!(cause(Some(Kind::TokenNotHad), minute, 0.0), None, "so may be what tokens come from");
        assert_eq!(cause(None, minute, 0.0), None);
        let off = Config { action: Action::Ignore, ..config.clone() };
        assert!(off.cause(now, now, 0.0, None).is_none());
    }

    #[test]
    fn what_it_may_be_called() {
        assert_eq!("".parse(), Ok(Action::Ignore));
        assert_eq!("exit".parse(), Ok(Action::Exit));
        assert!("Exit".parse::<Action>().unwrap_err().to_string().contains("ignore, unready or exit"));
    }
}
