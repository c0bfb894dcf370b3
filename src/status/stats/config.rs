//! `ISTIO_PROMETHEUS_ANNOTATIONS`: which endpoints of the application are scraped. Pure.
//!
//! Two forms are read: the one of Istio 1.30 (`scrape`, `path`, `port`, all strings) and the one that
//! Istio 1.31's injector adds for several ports (`targets`, a list of `port` and `path`). [`parse_1_30`]
//! is how 1.30 reads the variable: it knows no list, and finds out about a bad port at each scrape.
//! [`parse_either`] judges each form as the release that writes it does.

use std::collections::BTreeMap;

use serde_json::Value;

/// An endpoint of the application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// As written; one that is no number (which only 1.30 lets pass) fails at each scrape.
    pub port: String,
    /// As written; `/metrics` where it was empty.
    pub path: String,
}

/// Why the variable is invalid. Each names the variable.
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
    /// No port at all.
    #[error(
        "invalid prometheus scrape configuration: ISTIO_PROMETHEUS_ANNOTATIONS names port {0:?}, which is no number from 1 to 65535: write the number of the port that the application serves its metrics on"
    )]
    Port(String),
    /// A port of the mesh.
    #[error(
        "invalid prometheus scrape configuration: ISTIO_PROMETHEUS_ANNOTATIONS names port {0}, which is reserved: it is {1}; name the port that the application serves its metrics on"
    )]
    Reserved(String, &'static str),
}

/// Ports that an application in a mesh cannot have.
const RESERVED: [(u16, &str); 9] = [
    (15000, "Envoy's admin interface"),
    (15001, "outbound capture"),
    (15004, "the agent's debug interface"),
    (15006, "inbound capture"),
    (15008, "HBONE"),
    (15020, "the merged metrics themselves"),
    (15021, "the health port"),
    (15053, "DNS"),
    (15090, "Envoy's metrics, which are merged already"),
];

/// Reads the variable's text as 1.31 does.
///
/// `scrape` exactly `false` means no endpoint; without `targets` an empty `port` means 80, and an empty
/// `path` means `/metrics` everywhere; beside a list of one `port` and `path` win, beside a longer list
/// they count for nothing. Unknown fields are ignored and names match in any case, the last one winning.
///
/// # Errors
/// Text that is not JSON of the expected types; a port that is none, `status_port`, or reserved.
pub fn parse_annotations(text: &str, status_port: u16) -> Result<Vec<Target>, Error> {
    let Annotations { scrape, legacy, targets } = read(text)?;
    if !scrape {
        return Ok(Vec::new());
    }
    let check = |target: Target| {
        let number = target.port.parse::<u16>().ok().filter(|port| *port > 0);
        let number = number.ok_or_else(|| Error::Port(target.port.clone()))?;
        if number == status_port {
            return Err(Error::Recursion(target.port));
        }
        match RESERVED.iter().find(|(port, _)| *port == number) {
            Some((_, whose)) => Err(Error::Reserved(target.port, whose)),
            // In one form: what was checked is what is asked.
            None => Ok(Target { port: number.to_string(), path: target.path }),
        }
    };
    let listed = targets.into_iter().map(|t| check(t.or_path("/metrics"))).collect::<Result<Vec<_>, _>>()?;
    match <[Target; 1]>::try_from(listed) {
        Ok([one]) => {
            // One of the old form is not judged beside the list; it may fail at each scrape.
            let port = if legacy.port.is_empty() { one.port } else { legacy.port };
            Ok(vec![Target { port, path: legacy.path }.or_path(&one.path)])
        }
        Err(listed) if listed.is_empty() => Ok(vec![check(legacy.or_port("80").or_path("/metrics"))?]),
        Err(listed) => Ok(listed),
    }
}

/// Reads the form with a list as 1.31 does, and the one without as 1.30 does: pods of a mesh whose injector
/// knows no list have started with any port so far. The second value says what 1.31 would refuse.
///
/// # Errors
/// As [`parse_annotations`] beside a list, as [`parse_1_30`] without one.
pub(crate) fn parse_either(text: &str, status_port: u16) -> Result<(Vec<Target>, Option<Error>), Error> {
    let checked = parse_annotations(text, status_port);
    if !read(text)?.targets.is_empty() {
        return Ok((checked?, None));
    }
    Ok((parse_1_30(text, status_port)?, checked.err()))
}

/// Reads the variable's text as 1.30 does.
///
/// # Errors
/// Text that is not JSON of the expected types; a port that is `status_port`, compared as text.
pub(crate) fn parse_1_30(text: &str, status_port: u16) -> Result<Vec<Target>, Error> {
    let Annotations { scrape, legacy, .. } = read(text)?;
    let target = legacy.or_port("80").or_path("/metrics");
    match scrape {
        false => Ok(Vec::new()),
        true if target.port == status_port.to_string() => Err(Error::Recursion(target.port)),
        true => Ok(vec![target]),
    }
}

struct Annotations {
    scrape: bool,
    legacy: Target,
    targets: Vec<Target>,
}

impl Target {
    fn or_port(mut self, port: &str) -> Self {
        if self.port.is_empty() {
            port.clone_into(&mut self.port);
        }
        self
    }

    fn or_path(mut self, path: &str) -> Self {
        if self.path.is_empty() {
            path.clone_into(&mut self.path);
        }
        self
    }
}

fn read(text: &str) -> Result<Annotations, Error> {
    let bad = |why: String| Error::Unreadable(why);
    let value: Value = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let fields = object(&value).map_err(|why| bad(why.to_owned()))?;
    let target = |fields: &Fields<'_>| -> Result<Target, Error> {
        Ok(Target { port: string(fields, "port")?, path: string(fields, "path")? })
    };
    let scrape = string(&fields, "scrape")? != "false";
    let legacy = target(&fields)?;
    let mut targets = Vec::new();
    if let Some(list) = fields.get("targets").filter(|v| !v.is_null()) {
        for item in list.as_array().ok_or_else(|| bad("targets is no list".to_owned()))? {
            let fields = object(item).map_err(|why| bad(format!("targets: {why}")))?;
            targets.push(target(&fields)?);
        }
    }
    Ok(Annotations { scrape, legacy, targets })
}

type Fields<'a> = BTreeMap<String, &'a Value>;

fn object(value: &Value) -> Result<Fields<'_>, &'static str> {
    match value {
        Value::Null => Ok(Fields::new()),
        Value::Object(map) => Ok(map.iter().map(|(k, v)| (k.to_lowercase(), v)).collect()),
        _ => Err("it is no object"),
    }
}

fn string(fields: &Fields<'_>, name: &str) -> Result<String, Error> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(Error::Unreadable(format!("{name} is {other}, no string"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Read = Result<Vec<(String, String)>, Error>;

    fn pairs(read: Result<Vec<Target>, Error>) -> Read {
        read.map(|t| t.into_iter().map(|t| (t.port, t.path)).collect())
    }

    fn read(text: &str) -> Read {
        pairs(parse_annotations(text, 15020))
    }

    fn one(port: &str, path: &str) -> Read {
        Ok(vec![(port.to_owned(), path.to_owned())])
    }

    #[test]
    fn one_endpoint_with_defaults() {
        assert_eq!(read(r#"{"scrape":"true","path":"/m","port":"9090"}"#), one("9090", "/m"));
        for text in ["null", "{}", r#"{"scrape":"False"}"#, r#"{"path":"","port":"","more":1}"#] {
            assert_eq!(read(text), one("80", "/metrics"), "{text}");
        }
        assert_eq!(read(r#"{"Scrape":"x","PATH":"m","Port":"09000"}"#), one("9000", "m"));
        assert_eq!(read(r#"{"scrape":"false","port":"15020"}"#), Ok(vec![]));
        assert_eq!(read(r#"{"scrape":"false","targets":[{"port":"x"}]}"#), Ok(vec![]));
    }

    #[test]
    fn several_endpoints() {
        let two = r#"{"scrape":"true","targets":[{"port":"1","path":"/a"},{"port":"2"}]}"#;
        let both = || Ok(vec![("1".into(), "/a".into()), ("2".into(), "/metrics".into())]);
        assert_eq!(read(two), both());
        // Beside a longer list the other fields count for nothing, not even as a mistake.
        assert_eq!(read(&two.replacen('{', r#"{"port":"15020","path":"/x","#, 1)), both());
        assert_eq!(read(r#"{"port":"3","targets":[]}"#), one("3", "/metrics"));
    }

    #[test]
    fn beside_a_list_of_one_port_and_path_win() {
        let of = |more: &str| read(&format!(r#"{{{more}"targets":[{{"port":"1","path":"/a"}}]}}"#));
        assert_eq!(of(""), one("1", "/a"));
        // The Go agent has the default for a longer list only, and asks for `/` here.
        assert_eq!(read(r#"{"targets":[{"port":"1"}]}"#), one("1", "/metrics"));
        assert_eq!(of(r#""port":"3","path":"/b","#), one("3", "/b"));
        assert_eq!(of(r#""port":"3","#), one("3", "/a"));
        assert_eq!(of(r#""path":"/b","#), one("1", "/b"));
        for odd in ["15006", "15020", "http", "65536"] {
            assert_eq!(
                of(&format!(r#""port":"{odd}","#)),
                one(odd, "/a"),
                "no start ends for it in the Go agent"
            );
        }
    }

    #[test]
    fn ports_that_cannot_be_the_applications() {
        for port in ["http", "0", "-1", "65536", "", " 80", "9090.0"] {
            let listed = format!(r#"{{"targets":[{{"port":"80"}},{{"port":"{port}"}}]}}"#);
            assert_eq!(read(&listed), Err(Error::Port(port.to_owned())), "{port}");
            if !port.is_empty() {
                assert_eq!(read(&format!(r#"{{"port":"{port}"}}"#)), Err(Error::Port(port.to_owned())));
            }
        }
        for (port, _) in RESERVED {
            for text in
                [format!(r#"{{"targets":[{{"port":"0{port}"}}]}}"#), format!(r#"{{"port":"{port}"}}"#)]
            {
                assert!(pairs(parse_annotations(&text, 9)).is_err(), "{text}");
            }
        }
        for text in [r#"{"port":"15888"}"#, r#"{"targets":[{"port":"1"},{"port":"015888"}]}"#] {
            assert!(matches!(parse_annotations(text, 15888), Err(Error::Recursion(_))), "{text}");
        }
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
            r#"{"targets":[{"port":9090}]}"#,
        ] {
            assert!(matches!(read(text), Err(Error::Unreadable(_))), "{text}");
        }
    }

    #[test]
    fn each_form_as_the_release_that_writes_it() {
        let read = |text: &str| parse_either(text, 15020);
        let (targets, would) = read(r#"{"port":"http"}"#).unwrap();
        assert_eq!(pairs(Ok(targets)), one("http", "/metrics"));
        assert_eq!(would, Some(Error::Port("http".into())));
        assert!(matches!(read(r#"{"port":"15090"}"#), Ok((_, Some(Error::Reserved(..))))));
        assert!(matches!(read(r#"{"port":"15020"}"#), Err(Error::Recursion(_))));
        assert!(matches!(read(r#"{"targets":[{"port":"http"}]}"#), Err(Error::Port(_))));
        assert!(matches!(read(r#"{"port":"9090"}"#), Ok((_, None))));
    }

    #[test]
    fn the_release_before() {
        let read = |text: &str| pairs(parse_1_30(text, 15020));
        assert_eq!(read(r#"{"port":"http"}"#), one("http", "/metrics"));
        assert_eq!(read(r#"{"port":"015020"}"#), one("015020", "/metrics"));
        assert_eq!(read(r#"{"targets":[{"port":"1"},{"port":"2"}]}"#), one("80", "/metrics"));
        assert!(matches!(read(r#"{"port":"15020"}"#), Err(Error::Recursion(_))));
        assert_eq!(read(r#"{"scrape":"false","port":"15020"}"#), Ok(vec![]));
    }
}
