//! Cuts a template into text and the tokens of its actions.

use super::value::Value;
use super::{Error, Fault};
use crate::base::quote::unquote;

/// A piece of a template.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Piece {
    /// Plain text.
    Text(String),
    /// What stands between `{{` and `}}`, and the line it begins in.
    Action(Vec<Token>, usize),
}

/// A token of an action.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A function or a keyword.
    Word(String),
    /// `.a.b`; empty for `.` itself. `true`: directly behind a variable or a parenthesis.
    Path(Vec<String>, bool),
    /// `$` or `$name`, with the `$`.
    Variable(String),
    /// A literal.
    Literal(Value),
    /// `|`
    Pipe,
    /// `(`
    Open,
    /// `)`
    Close,
    /// `,`
    Comma,
    /// `:=`
    Declare,
    /// `=`
    Assign,
}

/// Cuts `text` up.
pub(super) fn pieces(text: &str) -> Result<Vec<Piece>, Error> {
    let mut out = Vec::new();
    let mut rest = text;
    let mut line = 1;
    let mut trim = false;
    loop {
        let Some(at) = rest.find("{{") else {
            push_text(&mut out, if trim { rest.trim_start_matches(SPACE) } else { rest });
            return Ok(out);
        };
        let mut plain = &rest[..at];
        line += plain.matches('\n').count();
        let mut inner = &rest[at + 2..];
        let mut leading = inner;
        if trim {
            plain = plain.trim_start_matches(SPACE);
        }
        if let Some(trimmed) = inner.strip_prefix('-').filter(|r| r.starts_with(SPACE)) {
            plain = plain.trim_end_matches(SPACE);
            inner = trimmed;
            leading = trimmed.strip_prefix(SPACE).unwrap_or(trimmed);
        }
        push_text(&mut out, plain);
        let start = line;
        let fail = |reason: &str| Error::new(start, reason);
        // A comment touches its braces, or their trim markers, on both sides.
        if let Some(comment) = leading.strip_prefix("/*") {
            let end = comment.find("*/").ok_or_else(|| fail("unclosed comment"))?;
            let after = &comment[end + 2..];
            line += rest[..rest.len() - after.len()].matches('\n').count() - rest[..at].matches('\n').count();
            let trimming = || after.strip_prefix(SPACE)?.strip_prefix("-}}").map(|rest| (rest, true));
            let closing = after.strip_prefix("}}").map(|rest| (rest, false)).or_else(trimming);
            (rest, trim) = closing.ok_or_else(|| fail("comment ends before closing delimiter"))?;
            continue;
        }
        let mut tokens = Vec::new();
        let mut cursor = inner;
        loop {
            let spaced = cursor.trim_start_matches(SPACE);
            if let Some((after, trims)) = close(cursor) {
                line += inner[..inner.len() - after.len()].matches('\n').count();
                (rest, trim) = (after, trims);
                break;
            }
            if spaced.is_empty() {
                return Err(fail("unclosed action"));
            }
            let glued = spaced.len() == cursor.len()
                && matches!(tokens.last(), Some(Token::Variable(_) | Token::Close));
            let (token, after) = token(spaced, glued).map_err(|reason| fail(&reason.to_string()))?;
            tokens.push(token);
            cursor = after;
        }
        out.push(Piece::Action(tokens, start));
    }
}

const SPACE: [char; 4] = [' ', '\t', '\r', '\n'];

fn push_text(out: &mut Vec<Piece>, text: &str) {
    if !text.is_empty() {
        out.push(Piece::Text(text.to_owned()));
    }
}

// The end of an action, and whether the text behind loses its leading space.
fn close(text: &str) -> Option<(&str, bool)> {
    let spaced = text.trim_start_matches(SPACE);
    if spaced.len() < text.len()
        && let Some(after) = spaced.strip_prefix("-}}")
    {
        return Some((after, true));
    }
    spaced.strip_prefix("}}").map(|after| (after, false))
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

fn token(text: &str, glued: bool) -> Result<(Token, &str), Fault> {
    let first = text.chars().next().unwrap_or_default();
    let simple = |token, len: usize| Ok((token, &text[len..]));
    match first {
        '|' => simple(Token::Pipe, 1),
        '(' => simple(Token::Open, 1),
        ')' => simple(Token::Close, 1),
        ',' => simple(Token::Comma, 1),
        '=' => simple(Token::Assign, 1),
        ':' if text.starts_with(":=") => simple(Token::Declare, 2),
        '"' | '`' | '\'' => quoted(text, first),
        '$' => {
            let end = 1 + text[1..].find(|c| !is_word(c)).unwrap_or(text.len() - 1);
            Ok((Token::Variable(text[..end].to_owned()), &text[end..]))
        }
        '.' if !text[1..].starts_with(|c: char| c.is_ascii_digit()) => Ok(path(text, glued)),
        '0'..='9' | '+' | '-' | '.' => number(text),
        c if is_word(c) => {
            let end = text.find(|c| !is_word(c)).unwrap_or(text.len());
            let token = match &text[..end] {
                "true" => Token::Literal(Value::Bool(true)),
                "false" => Token::Literal(Value::Bool(false)),
                "nil" => Token::Literal(Value::Nil),
                word => Token::Word(word.to_owned()),
            };
            Ok((token, &text[end..]))
        }
        other => Err(Fault::Unexpected(other)),
    }
}

fn path(text: &str, glued: bool) -> (Token, &str) {
    let mut names = Vec::new();
    let mut rest = text;
    while let Some(after) = rest.strip_prefix('.') {
        let end = after.find(|c| !is_word(c)).unwrap_or(after.len());
        rest = &after[end..];
        if end == 0 {
            break;
        }
        names.push(after[..end].to_owned());
    }
    (Token::Path(names, glued), rest)
}

fn quoted(text: &str, quote: char) -> Result<(Token, &str), Fault> {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if c == quote && !escaped {
            let (literal, after) = text.split_at(at + 1);
            let plain = unquote(literal).ok_or_else(|| Fault::Quoted(literal.to_owned()))?;
            let value = if quote == '\'' {
                Value::Int(i64::from(u32::from(plain.chars().next().unwrap_or_default())))
            } else {
                Value::Text(plain)
            };
            return Ok((Token::Literal(value), after));
        }
        escaped = c == '\\' && !escaped && quote != '`';
    }
    Err(Fault::Plain("unterminated quoted string"))
}

fn number(text: &str) -> Result<(Token, &str), Fault> {
    let mut previous = ' ';
    let part = |c: char| {
        let sign = matches!(c, '+' | '-') && matches!(previous, ' ' | 'e' | 'E');
        previous = c;
        sign || c == '.' || is_word(c)
    };
    let mut part = part;
    let end = text.find(|c| !part(c)).unwrap_or(text.len());
    let (digits, after) = text.split_at(end);
    let bad = || Fault::Number(digits.to_owned());
    let plain = digits.replace('_', "");
    let (sign, unsigned) = match plain.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, plain.strip_prefix('+').unwrap_or(&plain)),
    };
    let whole = |text: &str, radix| i64::from_str_radix(text, radix).ok().map(|n| Value::Int(n * sign));
    let lower = unsigned.to_ascii_lowercase();
    let value = match lower.get(..2) {
        Some("0x") => whole(&lower[2..], 16),
        Some("0o") => whole(&lower[2..], 8),
        Some("0b") => whole(&lower[2..], 2),
        _ => whole(&lower, 10).or_else(|| plain.parse().ok().map(Value::Float)),
    };
    Ok((Token::Literal(value.ok_or_else(bad)?), after))
}
