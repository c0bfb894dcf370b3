//! `ISTIO_KUBE_APP_PROBERS`: which probes there are. Pure.
//!
//! The injector writes it from the pod's probes and hooks. What is invalid ends the agent before it
//! has bound anything: a probe that silently is not there would restart the pod for ever.

use std::collections::BTreeMap;

use serde_json::Value;

/// What a probe does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// GET, judged by its status.
    Http {
        /// With a leading slash or without, maybe with a query.
        path: String,
        /// 0 where it was missing.
        port: i32,
        /// Scheme exactly `HTTPS`.
        https: bool,
    },
    /// A connection, judged by whether it comes about.
    Tcp {
        /// 0 where it was missing.
        port: i32,
    },
    /// `grpc.health.v1.Health/Check`.
    Grpc {
        /// 0 where it was missing.
        port: i32,
        /// Empty: the server as a whole.
        service: String,
    },
}

/// A probe of the application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// What to do.
    pub action: Action,
    /// `timeoutSeconds`; what zero and less mean is the action's business.
    pub timeout_seconds: i32,
}

/// All probes, by the path the kubelet asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table(BTreeMap<String, Probe>);

impl Table {
    /// The probe for exactly this path.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Probe> {
        self.0.get(path)
    }

    /// The paths, sorted.
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> + Clone {
        self.0.keys().map(String::as_str)
    }

    /// Paths and probes, sorted.
    #[cfg(debug_assertions)]
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Probe)> {
        self.0.iter().map(|(path, probe)| (path.as_str(), probe))
    }
}

/// Why the variable is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No JSON, or not of the right types.
    #[error(
        "failed to decode app prober err = {why}, json string = {text} (variable ISTIO_KUBE_APP_PROBERS)"
    )]
    Unreadable {
        /// What is wrong.
        why: String,
        /// The variable's text.
        text: String,
    },
    /// A path that no probe can have.
    #[error("invalid path, must be in form of regex pattern {PATTERN}; ISTIO_KUBE_APP_PROBERS names {0:?}")]
    Path(String),
    /// None or several actions, or no probe at all.
    #[error(
        "invalid prober type, must be one of type httpGet, tcpSocket or gRPC; ISTIO_KUBE_APP_PROBERS gives {path} {found}"
    )]
    Action {
        /// The probe's path.
        path: String,
        /// What is there instead of one action.
        found: &'static str,
    },
    /// A port that is a name.
    #[error("invalid prober config for {0}, the port must be int type (ISTIO_KUBE_APP_PROBERS)")]
    Port(String),
}

const PATTERN: &str = "^/(app-health|app-lifecycle)/[^/]+/(livez|readyz|startupz|prestopz|poststartz)$";

/// Reads the variable's text; empty means no probes.
///
/// Unknown fields are ignored, names match in any case (both are seen in the field).
///
/// # Errors
/// The first thing that is invalid, in the order of the paths.
pub fn parse(text: &str) -> Result<Table, Error> {
    if text.is_empty() {
        return Ok(Table::default());
    }
    let bad = |why: String| Error::Unreadable { why, text: text.to_owned() };
    let value: Value = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let probes = match value {
        Value::Null => return Ok(Table::default()),
        Value::Object(probes) => probes,
        other => return Err(bad(format!("an object of probes is expected, this is {}", kind(&other)))),
    };
    let mut read: Vec<(&String, Result<Raw, BadType>)> =
        probes.iter().map(|(path, v)| (path, raw(v))).collect();
    read.sort_by_key(|(path, _)| *path);
    // Types first, then meaning: a text that does not decode is reported as that, whatever else is wrong.
    let mut decoded = Vec::new();
    for (path, raw) in read {
        decoded.push((path, raw.map_err(|why| bad(format!("{path}: {why}")))?));
    }
    let mut table = BTreeMap::new();
    for (path, raw) in decoded {
        if !valid_path(path) {
            return Err(Error::Path(path.clone()));
        }
        table.insert(path.clone(), raw.probe(path)?);
    }
    Ok(Table(table))
}

fn valid_path(path: &str) -> bool {
    let mut parts = path.split('/');
    matches!(
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next()),
        (Some(""), Some("app-health" | "app-lifecycle"), Some(name), Some("livez" | "readyz" | "startupz" | "prestopz" | "poststartz"), None)
            if !name.is_empty()
    )
}

/// A port as it is written; names are refused later, with the path.
enum Port {
    Number(i32),
    Name,
}

#[derive(Default)]
struct Raw {
    null: bool,
    http: Option<(String, Port, bool)>,
    tcp: Option<Port>,
    grpc: Option<(i32, String)>,
    timeout: i32,
}

impl Raw {
    fn probe(self, path: &str) -> Result<Probe, Error> {
        let none = |found| Error::Action { path: path.to_owned(), found };
        let number = |port| match port {
            Port::Number(port) => Ok(port),
            Port::Name => Err(Error::Port(path.to_owned())),
        };
        let action = match (self.http, self.tcp, self.grpc) {
            (None, None, None) if self.null => return Err(none("null")),
            (None, None, None) => return Err(none("none of them")),
            (Some((path, port, https)), None, None) => Action::Http { path, port: number(port)?, https },
            (None, Some(port), None) => Action::Tcp { port: number(port)? },
            (None, None, Some((port, service))) => Action::Grpc { port, service },
            _ => return Err(none("more than one of them")),
        };
        Ok(Probe { action, timeout_seconds: self.timeout })
    }
}

type Fields<'a> = BTreeMap<String, &'a Value>;

/// A member of another type than the kubelet's.
#[derive(Debug, thiserror::Error)]
enum BadType {
    #[error("{name} is {found}, no {wanted}")]
    Member { name: String, found: String, wanted: &'static str },
    #[error("httpHeaders is no list")]
    NoList,
}

impl BadType {
    fn new(name: &str, found: &str, wanted: &'static str) -> Self {
        Self::Member { name: name.to_owned(), found: found.to_owned(), wanted }
    }
}

fn fields<'a>(value: &'a Value, of: &str) -> Result<Fields<'a>, BadType> {
    match value {
        Value::Object(map) => Ok(map.iter().map(|(k, v)| (k.to_lowercase(), v)).collect()),
        other => Err(BadType::new(of, kind(other), "object")),
    }
}

fn raw(value: &Value) -> Result<Raw, BadType> {
    if value.is_null() {
        return Ok(Raw { null: true, ..Raw::default() });
    }
    let probe = fields(value, "it")?;
    let of = |name: &str| probe.get(name).filter(|v| !v.is_null());
    let mut raw = Raw::default();
    if let Some(http) = of("httpget") {
        let http = fields(http, "httpGet")?;
        check_headers(&http)?;
        string(&http, "host")?;
        raw.http = Some((string(&http, "path")?, port(&http)?, string(&http, "scheme")? == "HTTPS"));
    }
    if let Some(tcp) = of("tcpsocket") {
        let tcp = fields(tcp, "tcpSocket")?;
        string(&tcp, "host")?;
        raw.tcp = Some(port(&tcp)?);
    }
    if let Some(grpc) = of("grpc") {
        let grpc = fields(grpc, "grpc")?;
        raw.grpc = Some((int32(&grpc, "port")?, string(&grpc, "service")?));
    }
    raw.timeout = int32(&probe, "timeoutseconds")?;
    Ok(raw)
}

// The headers themselves come from the kubelet; only their types are looked at.
fn check_headers(http: &Fields<'_>) -> Result<(), BadType> {
    let Some(list) = http.get("httpheaders").filter(|v| !v.is_null()) else { return Ok(()) };
    let list = list.as_array().ok_or(BadType::NoList)?;
    for header in list.iter().filter(|h| !h.is_null()) {
        let header = fields(header, "a header")?;
        string(&header, "name")?;
        string(&header, "value")?;
    }
    Ok(())
}

fn string(fields: &Fields<'_>, name: &str) -> Result<String, BadType> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(BadType::new(name, kind(other), "string")),
    }
}

fn int32(fields: &Fields<'_>, name: &str) -> Result<i32, BadType> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(0),
        Some(Value::Number(number)) => number
            .as_i64()
            .and_then(|n| i32::try_from(n).ok())
            .ok_or_else(|| BadType::new(name, &number.to_string(), "whole number of 32 bits")),
        Some(other) => Err(BadType::new(name, kind(other), "number")),
    }
}

fn port(fields: &Fields<'_>) -> Result<Port, BadType> {
    match fields.get("port") {
        Some(Value::String(_)) => Ok(Port::Name),
        _ => int32(fields, "port").map(Port::Number),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
