//! For tests: whether a piece of work lets others have their turn.

use tokio::task::yield_now;

/// Does the work; gives its result, and how often somebody else had a turn meanwhile.
pub(crate) async fn turns_of_others<T>(work: impl Future<Output = T>) -> (T, usize) {
    let mut turns = 0;
    let others = async {
        loop {
            turns += 1;
            yield_now().await;
        }
    };
    let done = tokio::select! { biased; done = work => done, () = others => unreachable!() };
    (done, turns)
}
