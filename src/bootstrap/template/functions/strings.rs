//! Sprig's functions over text.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::{Answer, Fault, loose};
use crate::bootstrap::template::text;
use crate::bootstrap::template::value::{LIMIT, Value};

pub(super) fn call(name: &str, a: &[Value]) -> Option<Answer> {
    // The text comes last, so that it can be piped in.
    let texts: Result<Vec<String>, Fault> = a.iter().map(loose).collect();
    let simple = |f: &dyn Fn(&[String]) -> Value| Some(texts.clone().map(|t| f(&t)));
    let text = |f: &dyn Fn(&[String]) -> String| Some(texts.clone().map(|t| Value::Text(f(&t))));
    match (name, a.len()) {
        ("quote", _) => text(&|t| t.iter().map(|t| text::quote(t)).collect::<Vec<_>>().join(" ")),
        ("squote", _) => text(&|t| t.iter().map(|t| format!("'{t}'")).collect::<Vec<_>>().join(" ")),
        ("upper", 1) => text(&|t| t[0].to_uppercase()),
        ("lower", 1) => text(&|t| t[0].to_lowercase()),
        ("title" | "untitle", 1) => text(&|t| capitals(&t[0], name == "title")),
        ("trim", 1) => text(&|t| t[0].trim().to_owned()),
        ("nospace", 1) => text(&|t| t[0].split_whitespace().collect()),
        ("trimAll", 2) => text(&|t| t[1].trim_matches(|c| t[0].contains(c)).to_owned()),
        ("trimSuffix", 2) => text(&|t| t[1].strip_suffix(&t[0]).unwrap_or(&t[1]).to_owned()),
        ("trimPrefix", 2) => text(&|t| t[1].strip_prefix(&t[0]).unwrap_or(&t[1]).to_owned()),
        ("replace", 3) => Some(texts.and_then(|t| {
            bounded(t[2].len() * (t[1].len() + 1)).map(|()| Value::Text(t[2].replace(&t[0], &t[1])))
        })),
        ("contains", 2) => simple(&|t| Value::Bool(t[1].contains(&t[0]))),
        ("hasPrefix", 2) => simple(&|t| Value::Bool(t[1].starts_with(&t[0]))),
        ("hasSuffix", 2) => simple(&|t| Value::Bool(t[1].ends_with(&t[0]))),
        ("cat", _) => text(&|t| t.join(" ")),
        ("toString", 1) => text(&|t| t[0].clone()),
        ("splitList", 2) => simple(&|t| Value::texts(&split(&t[1], &t[0]))),
        ("split", 2) => simple(&|t| {
            let parts = split(&t[1], &t[0]);
            Value::Map(
                parts.into_iter().enumerate().map(|(i, part)| (format!("_{i}"), Value::Text(part))).collect(),
            )
        }),
        ("b64enc", 1) => text(&|t| STANDARD.encode(&t[0])),
        ("b64dec", 1) => text(&|t| match STANDARD.decode(&t[0]) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => error.to_string(),
        }),
        ("repeat" | "trunc" | "indent" | "nindent", 2) => {
            let Value::Int(n) = a[0] else { return Some(Err(Fault::Plain("wanted a number"))) };
            Some(loose(&a[1]).and_then(|t| counted(name, n, &t)).map(Value::Text))
        }
        ("substr", 3) => {
            let (Value::Int(from), Value::Int(to)) = (&a[0], &a[1]) else {
                return Some(Err(Fault::Plain("wanted two numbers")));
            };
            Some(loose(&a[2]).map(|t| {
                let length = t.chars().count();
                let clip = |n: i64| usize::try_from(n).ok();
                let from = clip(*from).unwrap_or(0).min(length);
                let to = clip(*to).unwrap_or(length).clamp(from, length);
                Value::Text(t.chars().skip(from).take(to - from).collect())
            }))
        }
        _ => None,
    }
}

fn bounded(size: usize) -> Result<(), Fault> {
    if size > LIMIT { Err(Fault::Plain("the text becomes too long")) } else { Ok(()) }
}

fn split(text: &str, by: &str) -> Vec<String> {
    if by.is_empty() {
        return text.chars().map(String::from).collect();
    }
    text.split(by).map(str::to_owned).collect()
}

fn capitals(text: &str, upper: bool) -> String {
    let mut start = true;
    let letter = |c: char| {
        let first = std::mem::replace(&mut start, c.is_whitespace());
        let mapped: String = match (first, upper) {
            (true, true) => c.to_uppercase().collect(),
            (true, false) => c.to_lowercase().collect(),
            (false, _) => c.to_string(),
        };
        mapped
    };
    text.chars().map(letter).collect()
}

fn counted(name: &str, n: i64, text: &str) -> Result<String, Fault> {
    let count = usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX);
    if name == "trunc" {
        let length = text.chars().count();
        let skip = if n < 0 { length.saturating_sub(count) } else { 0 };
        return Ok(text.chars().skip(skip).take(count).collect());
    }
    if n < 0 {
        return Err(Fault::Negative(n));
    }
    bounded(count.saturating_mul(text.len() + text.matches('\n').count() + 1))?;
    let pad = " ".repeat(if name == "repeat" { 0 } else { count });
    Ok(match name {
        "repeat" => text.repeat(count),
        "indent" => format!("{pad}{}", text.replace('\n', &format!("\n{pad}"))),
        _ => format!("\n{pad}{}", text.replace('\n', &format!("\n{pad}"))),
    })
}
