//! Signals that ask for an end are held back while rules are being changed: half a set of rules lets
//! traffic pass by the proxy. The work takes milliseconds; a program that then does not end is killed
//! ([`super::exec`]).

use std::io;
use std::task::Poll;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::base::process::ignores;

/// What asks for an end. Not a SIGHUP or SIGINT that whoever started us has us ignore, as `nohup` does and as a shell does for
/// what it leaves in the background.
pub(super) fn signals() -> impl Iterator<Item = i32> {
    [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| *signal == SIGTERM || !ignores(*signal))
}

/// Holds them back from its creation to the end of the process.
#[derive(Debug)]
pub(crate) struct Hold(Vec<(i32, Signal)>);

impl Hold {
    /// Begins.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn begin() -> io::Result<Self> {
        signals()
            .map(|number| Ok((number, signal(SignalKind::from_raw(number))?)))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Resolves to the number of the first signal that came since, or comes.
    pub(crate) async fn asked(&mut self) -> i32 {
        std::future::poll_fn(|context| {
            let came = self
                .0
                .iter_mut()
                .find_map(|(number, signal)| signal.poll_recv(context).is_ready().then_some(*number));
            came.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}
