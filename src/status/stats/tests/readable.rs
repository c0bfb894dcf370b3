//! Whether what is merged can be read: golden files, and a reader that is strict.

use super::*;

#[tokio::test]
async fn golden() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/stats");
    for name in ["text", "openmetrics", "no-newline"] {
        let read = |kind: &str| std::fs::read_to_string(dir.join(format!("{name}.{kind}"))).unwrap();
        let (envoy, app, merged) = (read("envoy"), read("app"), read("merged"));
        let (kind, app) = app.split_once('\n').unwrap();
        for piece in [1, 7, 64, 4096] {
            let (envoy, app) = (chunked("text/plain", &envoy, piece), chunked(kind, app, piece));
            let envoy = Web::start(move |_| envoy.clone()).await;
            let app = Web::start(move |_| app.clone()).await;
            let served = merging(Some(&envoy), vec![target(&app, "/")], |_| {});
            assert_eq!(rest(&served.get("/metrics").await.text()), merged, "{name} in pieces of {piece}");
        }
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
