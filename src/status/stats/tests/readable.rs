//! Whether what is merged can be read: recordings of the Go agent, and a reader that is strict.

use serde_json::Value;

use super::*;
use crate::base::recordings::{self, Recording};

/// A scrape that is recorded: what Envoy and the application answer (type and body), the caller's headers, and what the
/// Go agent made of it after its own metrics.
struct Scrape {
    name: String,
    parts: [(String, String); 2],
    headers: String,
    merged: String,
    kind: String,
}

/// The recordings of one plain scrape of an Envoy and an application.
fn recorded() -> Vec<Scrape> {
    let annotation = r#"{"scrape": "true", "path": "/metrics", "port": "9090"}"#;
    let scrape = |case: Recording| {
        let apps = case.case.get("apps")?.as_array()?.clone();
        let (step, did) = (&case.case["steps"][0], &case.did[0]);
        let plain = step["op"] == "metrics"
            && ["m", "path", "bounds", "to"].iter().all(|key| step.get(key).is_none())
            && case.input("env") == serde_json::json!({"ISTIO_PROMETHEUS_ANNOTATIONS": annotation})
            && case.case.get("latent").is_none()
            && did["status"] == 200
            && apps.iter().map(|app| &app["name"]).eq(["envoy-stats", "app"])
            // Up from the beginning, and always the same.
            && apps.iter().all(|app| app.get("up").is_none() && app["host"] == "127.0.0.1");
        let part = |app: &Value| {
            let rule = app["rules"].as_array().filter(|rules| rules.len() == 1)?[0].as_object()?;
            let header = &rule.get("headers")?[0];
            let readable = rule.keys().all(|key| ["body", "headers"].contains(&key.as_str()));
            let type_and_body = (header[1].as_str()?.to_owned(), rule.get("body")?.as_str()?.to_owned());
            (readable && header[0] == "Content-Type").then_some(type_and_body)
        };
        let parts = if plain { [part(&apps[0])?, part(&apps[1])?] } else { return None };
        let headers = step["headers"].as_array().into_iter().flatten();
        let line = |pair: &Value| {
            // The recording is of what the bytes mean, not of how they are packed.
            let name = pair[0].as_str().filter(|name| !name.eq_ignore_ascii_case("accept-encoding"))?;
            Some(format!("{name}: {}\r\n", pair[1].as_str()?))
        };
        Some(Scrape {
            parts,
            headers: headers.map(line).collect::<Option<_>>()?,
            merged: did["rest"].as_str()?.to_owned(),
            kind: did["headers"]["content-type"].as_str()?.to_owned(),
            name: case.name,
        })
    };
    recordings::of("status").into_iter().filter_map(scrape).collect()
}

#[tokio::test]
async fn what_is_merged_is_what_the_go_agent_made_of_it() {
    let scrapes = recorded();
    assert!(scrapes.len() > 9, "only {} recordings can be compared", scrapes.len());
    for Scrape { name, parts, headers, merged, kind } in scrapes {
        for piece in [1, 7, 64, 4096] {
            let [envoy, app] = parts.each_ref().map(|(kind, body)| chunked(kind, body, piece));
            let envoy = Web::start(move |_| envoy.clone()).await;
            let app = Web::start(move |_| app.clone()).await;
            let served = merging(Some(&envoy), vec![target(&app, "/metrics")], |_| {});
            let got = served.ask("GET", "/stats/prometheus", &headers).await;
            assert_eq!(rest(&got.text()), merged, "{name} in pieces of {piece}");
            assert_eq!(got.header("content-type"), Some(kind.as_str()), "{name}");
        }
    }
}

/// The Go agent leaves it where it is, which ends the exposition before the application's part (docs/COMPATIBILITY.md).
#[tokio::test]
async fn an_end_within_what_envoy_says_is_taken_out() {
    for piece in [1, 7, 64] {
        let envoy = chunked("text/plain", &format!("{ENVOY}# EOF\n"), piece);
        let app = chunked("application/openmetrics-text; version=1.0.0", OPEN, piece);
        let (envoy, app) = (Web::start(move |_| envoy.clone()).await, Web::start(move |_| app.clone()).await);
        let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
        assert_eq!(rest(&served.get("/metrics").await.text()), format!("{ENVOY}{OPEN}"));
    }
}

fn chunked(kind: &str, body: &str, piece: usize) -> Vec<u8> {
    let mut out =
        format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n").into_bytes();
    for piece in body.as_bytes().chunks(piece) {
        out.extend(format!("{:x}\r\n", piece.len()).bytes());
        out.extend(piece);
        out.extend(b"\r\n");
    }
    out.extend(b"0\r\n\r\n");
    out
}

/// The text format, as strict as a scraper that skips nothing: every sample belongs to the family announced
/// last, if any was, and can be read to its last character.
fn check(text: &str) -> Result<usize, String> {
    let (mut seen, mut samples) = (std::collections::BTreeSet::new(), 0);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or(line)?;
            if !["counter", "gauge", "histogram", "summary", "untyped"].contains(&kind)
                || !seen.insert(name.to_owned())
            {
                return Err(format!("type again or not known: {line}"));
            }
            continue;
        }
        if line.starts_with('#') {
            continue;
        }
        let end = line.find(['{', ' ']).ok_or(line)?;
        let (name, mut rest) = line.split_at(end);
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':') {
            return Err(format!("name: {line}"));
        }
        if let Some(labels) = rest.strip_prefix('{') {
            let mut labels = labels;
            while !labels.starts_with('}') {
                let (label, value) = labels.split_once("=\"").ok_or(line)?;
                if !label.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                    return Err(format!("label: {line}"));
                }
                let mut escaped = false;
                let end = value.find(|c| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                });
                labels = &value[end.ok_or(line)? + 1..];
                labels = labels.strip_prefix(',').unwrap_or(labels);
            }
            rest = &labels[1..];
        }
        let mut fields = rest.split_whitespace();
        let value = fields.next().ok_or(line)?;
        let number = value.trim_start_matches(['+', '-']);
        if !(number == "Inf" || number == "NaN" || value.parse::<f64>().is_ok()) {
            return Err(format!("value: {line}"));
        }
        samples += 1;
    }
    Ok(samples)
}

#[test]
fn the_checker_checks() {
    assert_eq!(check("# TYPE a counter\na{b=\"c\\\"}\",d=\"\"} 1 2\nx +Inf\n"), Ok(2));
    for bad in [
        "a",
        "a b",
        "{x=\"\"} 1",
        "a{b} 1",
        "a{b=\"} 1",
        "# TYPE a x",
        "# TYPE a gauge\n# TYPE a gauge",
        "a-b 1",
    ] {
        assert!(check(bad).is_err(), "{bad}");
    }
}

#[tokio::test]
async fn what_is_merged_can_be_read_by_a_strict_reader() {
    let big: String = (0..2000).map(|n| format!("app_x{{n=\"{n}\"}} {n}\n")).collect();
    let (envoy, app) =
        (envoy().await, Web::start(move |_| http(200, "", &format!("# TYPE app_x gauge\n{big}"))).await);
    let served = merging(Some(&envoy), vec![target(&app, "/")], |c| c.details = true);
    served.get("/metrics").await;
    let samples = check(&served.get("/metrics").await.text()).unwrap();
    assert!(samples > 2001, "{samples}");
}
