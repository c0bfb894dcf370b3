//! The functions that templates call: Go's own, `toJSON`, and those of Sprig that fit a bootstrap.

mod collections;
mod strings;

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::Fault;
use super::text;
use super::value::{Value, go_json, raw_json};

const KNOWN: &[&str] = &[
    // Go's
    "and",
    "or",
    "not",
    "len",
    "index",
    "slice",
    "print",
    "printf",
    "println",
    "html",
    "js",
    "urlquery",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    // Istio's
    "toJSON",
    // Sprig's
    "toJson",
    "toRawJson",
    "toPrettyJson",
    "fromJson",
    "env",
    "expandenv",
    "default",
    "empty",
    "coalesce",
    "ternary",
    "fail",
    "required",
    "quote",
    "squote",
    "upper",
    "lower",
    "title",
    "untitle",
    "trim",
    "trimAll",
    "trimSuffix",
    "trimPrefix",
    "nospace",
    "replace",
    "contains",
    "hasPrefix",
    "hasSuffix",
    "repeat",
    "trunc",
    "substr",
    "cat",
    "indent",
    "nindent",
    "splitList",
    "split",
    "join",
    "list",
    "tuple",
    "first",
    "last",
    "rest",
    "initial",
    "append",
    "prepend",
    "concat",
    "uniq",
    "reverse",
    "has",
    "without",
    "compact",
    "sortAlpha",
    "dict",
    "get",
    "hasKey",
    "keys",
    "values",
    "pick",
    "omit",
    "merge",
    "int",
    "int64",
    "float64",
    "atoi",
    "toString",
    "toStrings",
    "add",
    "add1",
    "sub",
    "mul",
    "div",
    "mod",
    "max",
    "min",
    "until",
    "b64enc",
    "b64dec",
    "kindOf",
    "kindIs",
    "all",
    "any",
];

/// Whether there is such a function.
pub(super) fn is_known(name: &str) -> bool {
    KNOWN.contains(&name)
}

type Answer = Result<Value, Fault>;

/// Calls a function.
pub(super) fn call(name: &str, a: Vec<Value>, env: &BTreeMap<String, String>) -> Answer {
    if let Some(answer) = own(name, &a) {
        return answer;
    }
    if let Some(answer) = strings::call(name, &a) {
        return answer;
    }
    if let Some(answer) = collections::call(name, &a) {
        return answer;
    }
    match (name, a.as_slice()) {
        ("env", [key]) => Ok(Value::text(env.get(&string(key)?).cloned().unwrap_or_default())),
        ("expandenv", [_]) => Err(Fault::Plain("is not supported: name the variable with env")),
        _ => numbers(name, &a).unwrap_or_else(|| Err(Fault::Arguments(a.len()))),
    }
}

fn own(name: &str, a: &[Value]) -> Option<Answer> {
    Some(match (name, a) {
        ("not", [v]) => Ok(Value::Bool(!v.truth())),
        ("and", [first, rest @ ..]) => {
            Ok(rest.iter().fold(first, |l, r| if l.truth() { r } else { l }).clone())
        }
        ("or", [first, rest @ ..]) => {
            Ok(rest.iter().fold(first, |l, r| if l.truth() { l } else { r }).clone())
        }
        ("len", [v]) => match v {
            Value::Text(t) => size(t.len()),
            Value::List(items) => size(items.len()),
            Value::Map(members) => size(members.len()),
            other => Err(Fault::Type { what: "len of", kind: other.kind() }),
        },
        ("index", [v, keys @ ..]) => keys.iter().try_fold(v.clone(), |at, key| index(&at, key)),
        ("slice", [v, bounds @ ..]) if bounds.len() <= 2 => slice(v, bounds),
        ("print", _) => text::print(a, false).map(Value::Text),
        ("println", _) => text::print(a, true).map(Value::Text),
        ("printf", _) => text::printf(a).map(Value::Text),
        ("html" | "js" | "urlquery", _) => {
            let nothing = |v: &Value| if *v == Value::Nil { Value::text("<no value>") } else { v.clone() };
            let shown: Vec<Value> = a.iter().map(nothing).collect();
            text::print(&shown, false).map(|t| Value::Text(text::escape(name, &t)))
        }
        ("eq", [v, others @ ..]) if !others.is_empty() => others
            .iter()
            .map(|other| compare(v, other, true).map(|o| o == Ordering::Equal))
            .try_fold(false, |found, equal| equal.map(|e| found || e))
            .map(Value::Bool),
        ("ne", [l, r]) => compare(l, r, true).map(|o| Value::Bool(o != Ordering::Equal)),
        ("lt", [l, r]) => compare(l, r, false).map(|o| Value::Bool(o == Ordering::Less)),
        ("le", [l, r]) => compare(l, r, false).map(|o| Value::Bool(o != Ordering::Greater)),
        ("gt", [l, r]) => compare(l, r, false).map(|o| Value::Bool(o == Ordering::Greater)),
        ("ge", [l, r]) => compare(l, r, false).map(|o| Value::Bool(o != Ordering::Less)),
        ("toJSON", [v]) => Ok(Value::Text(text::to_json(v))),
        ("toJson", [v]) => Ok(Value::Text(go_json(&v.to_json()))),
        ("toRawJson", [v]) => Ok(Value::Text(raw_json(&v.to_json()))),
        ("toPrettyJson", [v]) => Ok(Value::Text(text::pretty_json(v))),
        // What is no JSON is nothing.
        ("fromJson", [v]) => {
            string(v).map(|t| serde_json::from_str(&t).map_or(Value::Nil, |json| Value::from_json(&json)))
        }
        ("default", [otherwise, v]) => Ok(if v.truth() { v } else { otherwise }.clone()),
        ("default", [otherwise]) => Ok(otherwise.clone()),
        ("empty", [v]) => Ok(Value::Bool(!v.truth())),
        ("coalesce", _) => Ok(a.iter().find(|v| v.truth()).cloned().unwrap_or(Value::Nil)),
        ("all", _) => Ok(Value::Bool(a.iter().all(Value::truth))),
        ("any", _) => Ok(Value::Bool(a.iter().any(Value::truth))),
        ("ternary", [yes, no, test]) => Ok(if test.truth() { yes } else { no }.clone()),
        ("fail", [why]) => Err(Fault::Said(string(why).unwrap_or_default())),
        ("required", [why, v]) if !v.truth() => Err(Fault::Said(string(why).unwrap_or_default())),
        ("required", [_, v]) => Ok(v.clone()),
        ("kindOf", [v]) => Ok(Value::text(v.go_kind())),
        ("kindIs", [kind, v]) => string(kind).map(|k| Value::Bool(k == v.go_kind())),
        _ => return None,
    })
}

fn size(n: usize) -> Answer {
    Ok(Value::Int(i64::try_from(n).unwrap_or(i64::MAX)))
}

fn string(value: &Value) -> Result<String, Fault> {
    match value {
        Value::Text(text) => Ok(text.clone()),
        other => Err(Fault::NoText(other.kind())),
    }
}

// Sprig makes text of anything.
fn loose(value: &Value) -> Result<String, Fault> {
    if *value == Value::Nil { Ok(String::new()) } else { value.print() }
}

fn position(value: &Value, most: usize) -> Result<usize, Fault> {
    let Value::Int(n) = value else {
        return Err(Fault::Type { what: "cannot index with", kind: value.kind() });
    };
    usize::try_from(*n).ok().filter(|n| *n <= most).ok_or(Fault::Range(*n))
}

fn out_of(at: usize) -> Fault {
    Fault::Range(i64::try_from(at).unwrap_or(i64::MAX))
}

fn index(value: &Value, key: &Value) -> Answer {
    match value {
        Value::List(items) => {
            let at = position(key, items.len())?;
            items.get(at).cloned().ok_or_else(|| out_of(at))
        }
        Value::Text(text) => {
            let at = position(key, text.len())?;
            text.as_bytes().get(at).map(|b| Value::Int((*b).into())).ok_or_else(|| out_of(at))
        }
        Value::Map(members) => {
            let key = string(key)?;
            let texts = members.values().all(|v| matches!(v, Value::Text(_)));
            Ok(members.get(&key).cloned().unwrap_or(if texts { Value::text("") } else { Value::Nil }))
        }
        Value::Nil => Err(Fault::Plain("index of untyped nil")),
        other => Err(Fault::Type { what: "can't index item of", kind: other.kind() }),
    }
}

fn slice(value: &Value, bounds: &[Value]) -> Answer {
    let length = match value {
        Value::Text(text) => text.len(),
        Value::List(items) => items.len(),
        other => return Err(Fault::Type { what: "can't slice item of", kind: other.kind() }),
    };
    let bound = |at: usize, or: usize| bounds.get(at).map_or(Ok(or), |b| position(b, length));
    let (from, to) = (bound(0, 0)?, bound(1, length)?);
    if from > to {
        return Err(Fault::Slice { from, to });
    }
    match value {
        Value::Text(text) => {
            text.get(from..to).map(Value::text).ok_or(Fault::Plain("slice inside of a character"))
        }
        Value::List(items) => Ok(Value::List(items[from..to].to_vec())),
        _ => Ok(Value::Nil),
    }
}

fn compare(l: &Value, r: &Value, equality: bool) -> Result<Ordering, Fault> {
    let different = Err(Fault::Plain("incompatible types for comparison"));
    match (l, r) {
        (Value::Int(l) | Value::Named(_, l), Value::Int(r) | Value::Named(_, r)) => Ok(l.cmp(r)),
        (Value::Float(l), Value::Float(r)) => Ok(l.partial_cmp(r).unwrap_or(Ordering::Less)),
        (Value::Text(l), Value::Text(r)) => Ok(l.cmp(r)),
        (Value::Bool(l), Value::Bool(r)) if equality => Ok(l.cmp(r)),
        (Value::Nil, Value::Nil) if equality => Ok(Ordering::Equal),
        (Value::Nil, _) | (_, Value::Nil) if equality => Ok(Ordering::Less),
        _ => different,
    }
}

fn numbers(name: &str, a: &[Value]) -> Option<Answer> {
    let whole = |value: &Value| match value {
        Value::Int(n) | Value::Named(_, n) => *n,
        #[expect(clippy::cast_possible_truncation, reason = "cut towards zero, as Sprig does")]
        Value::Float(n) => *n as i64,
        Value::Text(text) => whole_of(text).unwrap_or(0),
        Value::Bool(on) => i64::from(*on),
        _ => 0,
    };
    let numbers: Vec<i64> = a.iter().map(whole).collect();
    let of = |n: Option<i64>| n.map(Value::Int).ok_or(Fault::Plain("the number is out of range"));
    Some(match (name, numbers.as_slice()) {
        ("int" | "int64", [n]) => Ok(Value::Int(*n)),
        ("atoi", [_]) => string(&a[0]).map(|text| Value::Int(text.parse().unwrap_or(0))),
        ("float64", [_]) => Ok(Value::Float(match &a[0] {
            Value::Float(n) => *n,
            Value::Text(text) => text.parse().unwrap_or(0.0),
            #[expect(clippy::cast_precision_loss, reason = "the nearest number is meant, as in Go")]
            other => whole(other) as f64,
        })),
        ("add", all) => of(all.iter().try_fold(0_i64, |sum, n| sum.checked_add(*n))),
        ("add1", [n]) => of(n.checked_add(1)),
        ("mul", all) if !all.is_empty() => {
            of(all.iter().try_fold(1_i64, |product, n| product.checked_mul(*n)))
        }
        ("sub", [l, r]) => of(l.checked_sub(*r)),
        ("div", [l, r]) => l.checked_div(*r).map(Value::Int).ok_or(Fault::Plain("division by zero")),
        ("mod", [l, r]) => l.checked_rem(*r).map(Value::Int).ok_or(Fault::Plain("division by zero")),
        ("max", all) if !all.is_empty() => of(all.iter().max().copied()),
        ("min", all) if !all.is_empty() => of(all.iter().min().copied()),
        ("until", [n @ 0..=100_000]) => Ok(Value::List((0..*n).map(Value::Int).collect())),
        _ => return None,
    })
}

/// A whole number in a text, as Sprig reads it: a prefix names its base, and what is behind a point is cut off.
fn whole_of(text: &str) -> Option<i64> {
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    let bare = |text: &str| text.strip_prefix(['+', '-']).unwrap_or(text).to_owned();
    let text = match text.split_once('.') {
        Some((whole, cut)) if digits(&bare(whole)) && digits(cut) => match bare(whole).is_empty() {
            true => "0",
            false => whole,
        },
        _ => text,
    };
    let (sign, number) = match text.strip_prefix('-') {
        Some(number) => (-1, number),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let based = |prefixes: [&str; 2]| prefixes.iter().find_map(|prefix| number.strip_prefix(prefix));
    let (base, number) = if let Some(number) = based(["0x", "0X"]) {
        (16, number.strip_prefix('_').unwrap_or(number))
    } else if let Some(number) = based(["0b", "0B"]) {
        (2, number.strip_prefix('_').unwrap_or(number))
    } else if let Some(number) = based(["0o", "0O"]) {
        (8, number.strip_prefix('_').unwrap_or(number))
    } else if number.len() > 1 && number.starts_with('0') {
        (8, number)
    } else {
        (10, number)
    };
    let joined = !number.starts_with('_') && !number.ends_with('_') && !number.contains("__");
    let plain = number.replace('_', "");
    let read = joined && plain.bytes().all(|b| b.is_ascii_hexdigit());
    let read = read.then(|| i128::from_str_radix(&plain, base).ok())??;
    i64::try_from(sign * read).ok()
}
