//! What the Go agent did, for tests: the suites of `conformance/`, as `conformance/recordings.py` keeps them.
//!
//! A recording is never made from our own output (conformance/README.md says how one is made), so what is compared
//! with it needs no golden file.

use serde_json::{Map, Value};

/// A case of a suite and what the Go agent did in it.
pub(crate) struct Recording {
    /// The case's name.
    pub name: String,
    /// Its inputs.
    pub case: Value,
    /// What the Go agent did.
    pub did: Value,
}

impl Recording {
    /// The member `key` of the case; an empty object where there is none.
    pub(crate) fn input(&self, key: &str) -> Value {
        self.case.get(key).cloned().unwrap_or_else(|| Value::Object(Map::new()))
    }
}

/// Every recording of a suite, in its order.
pub(crate) fn of(suite: &str) -> Vec<Recording> {
    let file = format!("{}/conformance/{suite}/cases.jsonl", env!("CARGO_MANIFEST_DIR"));
    let lines = std::fs::read_to_string(file).unwrap();
    let entries: Vec<Value> = lines.lines().map(|l| unfolded(serde_json::from_str(l).unwrap())).collect();
    let named = |name: &Value| entries.iter().find(|e| e["case"]["name"] == *name).unwrap();
    let whole = |entry: &Value| match entry.get("like") {
        None => entry.get("recorded").cloned(),
        Some(base) => Some(changed(named(base)["recorded"].clone(), &entry["change"])),
    };
    let recording = |entry: &Value| {
        let name = entry["case"]["name"].as_str().unwrap().to_owned();
        Some(Recording { name, case: entry["case"].clone(), did: whole(entry)? })
    };
    entries.iter().filter_map(recording).collect()
}

/// `{"$times": N, "$of": thing}` written out.
fn unfolded(value: Value) -> Value {
    match value {
        Value::Object(map) if map.len() == 2 && map.contains_key("$times") => {
            let times = usize::try_from(map["$times"].as_u64().unwrap()).unwrap();
            match unfolded(map["$of"].clone()) {
                Value::String(letter) if letter.chars().count() == 1 => Value::String(letter.repeat(times)),
                thing => Value::Array(vec![thing; times]),
            }
        }
        Value::Object(map) => map.into_iter().map(|(key, item)| (key, unfolded(item))).collect(),
        Value::Array(list) => list.into_iter().map(unfolded).collect(),
        plain => plain,
    }
}

/// `base` without the pointers of `remove`, and with the values of `set`.
fn changed(mut base: Value, change: &Value) -> Value {
    let last = |pointer: &str| {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        (parent.to_owned(), key.replace("~1", "/").replace("~0", "~"))
    };
    for pointer in change["remove"].as_array().unwrap() {
        let (parent, key) = last(pointer.as_str().unwrap());
        base.pointer_mut(&parent).unwrap().as_object_mut().unwrap().remove(&key).unwrap();
    }
    for (pointer, value) in change["set"].as_object().unwrap() {
        let (parent, key) = last(pointer);
        match base.pointer_mut(&parent).unwrap() {
            Value::Array(list) => list[key.parse::<usize>().unwrap()] = value.clone(),
            parent => parent[key] = value.clone(),
        }
    }
    base
}

#[test]
fn every_recording_is_read_as_the_runner_reads_it() {
    let count = |suite| of(suite).len();
    assert!(count("bootstrap") > 150 && count("iptables") > 150 && count("status") > 150);
    let folded = serde_json::json!({"a": [{"$times": 3, "$of": "x"}, {"$times": 2, "$of": [1]}]});
    assert_eq!(unfolded(folded), serde_json::json!({"a": ["xxx", [[1], [1]]]}));
    let base = serde_json::json!({"a": {"b/c": 1, "d": 2}, "l": [1, 2]});
    let change = serde_json::json!({"set": {"/a/b~1c": 3, "/l/1": 9, "/n": null}, "remove": ["/a/d"]});
    assert_eq!(changed(base, &change), serde_json::json!({"a": {"b/c": 3}, "l": [1, 9], "n": null}));
}
