//! `sleep <time>`: for lifecycle hooks in images that have neither a shell nor `sleep`.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::base::error::BoxError;
use crate::config::args::Parsed;
use crate::config::go;

/// Sleeps; gives the exit status: 0, or 128 and the signal's number where one ended it early.
pub(super) fn run(parsed: &Parsed) -> Result<u8, BoxError> {
    let [text] = parsed.positional.as_slice() else {
        return Err(
            format!("one time is needed, as in sleep 10s; given were {}", parsed.positional.len()).into()
        );
    };
    let span = time(text)?;
    super::http::block_on(async move {
        // As the first process of a container no signal would end it without this.
        let mut term = signal(SignalKind::terminate()).map_err(|e| format!("signals: {e}"))?;
        let mut int = signal(SignalKind::interrupt()).map_err(|e| format!("signals: {e}"))?;
        tokio::select! {
            () = tokio::time::sleep(span) => Ok(0),
            _ = term.recv() => Ok(128 + 15),
            _ = int.recv() => Ok(128 + 2),
        }
    })
}

/// Text that is no time.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no time: write for instance 10s, 1m30s or 0.5")]
struct NoTime(String);

/// A Go duration, or a bare number of seconds as `sleep` has it.
fn time(text: &str) -> Result<Duration, NoTime> {
    let wrong = || NoTime(text.to_owned());
    let seconds = text.parse::<f64>().ok().map(|s| Duration::try_from_secs_f64(s).map_err(|_| wrong()));
    if let Some(seconds) = seconds {
        return seconds;
    }
    let span = go::duration(text).map_err(|_| wrong())?;
    if span.negative { Err(wrong()) } else { Ok(span.span) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_both_notations() {
        for (text, wanted) in [("10s", 10_000), ("1m30s", 90_000), ("2", 2000), ("0.25", 250), ("0", 0)] {
            assert_eq!(time(text), Ok(Duration::from_millis(wanted)), "{text}");
        }
        for text in ["", "-1s", "-1", "soon", "NaN", "inf"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
