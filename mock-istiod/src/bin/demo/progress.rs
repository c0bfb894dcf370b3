//! A line that shows what is waited for, and for how long: never a silent pause.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Waits for `work`, showing `what` and what `detail` says.
pub(crate) async fn wait<T>(what: &str, detail: impl Fn() -> String, work: impl Future<Output = T>) -> T {
    let terminal = std::io::stderr().is_terminal();
    // On a terminal the line rewrites itself; in a file every line stays, so there are fewer.
    let every = if terminal { Duration::from_millis(200) } else { Duration::from_secs(2) };
    let started = Instant::now();
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
    tokio::pin!(work);
    let mut shown = false;
    let done = loop {
        tokio::select! {
            done = &mut work => break done,
            _ = tick.tick() => {
                let line = format!("  ... {what} ({:.1} s){}", started.elapsed().as_secs_f64(), detail());
                let mut out = std::io::stderr().lock();
                // Progress that cannot be shown is no reason to fail.
                let _ = if terminal { write!(out, "\r\x1b[K{line}") } else { writeln!(out, "{line}") };
                let _ = out.flush();
                shown = true;
            }
        }
    };
    if terminal && shown {
        eprint!("\r\x1b[K");
    }
    done
}
