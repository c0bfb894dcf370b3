//! The signals the agent ends on. SIGHUP and SIGQUIT end it in order too (the Go agent dies of them and
//! leaves Envoy behind).

use std::io;

use futures_util::FutureExt;
use rustix::process::Signal as Raw;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::envoy::Reason;

/// What Go's runtime takes for whoever asks for it, and so away from the kernel.
const IGNORED: [SignalKind; 8] = [
    SignalKind::user_defined1(),
    SignalKind::alarm(),
    SignalKind::io(),
    SignalKind::from_raw(Raw::VTALARM.as_raw()),
    SignalKind::from_raw(Raw::PROF.as_raw()),
    SignalKind::from_raw(Raw::POWER.as_raw()),
    SignalKind::from_raw(Raw::XCPU.as_raw()),
    // A file at the size that the process may write fails the write, no more.
    SignalKind::from_raw(Raw::XFSZ.as_raw()),
];

/// `/quitquitquit`, as one program tells the next. One that does not know it ends in order, as on SIGTERM.
const QUIT_AT_ONCE: &str = "quitquitquit";

/// Handlers, installed before anything is bound so that no signal is lost in between.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    quit: Signal,
    // Held so that they do nothing, as in the Go agent: their default action would end the process.
    _ignored: Vec<Signal>,
    // The same, unless it asks for an upgrade.
    upgrade: Option<Signal>,
}

impl Signals {
    /// Installs the handlers.
    pub(super) fn install() -> io::Result<Self> {
        let all = Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            _ignored: IGNORED.iter().map(|kind| signal(*kind)).collect::<io::Result<_>>()?,
            upgrade: Some(signal(SignalKind::user_defined2())?),
        };
        if crate::base::handover::passing() {
            // Those that came between two programs.
            crate::base::handover::unblock_signals();
        }
        Ok(all)
    }

    /// SIGUSR2, for who makes something of it.
    pub(super) fn take_upgrade(&mut self) -> Option<Signal> {
        self.upgrade.take()
    }

    /// One that is there already.
    pub(super) fn pending(&mut self) -> Option<&'static str> {
        self.name().now_or_never()
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) -> Reason {
        Reason::Signal(self.name().await)
    }

    async fn name(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "terminated",
            _ = self.interrupt.recv() => "interrupt",
            _ = self.hangup.recv() => "hangup",
            _ = self.quit.recv() => "quit",
        }
    }

    /// What a program after us is told of a reason to end.
    pub(super) fn name_of(reason: &Reason) -> &'static str {
        match reason {
            Reason::Signal(name) => name,
            Reason::Quit => QUIT_AT_ONCE,
            Reason::Drained | Reason::Failure(_) => "terminated",
        }
    }

    /// The one of this name, which a program before us has seen.
    pub(super) fn named(name: &str) -> Reason {
        if name == QUIT_AT_ONCE {
            return Reason::Quit;
        }
        let known = ["interrupt", "hangup", "quit"].into_iter().find(|known| *known == name);
        Reason::Signal(known.unwrap_or("terminated"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_to_end_is_the_same_for_the_next_program() {
        for reason in [Reason::Signal("terminated"), Reason::Signal("interrupt"), Reason::Quit] {
            assert_eq!(Signals::named(Signals::name_of(&reason)), reason);
        }
        let failed = Reason::Failure("x".to_owned());
        assert_eq!(Signals::named(Signals::name_of(&failed)), Reason::Signal("terminated"));
    }
}
