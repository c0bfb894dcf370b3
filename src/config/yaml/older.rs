//! What the parser refuses and the Go agent's, which knows YAML 1.1, does not: white space that means nothing where it
//! stands or is not there before a comment, `\'` in double quotes, and a bracket too many. Where the parser ends for it, it is put as the parser wants it, and the text is read
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
    /// A comment right behind quotes or brackets: line and column of its `#`.
    Comment(usize, usize),
    /// A bracket that closes what is closed: line and column.
    Bracket(usize, usize),
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
    | Left::Apostrophe(line, _)
    | Left::Comment(line, _)
    | Left::Bracket(line, _)) = left;
    let start = lines(text).take(line.checked_sub(1)?).map(str::len).sum();
    let (before, rest) = text.split_at_checked(start)?;
    // Byte order marks at the start have no column.
    let marks = rest.chars().take_while(|c| *c == '\u{feff}').count();
    let place = |column| rest.char_indices().nth(column + marks);
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
            let (at, _) = place(column)?;
            let (key, value) = rest.split_at(at);
            let bare = key.trim_end_matches('\t');
            (bare.len() < key.len()).then(|| format!("{before}{bare} {value}"))
        }
        Left::Apostrophe(_, column) => {
            let (at, quote) = place(column)?;
            let (head, scalar) = rest.split_at(at + quote.len_utf8());
            let bare = bare_apostrophes(scalar);
            (bare.len() < scalar.len()).then(|| format!("{before}{head}{bare}"))
        }
        Left::Comment(_, column) => {
            let (at, _) = place(column)?;
            let (value, comment) = rest.split_at(at);
            comment.starts_with('#').then(|| format!("{before}{value} {comment}"))
        }
        Left::Bracket(_, column) => {
            let (at, _) = place(column)?;
            let (document, more) = text.split_at(start + at);
            (more.starts_with(['}', ']']) && in_brackets(text)).then(|| document.to_owned())
        }
    }
}

/// Whether the first document is one in brackets: what follows the last of them is no part of it.
fn in_brackets(text: &str) -> bool {
    let bare = |line| str::trim_start_matches(line, ['\u{feff}', ' ', '\t']);
    let words = lines(text).map(|line| bare(bare(line).strip_prefix("---").unwrap_or(line)).trim_end());
    let mut words = words.filter(|line| !line.is_empty() && !line.starts_with(['#', '%']));
    words.next().is_some_and(|line| line.starts_with(['{', '[']))
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

#[cfg(test)]
mod tests {
    use crate::config::yaml::to_json;
    use serde_json::json;

    #[test]
    fn a_bracket_too_many_ends_the_document() {
        for text in [
            "{\"a\":1}}",
            "{\"a\":1}\n}\n",
            "--- # c\n{a: 1}]}",
            "{a: 1}\n...\n}",
            "\u{feff}{a: 1}\nb: ]",
            "\u{feff}{\"a\": 1}}",
        ] {
            assert_eq!(to_json(text), Ok(json!({"a": 1})), "{text}");
        }
        for bad in ["a: {b: 1}}", "a: 1\n}", "{\"a\":[1]]}", "a: {\n}}\n", "# {\na: 1\n}", "}"] {
            assert!(to_json(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_comment_may_follow_quotes_and_brackets_without_a_blank() {
        let text = "a: \"b\"#c\nd: {}#e\nf: ['g'#h\n]#\ni: |#j\n  k\nl: m#n\n";
        assert_eq!(to_json(text), Ok(json!({"a": "b", "d": {}, "f": ["g"], "i": "k\n", "l": "m#n"})));
    }

    #[test]
    fn a_byte_order_mark_at_the_start_moves_nothing() {
        for text in ["\u{feff}a: \"b\"#c", "\u{feff}a\t: b", "\u{feff}{a: b}]", "\u{feff}\u{feff}a: \"b\"#c"]
        {
            assert_eq!(to_json(text), Ok(json!({"a": "b"})), "{text:?}");
        }
        assert_eq!(to_json("\u{feff}a: \"b\\'\""), Ok(json!({"a": "b'"})));
    }

    #[test]
    fn a_byte_order_mark_inside_is_a_letter() {
        for (text, value) in [
            ("\u{feff}a: x\u{feff}y", json!({"a": "x\u{feff}y"})),
            ("# c\u{feff}\na: 1", json!({"a": 1})),
            ("a: 1\n\u{feff}b: 2", json!({"a": 1, "\u{feff}b": 2})),
            ("a: |\n  x\u{feff}\nb: \"\u{feff}\"", json!({"a": "x\u{feff}\n", "b": "\u{feff}"})),
            ("\u{feff}\u{feff}a: 1", json!({"a": 1})),
        ] {
            assert_eq!(to_json(text), Ok(value), "{text:?}");
        }
        assert!(to_json("a: \u{fffe}").is_err());
    }

    // What the two parsers read differently, and is left so.
    #[test]
    fn what_nobody_writes_in_yaml_is_read_as_json_or_refused() {
        for (text, value) in [
            ("{\"a\"\n:1}", json!({"a": 1})),
            ("\t# c\n", json!(null)),
            ("...\na: 1", json!({"a": 1})),
            ("a: \"x\u{2028}y\u{85}z\"", json!({"a": "x\u{2028}y\u{85}z"})),
        ] {
            assert_eq!(to_json(text), Ok(value), "{text:?}");
        }
        for bad in ["a: b\n'c'|", ".nan: 1", "[-, b]"] {
            assert!(to_json(bad).is_err(), "{bad}");
        }
    }
}
