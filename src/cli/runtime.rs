//! The runtime, or one line on why there is none.

use std::panic;

use tokio::runtime::{Builder, Runtime};

use crate::base::error::BoxError;
use crate::base::slack;

/// Sockets that have something to tell at a time: more are asked for in the next turn. Each costs 12 bytes for as long as the
/// agent lives, and the library's own number is 1,024, 12 KB of anonymous memory.
const AT_A_TIME: usize = 256;

/// The system has refused what a runtime needs.
#[derive(Debug, thiserror::Error)]
#[error("the runtime cannot be built: {0}; is the limit of open files (ulimit -n) too low?")]
pub(super) struct NoRuntime(#[source] BoxError);

/// A runtime for this thread.
///
/// # Errors
/// What the system refuses: descriptors, mostly.
pub(super) fn build() -> Result<Runtime, NoRuntime> {
    // Where the pair of sockets for signals is refused, the library panics.
    let said = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    slack::begin();
    let built = panic::catch_unwind(|| {
        Builder::new_current_thread().enable_all().max_io_events_per_tick(AT_A_TIME).build()
    });
    panic::set_hook(said);
    match built {
        Ok(Ok(runtime)) => Ok(runtime),
        Ok(Err(error)) => Err(NoRuntime(error.into())),
        Err(panicked) => Err(NoRuntime((*panicked.downcast::<String>().unwrap_or_default()).into())),
    }
}
