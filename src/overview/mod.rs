//! What `pilot-agent status` shows: the running agent's document and Envoy's state, in one form for programs and one
//! for people.
//!
//! Asks three loopback addresses and decides nothing: verdict and troubles are the agent's. The JSON form is stable:
//! a field, once released, stays; times are RFC 3339, spans are seconds. Nothing secret is in what is asked.

mod ask;
mod screen;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::base::clock::rfc3339;

pub(crate) use ask::{Answers, Error, agentz, gather};
pub(crate) use screen::screen;

/// The documented form.
#[must_use]
pub(crate) fn document(answers: &Answers, now: SystemTime) -> Value {
    let a = &answers.agentz;
    let verdict = &a["verdict"];
    let certificate = &a["identity"]["certificate"];
    let certificate = if certificate.is_null() {
        Value::Null
    } else {
        json!({
            "identities": certificate["identities"],
            "serial": certificate["serial"],
            "notBefore": date(&certificate["notBefore"]),
            "notAfter": date(&certificate["notAfter"]),
            "renewal": date(&certificate["renewal"]),
            "secondsLeft": left(&certificate["notAfter"], now),
        })
    };
    let up = &a["config"]["upstream"];
    let counters = &a["status"]["counters"];
    json!({
        "time": rfc3339(now),
        "healthy": answers.ready.is_ok() && verdict.is_null(),
        "ready": answers.ready.is_ok(),
        "notReady": answers.ready.as_ref().err().map(ToString::to_string),
        "verdict": verdict,
        "troubles": a["troubles"],
        "agent": {
            "version": a["version"],
            "follows": a["follows"],
            "type": a["type"],
            "startedAt": date(&a["startedAt"]),
            "uptimeSeconds": age(&a["startedAt"], now),
        },
        "identity": {
            "certificate": certificate,
            "failures": a["identity"]["failures"],
            "lastError": text(&a["identity"]["lastError"]),
            "files": a["identity"]["files"],
            "trustBundle": a["identity"]["trustBundle"],
            "outputError": text(&a["identity"]["outputError"]),
        },
        "istiod": {
            "address": up["address"],
            "peer": up["peer"],
            "connectedSince": date(&up["connectedSince"]),
            "downSince": date(&up["downSince"]),
            "failures": up["failures"],
            "lastError": up["lastError"],
            "tokenExpires": date(&up["tokenExpires"]),
            "types": types(&a["config"]["types"], now),
            "rejections": rejections(&a["config"]["nacks"]),
        },
        "envoy": envoy(a, &answers.envoy, counters),
        "application": application(&a["application"]),
        "probes": probes(&a["status"]["probes"], now),
        "dns": {
            "queries": counters["dns_requests_total"],
            "upstreamQueries": counters["dns_upstream_requests_total"],
            "upstreamFailures": counters["dns_upstream_failures_total"],
        },
        "wasm": {
            "modules": counters["wasm_cache_entries"],
            "fetches": counters["wasm_remote_fetch_count"],
            "conversions": counters["wasm_config_conversion_count"],
        },
        "events": a["events"],
        "capture": answers.capture,
    })
}

fn envoy(a: &Value, said: &Result<Value, Error>, counters: &Value) -> Value {
    let mut out =
        json!({ "process": a["envoy"], "restarts": counters["envoy_restarts_total"].as_u64().unwrap_or(0) });
    match said {
        Ok(info) => {
            // commit/version/state/type/TLS library
            let version = info["version"].as_str().unwrap_or_default();
            out["version"] = version.split('/').nth(1).unwrap_or(version).into();
            out["build"] = version.into();
            out["state"] = info["state"].clone();
            let uptime = info["uptime_current_epoch"].as_str().and_then(|t| t.strip_suffix('s'));
            out["uptimeSeconds"] = uptime.and_then(|t| t.parse::<u64>().ok()).into();
        }
        Err(why) => out["error"] = why.to_string().into(),
    }
    out
}

fn types(types: &Value, now: SystemTime) -> Vec<Value> {
    let of = |t: &Value| {
        let age = t["responseAgeSeconds"].as_u64();
        let pushed = age.and_then(|age| now.checked_sub(Duration::from_secs(age)));
        json!({
            "name": t["name"],
            "typeUrl": t["typeUrl"],
            "state": t["state"],
            "version": t["version"],
            "resources": t["resources"],
            "responses": t["responses"],
            "rejected": t["rejected"],
            "lastPush": pushed.map(rfc3339),
            "lastPushAgeSeconds": age,
        })
    };
    types.as_array().into_iter().flatten().map(of).collect()
}

fn rejections(nacks: &Value) -> Vec<Value> {
    let of = |n: &Value| {
        json!({
            "name": n["name"],
            "typeUrl": n["typeUrl"],
            "resources": n["resources"],
            "message": n["message"],
            "version": n["version"],
            "first": date(&n["first"]),
            "last": date(&n["last"]),
            "count": n["count"],
        })
    };
    nacks.as_array().into_iter().flatten().map(of).collect()
}

fn application(of: &Value) -> Value {
    if of.is_null() {
        return Value::Null;
    }
    let mut out = of.clone();
    out["since"] = date(&of["since"]);
    out
}

fn probes(all: &Value, now: SystemTime) -> Vec<Value> {
    let of = |p: &Value| {
        let age = p["lastAgeSeconds"].as_u64();
        let last = age.and_then(|age| now.checked_sub(Duration::from_secs(age)));
        json!({
            "path": p["path"],
            "healthy": p["failuresInARow"] == 0,
            "probes": p["probes"],
            "failuresInARow": p["failuresInARow"],
            "last": p["last"],
            "lastTime": last.map(rfc3339),
            "lastAgeSeconds": age,
        })
    };
    all.as_array().into_iter().flatten().map(of).collect()
}

fn text(value: &Value) -> Value {
    if value == "" { Value::Null } else { value.clone() }
}

fn moment(value: &Value) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_secs(value.as_u64().filter(|n| *n > 0)?))
}

fn date(value: &Value) -> Value {
    moment(value).map_or(Value::Null, |at| rfc3339(at).into())
}

fn left(value: &Value, now: SystemTime) -> Value {
    moment(value).map_or(Value::Null, |at| at.duration_since(now).unwrap_or_default().as_secs().into())
}

fn age(value: &Value, now: SystemTime) -> Value {
    moment(value).map_or(Value::Null, |at| now.duration_since(at).unwrap_or_default().as_secs().into())
}

#[cfg(test)]
mod tests;
