//! Log lines that any client can cause: at most so many a minute, with the number of those left out. The last of a minute
//! says that it is the last: where no line follows, nobody would know that some are missing.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A minute's worth is counted anew after this.
const SPAN: Duration = Duration::from_secs(60);

/// What others have chosen of one kind of lines takes at most so many bytes a minute: a quarter of what an attack may
/// add to the log. The first text of a minute is told at any length.
const ROOM: usize = 16 * 1024;

/// Behind the last line of a minute.
const LAST: &str = " (more lines like this are left out for up to a minute)";

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
    bytes: usize,
    left_out: u64,
}

impl Seldom {
    /// At most `most` lines a minute.
    #[must_use]
    pub(crate) const fn new(most: u32) -> Self {
        Self { most, state: Mutex::new(None) }
    }

    /// What to put behind the line: nothing, that others were left out before it, or that those after it are; `None`:
    /// say nothing.
    #[must_use]
    pub(crate) fn may(&self) -> Option<String> {
        self.may_hold(0)
    }

    /// As [`Self::may`], for a line that holds so many bytes that others have chosen: 16 kB of them a minute.
    #[must_use]
    pub(crate) fn may_hold(&self, bytes: usize) -> Option<String> {
        self.at(Instant::now(), bytes)
    }

    /// Whether this is the first line for a minute; the others are somebody else's to count.
    #[must_use]
    pub(crate) fn is_first(&self) -> bool {
        let mut state = self.state.lock().expect("no panic holds this lock");
        let now = Instant::now();
        if state.as_ref().is_some_and(|state| now.duration_since(state.since) < SPAN) {
            return false;
        }
        *state = Some(Window { since: now, told: 0, bytes: 0, left_out: 0 });
        true
    }

    fn at(&self, now: Instant, bytes: usize) -> Option<String> {
        let mut state = self.state.lock().expect("no panic holds this lock");
        let state = state.get_or_insert(Window { since: now, told: 0, bytes: 0, left_out: 0 });
        if now.duration_since(state.since) >= SPAN {
            (state.since, state.told, state.bytes) = (now, 0, 0);
        }
        let full = state.told > 0 && state.bytes.saturating_add(bytes) > ROOM;
        if state.told >= self.most || full {
            state.left_out += 1;
            return None;
        }
        state.told += 1;
        state.bytes = state.bytes.saturating_add(bytes);
        let before = match std::mem::take(&mut state.left_out) {
            0 => String::new(),
            n => format!(" ({n} lines like this were left out)"),
        };
        let last = if state.told == self.most { LAST } else { "" };
        Some(format!("{before}{last}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_a_minute_and_the_rest_is_counted() {
        let seldom = Seldom::new(2);
        let start = Instant::now();
        assert_eq!(seldom.at(start, 0).as_deref(), Some(""));
        assert_eq!(seldom.at(start, 0).as_deref(), Some(LAST));
        for _ in 0..5 {
            assert_eq!(seldom.at(start + Duration::from_secs(59), 0), None);
        }
        let next = seldom.at(start + SPAN, 0).unwrap();
        assert!(next.contains("5 lines"), "{next}");
        assert_eq!(seldom.at(start + SPAN, 0).as_deref(), Some(LAST));
    }

    #[test]
    fn a_first_line_is_first_for_a_minute() {
        let seldom = Seldom::new(1);
        assert!(seldom.is_first());
        assert!(!seldom.is_first());
    }

    #[test]
    fn long_texts_have_so_many_bytes_a_minute() {
        let seldom = Seldom::new(60);
        let start = Instant::now();
        assert!(seldom.at(start, 2 * ROOM).is_some(), "the first is told at any length");
        assert_eq!(seldom.at(start, 1), None);
        let texts = (0..60).filter(|_| seldom.at(start + SPAN, 2048).is_some()).count();
        assert_eq!(texts, ROOM / 2048);
        assert_eq!(seldom.at(start + 2 * SPAN, 100).as_deref(), Some(" (52 lines like this were left out)"));
    }
}
