//! exec: a command's exit status. No shell, the agent's environment and working directory; what it
//! writes is thrown away.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::Outcome;
use crate::base::error::in_words;
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
    // The wait for a thread and for the disk are part of it.
    let until = Instant::now() + limit;
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
        Err(error) => return Outcome::Unhealthy(format!("exec: {program:?}: {}", in_words(&error))),
    };
    match timeout_at(until, child.wait()).await {
        Ok(Ok(status)) => verdict(status),
        Ok(Err(error)) => Outcome::Unhealthy(format!("exec: {program:?} cannot be waited for: {error}")),
        Err(_) => {
            // The process alone, as the Go agent does: what it has started is not ours to end.
            let _ = child.start_kill();
            let _ = timeout(GONE, child.wait()).await;
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
        (None, Some(signal)) => {
            let core = if status.core_dumped() { " (core dumped)" } else { "" };
            format!("signal: {}{core}", signal_name(signal))
        }
        (None, None) => status.to_string(),
    })
}

// As the C library calls those that end a command.
fn signal_name(signal: i32) -> String {
    match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        6 => "aborted",
        8 => "floating point exception",
        9 => "killed",
        11 => "segmentation fault",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_the_words_that_istiod_has_always_shown() {
        for (raw, words) in [
            (3 << 8, "exit status 3"),
            (9, "signal: killed"),
            (15, "signal: terminated"),
            (11 | 0x80, "signal: segmentation fault (core dumped)"),
            (40, "signal: signal 40"),
        ] {
            let outcome = verdict(ExitStatus::from_raw(raw));
            assert!(matches!(&outcome, Outcome::Unhealthy(why) if why == words), "{outcome:?}");
        }
    }

    #[tokio::test]
    async fn what_a_slow_disk_takes_is_not_given_to_the_command_again() {
        let command = ["sleep", "0.5"].map(str::to_owned);
        // Each is less than the limit, both together are more.
        let disk = COMMANDS.run(|| std::thread::sleep(Duration::from_millis(700)));
        let (disk, outcome) = futures_util::future::join(disk, probe(&command, Duration::from_secs(1))).await;
        disk.unwrap();
        assert!(matches!(outcome, Outcome::Unhealthy(_)), "{outcome:?}");
    }
}
