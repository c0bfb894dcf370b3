//! Two things that do not need each other, side by side.

use std::pin::pin;

use futures_util::future::{Either, select};

/// What both bring. Of two errors it is the first's, whichever came sooner; neither is waited for longer than it takes.
///
/// # Errors
/// The first's, at once; the second's when the first has succeeded.
pub(crate) async fn both<A, B, E>(
    first: impl Future<Output = Result<A, E>>,
    second: impl Future<Output = Result<B, E>>,
) -> Result<(A, B), E> {
    match select(pin!(first), pin!(second)).await {
        Either::Left((first, second)) => Ok((first?, second.await?)),
        Either::Right((second, first)) => Ok((first.await?, second?)),
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn of_two_errors_it_is_the_first_ones() {
        let late = async |result: Result<u8, u8>| {
            yield_now().await;
            result
        };
        assert_eq!(both(late(Ok(1)), ready(Ok(2))).await, Ok::<_, u8>((1, 2)));
        assert_eq!(both(ready(Ok(1)), late(Ok(2))).await, Ok((1, 2)));
        assert_eq!(both(late(Err(1)), ready(Err::<u8, _>(2))).await, Err(1));
        assert_eq!(both(late(Ok(1)), ready(Err::<u8, _>(2))).await, Err(2));
        assert_eq!(
            both(late(Err(1)), pending::<Result<u8, _>>()).await,
            Err(1),
            "nothing is waited for in vain"
        );
    }
}
