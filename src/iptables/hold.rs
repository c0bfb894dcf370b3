//! Signals that ask for an end are held back while rules are being changed: half a set of rules lets
//! traffic pass by the proxy. The work takes milliseconds; a program that then does not end is killed
//! ([`super::exec`]).

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Holds back SIGTERM, SIGINT and SIGHUP from its creation to the end of the process.
#[derive(Debug)]
pub(crate) struct Hold([(i32, Signal); 3]);

impl Hold {
    /// Begins.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn begin() -> io::Result<Self> {
        let of = |kind: SignalKind| signal(kind).map(|s| (kind.as_raw_value(), s));
        let [term, int, hup] = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        Ok(Self([of(term)?, of(int)?, of(hup)?]))
    }

    /// Resolves to the number of the first signal that came since, or comes.
    pub(crate) async fn asked(&mut self) -> i32 {
        let [term, int, hup] = &mut self.0;
        tokio::select! {
            _ = term.1.recv() => term.0,
            _ = int.1.recv() => int.0,
            _ = hup.1.recv() => hup.0,
        }
    }
}
