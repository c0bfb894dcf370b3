//! The attempts of one call to a CA, whatever it speaks: how many, how far apart, and when there is no other.
//!
//! Five, 100 ms apart, doubling, ±10 %, as the Go agent's; a bound on each and one on all together, which it lacks, so that
//! a CA which hangs costs a minute and never a workload.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use prometheus::IntCounterVec;
use tokio::time::{Instant, timeout_at};

use super::Error;
use crate::base::backoff::{Jitter, Policy};
use crate::base::metrics::Metrics;
use crate::trouble::Reporter;

/// In total, as the Go agent's library counts.
pub(super) const ATTEMPTS: u32 = 5;
/// A CA that has not answered for so long is told of before the attempt ends.
const SILENT: Duration = Duration::from_secs(10);

/// How an attempt failed, and whether the next may follow.
pub(super) struct Failed {
    pub(super) error: Error,
    pub(super) retry: bool,
}

/// What the calls of one client have in common.
#[derive(Debug)]
pub(super) struct Attempts {
    waits: Policy,
    pub(super) retries: IntCounterVec,
    /// Bound of one attempt.
    each: Duration,
    /// Bound of a call with all its attempts.
    total: Duration,
}

/// The attempts of one call.
pub(super) struct Series<'a> {
    of: &'a Attempts,
    end: Instant,
    /// How many there were before the one under way.
    pub(super) number: u32,
}

impl Attempts {
    /// Attempts that may take so long each and together, and their counter of retries in `metrics`.
    ///
    /// # Panics
    /// When called twice for one registry.
    pub(super) fn new(each: Duration, total: Duration, metrics: &Metrics) -> Self {
        let (first, last) = (Duration::from_millis(100), Duration::from_millis(800));
        let waits =
            Policy::new(first, last, 2.0, Jitter::PlusMinus(0.1)).expect("constants that can be meant");
        let retries = metrics.counter(
            "num_outgoing_retries",
            "Number of outgoing retry requests (e.g. to a token exchange server, CA, etc.)",
            &["request_type"],
        );
        Self { waits, retries, each, total }
    }

    /// Those of a call that begins now.
    pub(super) fn begin(&self) -> Series<'_> {
        Series { of: self, end: Instant::now() + self.total, number: 0 }
    }
}

impl Series<'_> {
    /// Until when an attempt that begins now may take.
    pub(super) fn until(&self) -> Instant {
        self.end.min(Instant::now() + self.of.each)
    }

    /// How long to wait before the next attempt, and what to say of it.
    ///
    /// # Errors
    /// Where there is none, with the call's error. `sent`: a request may have left.
    pub(super) fn again(&mut self, failed: Failed, sent: bool) -> Result<(Duration, String), Error> {
        let wait = self.of.waits.delay(self.number);
        self.number += 1;
        if !failed.retry || self.number == ATTEMPTS || Instant::now() + wait >= self.end {
            return Err(if sent { failed.error } else { Error::Unsent(Box::new(failed.error)) });
        }
        self.of.retries.with_label_values(&["csr"]).inc();
        let (next, millis) = (self.number + 1, wait.as_millis());
        Ok((wait, format!("{}; attempt {next} of {ATTEMPTS} in {millis} ms", failed.error)))
    }
}

/// One attempt, until its time is over. `trouble` is told of a CA at `endpoint` that is silent before that.
pub(super) async fn watched<T>(
    attempt: impl Future<Output = Result<T, Failed>>,
    until: Instant,
    endpoint: &str,
    trouble: &Reporter,
) -> Result<T, Failed> {
    let deadline = |after| Error::Deadline { endpoint: endpoint.to_owned(), after };
    let started = Instant::now();
    let late = started + SILENT;
    let mut attempt = pin!(attempt);
    let done = match timeout_at(late.min(until), &mut attempt).await {
        Err(_) if late < until => {
            // A dial that is slow has told so itself.
            if trouble.kind().is_none() {
                trouble.report(deadline(SILENT).report());
            }
            timeout_at(until, attempt).await
        }
        done => done,
    };
    done.unwrap_or_else(|_| Err(Failed { error: deadline(started.elapsed()), retry: false }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_ca_that_is_silent_is_told_of_before_its_time_is_over() {
        let trouble = Reporter::default();
        let until = |seconds| Instant::now() + Duration::from_secs(seconds);
        let mut attempt =
            pin!(watched(std::future::pending::<Result<(), Failed>>(), until(30), "ca", &trouble));
        assert!(timeout_at(until(9), &mut attempt).await.is_err());
        assert_eq!(trouble.kind(), None);
        assert!(timeout_at(until(2), &mut attempt).await.is_err());
        assert_eq!(trouble.kind(), Some(crate::trouble::Kind::CertificateNotAnswered));
        let Err(failed) = attempt.await else { panic!("it answered") };
        assert!(!failed.retry && failed.error.to_string().contains("within 30s"), "{}", failed.error);
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_end_by_number_by_time_and_by_what_failed() {
        let failed = |retry| {
            let (endpoint, after) = ("ca".to_owned(), Duration::ZERO);
            Failed { error: Error::Deadline { endpoint, after }, retry }
        };
        let of = |total| Attempts::new(Duration::from_secs(2), Duration::from_secs(total), &Metrics::new());
        let many = of(60);
        let mut series = many.begin();
        assert_eq!(series.until(), Instant::now() + Duration::from_secs(2));
        for next in 2..=ATTEMPTS {
            let (wait, said) = series.again(failed(true), true).unwrap();
            assert!(said.contains(&format!("attempt {next} of 5")), "{said}");
            assert!((90..=880).contains(&wait.as_millis()), "{wait:?}");
        }
        assert!(matches!(series.again(failed(true), true), Err(Error::Deadline { .. })));
        assert_eq!(many.retries.with_label_values(&["csr"]).get(), 4);
        // What has not left is told apart; what is not to be repeated has no second attempt.
        assert!(matches!(many.begin().again(failed(false), false), Err(Error::Unsent(_))));
        let short = of(1);
        let mut series = short.begin();
        assert_eq!(series.until(), Instant::now() + Duration::from_secs(1));
        tokio::time::advance(Duration::from_millis(950)).await;
        assert!(series.again(failed(true), true).is_err());
    }
}
