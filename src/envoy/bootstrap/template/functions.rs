//! The functions that templates call: Go's own, `toJSON`, and those of Sprig that fit a bootstrap.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::eval::LIMIT;
use super::text;
use super::value::{Value, go_json};

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

type Answer = Result<Value, String>;

/// Calls a function.
pub(super) fn call(name: &str, a: Vec<Value>, env: &BTreeMap<String, String>) -> Answer {
    if let Some(answer) = own(name, &a) {
        return answer;
    }
    if let Some(answer) = strings(name, &a) {
        return answer;
    }
    if let Some(answer) = lists(name, &a) {
        return answer;
    }
    match (name, a.as_slice()) {
        ("env", [key]) => Ok(Value::text(env.get(&string(key)?).cloned().unwrap_or_default())),
        ("expandenv", [_]) => Err("is not supported: name the variable with env".to_owned()),
        _ => numbers(name, &a).unwrap_or_else(|| Err(format!("wrong arguments: {} given", a.len()))),
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
            other => Err(format!("len of type {}", other.kind())),
        },
        ("index", [v, keys @ ..]) => keys.iter().try_fold(v.clone(), |at, key| index(&at, key)),
        ("slice", [v, bounds @ ..]) if bounds.len() <= 2 => slice(v, bounds),
        ("print", _) => text::print(a, false).map(Value::Text),
        ("println", _) => text::print(a, true).map(Value::Text),
        ("printf", _) => text::printf(a).map(Value::Text),
        ("html" | "js" | "urlquery", _) => text::print(a, false).map(|t| Value::Text(text::escape(name, &t))),
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
        ("toJson" | "toRawJson", [v]) => Ok(Value::Text(go_json(&v.to_json()))),
        ("toPrettyJson", [v]) => Ok(Value::Text(text::pretty_json(v))),
        ("fromJson", [v]) => string(v).and_then(|t| {
            serde_json::from_str(&t).map(|json| Value::from_json(&json)).map_err(|e| e.to_string())
        }),
        ("default", [otherwise, v]) => Ok(if v.truth() { v } else { otherwise }.clone()),
        ("default", [otherwise]) => Ok(otherwise.clone()),
        ("empty", [v]) => Ok(Value::Bool(!v.truth())),
        ("coalesce", _) => Ok(a.iter().find(|v| v.truth()).cloned().unwrap_or(Value::Nil)),
        ("all", _) => Ok(Value::Bool(a.iter().all(Value::truth))),
        ("any", _) => Ok(Value::Bool(a.iter().any(Value::truth))),
        ("ternary", [yes, no, test]) => Ok(if test.truth() { yes } else { no }.clone()),
        ("fail", [why]) => Err(string(why).unwrap_or_default()),
        ("required", [why, v]) if !v.truth() => Err(string(why).unwrap_or_default()),
        ("required", [_, v]) => Ok(v.clone()),
        ("kindOf", [v]) => Ok(Value::text(v.kind())),
        ("kindIs", [kind, v]) => string(kind).map(|k| Value::Bool(k == v.kind())),
        _ => return None,
    })
}

fn size(n: usize) -> Answer {
    Ok(Value::Int(i64::try_from(n).unwrap_or(i64::MAX)))
}

fn string(value: &Value) -> Result<String, String> {
    match value {
        Value::Text(text) => Ok(text.clone()),
        other => Err(format!("wanted a string, got {}", other.kind())),
    }
}

// Sprig makes text of anything.
fn loose(value: &Value) -> Result<String, String> {
    if *value == Value::Nil { Ok(String::new()) } else { value.print() }
}

fn position(value: &Value, most: usize) -> Result<usize, String> {
    let Value::Int(n) = value else { return Err(format!("cannot index with type {}", value.kind())) };
    usize::try_from(*n).ok().filter(|n| *n <= most).ok_or_else(|| format!("index out of range: {n}"))
}

fn index(value: &Value, key: &Value) -> Answer {
    match value {
        Value::List(items) => {
            let at = position(key, items.len())?;
            items.get(at).cloned().ok_or_else(|| format!("index out of range: {at}"))
        }
        Value::Text(text) => {
            let at = position(key, text.len())?;
            text.as_bytes()
                .get(at)
                .map(|b| Value::Int((*b).into()))
                .ok_or_else(|| format!("index out of range: {at}"))
        }
        Value::Map(members) => {
            let key = string(key)?;
            let texts = members.values().all(|v| matches!(v, Value::Text(_)));
            Ok(members.get(&key).cloned().unwrap_or(if texts { Value::text("") } else { Value::Nil }))
        }
        Value::Nil => Err("index of untyped nil".to_owned()),
        other => Err(format!("can't index item of type {}", other.kind())),
    }
}

fn slice(value: &Value, bounds: &[Value]) -> Answer {
    let length = match value {
        Value::Text(text) => text.len(),
        Value::List(items) => items.len(),
        other => return Err(format!("can't slice item of type {}", other.kind())),
    };
    let bound = |at: usize, or: usize| bounds.get(at).map_or(Ok(or), |b| position(b, length));
    let (from, to) = (bound(0, 0)?, bound(1, length)?);
    if from > to {
        return Err(format!("invalid slice index: {from} > {to}"));
    }
    match value {
        Value::Text(text) => {
            text.get(from..to).map(Value::text).ok_or_else(|| "slice inside of a character".to_owned())
        }
        Value::List(items) => Ok(Value::List(items[from..to].to_vec())),
        _ => Ok(Value::Nil),
    }
}

fn compare(l: &Value, r: &Value, equality: bool) -> Result<Ordering, String> {
    let different = Err("incompatible types for comparison".to_owned());
    match (l, r) {
        (Value::Int(l), Value::Int(r)) => Ok(l.cmp(r)),
        (Value::Float(l), Value::Float(r)) => Ok(l.partial_cmp(r).unwrap_or(Ordering::Less)),
        (Value::Text(l), Value::Text(r)) => Ok(l.cmp(r)),
        (Value::Bool(l), Value::Bool(r)) if equality => Ok(l.cmp(r)),
        (Value::Nil, Value::Nil) if equality => Ok(Ordering::Equal),
        (Value::Nil, _) | (_, Value::Nil) if equality => Ok(Ordering::Less),
        _ => different,
    }
}

fn strings(name: &str, a: &[Value]) -> Option<Answer> {
    // The text comes last, so that it can be piped in.
    let texts: Result<Vec<String>, String> = a.iter().map(loose).collect();
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
            let Value::Int(n) = a[0] else { return Some(Err("wanted a number".to_owned())) };
            Some(loose(&a[1]).and_then(|t| counted(name, n, &t)).map(Value::Text))
        }
        ("substr", 3) => {
            let (Value::Int(from), Value::Int(to)) = (&a[0], &a[1]) else {
                return Some(Err("wanted two numbers".to_owned()));
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

fn bounded(size: usize) -> Result<(), String> {
    if size > LIMIT { Err("the text becomes too long".to_owned()) } else { Ok(()) }
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

fn counted(name: &str, n: i64, text: &str) -> Result<String, String> {
    let count = usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX);
    if name == "trunc" {
        let length = text.chars().count();
        let skip = if n < 0 { length.saturating_sub(count) } else { 0 };
        return Ok(text.chars().skip(skip).take(count).collect());
    }
    if n < 0 {
        return Err(format!("{n} is negative"));
    }
    bounded(count.saturating_mul(text.len() + text.matches('\n').count() + 1))?;
    let pad = " ".repeat(if name == "repeat" { 0 } else { count });
    Ok(match name {
        "repeat" => text.repeat(count),
        "indent" => format!("{pad}{}", text.replace('\n', &format!("\n{pad}"))),
        _ => format!("\n{pad}{}", text.replace('\n', &format!("\n{pad}"))),
    })
}

fn lists(name: &str, a: &[Value]) -> Option<Answer> {
    Some(match (name, a) {
        ("list" | "tuple", _) => Ok(Value::List(a.to_vec())),
        ("join", [by, Value::List(items)]) => {
            let parts: Result<Vec<_>, _> = items.iter().map(loose).collect();
            parts.and_then(|p| Ok(Value::Text(p.join(&string(by)?))))
        }
        ("join", [_, one]) => loose(one).map(Value::Text),
        ("toStrings", [Value::List(items)]) => {
            items.iter().map(|v| loose(v).map(Value::Text)).collect::<Result<_, _>>().map(Value::List)
        }
        ("first", [Value::List(items)]) => Ok(items.first().cloned().unwrap_or(Value::Nil)),
        ("last", [Value::List(items)]) => Ok(items.last().cloned().unwrap_or(Value::Nil)),
        ("rest", [Value::List(items)]) => Ok(Value::List(items.iter().skip(1).cloned().collect())),
        ("initial", [Value::List(items)]) => Ok(Value::List(items[..items.len().saturating_sub(1)].to_vec())),
        ("append", [Value::List(items), one]) => {
            Ok(Value::List(items.iter().chain([one]).cloned().collect()))
        }
        ("prepend", [Value::List(items), one]) => {
            Ok(Value::List([one].into_iter().chain(items).cloned().collect()))
        }
        ("concat", _) if a.iter().all(|v| matches!(v, Value::List(_))) => {
            let items =
                a.iter().flat_map(|v| if let Value::List(items) = v { items.clone() } else { Vec::new() });
            Ok(Value::List(items.collect()))
        }
        ("uniq", [Value::List(items)]) => {
            let mut seen: Vec<Value> = Vec::new();
            items.iter().for_each(|v| {
                if !seen.contains(v) {
                    seen.push(v.clone())
                }
            });
            Ok(Value::List(seen))
        }
        ("reverse", [Value::List(items)]) => Ok(Value::List(items.iter().rev().cloned().collect())),
        ("has", [one, Value::List(items)]) => Ok(Value::Bool(items.contains(one))),
        ("without", [Value::List(items), gone @ ..]) => {
            Ok(Value::List(items.iter().filter(|v| !gone.contains(v)).cloned().collect()))
        }
        ("compact", [Value::List(items)]) => {
            Ok(Value::List(items.iter().filter(|v| v.truth()).cloned().collect()))
        }
        ("sortAlpha", [Value::List(items)]) => {
            items.iter().map(loose).collect::<Result<Vec<_>, _>>().map(|mut texts| {
                texts.sort();
                Value::texts(&texts)
            })
        }
        _ => return maps(name, a),
    })
}

fn maps(name: &str, a: &[Value]) -> Option<Answer> {
    Some(match (name, a) {
        ("dict", _) => a
            .chunks(2)
            .map(|pair| Ok((loose(&pair[0])?, pair.get(1).cloned().unwrap_or_else(|| Value::text("")))))
            .collect::<Result<_, String>>()
            .map(Value::Map),
        ("get", [Value::Map(members), key]) => {
            string(key).map(|k| members.get(&k).cloned().unwrap_or_else(|| Value::text("")))
        }
        ("hasKey", [Value::Map(members), key]) => string(key).map(|k| Value::Bool(members.contains_key(&k))),
        ("keys", _) if a.iter().all(|v| matches!(v, Value::Map(_))) => {
            let keys = a
                .iter()
                .flat_map(|v| if let Value::Map(m) = v { m.keys().cloned().collect() } else { Vec::new() });
            Ok(Value::texts(&keys.collect::<Vec<_>>()))
        }
        ("values", [Value::Map(members)]) => Ok(Value::List(members.values().cloned().collect())),
        ("pick" | "omit", [Value::Map(members), keys @ ..]) => {
            let keys: Result<Vec<String>, String> = keys.iter().map(string).collect();
            keys.map(|keys| {
                let kept = members.iter().filter(|(k, _)| keys.contains(k) == (name == "pick"));
                Value::Map(kept.map(|(k, v)| (k.clone(), v.clone())).collect())
            })
        }
        // The first that has a member wins.
        ("merge", _) if a.iter().all(|v| matches!(v, Value::Map(_))) => {
            let mut merged = BTreeMap::new();
            for value in a.iter().rev() {
                if let Value::Map(members) = value {
                    merged.extend(members.clone());
                }
            }
            Ok(Value::Map(merged))
        }
        _ => return None,
    })
}

fn numbers(name: &str, a: &[Value]) -> Option<Answer> {
    let whole = |value: &Value| match value {
        Value::Int(n) => *n,
        #[allow(clippy::cast_possible_truncation)]
        Value::Float(n) => *n as i64,
        Value::Text(text) => text.parse().unwrap_or(0),
        Value::Bool(on) => i64::from(*on),
        _ => 0,
    };
    let numbers: Vec<i64> = a.iter().map(whole).collect();
    let of = |n: Option<i64>| n.map(Value::Int).ok_or_else(|| "the number is out of range".to_owned());
    Some(match (name, numbers.as_slice()) {
        ("int" | "int64" | "atoi", [n]) => Ok(Value::Int(*n)),
        ("float64", [_]) => Ok(Value::Float(match &a[0] {
            Value::Float(n) => *n,
            Value::Text(text) => text.parse().unwrap_or(0.0),
            #[allow(clippy::cast_precision_loss)]
            other => whole(other) as f64,
        })),
        ("add", all) => of(all.iter().try_fold(0_i64, |sum, n| sum.checked_add(*n))),
        ("add1", [n]) => of(n.checked_add(1)),
        ("mul", all) if !all.is_empty() => {
            of(all.iter().try_fold(1_i64, |product, n| product.checked_mul(*n)))
        }
        ("sub", [l, r]) => of(l.checked_sub(*r)),
        ("div", [l, r]) => l.checked_div(*r).map(Value::Int).ok_or_else(|| "division by zero".to_owned()),
        ("mod", [l, r]) => l.checked_rem(*r).map(Value::Int).ok_or_else(|| "division by zero".to_owned()),
        ("max", all) if !all.is_empty() => of(all.iter().max().copied()),
        ("min", all) if !all.is_empty() => of(all.iter().min().copied()),
        ("until", [n @ 0..=100_000]) => Ok(Value::List((0..*n).map(Value::Int).collect())),
        _ => return None,
    })
}
