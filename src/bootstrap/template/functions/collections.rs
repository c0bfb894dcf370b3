//! Sprig's functions over lists and dictionaries.

use std::collections::BTreeMap;

use super::{Answer, Fault, loose, string};
use crate::bootstrap::template::value::Value;

pub(super) fn call(name: &str, a: &[Value]) -> Option<Answer> {
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
        ("has", [_, Value::Nil]) => Ok(Value::Bool(false)),
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
        // One of which there could be more counts as a list of one.
        ("toStrings", [Value::Nil]) => Ok(Value::List(Vec::new())),
        ("toStrings", [one]) => loose(one).map(|one| Value::texts(&[one])),
        ("sortAlpha", [one]) => one.print().map(|one| Value::texts(&[one])),
        _ => return maps(name, a),
    })
}

fn maps(name: &str, a: &[Value]) -> Option<Answer> {
    Some(match (name, a) {
        ("dict", _) => a
            .chunks(2)
            .map(|pair| Ok((loose(&pair[0])?, pair.get(1).cloned().unwrap_or_else(|| Value::text("")))))
            .collect::<Result<_, Fault>>()
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
            let keys: Result<Vec<String>, Fault> = keys.iter().map(string).collect();
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
