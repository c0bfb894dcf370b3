//! exec: a command's exit status. No shell, the agent's environment and working directory; what it
//! writes is thrown away.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::Command;

use super::super::Outcome;
use crate::base::lane::Lane;

/// A killed command is gone at once, unless the kernel holds it in a disk's queue; it is not waited for
/// beyond this (the runtime reaps it later).
const GONE: Duration = Duration::from_secs(1);

/// One probe at a time.
static COMMANDS: Lane = Lane::new("commands of probes", 1);

pub(super) async fn probe(command: &[String], limit: Duration) -> Outcome {
    let Some((program, arguments)) = command.split_first() else {
        return Outcome::Unknown("there is no command".to_owned());
    };
    let mut wanted = Command::new(program);
    wanted
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut child = match COMMANDS.spawn(limit, wanted).await {
        Ok(child) => child,
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            return Outcome::Unhealthy(format!(
                "exec: {program:?} is not read from its disk within {limit:?}"
            ));
        }
        Err(error) => return Outcome::Unhealthy(format!("exec: {program:?}: {error}")),
    };
    match tokio::time::timeout(limit, child.wait()).await {
        Ok(Ok(status)) => verdict(status),
        Ok(Err(error)) => Outcome::Unhealthy(format!("exec: {program:?} cannot be waited for: {error}")),
        Err(_) => {
            // The process alone, as the Go agent does: what it has started is not ours to end.
            let _ = child.start_kill();
            let _ = tokio::time::timeout(GONE, child.wait()).await;
            Outcome::Unhealthy("command timeout exceeded: signal: killed".to_owned())
        }
    }
}

fn verdict(status: ExitStatus) -> Outcome {
    if status.success() {
        return Outcome::Healthy;
    }
    Outcome::Unhealthy(match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal: {signal}"),
        (None, None) => status.to_string(),
    })
}
