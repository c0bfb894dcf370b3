//! `ISTIO_PROMETHEUS_ANNOTATIONS`: which endpoints of the application are scraped. Pure.
//!
//! Two forms are read: the one of Istio 1.30 (`scrape`, `path`, `port`, all strings) and the one that
//! Istio 1.31's injector adds for several ports (`targets`, a list of `port` and `path`).

use std::collections::BTreeMap;

use serde_json::Value;

/// An endpoint of the application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// As written; one that is no number fails at each scrape, as in the Go agent.
    pub port: String,
    /// As written; `/metrics` where it was empty.
    pub path: String,
}

/// Why the variable cannot be meant. Each names the variable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No JSON, or not of the right types.
    #[error(
        "failed to unmarshal ISTIO_PROMETHEUS_ANNOTATIONS: {0} (an object of the strings scrape, path and port is expected)"
    )]
    Unreadable(String),
    /// The agent would scrape itself.
    #[error(
        "invalid prometheus scrape configuration: application port is the same as agent port, which may lead to a recursive loop; ISTIO_PROMETHEUS_ANNOTATIONS names port {0}, the status port: name the port that the application serves its metrics on"
    )]
    Recursion(String),
}

/// Reads the variable's text.
///
/// `scrape` exactly `false` means no endpoint; an empty `port` means 80, an empty `path` `/metrics`;
/// unknown fields are ignored and names match in any case, the last one winning.
///
/// # Errors
/// Text that is not JSON of the expected types; a port that is `status_port`.
pub fn parse_annotations(text: &str, status_port: u16) -> Result<Vec<Target>, Error> {
    let bad = |why: String| Error::Unreadable(why);
    let value: Value = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let fields = object(&value).map_err(|why| bad(why.to_owned()))?;
    let read = |name: &str| string(&fields, name).map_err(&bad);
    let (scrape, path, port) = (read("scrape")?, read("path")?, read("port")?);
    let mut targets = Vec::new();
    if let Some(list) = fields.get("targets").filter(|v| !v.is_null()) {
        for item in list.as_array().ok_or_else(|| bad("targets is no list".to_owned()))? {
            let fields = object(item).map_err(|why| bad(format!("targets: {why}")))?;
            let (port, path) =
                (string(&fields, "port").map_err(&bad)?, string(&fields, "path").map_err(&bad)?);
            targets.push((port, path));
        }
    }
    if targets.is_empty() {
        targets.push((port, path));
    }
    let targets: Vec<Target> = targets
        .into_iter()
        .map(|(port, path)| Target {
            port: if port.is_empty() { "80".to_owned() } else { port },
            path: if path.is_empty() { "/metrics".to_owned() } else { path },
        })
        .collect();
    if scrape == "false" {
        return Ok(Vec::new());
    }
    match targets.iter().find(|t| t.port == status_port.to_string()) {
        Some(same) => Err(Error::Recursion(same.port.clone())),
        None => Ok(targets),
    }
}

type Fields<'a> = BTreeMap<String, &'a Value>;

fn object(value: &Value) -> Result<Fields<'_>, &'static str> {
    match value {
        Value::Null => Ok(Fields::new()),
        Value::Object(map) => Ok(map.iter().map(|(k, v)| (k.to_lowercase(), v)).collect()),
        _ => Err("it is no object"),
    }
}

fn string(fields: &Fields<'_>, name: &str) -> Result<String, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(format!("{name} is {other}, no string")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, String)>, Error> {
        parse_annotations(text, 15020).map(|t| t.into_iter().map(|t| (t.port, t.path)).collect())
    }

    fn one(port: &str, path: &str) -> Result<Vec<(String, String)>, Error> {
        Ok(vec![(port.to_owned(), path.to_owned())])
    }

    #[test]
    fn one_endpoint_with_defaults() {
        assert_eq!(read(r#"{"scrape":"true","path":"/m","port":"9090"}"#), one("9090", "/m"));
        for text in ["null", "{}", r#"{"scrape":"False"}"#, r#"{"path":"","port":"","more":1}"#] {
            assert_eq!(read(text), one("80", "/metrics"), "{text}");
        }
        assert_eq!(read(r#"{"Scrape":"x","PATH":"m","Port":"http"}"#), one("http", "m"));
        assert_eq!(read(r#"{"scrape":"false","port":"15020"}"#), Ok(vec![]));
    }

    #[test]
    fn several_endpoints() {
        let two = r#"{"scrape":"true","targets":[{"port":"1","path":"/a"},{"port":"2"}]}"#;
        assert_eq!(read(two), Ok(vec![("1".into(), "/a".into()), ("2".into(), "/metrics".into())]));
        assert_eq!(read(r#"{"port":"3","targets":[]}"#), one("3", "/metrics"));
        assert!(matches!(read(r#"{"targets":[{"port":"1"},{"port":"15020"}]}"#), Err(Error::Recursion(_))));
    }

    #[test]
    fn what_cannot_be_meant() {
        for text in [
            "",
            "yes",
            "[]",
            "1",
            r#"{"port":9090}"#,
            r#"{"scrape":true}"#,
            r#"{"targets":"1"}"#,
            r#"{"targets":[1]}"#,
        ] {
            assert!(matches!(read(text), Err(Error::Unreadable(_))), "{text}");
        }
        assert!(matches!(read(r#"{"port":"15020"}"#), Err(Error::Recursion(_))));
    }
}
