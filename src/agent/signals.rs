//! The signals the agent ends on. SIGHUP and SIGQUIT end it in order too (the Go agent dies of them and
//! leaves Envoy behind).

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::envoy::Reason;

/// Handlers, installed before anything is bound so that no signal is lost in between.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    quit: Signal,
    // Held so that these do nothing, as in the Go agent: their default action would end the process.
    _ignored: [Signal; 2],
}

impl Signals {
    /// Installs the handlers.
    pub(super) fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            _ignored: [signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?],
        })
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) -> Reason {
        let name = tokio::select! {
            _ = self.terminate.recv() => "terminated",
            _ = self.interrupt.recv() => "interrupt",
            _ = self.hangup.recv() => "hangup",
            _ = self.quit.recv() => "quit",
        };
        Reason::Signal(name)
    }
}
