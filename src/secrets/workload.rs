//! The certificate from the CA: which one is good, when the next is due, when to try again.
//!
//! No IO and no channels: the manager asks what to do and reports what happened. Dates are judged by
//! the wall clock, read anew each time, and by the time that passed: whichever comes first makes a
//! renewal due, so neither a suspended machine nor a clock set back runs past it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::Error;
use super::request::Issued;
use super::rotation;
use crate::base::backoff::{Backoff, Jitter, Policy};
use crate::base::slack;

/// Floor between the end of one attempt and the start of the next, whoever asks.
const FLOOR: Duration = Duration::from_millis(200);

/// Least time between two certificates, when each is due at once (a ratio of 1, a life of seconds, a
/// clock that is off). It doubles as long as that goes on.
const SPACING: Duration = Duration::from_secs(1);
const MAX_SPACING: Duration = Duration::from_secs(300);

/// A waiting wall-clock date is looked at again after this long: timers stand still in a suspended
/// machine and know nothing of a clock that is set.
const LOOK: Duration = Duration::from_secs(30);

/// The certificate in use.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) issued: Issued,
    /// When it is to be renewed: by date, and by time passed.
    pub(super) renewal: SystemTime,
    renewal_mono: Instant,
    expiry_told: bool,
    /// Of `IDENTITY_NEAR_EXPIRY_JITTER`.
    pub(super) near_draw: f64,
}

#[derive(Debug)]
pub(super) struct Workload {
    ratio: f64,
    jitter: f64,
    pub(super) current: Option<Current>,
    backoff: Backoff,
    spacing: Backoff,
    /// No attempt before this.
    not_before: Instant,
    ended: Option<Instant>,
    pub(super) last_error: Option<Arc<Error>>,
    /// The current one is of before this program: nobody waits for a better one.
    pub(super) restored: bool,
}

/// What a failed attempt means.
#[derive(Debug)]
pub(super) struct Failed {
    /// The first failure of this renewal: who follows the certificate should hear of it.
    pub(super) first: bool,
    pub(super) next: Duration,
}

impl Workload {
    pub(super) fn new(ratio: f64, jitter: f64) -> Self {
        let spacing = Policy::new(SPACING, MAX_SPACING, 2.0, Jitter::None);
        Self {
            ratio,
            jitter,
            current: None,
            backoff: Backoff::new(rotation::retry()),
            spacing: Backoff::new(spacing.expect("bounds are in order")),
            not_before: Instant::now(),
            ended: None,
            last_error: None,
            restored: false,
        }
    }

    pub(super) fn failures(&self) -> u32 {
        self.backoff.failures()
    }

    pub(super) fn not_before(&self) -> Instant {
        self.not_before
    }

    /// The certificate, unless it has expired.
    pub(super) fn valid(&self, now: SystemTime) -> Option<&Current> {
        self.current.as_ref().filter(|c| now < c.issued.leaf.not_after)
    }

    /// Whether a new certificate should be had: there is none, or it is time; once begun a renewal is seen through, though a
    /// clock that was ahead is set back.
    pub(super) fn due(&self, now: SystemTime, mono: Instant) -> bool {
        self.failures() > 0
            || self.current.as_ref().is_none_or(|c| now >= c.renewal || mono >= c.renewal_mono)
    }

    /// When to look again, given that an attempt is wanted as soon as one is due.
    pub(super) fn wake(&self, now: SystemTime, mono: Instant, wanted: bool) -> Instant {
        let Some(current) = &self.current else {
            return if wanted { self.not_before } else { slack::until(mono + LOOK) };
        };
        let look = slack::until(mono + LOOK);
        let renewal = if self.due(now, mono) {
            if wanted { self.not_before } else { look }
        } else {
            let by_date = current.renewal.duration_since(now).unwrap_or_default();
            current.renewal_mono.min(mono + by_date).max(self.not_before)
        };
        let expiry = match current.issued.leaf.not_after.duration_since(now) {
            Ok(left) if !current.expiry_told && left < LOOK => mono + left,
            _ => look,
        };
        renewal.min(expiry).min(look)
    }

    /// Somebody waits who has nothing: do not sit out a long back-off, but keep a floor that grows with
    /// the failures, since a mesh of waiting proxies must not bury a CA that is coming back.
    pub(super) fn hurry(&mut self, mono: Instant) {
        let floor = Duration::from_millis(500).saturating_mul(self.failures()).min(Duration::from_secs(5));
        let earliest = self.ended.map_or(mono, |e| e + floor.max(FLOOR));
        self.not_before = self.not_before.min(earliest.max(mono));
    }

    /// The cause of failures may be gone.
    pub(super) fn mended(&mut self, mono: Instant) {
        if self.failures() > 0 {
            self.hurry(mono);
        }
    }

    /// A good answer.
    pub(super) fn succeeded(&mut self, issued: Issued, mono: Instant) {
        self.ended = Some(mono);
        self.restored = false;
        self.backoff.reset();
        self.last_error = None;
        let expiry = issued.leaf.not_after;
        // One that peers refuse until later is no good one: the CA's clock may be set before that.
        let is_ahead = rotation::is_ahead(issued.leaf.not_before, issued.created);
        let delay = if is_ahead {
            Duration::ZERO
        } else {
            rotation::delay(issued.created, expiry, self.ratio, self.jitter, rotation::draw())
        };
        let life = expiry.duration_since(issued.created).unwrap_or_default();
        let spaced = if delay < SPACING {
            // Never so far apart that a short life runs out in between.
            let wait = self.spacing.next_delay().min((life / 2).max(SPACING / 2));
            if self.spacing.failures() == 1 && !is_ahead {
                tracing::warn!(target: "cache",
                    "the new certificate is due for renewal after {} already (valid for {}, ratio {}): \
                     keeping at least {wait:?} between two requests; check SECRET_GRACE_PERIOD_RATIO, \
                     SECRET_TTL and both clocks",
                    rotation::span(delay), rotation::span(life), self.ratio);
            }
            wait
        } else {
            self.spacing.reset();
            FLOOR
        };
        self.not_before = mono + spaced;
        self.current = Some(Current {
            renewal: issued.created + delay,
            renewal_mono: mono + delay,
            issued,
            expiry_told: false,
            near_draw: rotation::draw().abs(),
        });
    }

    /// An answer that is no better than the current one: a better one is asked for later.
    pub(super) fn kept(&mut self, mono: Instant) {
        self.ended = Some(mono);
        self.backoff.reset();
        self.last_error = None;
        self.not_before = mono + self.spacing.next_delay();
    }

    /// One from before the restart: good, and to be renewed at `renewal`.
    pub(super) fn restored(&mut self, issued: Issued, renewal: SystemTime, now: SystemTime, mono: Instant) {
        self.restored = true;
        self.current = Some(Current {
            renewal,
            renewal_mono: mono + renewal.duration_since(now).unwrap_or_default(),
            issued,
            expiry_told: false,
            near_draw: rotation::draw().abs(),
        });
    }

    /// A failed attempt.
    pub(super) fn failed(&mut self, error: &Arc<Error>, mono: Instant) -> Failed {
        let first = self.backoff.failures() == 0;
        let next = self.backoff.next_delay().max(FLOOR);
        self.ended = Some(mono);
        self.not_before = mono + next;
        self.last_error = Some(Arc::clone(error));
        Failed { first, next }
    }

    /// Whether the certificate has expired since the last call; true once.
    pub(super) fn expired_now(&mut self, now: SystemTime) -> bool {
        match &mut self.current {
            Some(c) if !c.expiry_told && now >= c.issued.leaf.not_after => {
                c.expiry_told = true;
                true
            }
            _ => false,
        }
    }
}
