//! An exposition as it goes by, line by line. Pure; the fuzzer calls it.
//!
//! Only the start of an unfinished line is ever held: where a body is cut, a half number must not pass
//! for a number (`requests_total 12` of `requests_total 1234`).

/// A line longer than this is passed on unfinished.
const LONGEST: usize = 64 * 1024;
const EOF: &[u8] = b"# EOF";

/// One part's body on its way.
#[derive(Debug, Default)]
pub struct Lines {
    /// Whether `# EOF` lines are dropped, and the blank ones behind them, because another part follows.
    strip_eof: bool,
    /// The line before was such an end.
    ended: bool,
    /// The start of a line whose end has not come.
    held: Vec<u8>,
    /// The last byte passed on was no line end.
    inside: bool,
    /// The last line passed on was the end of an exposition.
    whole: bool,
}

impl Lines {
    /// For a part that is not the last of an OpenMetrics exposition (`strip_eof`), or any other.
    #[must_use]
    pub fn new(strip_eof: bool) -> Self {
        Self { strip_eof, ..Self::default() }
    }

    /// Takes a piece and passes on what is complete.
    pub fn feed(&mut self, piece: &[u8], mut out: impl FnMut(&[u8])) {
        let Some(last) = memchr::memrchr(b'\n', piece) else {
            self.held.extend_from_slice(piece);
            if self.held.len() > LONGEST {
                self.inside = true;
                (self.ended, self.whole) = (false, false);
                out(&std::mem::take(&mut self.held));
            }
            return;
        };
        let (mut lines, rest) = piece.split_at(last + 1);
        if self.inside || !self.held.is_empty() {
            let (end, more) = lines.split_at(memchr::memchr(b'\n', lines).unwrap_or(last) + 1);
            self.held.extend_from_slice(end);
            let mut line = std::mem::take(&mut self.held);
            self.whole = !self.inside && is_eof(&line);
            if !self.drops(&line) {
                out(&line);
            }
            line.clear();
            self.held = line;
            // The end of a line that was passed on unfinished was not the start of one; the next is.
            self.inside = false;
            lines = more;
        }
        if let Some(body) = lines.strip_suffix(b"\n") {
            self.whole = is_eof(&body[memchr::memrchr(b'\n', body).map_or(0, |at| at + 1)..]);
        }
        if self.strip_eof {
            self.without_eof(lines, &mut out);
        } else if !lines.is_empty() {
            out(lines);
        }
        self.held.extend_from_slice(rest);
    }

    // Of a line, or of its end where its start was passed on.
    fn drops(&mut self, line: &[u8]) -> bool {
        let blank = line.trim_ascii_end().is_empty();
        let dropped = self.strip_eof && !self.inside && (is_eof(line) || (self.ended && blank));
        self.ended = dropped;
        dropped
    }

    fn without_eof(&mut self, mut lines: &[u8], out: &mut impl FnMut(&[u8])) {
        loop {
            while self.ended && !lines.is_empty() {
                let end = line_end(lines, 0);
                if !self.drops(&lines[..end]) {
                    break;
                }
                lines = &lines[end..];
            }
            let starts_line = |at: usize| at == 0 || lines[at - 1] == b'\n';
            let found = memchr::memmem::find_iter(lines, EOF).filter(|at| starts_line(*at));
            let Some((at, end)) =
                found.map(|at| (at, line_end(lines, at))).find(|(at, end)| self.drops(&lines[*at..*end]))
            else {
                break;
            };
            if at > 0 {
                out(&lines[..at]);
            }
            lines = &lines[end..];
        }
        if !lines.is_empty() {
            out(lines);
        }
    }

    /// The body has ended as it should: what is held is the last line, or the rest of it, which may be nothing.
    #[must_use]
    pub fn end(mut self) -> Option<Vec<u8>> {
        let none = self.held.is_empty() && !self.inside;
        let line = std::mem::take(&mut self.held);
        if none || self.drops(&line) { None } else { Some(line) }
    }

    /// Whether the exposition has come to its end, though the body may go on or break off.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.whole && self.held.is_empty()
    }

    /// Whether what was passed on so far ends inside a line.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.inside
    }

    /// The body was cut: what is held is no line, and is dropped. Whether anything was.
    #[must_use]
    pub fn cut(self) -> bool {
        !self.held.is_empty() || self.inside
    }
}

fn is_eof(line: &[u8]) -> bool {
    line.trim_ascii_end() == EOF
}

fn line_end(lines: &[u8], from: usize) -> usize {
    memchr::memchr(b'\n', &lines[from..]).map_or(lines.len(), |n| from + n + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pass(pieces: &[&[u8]], strip: bool, whole: bool) -> Vec<u8> {
        let mut lines = Lines::new(strip);
        let mut all = Vec::new();
        for piece in pieces {
            lines.feed(piece, |b| {
                assert!(!b.is_empty());
                all.extend_from_slice(b);
            });
        }
        if whole {
            all.extend(lines.end().unwrap_or_default());
        }
        all
    }

    #[test]
    fn eof_goes_where_another_part_follows() {
        assert_eq!(pass(&[b"a 1\n# EOF\n"], true, true), b"a 1\n");
        assert_eq!(pass(&[b"a 1\n# E", b"OF"], true, true), b"a 1\n");
        assert_eq!(pass(&[b"a 1\n# EOF\n"], false, true), b"a 1\n# EOF\n");
        assert_eq!(pass(&[b"# EOFX\nx # EOF\n# EOF\nb 2\n"], true, true), b"# EOFX\nx # EOF\nb 2\n");
    }

    #[test]
    fn an_exposition_is_whole_once_its_end_has_come() {
        let whole = |pieces: &[&[u8]]| {
            let mut lines = Lines::new(false);
            pieces.iter().for_each(|piece| lines.feed(piece, |_| {}));
            lines.is_whole()
        };
        for pieces in
            [&[b"a 1\n# EOF\n" as &[u8]] as &[&[u8]], &[b"# EOF\n"], &[b"a 1\n# E", b"OF\n"], &[b"# EOF\r\n"]]
        {
            assert!(whole(pieces), "{pieces:?}");
        }
        let long = [b'x'; LONGEST + 1];
        for pieces in [
            &[b"a 1\n" as &[u8]] as &[&[u8]],
            &[b"# EOF"],
            &[b"# EOF\nb 2\n"],
            &[b"# EOF\n", b"b"],
            &[b"x # EOF\n"],
            &[&long, b"# EOF\n"],
            &[b"# EOF\n", &long],
        ] {
            assert!(!whole(pieces), "{}", pieces.len());
        }
    }

    #[test]
    fn blank_lines_behind_it_go_with_it() {
        assert_eq!(pass(&[b"a 1\n# EOF \r\n\n \r\n"], true, true), b"a 1\n");
        assert_eq!(pass(&[b"\na 1\n\n# EOF\n", b" ", b"\t"], true, true), b"\na 1\n\n");
        assert_eq!(pass(&[b"# EOF\n\n", b"\n b 2\n\n"], true, true), b" b 2\n\n");
        assert_eq!(pass(&[b"a 1\n# EOF\n\n"], false, true), b"a 1\n# EOF\n\n");
    }

    #[test]
    fn half_a_line_is_not_passed_on_when_cut() {
        assert_eq!(pass(&[b"a 1\nb 12"], false, false), b"a 1\n");
        assert_eq!(pass(&[b"a 1\nb 12"], false, true), b"a 1\nb 12");
        let long = vec![b'x'; LONGEST + 1];
        assert_eq!(pass(&[&long, b"y\nz"], true, false).len(), long.len() + 2);
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "[a\n# EOF]{0,80}", cuts in proptest::collection::vec(0usize..80, 0..6)) {
            let mut at: Vec<usize> = cuts.into_iter().map(|c| c.min(text.len())).collect();
            at.sort_unstable();
            at.insert(0, 0);
            at.push(text.len());
            let pieces: Vec<&[u8]> = at.windows(2).map(|w| &text.as_bytes()[w[0]..w[1]]).collect();
            for strip in [false, true] {
                let whole = pass(&[text.as_bytes()], strip, true);
                prop_assert_eq!(&pass(&pieces, strip, true), &whole);
                if !strip {
                    prop_assert_eq!(&whole, text.as_bytes());
                }
                let mut ended = false;
                let expected: Vec<&str> = text
                    .split_inclusive('\n')
                    .filter(|line| {
                        let text = line.trim_ascii_end();
                        ended = strip && (text == "# EOF" || (ended && text.is_empty()));
                        !ended
                    })
                    .collect();
                prop_assert_eq!(String::from_utf8(whole).unwrap(), expected.concat());
            }
        }
    }
}
