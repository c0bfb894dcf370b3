//! A panic on purpose, in debug builds only, so that a test sees from outside what a defect anywhere does
//! (`tests/it/panics.rs`). `AGENT_TEST_PANIC=<name of a task>[@<milliseconds>]`: the first task of that name panics when
//! it starts, or so long after; `<name> task` means a member of a [`super::tasks::Set`]. In release builds nothing of
//! this exists.

#[cfg(debug_assertions)]
mod debug {
    use std::pin::Pin;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use futures_util::future::Either;

    struct Plan {
        task: String,
        after: Duration,
        struck: AtomicBool,
    }

    static PLAN: OnceLock<Plan> = OnceLock::new();

    /// The value of `AGENT_TEST_PANIC`.
    pub(crate) fn plan(text: &str) {
        let (task, after) = text.split_once('@').unwrap_or((text, "0"));
        let after = Duration::from_millis(after.parse().unwrap_or_default());
        let plan = Plan { task: task.to_owned(), after, struck: AtomicBool::new(false) };
        drop(PLAN.set(plan));
    }

    /// `work` of `task`, unless it is to panic. No larger than `work` where nothing is planned: tests' stacks are small.
    pub(crate) fn run<F: Future>(task: &str, work: F) -> Either<F, impl Future<Output = F::Output> + use<F>> {
        struck(PLAN.get().is_some_and(|plan| plan.task == task), work)
    }

    /// As [`run`], for a member of the set of this name.
    pub(crate) fn run_in_set<F: Future>(
        set: &str,
        work: F,
    ) -> Either<F, impl Future<Output = F::Output> + use<F>> {
        struck(PLAN.get().is_some_and(|plan| plan.task.strip_suffix(" task") == Some(set)), work)
    }

    fn struck<F: Future>(meant: bool, work: F) -> Either<F, impl Future<Output = F::Output> + use<F>> {
        match PLAN.get().filter(|plan| meant && !plan.struck.swap(true, Ordering::Relaxed)) {
            None => Either::Left(work),
            Some(plan) => Either::Right(panics(plan.after, Box::pin(work))),
        }
    }

    async fn panics<F: Future>(after: Duration, work: Pin<Box<F>>) -> F::Output {
        if after.is_zero() {
            panic!("on purpose");
        }
        tokio::select! {
            biased;
            done = work => done,
            () = tokio::time::sleep(after) => panic!("on purpose"),
        }
    }
}

#[cfg(debug_assertions)]
pub(crate) use debug::{plan, run, run_in_set};

#[cfg(not(debug_assertions))]
mod release {
    pub(crate) fn run<F: Future>(_: &str, work: F) -> F {
        work
    }

    pub(crate) fn run_in_set<F: Future>(_: &str, work: F) -> F {
        work
    }
}

#[cfg(not(debug_assertions))]
pub(crate) use release::{run, run_in_set};
