//! The signals the agent ends on. SIGHUP and SIGQUIT end it in order too (the Go agent dies of them and
//! leaves Envoy behind). A SIGHUP that whoever started the agent has it ignore, as `nohup` does, is ignored, here and in
//! Envoy.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt;
use rustix::process::Signal as Raw;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::flag::register_conditional_shutdown;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::base::process::ignores;
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

/// What the Go agent ends with where a signal comes before it has asked for any.
const TOO_EARLY: i32 = 2;

/// Ends the process on a signal as long as there are no [`Signals`]: the configuration is read before, which looks up
/// names and asks the platform, for seconds where nobody answers. Of any other process the kernel does that; of the first
/// of a container it passes a signal over that nobody handles, and the pod is killed when its grace period is over.
pub(crate) struct Early(Arc<AtomicBool>);

impl Early {
    /// From now on.
    pub(crate) fn watched() -> Self {
        let is_first = std::process::id() == 1;
        let armed = Arc::new(AtomicBool::new(is_first));
        let signals = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];
        for signal in signals.into_iter().filter(|signal| is_first && !(*signal == SIGHUP && ignores(SIGHUP)))
        {
            // Without it everything is as it was.
            let _ = register_conditional_shutdown(signal, TOO_EARLY, Arc::clone(&armed));
        }
        Self(armed)
    }
}

/// Handlers, installed before anything is bound so that no signal is lost in between.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// `None`: ignored.
    hangup: Option<Signal>,
    quit: Signal,
    // Held so that they do nothing, as in the Go agent: their default action would end the process.
    _ignored: Vec<Signal>,
    // The same, unless it asks for an upgrade.
    upgrade: Option<Signal>,
}

impl Signals {
    /// Installs the handlers, in the place of those of the start. What came between two programs, or comes before the
    /// second one serves, waits in the kernel: it is for whichever of them goes on.
    pub(super) fn install(early: &Early) -> io::Result<Self> {
        let all = Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: (!ignores(SIGHUP)).then(|| signal(SignalKind::hangup())).transpose()?,
            quit: signal(SignalKind::quit())?,
            _ignored: IGNORED.iter().map(|kind| signal(*kind)).collect::<io::Result<_>>()?,
            upgrade: Some(signal(SignalKind::user_defined2())?),
        };
        early.0.store(false, Ordering::SeqCst);
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
            () = came(&mut self.hangup) => "hangup",
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

async fn came(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
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
