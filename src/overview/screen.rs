//! The screen, made from the documented form alone, so that both say the same.

use std::fmt::Write as _;
use std::time::Duration;

use jiff::tz::TimeZone;
use serde_json::Value;

use crate::base::quote::plain;
use crate::trouble::span;

/// A person's view of [`super::document`].
#[must_use]
pub(crate) fn screen(d: &Value) -> String {
    let mut out = String::new();
    let a = &d["agent"];
    let _ = writeln!(
        out,
        "pilot-agent {} (follows Istio {}), {}, up {}\n",
        word(&a["version"]),
        word(&a["follows"]),
        word(&a["type"]),
        seconds(&a["uptimeSeconds"])
    );
    identity(&mut out, &d["identity"]);
    istiod(&mut out, &d["istiod"]);
    envoy(&mut out, d);
    beside(&mut out, d);
    troubles(&mut out, d);
    out
}

fn line(out: &mut String, name: &str, text: &str) {
    // Whoever holds the status port may have said it.
    let _ = writeln!(out, "{name:<10} {}", plain(text, &[]));
}

fn word(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => plain(text, &[]).into_owned(),
        other => other.to_string(),
    }
}

fn seconds(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), |n| span(Duration::from_secs(n)))
}

/// In this machine's time zone.
fn local(value: &Value) -> String {
    let at = value.as_str().and_then(|t| t.parse::<jiff::Timestamp>().ok());
    at.map_or_else(
        || "-".to_owned(),
        |t| t.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S %Z").to_string(),
    )
}

/// How far a moment is away.
fn distance(value: &Value) -> String {
    let Some(at) = value.as_str().and_then(|t| t.parse::<jiff::Timestamp>().ok()) else {
        return "-".to_owned();
    };
    let off = at.duration_since(jiff::Timestamp::now());
    let text = span(Duration::from_secs(off.as_secs().unsigned_abs()));
    if off.is_positive() { format!("in {text}") } else { format!("{text} ago") }
}

fn identity(out: &mut String, i: &Value) {
    let c = &i["certificate"];
    if c.is_null() {
        let files = i["files"].as_array().map_or(0, Vec::len);
        let text =
            if files > 0 { format!("from {files} mounted files") } else { "no certificate yet".to_owned() };
        line(out, "identity", &text);
    } else {
        let names: Vec<String> = c["identities"].as_array().into_iter().flatten().map(word).collect();
        line(out, "identity", &names.join(", "));
        let until = &c["notAfter"];
        let renewal = &c["renewal"];
        line(
            out,
            "",
            &format!("valid until {} ({}), serial {}", local(until), distance(until), word(&c["serial"])),
        );
        let away = distance(renewal);
        let when = if away.ends_with(" ago") { "was to be renewed at" } else { "renewed at" };
        line(out, "", &format!("{when} {} ({away})", local(renewal)));
    }
    if let Some(error) = i["lastError"].as_str() {
        line(out, "", &format!("last attempt failed: {error}"));
    }
    if let Some(error) = i["outputError"].as_str() {
        line(out, "", &format!("OUTPUT_CERTS: {error}"));
    }
}

fn istiod(out: &mut String, u: &Value) {
    let peer = u["peer"].as_str().map(|p| format!(" ({p})")).unwrap_or_default();
    let state = if u["connectedSince"].is_string() {
        format!("connected since {} ({})", local(&u["connectedSince"]), distance(&u["connectedSince"]))
    } else if u["downSince"].is_string() {
        let why = u["lastError"].as_str().unwrap_or("it ended the stream");
        format!("NOT connected since {} ({}): {why}", local(&u["downSince"]), distance(&u["downSince"]))
    } else {
        "not connected yet".to_owned()
    };
    line(out, "istiod", &format!("{}{peer}, {state}", word(&u["address"])));
    if u["tokenExpires"].is_string() {
        line(out, "", &format!("the token sent expires {}", distance(&u["tokenExpires"])));
    }
    let types = u["types"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !types.is_empty() {
        line(
            out,
            "",
            &format!(
                "{:<9} {:<9} {:>12} {:>15} {:>9}",
                "type", "state", "last push", "resources in it", "rejected"
            ),
        );
    }
    for t in types {
        let pushed = match t["lastPushAgeSeconds"].as_u64() {
            Some(age) => format!("{} ago", span(Duration::from_secs(age))),
            None => "never".to_owned(),
        };
        let text = format!(
            "{:<9} {:<9} {:>12} {:>15} {:>9}",
            word(&t["name"]),
            word(&t["state"]),
            pushed,
            word(&t["resources"]),
            word(&t["rejected"])
        );
        line(out, "", &text);
    }
    for r in u["rejections"].as_array().into_iter().flatten() {
        let names: Vec<String> = r["resources"].as_array().into_iter().flatten().map(word).collect();
        let names = if names.is_empty() { String::new() } else { format!(" {}", names.join(", ")) };
        let count = word(&r["count"]);
        let text = format!(
            "{}{names}: {} ({count} times, last {})",
            word(&r["name"]),
            word(&r["message"]),
            distance(&r["last"])
        );
        line(out, "rejected", &text);
    }
}

fn envoy(out: &mut String, d: &Value) {
    let e = &d["envoy"];
    let restarts = e["restarts"].as_u64().unwrap_or(0);
    let text = match e["error"].as_str() {
        Some(why) => format!("{}, does not answer: {why}", word(&e["process"])),
        None => format!(
            "{}, {}, up {}, {restarts} restarts",
            word(&e["version"]),
            word(&e["state"]),
            seconds(&e["uptimeSeconds"])
        ),
    };
    line(out, "envoy", &text);
    let ready = match d["notReady"].as_str() {
        None => "yes".to_owned(),
        Some(why) => format!("NO: {why}"),
    };
    line(out, "ready", &ready);
}

fn beside(out: &mut String, d: &Value) {
    let app = &d["application"];
    if !app.is_null() {
        let why = app["lastError"].as_str().map(|e| format!(": {e}")).unwrap_or_default();
        line(
            out,
            "probes",
            &format!(
                "{}: {} after {} probes{why}",
                word(&app["method"]),
                word(&app["state"]),
                word(&app["probes"])
            ),
        );
    }
    for p in d["probes"].as_array().into_iter().flatten() {
        let failures = p["failuresInARow"].as_u64().unwrap_or(0);
        let state = if failures == 0 { "ok".to_owned() } else { format!("FAILED {failures} times in a row") };
        let text = format!(
            "{}: {state}, {} {} ago, {} so far",
            word(&p["path"]),
            word(&p["last"]),
            seconds(&p["lastAgeSeconds"]),
            word(&p["probes"])
        );
        line(out, "probe", &text);
    }
    let dns = &d["dns"];
    if dns["queries"].is_number() {
        let failed = dns["upstreamFailures"].as_u64().unwrap_or(0);
        let handed = dns["upstreamQueries"].as_u64().unwrap_or(0);
        line(
            out,
            "dns",
            &format!("{} queries, {handed} handed on, {failed} of them failed", word(&dns["queries"])),
        );
    }
    let wasm = &d["wasm"];
    if wasm["modules"].as_u64().is_some_and(|n| n > 0) || wasm["fetches"].is_number() {
        line(
            out,
            "wasm",
            &format!("{} modules kept, {} fetches", word(&wasm["modules"]), word(&wasm["fetches"])),
        );
    }
    for text in d["capture"].as_array().into_iter().flatten() {
        line(out, "capture", &word(text));
    }
}

fn troubles(out: &mut String, d: &Value) {
    out.push('\n');
    for t in d["troubles"].as_array().into_iter().flatten() {
        let count =
            t["count"].as_u64().filter(|n| *n > 1).map(|n| format!(", {n} times")).unwrap_or_default();
        let text =
            format!("{} for {}{count}: {}", word(&t["kind"]), seconds(&t["seconds"]), word(&t["detail"]));
        line(out, "trouble", &text);
        line(out, "", &format!("-> {}", word(&t["hint"])));
    }
    let v = &d["verdict"];
    let verdict = match (v["kind"].as_str(), d["notReady"].as_str()) {
        (Some(kind), _) => format!("{kind}: {}; {}", word(&v["detail"]), word(&v["hint"])),
        (None, Some(why)) => format!("not ready: {why}"),
        (None, None) => "healthy".to_owned(),
    };
    let verdict = verdict.split_whitespace().collect::<Vec<_>>().join(" ");
    let _ = writeln!(out, "verdict: {}", plain(verdict, &[]));
}
