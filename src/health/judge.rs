//! From probe results to a verdict: consecutive successes and failures against their thresholds. Pure.

/// What is known of the application.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AppHealth {
    /// No threshold has been reached yet.
    Undefined,
    /// As many successes in a row as asked for.
    Healthy,
    /// As many failures in a row as asked for.
    Unhealthy,
}

/// Counts what comes in a row. A probe of the other kind starts the count anew.
#[derive(Debug, Clone)]
pub(crate) struct Judge {
    success_threshold: u32,
    failure_threshold: u32,
    successes: u32,
    failures: u32,
    state: AppHealth,
}

impl Judge {
    /// Both thresholds are at least 1.
    #[must_use]
    pub(crate) fn new(success_threshold: u32, failure_threshold: u32) -> Self {
        Self { success_threshold, failure_threshold, successes: 0, failures: 0, state: AppHealth::Undefined }
    }

    /// Takes a probe's result; gives the new state when it has changed.
    pub(crate) fn record(&mut self, healthy: bool) -> Option<AppHealth> {
        let (count, other, threshold, state) = if healthy {
            (&mut self.successes, &mut self.failures, self.success_threshold, AppHealth::Healthy)
        } else {
            (&mut self.failures, &mut self.successes, self.failure_threshold, AppHealth::Unhealthy)
        };
        *other = 0;
        *count = count.saturating_add(1);
        if *count < threshold || self.state == state {
            return None;
        }
        *count = 0;
        self.state = state;
        Some(state)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(judge: &mut Judge, results: &[bool]) -> Vec<Option<AppHealth>> {
        results.iter().map(|r| judge.record(*r)).collect()
    }

    #[test]
    fn thresholds_of_one_tell_every_flip_and_nothing_else() {
        use AppHealth::{Healthy, Unhealthy};
        let mut judge = Judge::new(1, 1);
        assert_eq!(
            run(&mut judge, &[true, false, false, true, true, false]),
            [Some(Healthy), Some(Unhealthy), None, Some(Healthy), None, Some(Unhealthy)]
        );
        let mut judge = Judge::new(1, 1);
        assert_eq!(judge.record(false), Some(Unhealthy), "the first verdict is told, whichever it is");
    }

    #[test]
    fn a_row_that_is_broken_counts_from_the_start() {
        let mut judge = Judge::new(2, 3);
        assert_eq!(run(&mut judge, &[false, false, true, false, false, true]), [None; 6]);
        assert_eq!(run(&mut judge, &[true, false, false, false]).pop().unwrap(), Some(AppHealth::Unhealthy));
        assert_eq!(run(&mut judge, &[true, false, true, true]), [None, None, None, Some(AppHealth::Healthy)]);
    }

    proptest! {
        // The model looks back: a state begins where the last n results were alike and it was not
        // the state already.
        #[test]
        fn as_the_model(s in 1u32..5, f in 1u32..5, results in proptest::collection::vec(any::<bool>(), 0..60)) {
            let mut judge = Judge::new(s, f);
            let mut state = AppHealth::Undefined;
            for n in 1..=results.len() {
                let last = results[n - 1];
                let threshold = if last { s } else { f } as usize;
                let row = results[..n].iter().rev().take_while(|r| **r == last).count();
                let target = if last { AppHealth::Healthy } else { AppHealth::Unhealthy };
                let expected = (row >= threshold && state != target).then_some(target);
                state = expected.unwrap_or(state);
                prop_assert_eq!(judge.record(last), expected);
            }
        }
    }
}
