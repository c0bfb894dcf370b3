//! `run -- command`: waits for the proxy, runs the command, and may end the proxy afterwards.
//!
//! For Jobs in images without a shell: the proxy of a pod is a container of its own, so the application must not
//! begin before it is ready, and a Job is over only when the proxy is gone too. Signals go on to the command and its
//! exit status is ours, so whoever looks at the container sees the command. The proxy is ended (`/quitquitquit`)
//! whatever the command's status was; not when the command was never started, because the next attempt of the
//! container needs the proxy.

use std::io;
use std::pin::pin;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, WaitOptions};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{endpoint, http, wait};
use crate::base::error::BoxError;
use crate::base::logging;
use crate::base::process::ignores;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::go;

/// Time between two questions whether the proxy is ready, and how long one answer may take.
const PERIOD: Duration = Duration::from_millis(250);
const REQUEST: Duration = Duration::from_secs(2);
/// How long the proxy may take to say that it ends.
const QUIT: Duration = Duration::from_secs(5);
/// What a shell gives for a command that is not there, and for one that cannot be executed.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// What is handed on to the command.
const SIGNALS: [SignalKind; 8] = [
    SignalKind::terminate(),
    SignalKind::interrupt(),
    SignalKind::hangup(),
    SignalKind::quit(),
    SignalKind::user_defined1(),
    SignalKind::user_defined2(),
    SignalKind::alarm(),
    SignalKind::window_change(),
];

/// Runs it; gives the exit status.
pub(super) fn run(parsed: &Parsed, env: &Env) -> Result<u8, BoxError> {
    let Some((program, arguments)) = parsed.positional.split_first() else {
        return Err("a command is needed: pilot-agent run -- command argument ...".into());
    };
    let limit = go::duration(parsed.or_default(super::RUN, "wait-timeout"))?.at_least_zero();
    let port = endpoint::status_port(parsed, env)?;
    // Standard output is the command's.
    let logs = logging::Options { targets: vec!["stderr".to_owned()], ..super::logging_options(parsed) };
    logging::init(&logs)?;
    let quit = parsed.is_true(super::RUN, "quit");
    http::block_on(async move {
        let mut signals = Signals::install().map_err(|e| format!("signals: {e}"))?;
        let mut children = signal(SignalKind::child()).map_err(|e| format!("signals: {e}"))?;
        let url = format!("http://localhost:{port}/healthz/ready");
        let mut ready = pin!(wait::until_ready(&url, None, limit, PERIOD, REQUEST));
        loop {
            tokio::select! {
                ready = &mut ready => break ready.map_err(|e| format!("{program} was not started: {e}"))?,
                // That of a window's size ends nobody who does not wait for it.
                number = signals.next() => if number != SignalKind::window_change().as_raw_value() {
                    return Ok(killed(number));
                },
            }
        }
        let child = match Command::new(program).args(arguments).spawn() {
            Ok(child) => Pid::from_child(&child),
            Err(e) => {
                tracing::error!("{program} cannot be started: {e}");
                let missing = e.kind() == std::io::ErrorKind::NotFound;
                return Ok(if missing { NOT_FOUND } else { NOT_EXECUTABLE });
            }
        };
        let ended = loop {
            tokio::select! {
                ended = end_of(child, &mut children) => break ended,
                number = signals.next() => {
                    if let Some(signal) = rustix::process::Signal::from_named_raw(number) {
                        // It may have ended this moment; then there is nobody to tell.
                        let _ = rustix::process::kill_process(child, signal);
                    }
                }
            }
        };
        let ended = ended.map_err(|e| format!("{program} cannot be waited for: {e}"))?;
        if quit {
            end_proxy(port).await;
        }
        Ok(status(ended))
    })
}

/// Waits for the end of `child`, and looks after everybody else's: as the first process of a container this one has
/// all orphans there.
async fn end_of(child: Pid, children: &mut Signal) -> io::Result<ExitStatus> {
    use std::os::unix::process::ExitStatusExt;
    loop {
        while let Some((pid, status)) = rustix::process::wait(WaitOptions::NOHANG)? {
            if pid == child {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
        }
        children.recv().await;
    }
}

async fn end_proxy(port: u16) {
    let url = format!("http://localhost:{port}/quitquitquit");
    let asked = tokio::time::timeout(QUIT, http::exchange("POST", &url, "")).await;
    let failed = match asked {
        Ok(Ok(reply)) if reply.status == 200 => return,
        Ok(Ok(reply)) => format!("status {}", reply.status),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", QUIT.as_secs()),
    };
    tracing::warn!("the proxy was not ended: {failed}; POST {url} ends it");
}

fn status(ended: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    match (ended.code(), ended.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(number)) => killed(number),
        (None, None) => u8::MAX,
    }
}

/// As a shell shows a death by signal.
fn killed(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

struct Signals(Vec<(i32, Signal)>);

impl Signals {
    fn install() -> std::io::Result<Self> {
        // What whoever started us has us ignore as `nohup` does, the command ignores too.
        let hangup = SignalKind::hangup();
        let taken = SIGNALS.iter().filter(|kind| **kind != hangup || !ignores(hangup.as_raw_value()));
        taken.map(|kind| Ok((kind.as_raw_value(), signal(*kind)?))).collect::<Result<_, _>>().map(Self)
    }

    /// The number of the next signal.
    async fn next(&mut self) -> i32 {
        std::future::poll_fn(|context| {
            for (number, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}
