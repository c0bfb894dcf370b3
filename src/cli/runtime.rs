//! The runtime, or one line on why there is none.

use std::panic;

use tokio::runtime::{Builder, Runtime};

use crate::base::slack;

/// A runtime for this thread.
///
/// # Errors
/// What the system refuses: descriptors, mostly.
pub(super) fn build() -> Result<Runtime, String> {
    // Where the pair of sockets for signals is refused, the library panics.
    let said = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    slack::begin();
    let built = panic::catch_unwind(|| Builder::new_current_thread().enable_all().build());
    panic::set_hook(said);
    let cause = match built {
        Ok(Ok(runtime)) => return Ok(runtime),
        Ok(Err(error)) => error.to_string(),
        Err(panicked) => *panicked.downcast::<String>().unwrap_or_default(),
    };
    Err(format!("the runtime cannot be built: {cause}; is the limit of open files (ulimit -n) too low?"))
}
