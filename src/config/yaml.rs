//! YAML as the Go agent reads it: YAML 1.1 scalars, turned into JSON.
//!
//! Unquoted `yes` and `on` are booleans, `0x10`, `010` and `1_000` numbers, whole floats become integers,
//! dates stay text, the last of equal keys wins, only the first document counts. Why not serde's YAML:
//! it follows YAML 1.2 and does not tell a quoted `yes` from a bare one, on which all of that depends.
//! Depth and size (aliases can multiply, and what has an anchor is kept twice) are bounded, so that a document cannot
//! exhaust the memory.

mod older;
mod scalar;

use std::borrow::Cow;
use std::collections::HashMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Span, StrInput};
use serde_json::{Map, Value};

use older::{Left, help, lines, right_of_all};
use scalar::scalar;

/// Nesting beyond this is refused; mesh files have less than twenty levels.
const DEPTH: usize = 200;
/// Values beyond this, aliases counted as what they stand for, are refused.
const NODES: usize = 200_000;
/// So are bytes of text beyond this, counted likewise. A ConfigMap has at most 1 MiB.
pub(crate) const BYTES: usize = 4 << 20;

/// What may be read again for lines that stand too far left, in bytes.
const AGAIN: usize = 16 << 20;

/// Why a text is no YAML; carries the line where the parser knows it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("error converting YAML to JSON: yaml: {text}")]
pub struct Error {
    text: String,
    // Where the line may be helped; not told.
    left: Option<Left>,
}

impl Error {
    fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), left: None }
    }
}

/// Reads the first document of `text`; an empty one is `null`.
///
/// # Errors
/// When the text is no YAML, or holds what JSON cannot.
pub fn to_json(text: &str) -> Result<Value, Error> {
    if text.len() > BYTES {
        return Err(too_long());
    }
    if !text.chars().all(readable) {
        return Err(Error::new("control characters are not allowed"));
    }
    if other_version(text) {
        return Err(Error::new("found incompatible YAML document; write no %YAML line, or 1.1"));
    }
    read(&marks_inside(text)).0
}

/// Stands for a byte order mark inside the text, where the parser wants none; no text holds it (`readable`).
const MARK_INSIDE: &str = "\u{fffe}";

fn marks_inside(text: &str) -> Cow<'_, str> {
    let start = text.len() - text.trim_start_matches('\u{feff}').len();
    match text[start..].contains('\u{feff}') {
        true => Cow::Owned(text[..start].to_owned() + &text[start..].replace('\u{feff}', MARK_INSIDE)),
        false => Cow::Borrowed(text),
    }
}

// What may stand in a text of YAML.
fn readable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}') || matches!(c, '\t' | '\n' | '\r' | '\u{85}')
}

// Whether a directive above the first document names a version that the Go agent's parser does not read.
fn other_version(text: &str) -> bool {
    let head = lines(text).map(str::trim_end).take_while(|l| l.is_empty() || l.starts_with(['%', '#']));
    let mut named = head.filter_map(|line| line.strip_prefix("%YAML")?.split_whitespace().next());
    named.any(|version| version != "1.1")
}

/// What is read, and how often the text was read again for it.
fn read(text: &str) -> (Result<Value, Error>, usize) {
    let right = right_of_all(text);
    let (mut text, mut left, mut again) = (Cow::Borrowed(text), AGAIN, 0);
    loop {
        let error = match document(&text) {
            Ok(value) => return (Ok(value), again),
            Err(error) => error,
        };
        let affordable = error.left.filter(|_| left >= text.len());
        let helped = affordable.and_then(|line| help(&text, line, &right));
        let Some(helped) = helped else { return (Err(error), again) };
        left -= text.len();
        again += 1;
        text = Cow::Owned(helped);
    }
}

fn document(text: &str) -> Result<Value, Error> {
    let mut reader = Reader {
        parser: Parser::new_from_str(text),
        tabs: Tabs::of(text),
        open: (!text.trim_end_matches(' ').ends_with(['\n', '\r'])).then(|| text.chars().count()),
        anchors: HashMap::new(),
        size: Size::default(),
    };
    loop {
        match reader.next()? {
            None | Some(Event::StreamEnd) => return Ok(Value::Null),
            Some(Event::StreamStart | Event::DocumentStart(_) | Event::Nothing) => {}
            Some(event) => {
                let value = reader.value(event, 0)?;
                // What follows in the document may still be an error; what follows the document may not.
                return match reader.next()? {
                    None | Some(Event::DocumentEnd | Event::StreamEnd) => Ok(value),
                    Some(_) => Err(Error::new("did not find expected document end")),
                };
            }
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    tabs: Option<Tabs<'a>>,
    /// Where the text ends, in characters, if that is the middle of a line.
    open: Option<usize>,
    anchors: HashMap<usize, (Value, Size)>,
    size: Size,
}

/// Tabs before the first word of a line, which are no indentation. The parser takes them for one where none has begun.
struct Tabs<'a> {
    lines: Vec<&'a str>,
    /// Open brackets, within which they mean nothing.
    brackets: usize,
}

impl<'a> Tabs<'a> {
    // `None`: there is no tab.
    fn of(text: &'a str) -> Option<Self> {
        text.contains('\t').then(|| Self { lines: lines(text).collect(), brackets: 0 })
    }

    /// Whether what begins here is indented by a tab.
    fn indent(&mut self, event: &Event<'_>, span: Span) -> bool {
        let before = |at: Marker| {
            let line = self.lines.get(at.line().checked_sub(1)?)?;
            let end = line.char_indices().nth(at.col()).map_or(line.len(), |(end, _)| end);
            line.get(..end)
        };
        let outside = self.brackets == 0;
        match event {
            Event::MappingStart(..) | Event::SequenceStart(..) => {
                let opens = outside && before(span.end).is_some_and(|line| line.ends_with(['{', '[']));
                self.brackets += usize::from(opens || !outside);
            }
            Event::MappingEnd | Event::SequenceEnd => {
                self.brackets = self.brackets.saturating_sub(1);
                return false;
            }
            Event::Scalar(..) | Event::Alias(_) => {}
            _ => return false,
        }
        let indents = |line: &str| line.contains('\t') && line.trim_matches([' ', '\t']).is_empty();
        outside && before(span.start).is_some_and(indents)
    }
}

/// How much a value holds.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    nodes: usize,
    bytes: usize,
}

impl Size {
    fn of(value: &Value) -> Self {
        let (bytes, inside): (usize, Vec<Self>) = match value {
            Value::String(text) => (text.len(), Vec::new()),
            Value::Array(items) => (0, items.iter().map(Self::of).collect()),
            Value::Object(fields) => {
                (fields.keys().map(String::len).sum(), fields.values().map(Self::of).collect())
            }
            _ => (0, Vec::new()),
        };
        let sum = |all: Self, one: &Self| Self { nodes: all.nodes + one.nodes, bytes: all.bytes + one.bytes };
        inside.iter().fold(Self { nodes: 1, bytes }, sum)
    }
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<Option<Event<'a>>, Error> {
        match self.parser.next_event() {
            None => Ok(None),
            Some(Ok((event, span))) => match self.tabs.as_mut().is_some_and(|tabs| tabs.indent(&event, span))
            {
                false => Ok(Some(self.closed(event, span))),
                // Otherwise what stands further left would seem to be no part of the document any more.
                true => Err(Error::new(format!(
                    "line {}: found character that cannot start any token: a tab",
                    span.start.line()
                ))),
            },
            Some(Err(error)) => {
                let (line, column) = (error.marker().line(), error.marker().col());
                let left = match error.info() {
                    "invalid indentation" | "invalid indentation in flow construct" => Some(Left::Line(line)),
                    "invalid indentation in quoted scalar" => Some(Left::Quoted(line)),
                    "tabs disallowed within this context (block indentation)" => Some(Left::Tabbed(line)),
                    "tab cannot be used as indentation" => Some(Left::QuotedTab(line)),
                    "':' must be followed by a valid YAML whitespace" => Some(Left::Tab(line, column)),
                    "while parsing a quoted scalar, found unknown escape character" => {
                        Some(Left::Apostrophe(line, column))
                    }
                    "comments must be separated from other tokens by whitespace" => {
                        Some(Left::Comment(line, column))
                    }
                    "misplaced bracket" => Some(Left::Bracket(line, column)),
                    _ => None,
                };
                Err(Error { text: format!("line {line}: {}", error.info()), left })
            }
        }
    }

    // As it was written. A block of text whose last line has no end has none there either; the parser adds one.
    fn closed(&self, event: Event<'a>, span: Span) -> Event<'a> {
        match event {
            Event::Scalar(text, style, anchor, tag) if text.contains(MARK_INSIDE) => {
                let text = text.replace(MARK_INSIDE, "\u{feff}").into();
                self.closed(Event::Scalar(text, style, anchor, tag), span)
            }
            Event::Scalar(text, style @ (ScalarStyle::Literal | ScalarStyle::Folded), anchor, tag)
                if self.open == Some(span.end.index()) =>
            {
                let text = text.strip_suffix('\n').map(|text| text.to_owned().into()).unwrap_or(text);
                Event::Scalar(text, style, anchor, tag)
            }
            event => event,
        }
    }

    fn count(&mut self, more: Size) -> Result<(), Error> {
        self.size.nodes = self.size.nodes.saturating_add(more.nodes);
        self.size.bytes = self.size.bytes.saturating_add(more.bytes);
        if self.size.nodes > NODES {
            return Err(Error::new(format!(
                "document holds more than {NODES} values; aliases count in full"
            )));
        }
        if self.size.bytes > BYTES { Err(too_long()) } else { Ok(()) }
    }

    fn value(&mut self, event: Event<'a>, depth: usize) -> Result<Value, Error> {
        if depth > DEPTH {
            return Err(Error::new(format!("document is nested deeper than {DEPTH} levels")));
        }
        self.count(Size { nodes: 1, bytes: 0 })?;
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.count(Size { nodes: 0, bytes: text.len() })?;
                (anchor, scalar(&text, style, tag.as_ref())?)
            }
            Event::SequenceStart(anchor, _) => (anchor, self.sequence(depth)?),
            Event::MappingStart(anchor, _) => (anchor, self.mapping(depth)?),
            Event::Alias(id) => {
                let size = self.anchors.get(&id).ok_or_else(|| Error::new("unknown anchor"))?.1;
                self.count(size)?;
                (0, self.anchors[&id].0.clone())
            }
            _ => return Err(Error::new("did not find expected node content")),
        };
        if anchor != 0 {
            let size = Size::of(&value);
            self.count(size)?;
            self.anchors.insert(anchor, (value.clone(), size));
        }
        Ok(value)
    }

    fn sequence(&mut self, depth: usize) -> Result<Value, Error> {
        let mut items = Vec::new();
        loop {
            match self.need()? {
                Event::SequenceEnd => return Ok(Value::Array(items)),
                event => items.push(self.value(event, depth + 1)?),
            }
        }
    }

    fn mapping(&mut self, depth: usize) -> Result<Value, Error> {
        let mut object = Map::new();
        loop {
            let event = self.need()?;
            let merge = matches!(&event, Event::Scalar(text, ScalarStyle::Plain, _, None) if text == "<<");
            let key = match event {
                Event::MappingEnd => return Ok(Value::Object(object)),
                event => self.value(event, depth + 1)?,
            };
            let event = self.need()?;
            let value = self.value(event, depth + 1)?;
            match (merge, value) {
                (true, Value::Object(other)) => object.extend(other),
                (true, Value::Array(others)) => {
                    for other in others.into_iter().rev() {
                        let Value::Object(other) = other else { return Err(no_merge()) };
                        object.extend(other);
                    }
                }
                (true, _) => return Err(no_merge()),
                (false, value) => {
                    object.insert(key_text(key)?, value);
                }
            }
        }
    }

    fn need(&mut self) -> Result<Event<'a>, Error> {
        self.next()?.ok_or_else(|| Error::new("unexpected end of document"))
    }
}

fn too_long() -> Error {
    Error::new(format!("document holds more than {BYTES} bytes of text; aliases count in full"))
}

fn no_merge() -> Error {
    Error::new("map merge requires map or sequence of maps as the value")
}

fn key_text(key: Value) -> Result<String, Error> {
    match key {
        Value::String(text) => Ok(text),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(value) => Ok(value.to_string()),
        other => Err(Error::new(format!("unsupported map key: {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_is_helped_once_and_a_carriage_return_ends_one() {
        for (text, value) in [
            (": '\r\t\n", None),
            (": '\r\r\t", None),
            ("a: 'x\r\ty'", Some(json!({ "a": "x y" }))),
            ("a: 'x\r\n\ty\r\tz'", Some(json!({ "a": "x y z" }))),
            ("a: [\r\tb,\r\tc]\rd: e", Some(json!({ "a": ["b", "c"], "d": "e" }))),
        ] {
            let (read, again) = read(text);
            assert_eq!(read.ok(), value, "{text:?}");
            assert!(again <= text.matches('\t').count(), "{text:?}: read again {again} times");
        }
        assert_eq!(lines("a\r\n\rb\n\nc\r").collect::<Vec<_>>(), ["a\r\n", "\r", "b\n", "\n", "c\r"]);
    }

    #[test]
    fn escapes_are_those_of_the_go_agent_and_of_json() {
        let read = |text: &str| to_json(text).map(|value| value["a"].clone());
        assert_eq!(read(r#"a: "it\'s \\'\' so\x41\'""#), Ok(json!("it's \\'' soA'")));
        let text = "b: \"\\'\"\n\u{e9}: 1\na: [\n\"\u{e9}\\'\n  x\", 'y\\']";
        assert_eq!(read(text), Ok(json!(["\u{e9}' x", "y\\"])));
        assert_eq!(read(r#"{"a": "\/\u00e9"}"#), Ok(json!("/\u{e9}")));
        for bad in [r#"a: "\q\'""#, r#"a: "\'\q""#, r#"a: "\q" # \'"#, r"a: 'it\'s'"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tags_decide_also_over_quotes() {
        for (text, value) in [
            ("!!str 5", Some(json!("5"))),
            ("! 5", Some(json!("5"))),
            ("!foo 5", Some(json!("5"))),
            ("!", Some(json!(""))),
            ("!<tag:yaml.org,2002:str> 5", Some(json!("5"))),
            ("!!int \"7\"", Some(json!(7))),
            ("!!float 1", Some(json!(1))),
            ("!!bool yes", Some(json!(true))),
            ("!!null ''", Some(json!(null))),
            ("!!binary aGk=", Some(json!("hi"))),
            ("!!timestamp 2001-01-01", Some(json!("2001-01-01"))),
            ("!!int x", None),
            ("!!int 1.0", None),
            ("!!null x", None),
            ("!!binary ?", None),
            ("!!timestamp x", None),
        ] {
            assert_eq!(to_json(text).ok(), value, "{text}");
        }
    }

    #[test]
    fn control_characters_are_refused_as_they_stand() {
        for bad in ["a: \u{1}", "# \u{7f}", "a: \0", "a: \u{9b}", "a: \u{ffff}"] {
            assert!(to_json(bad).unwrap_err().to_string().contains("control characters"), "{bad:?}");
        }
        assert_eq!(to_json("a: \"\\x01\""), Ok(json!({"a": "\u{1}"})));
    }

    #[test]
    fn scalars_are_those_of_yaml_1_1() {
        for (text, value) in [
            ("yes", json!(true)),
            ("Off", json!(false)),
            ("\"yes\"", json!("yes")),
            ("037200", json!(16000)),
            ("0x3E80", json!(16000)),
            ("15_020", json!(15020)),
            ("15020.0", json!(15020)),
            ("1.502e4", json!(15020)),
            ("0.5", json!(0.5)),
            ("-3", json!(-3)),
            ("2024-01-02", json!("2024-01-02")),
            ("1m30s", json!("1m30s")),
            ("45s", json!("45s")),
            ("10.0.0.1", json!("10.0.0.1")),
            ("!!str 5", json!("5")),
            ("~", json!(null)),
            ("", json!(null)),
            ("089", json!(89)),
            ("+", json!("+")),
            ("-", json!([null])),
            ("18446744073709551615", json!(18_446_744_073_709_551_615u64)),
            ("1e400", json!("1e400")),
        ] {
            assert_eq!(to_json(text).unwrap_or_else(|e| panic!("{text}: {e}")), value, "{text}");
        }
    }

    #[test]
    fn a_block_of_text_ends_as_the_document_does() {
        for (text, want) in [
            ("|\n  x\n", "x\n"),
            ("|\n  x", "x"),
            ("|\r\n  \u{e9}", "\u{e9}"),
            ("|+\n  x\n\n  y", "x\n\ny"),
            (">\n  x\n  y", "x y"),
            ("|-\n  x", "x"),
            ("|\n  x ", "x "),
            ("|\n  x\n# c", "x\n"),
            ("|\n  x\n...", "x\n"),
            ("|\n  x\n ", "x\n"),
            ("|", ""),
        ] {
            let both = format!("a: |\n  z\nb: {text}");
            assert_eq!(to_json(&both).unwrap(), json!({"a": "z\n", "b": want}), "{text:?}");
        }
    }

    #[test]
    fn anchors_merges_duplicates_and_further_documents() {
        let got = to_json("a: &m {x: 1}\nb: &n {x: 2, w: 3}\nc: {<<: [*m, *n], z: 4}").unwrap();
        assert_eq!(got["c"], json!({"x": 1, "w": 3, "z": 4}), "the first of several counts");
        let got = to_json("a: &m {x: 1}\nb: *m\nc: {<<: *m, z: 2}\nd: 1\nd: 2\n---\n: [").unwrap();
        assert_eq!(got, json!({"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "z": 2}, "d": 2}));
        assert_eq!(
            to_json("{\"a\":1,\"a\":{\"b\":[true,null]}}").unwrap(),
            json!({"a": {"b": [true, null]}})
        );
        assert_eq!(to_json("1: a\ntrue: b").unwrap(), json!({"1": "a", "true": "b"}));
    }

    #[test]
    fn a_version_is_1_1_where_one_is_named() {
        assert_eq!(to_json("# c\n%YAML 1.1 # c\n---\na: yes\n").unwrap(), json!({"a": true}));
        assert!(to_json("%YAML 1.2\n---\na: 1\n").unwrap_err().to_string().contains("incompatible"));
        assert_eq!(to_json("---\na: 1\n...\n%YAML 1.2\n---\nb: 2\n").unwrap(), json!({"a": 1}));
    }

    #[test]
    fn what_is_no_yaml_is_refused_with_its_line() {
        for bad in
            ["a: [", "a: b\n\tc: d", "{\"a\": 1", "a: *nope", "<<: 1", "? [1]\n: 2", ".inf", "a: b: c", "'a"]
        {
            let error = to_json(bad).expect_err(bad).to_string();
            assert!(error.starts_with("error converting YAML to JSON: yaml: "), "{error}");
        }
    }

    #[test]
    fn brackets_and_tabs_are_read_as_yaml_1_1_has_them() {
        let want = json!({"a": {"b": "x", "c": [1, 2]}, "d": "z"});
        for text in [
            "a: {\n  b: x,\n  c: [1, 2]\n}\nd: z\n",
            "a: {\nb: x,\nc: [\n1,\n2\n]\n}\nd: z\n",
            "a:\n  b: x\n  c: [\n1, 2\n  ]\nd: z\n",
            "a: {\"b\":\"x\",\n\"c\":[1,\n2]}\nd:\tz\n",
            "a: {b:\tx, c: [1, 2]}\nd: \tz",
            "a: {\n\t\"b\": \"x\",\n\t\"c\": [1,\n\t\t2]\n}\nd: z\n",
        ] {
            assert_eq!(to_json(text).unwrap_or_else(|e| panic!("{text}: {e}")), want, "{text}");
        }
        let folded = json!({"a": {"b": "x y z\nv", "c": "x y"}, "d": 1});
        assert_eq!(to_json("a:\n  b: \"x\ny\n z\n\nv\"\n  c: 'x\n  y'\nd: 1\n").unwrap(), folded);
        assert_eq!(to_json("a:\n  b: \"x\n\ty\n\t z\n\t\n\tv\"\n  c: 'x\n\ty'\nd: 1\n").unwrap(), folded);
        for bad in [
            "a: {\n\tb: 1\n\t}",
            "a: \"x\ny\nb: 1",
            "a:\n\tb: x",
            "a: {\n}}\n",
            "a: [\n1\nb: 2\n",
            "a:\tb: c",
        ] {
            assert!(to_json(bad).is_err(), "{bad}");
        }
        // Each would end with its first line.
        for bad in [
            "\ta: 1\nb: 2",
            "# c\n---\n \ta:\n  - 1\nb: 2",
            "&x\n\ta: 1\nb: 2",
            "\t- 1\nb: 2",
            "\t{a: 1}\nb: 2",
        ] {
            let error = to_json(bad).expect_err(bad).to_string();
            assert!(error.contains("found character that cannot start any token"), "{bad}: {error}");
        }
        assert_eq!(
            to_json("a: {\n\tb: {c: 1},\n\t\td: [2]}\ne: 3\t").unwrap(),
            json!({"a": {"b": {"c": 1}, "d": [2]}, "e": 3})
        );
        let many = format!("a: {{\n{}}}", "b: 1,\n".repeat(20_000));
        let _ = to_json(&many);
    }

    #[test]
    fn depth_and_size_are_bounded() {
        assert!(to_json(&"[".repeat(5000)).is_err());
        let nested = |deep: usize| to_json(&format!("{}{}", "[".repeat(deep), "]".repeat(deep)));
        assert!(nested(DEPTH).is_ok());
        assert!(nested(DEPTH + 2).unwrap_err().to_string().contains("nested deeper"));
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for n in 1..9 {
            let refs = vec![format!("*a{}", n - 1); 10].join(",");
            bomb.push_str(&format!("a{n}: &a{n} [{refs}]\n"));
        }
        assert!(to_json(&bomb).unwrap_err().to_string().contains("more than"));
        // A long text many times over, anchors within anchors, a long document.
        let long = format!("a: &a {}\nb: [{}]", "x".repeat(60_000), vec!["*a"; 20_000].join(","));
        let nested =
            format!("{}x{}", (0..150).map(|n| format!("&a{n} [")).collect::<String>(), "]".repeat(150));
        let around = nested.replace('x', &"y".repeat(60_000));
        for text in [&long, &around, &"z".repeat(BYTES + 1)] {
            let error = to_json(text).unwrap_err().to_string();
            assert!(error.contains("bytes of text"), "{error}");
        }
        assert!(to_json(&nested).is_ok());
    }

    proptest::proptest! {
        #[test]
        fn json_is_yaml(text in "[a-z0-9:{}\\[\\], \"'#&*!|>\\n\\t-]{0,60}") {
            let _ = to_json(&text);
            let quoted = serde_json::to_string(&json!({"k": text, "l": [1, true, null, 2.5]})).unwrap();
            let back = to_json(&quoted).unwrap();
            proptest::prop_assert_eq!(back, json!({"k": text, "l": [1, true, null, 2.5]}));
        }
    }
}
