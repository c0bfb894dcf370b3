//! The runtime, or one line on why there is none.

use std::panic;

use tokio::runtime::{Builder, Runtime};

use crate::base::error::BoxError;
use crate::base::slack;

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
    let built = panic::catch_unwind(|| Builder::new_current_thread().enable_all().build());
    panic::set_hook(said);
    match built {
        Ok(Ok(runtime)) => Ok(runtime),
        Ok(Err(error)) => Err(NoRuntime(error.into())),
        Err(panicked) => Err(NoRuntime((*panicked.downcast::<String>().unwrap_or_default()).into())),
    }
}
