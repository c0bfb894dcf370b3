//! What the parser refuses and the Go agent's, which knows YAML 1.1, does not: white space that means nothing where it
//! stands, and `\'` in double quotes. Where the parser ends for it, it is put as the parser wants it, and the text is read
//! again.

/// What a line is moved by beyond the widest indentation there is, in columns.
const MOVE: usize = 8;

/// Where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// A line inside of brackets that stands no further right than the key before them.
    Line(usize),
    /// The like inside of quotes, which begin in this line.
    Quoted(usize),
    /// A line that begins with a tab, as it may inside of brackets.
    Tabbed(usize),
    /// The like inside of quotes, where what a line begins with means nothing.
    QuotedTab(usize),
    /// A tab alone between a colon and its value: line, and column of the value.
    Tab(usize, usize),
    /// An apostrophe behind a backslash: line and column where its quotes begin.
    Apostrophe(usize, usize),
}

/// With their ends, as the parser counts them: a carriage return ends one, too.
pub(super) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let alone = |(at, end): (usize, &str)| end == "\n" || !text[at + 1..].starts_with('\n');
    let ends = text.match_indices(['\n', '\r']).filter(move |&end| alone(end)).map(|(at, _)| at + 1);
    let mut begin = 0;
    ends.chain([text.len()]).filter_map(move |end| {
        let line = &text[begin..end];
        begin = end;
        (!line.is_empty()).then_some(line)
    })
}

/// Blanks that put a line further right than any line of the text.
pub(super) fn right_of_all(text: &str) -> String {
    let indents = lines(text).map(|line| line.len() - line.trim_start_matches([' ', '-', '?']).len());
    " ".repeat(indents.max().unwrap_or(0) + MOVE)
}

/// The text with this put as the parser wants it. Each help takes away a reason to be asked again for the same place.
pub(super) fn help(text: &str, left: Left, right: &str) -> Option<String> {
    let (Left::Line(line)
    | Left::Quoted(line)
    | Left::Tabbed(line)
    | Left::QuotedTab(line)
    | Left::Tab(line, _)
    | Left::Apostrophe(line, _)) = left;
    let start = lines(text).take(line.checked_sub(1)?).map(str::len).sum();
    let (before, rest) = text.split_at_checked(start)?;
    match left {
        Left::Line(_) if rest.starts_with(right) => None,
        Left::Line(_) => Some(format!("{before}{right}{rest}")),
        Left::Quoted(_) => {
            let stays = |line: &&str| line.starts_with(right) || line.trim().is_empty();
            let first = lines(rest).next()?.len();
            let same: usize = lines(&rest[first..]).take_while(stays).map(str::len).sum();
            let (same, moved) = rest.split_at(first + same);
            (!moved.is_empty()).then(|| format!("{before}{same}{right}{moved}"))
        }
        Left::Tabbed(_) => {
            let bare = rest.trim_start_matches([' ', '\t']);
            let inside = before.trim_end().ends_with(['{', '[', ',']) || bare.starts_with(['}', ']']);
            let tab = rest[..rest.len() - bare.len()].contains('\t');
            (inside && tab).then(|| format!("{before}{right}{bare}"))
        }
        Left::QuotedTab(_) => {
            let bare = rest.trim_start_matches([' ', '\t']);
            let tab = rest[..rest.len() - bare.len()].contains('\t');
            tab.then(|| format!("{before}{right}{bare}"))
        }
        Left::Tab(_, column) => {
            let (at, _) = rest.char_indices().nth(column)?;
            let (key, value) = rest.split_at(at);
            let bare = key.trim_end_matches('\t');
            (bare.len() < key.len()).then(|| format!("{before}{bare} {value}"))
        }
        Left::Apostrophe(_, column) => {
            let (at, quote) = rest.char_indices().nth(column)?;
            let (head, scalar) = rest.split_at(at + quote.len_utf8());
            let bare = bare_apostrophes(scalar);
            (bare.len() < scalar.len()).then(|| format!("{before}{head}{bare}"))
        }
    }
}

/// A text without the backslashes that stand before apostrophes, up to the end of the double quotes that it begins within.
fn bare_apostrophes(scalar: &str) -> String {
    let mut out = String::with_capacity(scalar.len());
    let mut rest = scalar;
    while let Some(at) = rest.find(['\\', '"']).filter(|&at| rest[at..].starts_with('\\')) {
        let (before, escape) = rest.split_at(at);
        let mut escaped = escape.chars();
        let pair = (escaped.next(), escaped.next());
        rest = escaped.as_str();
        out.push_str(before);
        out.push_str(&escape[usize::from(pair.1 == Some('\''))..escape.len() - rest.len()]);
    }
    out.push_str(rest);
    out
}
