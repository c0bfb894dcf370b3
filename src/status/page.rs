//! `/debug/`: how the agent is, as one page for people.
//!
//! Made from the same document as `/debug/agentz`, so it cannot say anything else. It loads nothing, runs no
//! script, refreshes itself, and changes nothing: everything in it is text, escaped.

mod timeline;

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use http::{HeaderValue, StatusCode, header};
use serde_json::Value;

use crate::serve::respond::{Answer, page};
use crate::trouble::Event;

/// `info`: what Envoy tells of itself.
pub(super) fn answer(document: &Value, info: &Value, events: &[Event]) -> Answer {
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    let mut answer = page(StatusCode::OK, html, render(document, info, events, SystemTime::now()));
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        ),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

fn render(document: &Value, info: &Value, events: &[Event], now: SystemTime) -> String {
    let mut out = String::with_capacity(16 << 10);
    out.push_str(HEAD);
    verdict(&mut out, document);
    out.push_str("<section><h2>Timeline</h2>");
    timeline::render(&mut out, events, now);
    out.push_str("</section><div class=grid>");
    identity(&mut out, document, now);
    istiod(&mut out, document, now);
    envoy(&mut out, document, info, now);
    beside(&mut out, document, now);
    out.push_str("</div>");
    configuration(&mut out, document);
    happened(&mut out, events);
    out.push_str("<footer>The same as JSON: <a href=agentz>/debug/agentz</a>. Levels of the log: <a href=/logging>/logging</a>. This page \
                  refreshes itself every 5 s and changes nothing.</footer></main>");
    out
}

fn verdict(out: &mut String, document: &Value) {
    let troubles = document["troubles"].as_array().map(Vec::as_slice).unwrap_or_default();
    let Some((first, rest)) = troubles.split_first() else {
        out.push_str(
            "<section class='verdict good'><h1>Healthy</h1><p>Nothing is known to be wrong.</p></section>",
        );
        return;
    };
    let class = if first["severity"] == "broken" { "bad" } else { "fair" };
    let _ = write!(
        out,
        "<section class='verdict {class}'><h1>{}</h1><p class=detail>{}</p><p><b>What to do:</b> {}</p>\
         <p class=dim>{}, for {}, {} times</p></section>",
        escaped(text(&first["kind"])),
        escaped(text(&first["detail"])),
        escaped(text(&first["hint"])),
        escaped(text(&first["summary"])),
        span(first["seconds"].as_u64().unwrap_or_default()),
        first["count"],
    );
    if rest.is_empty() {
        return;
    }
    out.push_str("<section><h2>What else, or what follows</h2><table>");
    for trouble in rest {
        row(
            out,
            text(&trouble["kind"]),
            &format!("{} ({})", text(&trouble["detail"]), text(&trouble["hint"])),
        );
    }
    out.push_str("</table></section>");
}

fn identity(out: &mut String, document: &Value, now: SystemTime) {
    let identity = &document["identity"];
    let certificate = &identity["certificate"];
    out.push_str("<section><h2>Identity</h2><table>");
    if certificate.is_null() {
        let files = identity["files"].as_array().is_some_and(|f| !f.is_empty());
        row(out, "Certificate", if files { "from files" } else { "none from a CA" });
    } else {
        let names = certificate["identities"].as_array().map(Vec::as_slice).unwrap_or_default();
        row(out, "SPIFFE ID", &names.iter().map(text).collect::<Vec<_>>().join(", "));
        row(out, "Valid until", &moment(&certificate["notAfter"], now));
        row(out, "Renewed", &moment(&certificate["renewal"], now));
    }
    for file in identity["files"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let trouble = text(&file[1]);
        row(out, text(&file[0]), if trouble.is_empty() { "good" } else { trouble });
    }
    if !text(&identity["lastError"]).is_empty() {
        row(out, "Last error", text(&identity["lastError"]));
    }
    out.push_str("</table></section>");
}

fn istiod(out: &mut String, document: &Value, now: SystemTime) {
    let way = &document["config"]["upstream"];
    out.push_str("<section><h2>Istiod</h2><table>");
    row(out, "Address", text(&way["address"]));
    if let Some(peer) = way["peer"].as_str() {
        row(out, "Answered from", peer);
    }
    match way["connectedSince"].as_u64() {
        Some(_) => row(out, "Connected", &moment(&way["connectedSince"], now)),
        None if way["downSince"].is_null() => row(out, "Not connected", "Envoy has opened no stream yet"),
        None => row(out, "Not connected", &moment(&way["downSince"], now)),
    }
    if let Some(error) = way["lastError"].as_str() {
        row(out, "Last error", error);
    }
    out.push_str("</table></section>");
}

fn envoy(out: &mut String, document: &Value, info: &Value, now: SystemTime) {
    out.push_str("<section><h2>Envoy and agent</h2><table>");
    row(out, "Envoy", text(&document["envoy"]));
    if let Some(build) = info["version"].as_str() {
        // commit/version/kind of build/...
        let uptime = text(&info["uptime_current_epoch"]).trim_end_matches('s').parse().unwrap_or_default();
        row(
            out,
            "Its own word",
            &format!(
                "version {}, {}, up {}",
                build.split('/').nth(1).unwrap_or(build),
                text(&info["state"]),
                span(uptime)
            ),
        );
    }
    let restarts = &document["status"]["counters"]["envoy_restarts_total"];
    if restarts.as_u64().is_some_and(|n| n > 0) {
        row(out, "Started again", &format!("{restarts} times"));
    }
    row(
        out,
        "Agent",
        &format!("{}, follows Istio {}", text(&document["version"]), text(&document["follows"])),
    );
    row(out, "Role", text(&document["type"]));
    row(out, "Started", &moment(&document["startedAt"], now));
    out.push_str("</table></section>");
}

/// What not every proxy has: probes, DNS, Wasm.
fn beside(out: &mut String, document: &Value, now: SystemTime) {
    let (application, status) = (&document["application"], &document["status"]);
    let counters = &status["counters"];
    let number = |name: &str| counters[name].as_u64().unwrap_or_default();
    let mut rows: Vec<(String, String)> = Vec::new();
    if !application.is_null() {
        let why = application["lastError"].as_str().map(|e| format!(": {e}")).unwrap_or_default();
        let since = moment(&application["since"], now);
        rows.push((
            "Health check".to_owned(),
            format!("{}, since {since}{why}", text(&application["state"])),
        ));
    }
    for probe in status["probes"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let state = match probe["failuresInARow"].as_u64().unwrap_or_default() {
            0 => "good".to_owned(),
            n => format!("FAILED {n} times in a row"),
        };
        let ago = span(probe["lastAgeSeconds"].as_u64().unwrap_or_default());
        rows.push((text(&probe["path"]).to_owned(), format!("{state}, {ago} ago: {}", text(&probe["last"]))));
    }
    if number("dns_requests_total") > 0 {
        let (asked, handed) = (number("dns_requests_total"), number("dns_upstream_requests_total"));
        let failed = number("dns_upstream_failures_total");
        rows.push((
            "DNS".to_owned(),
            format!("{asked} queries, {handed} handed on, {failed} of them failed"),
        ));
    }
    if number("wasm_remote_fetch_count") > 0 {
        let (kept, fetched) = (number("wasm_cache_entries"), number("wasm_remote_fetch_count"));
        rows.push(("Wasm".to_owned(), format!("{kept} modules kept, {fetched} fetches")));
    }
    if rows.is_empty() {
        return;
    }
    out.push_str("<section><h2>Beside them</h2><table>");
    rows.iter().for_each(|(name, value)| row(out, name, value));
    out.push_str("</table></section>");
}

fn configuration(out: &mut String, document: &Value) {
    let config = &document["config"];
    let types = config["types"].as_array().map(Vec::as_slice).unwrap_or_default();
    if types.is_empty() {
        return;
    }
    out.push_str("<section><h2>Configuration</h2><table><tr><th>Type<th>State<th>Last push<th>Resources in it<th>Pushes<th>Rejected</tr>");
    for kind in types {
        let age = kind["responseAgeSeconds"]
            .as_u64()
            .map_or_else(|| "never".to_owned(), |s| format!("{} ago", span(s)));
        let _ = write!(
            out,
            "<tr><td>{}<td class={}>{}<td>{age}<td>{}<td>{}<td>{}</tr>",
            escaped(text(&kind["name"])),
            escaped(text(&kind["state"])),
            escaped(text(&kind["state"])),
            kind["resources"],
            kind["responses"],
            kind["rejected"],
        );
    }
    out.push_str("</table></section>");
}

fn happened(out: &mut String, events: &[Event]) {
    out.push_str("<section><h2>Last events</h2><table>");
    for event in events.iter().rev().take(20) {
        let at = jiff::Timestamp::try_from(event.at).map(|t| format!("{t:.3}")).unwrap_or_default();
        row(out, &at, &format!("{}: {}", event.what.name(), event.text));
    }
    out.push_str("</table></section>");
}

fn row(out: &mut String, name: &str, value: &str) {
    let _ = write!(out, "<tr><td class=name>{}<td>{}</tr>", escaped(name), escaped(value));
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// `2026-01-02T03:04:05Z, in 3h2m` or `.., 5m ago`.
fn moment(value: &Value, now: SystemTime) -> String {
    let Some(seconds) = value.as_u64().filter(|s| *s > 0) else { return "unknown".to_owned() };
    let date = i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok());
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let distance = if seconds > now {
        format!("in {}", span(seconds - now))
    } else {
        format!("{} ago", span(now - seconds))
    };
    format!("{}, {distance}", date.map(|d| d.to_string()).unwrap_or_default())
}

fn span(seconds: u64) -> String {
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m{s}s"),
        (0, h, m, _) => format!("{h}h{m}m"),
        (d, h, ..) => format!("{d}d{h}h"),
    }
}

/// Text in HTML and in attributes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

const HEAD: &str = "<!doctype html><html lang=en><head><meta charset=utf-8><title>pilot-agent</title>\
<meta http-equiv=refresh content=5><meta name=viewport content='width=device-width,initial-scale=1'><style>\
body{margin:0;background:#f6f7f9;color:#1c2430;font:15px/1.45 system-ui,sans-serif}main{max-width:70rem;margin:0 auto;padding:1rem}\
section{background:#fff;border:1px solid #dde2e8;border-radius:8px;padding:.8rem 1.1rem;margin:0 0 1rem;overflow-wrap:anywhere}\
h1{font-size:1.5rem;margin:.1rem 0}h2{font-size:1rem;margin:0 0 .4rem;color:#51606f}p{margin:.3rem 0}.dim{color:#51606f}\
.verdict{border-left:10px solid}.good{border-left-color:#1a8a4a}.fair{border-left-color:#d29a00}.bad{border-left-color:#c62828}\
.detail{font-family:ui-monospace,monospace;font-size:.92rem}table{border-collapse:collapse;width:100%}\
td,th{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0}th{font-weight:600;color:#51606f}.name{color:#51606f;white-space:nowrap}\
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:0 1rem}.synced{color:#1a8a4a}.rejected,.stale{color:#c62828}\
svg{width:100%;height:auto;display:block}footer{color:#51606f;font-size:.85rem}\
</style></head><body><main>";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trouble::What;
    use serde_json::json;

    #[test]
    fn the_verdict_stands_on_top_and_nothing_is_markup() {
        let document = json!({
            "troubles": [
                {"kind": "TokenExpired", "severity": "broken", "detail": "<script>alert(1)</script>", "hint": "h", "seconds": 90, "count": 3},
                {"kind": "NoConfig", "severity": "broken", "detail": "d", "hint": "h"},
            ],
            "config": {"upstream": {"address": "istiod:15012", "downSince": 1}, "types": [{"name": "CDS", "state": "stale"}]},
            "application": {"state": "unhealthy", "lastError": "<i>refused", "since": 1},
            "status": {"probes": [{"path": "/app-health/x/livez", "failuresInARow": 2, "last": "500"}],
                       "counters": {"dns_requests_total": 3, "wasm_remote_fetch_count": 1}},
        });
        let info = json!({"version": "c/1.40.0/Clean", "state": "LIVE", "uptime_current_epoch": "61s"});
        let events = [Event { at: UNIX_EPOCH, what: What::Lost, text: "'\"<b>".to_owned() }];
        let html = render(&document, &info, &events, SystemTime::now());
        let at = |part: &str| html.find(part).unwrap_or_else(|| panic!("{part} in {html}"));
        assert!(at("<h1>TokenExpired</h1>") < at("NoConfig") && at("NoConfig") < at("<svg"));
        assert!(html.contains("&lt;script&gt;") && !html.contains("<script") && !html.contains("<b>'"));
        assert!(html.contains("for 1m30s, 3 times") && html.contains("istiod:15012"));
        assert!(
            html.contains("version 1.40.0, LIVE, up 1m1s")
                && html.contains("3 queries")
                && !html.contains("<i>")
        );
        assert!(html.contains("FAILED 2 times in a row") && html.contains("0 modules kept, 1 fetches"));
        let empty = render(&json!({}), &Value::Null, &[], SystemTime::now());
        assert!(empty.contains("<h1>Healthy</h1>") && !empty.contains("Beside them"));
    }
}
