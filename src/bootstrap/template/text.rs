//! Text as Go and Sprig make it: formats and escapes.

use super::Fault;
use super::value::{Value, float, go_json, signed};

/// `printf`.
pub(super) fn printf(arguments: &[Value]) -> Result<String, Fault> {
    let Some((Value::Text(format), arguments)) = arguments.split_first() else {
        return Err(Fault::Plain("wants a format"));
    };
    // The next argument, and whether the format has named one by its number.
    let (mut next, mut named) = (0, false);
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut spec = String::new();
        while let Some(c) = chars.next_if(|c| "+-# 0.".contains(*c) || c.is_ascii_digit()) {
            spec.push(c);
        }
        if chars.next_if_eq(&'[').is_some() {
            let mut number = String::new();
            while let Some(c) = chars.next_if(|c| *c != ']') {
                number.push(c);
            }
            chars.next();
            next = number.parse::<usize>().ok().and_then(|n| n.checked_sub(1)).unwrap_or(usize::MAX);
            named = true;
        }
        match chars.next() {
            None => out.push_str("%!(NOVERB)"),
            Some('%') => out.push('%'),
            Some(verb) => match arguments.get(next) {
                None if named => out.push_str(&format!("%!{verb}(BADINDEX)")),
                None => out.push_str(&format!("%!{verb}(MISSING)")),
                Some(value) => {
                    out.push_str(&verb_text(verb, &spec, value)?);
                    next += 1;
                }
            },
        }
    }
    let extra = arguments.get(next..).filter(|_| !named).into_iter().flatten();
    let extra: Vec<String> =
        extra.map(|v| Ok(format!("{}={}", v.kind(), v.print()?))).collect::<Result<_, Fault>>()?;
    if !extra.is_empty() {
        out.push_str(&format!("%!(EXTRA {})", extra.join(", ")));
    }
    Ok(out)
}

fn verb_text(verb: char, spec: &str, value: &Value) -> Result<String, Fault> {
    let (flags, rest) = spec.split_at(spec.find(|c: char| !"+-# 0".contains(c)).unwrap_or(spec.len()));
    let (width, precision) = match rest.split_once('.') {
        Some((width, precision)) => (width, Some(precision.parse::<usize>().unwrap_or(0).min(1000))),
        None => (rest, None),
    };
    let width = width.parse::<usize>().unwrap_or(0).min(10_000);
    if let (Value::Nil, false) = (value, matches!(verb, 'v' | 'T')) {
        return Ok(format!("%!{verb}(<nil>)"));
    }
    let bad = || Ok(format!("%!{verb}({}={})", value.kind(), value.print()?));
    let mut text = match (verb, value) {
        ('v', Value::Text(text)) if flags.contains('#') => quote(text),
        ('v' | 's', Value::Text(text) | Value::Named(text, _)) => match precision {
            Some(most) => text.chars().take(most).collect(),
            None => text.clone(),
        },
        ('v', value) => value.print()?,
        ('s', Value::List(_) | Value::Map(_)) => value.print()?,
        ('t', Value::Bool(on)) => on.to_string(),
        ('d', Value::Int(n) | Value::Named(_, n)) => n.to_string(),
        ('x', Value::Int(n)) => format!("{n:x}"),
        ('X', Value::Int(n)) => format!("{n:X}"),
        ('o', Value::Int(n)) => format!("{n:o}"),
        ('b', Value::Int(n)) => format!("{n:b}"),
        ('c', Value::Int(n)) => {
            u32::try_from(*n).ok().and_then(char::from_u32).unwrap_or('\u{fffd}').to_string()
        }
        ('x', Value::Text(text)) => text.bytes().map(|b| format!("{b:02x}")).collect(),
        ('X', Value::Text(text)) => text.bytes().map(|b| format!("{b:02X}")).collect(),
        ('U', Value::Int(n)) => format!("U+{n:04X}"),
        ('q', Value::Text(text) | Value::Named(text, _)) => quote(text),
        ('f' | 'F', Value::Float(n)) => format!("{n:.*}", precision.unwrap_or(6)),
        ('e', Value::Float(n)) => {
            let text = format!("{n:.*e}", precision.unwrap_or(6));
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            format!("{digits}e{}", signed(exponent))
        }
        ('g', Value::Float(n)) => float(*n),
        ('T', Value::Nil) => "<nil>".to_owned(),
        ('T', value) => value.kind().to_owned(),
        _ => return bad(),
    };
    let sign = if flags.contains('+') { Some('+') } else { flags.contains(' ').then_some(' ') };
    if let (Some(sign), Value::Int(0..)) = (sign, value) {
        text.insert(0, sign);
    }
    let missing = width.saturating_sub(text.chars().count());
    if flags.contains('-') {
        text.push_str(&" ".repeat(missing));
    } else if flags.contains('0') && matches!(value, Value::Int(_) | Value::Float(_)) {
        let sign = usize::from(text.starts_with(['-', '+']));
        text.insert_str(sign, &"0".repeat(missing));
    } else {
        text.insert_str(0, &" ".repeat(missing));
    }
    Ok(text)
}

/// A Go string literal.
pub(super) fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || u32::from(c) == 0x7f => {
                out.push_str(&format!("\\x{:02x}", u32::from(c)))
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// `print` (`newline` false) and `println`.
pub(super) fn print(arguments: &[Value], newline: bool) -> Result<String, Fault> {
    let mut out = String::new();
    let is_text = |v: &Value| matches!(v, Value::Text(_));
    for (at, value) in arguments.iter().enumerate() {
        if at > 0 && (newline || !is_text(value) && !is_text(&arguments[at - 1])) {
            out.push(' ');
        }
        out.push_str(&value.print()?);
    }
    if newline {
        out.push('\n');
    }
    Ok(out)
}

/// The escapes of `html`, `js` and `urlquery`.
pub(super) fn escape(kind: &str, text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match (kind, c) {
            ("html", '&') => out.push_str("&amp;"),
            ("html", '<') => out.push_str("&lt;"),
            ("html", '>') => out.push_str("&gt;"),
            ("html", '"') => out.push_str("&#34;"),
            ("html", '\'') => out.push_str("&#39;"),
            ("html", '\0') => out.push('\u{fffd}'),
            ("js", '\\' | '"' | '\'') => out.extend(['\\', c]),
            ("js", '<' | '>' | '&' | '=') => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            ("js", c) if u32::from(c) < 0x20 => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            ("urlquery", ' ') => out.push('+'),
            ("urlquery", c) if !(c.is_ascii_alphanumeric() || "-_.~".contains(c)) => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    out.push_str(&format!("%{byte:02X}"));
                }
            }
            (_, c) => out.push(c),
        }
    }
    out
}

/// JSON with two spaces of indentation.
pub(super) fn pretty_json(value: &Value) -> String {
    let mut json = value.to_json();
    json.sort_all_objects();
    super::value::escape(&serde_json::to_string_pretty(&json).unwrap_or_default())
}

/// Compact JSON; `{}` for nothing.
pub(super) fn to_json(value: &Value) -> String {
    if *value == Value::Nil { "{}".to_owned() } else { go_json(&value.to_json()) }
}
