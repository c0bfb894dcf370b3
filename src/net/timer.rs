//! The timer for hyper's HTTP/2: long waits, which are those between pings, end together with others (`base::slack`).

use std::pin::Pin;
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};
use hyper_util::rt::TokioTimer;

use crate::base::slack;

/// hyper-util's, on the grid.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slack(TokioTimer);

impl Timer for Slack {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.0.sleep_until(slack::until(deadline.into()).into())
    }

    // A sleep that is put off would end at its old time too, to be put to its new place.
    fn reset(&self, sleep: &mut Pin<Box<dyn Sleep>>, new_deadline: Instant) {
        *sleep = self.sleep_until(new_deadline);
    }

    fn now(&self) -> Instant {
        self.0.now()
    }
}
