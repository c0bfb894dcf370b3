//! Log lines that any client can cause: at most so many a minute, with the number of those left out.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A minute's worth is counted anew after this.
const SPAN: Duration = Duration::from_secs(60);

/// A bound on one kind of line.
#[derive(Debug)]
pub(crate) struct Seldom {
    most: u32,
    state: Mutex<Option<Window>>,
}

#[derive(Debug)]
struct Window {
    since: Instant,
    told: u32,
    left_out: u64,
}

impl Seldom {
    /// At most `most` lines a minute.
    #[must_use]
    pub(crate) const fn new(most: u32) -> Self {
        Self { most, state: Mutex::new(None) }
    }

    /// What to put behind the line: nothing, or that others were left out before it; `None`: say nothing.
    #[must_use]
    pub(crate) fn may(&self) -> Option<String> {
        self.at(Instant::now())
    }

    fn at(&self, now: Instant) -> Option<String> {
        let mut state = self.state.lock().expect("no panic holds this lock");
        let state = state.get_or_insert(Window { since: now, told: 0, left_out: 0 });
        if now.duration_since(state.since) >= SPAN {
            (state.since, state.told) = (now, 0);
        }
        if state.told >= self.most {
            state.left_out += 1;
            return None;
        }
        state.told += 1;
        Some(match std::mem::take(&mut state.left_out) {
            0 => String::new(),
            n => format!(" ({n} lines like this were left out)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_a_minute_and_the_rest_is_counted() {
        let seldom = Seldom::new(2);
        let start = Instant::now();
        assert_eq!(seldom.at(start).as_deref(), Some(""));
        assert_eq!(seldom.at(start).as_deref(), Some(""));
        for _ in 0..5 {
            assert_eq!(seldom.at(start + Duration::from_secs(59)), None);
        }
        let next = seldom.at(start + SPAN).unwrap();
        assert!(next.contains("5 lines"), "{next}");
        assert_eq!(seldom.at(start + SPAN).as_deref(), Some(""));
    }
}
